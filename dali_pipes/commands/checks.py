"""The checks of ``dali-pipes doctor``: the installed software, the GPUs, the cores, this node, and an AIStore cluster.

They change nothing. Test files in the cache directories are deleted at once. A cluster is asked for its health, its
description, a dSort job that does not exist, and a list of ETLs. (A build without dSort answers any question about jobs
with an empty list; a build with dSort answers that it does not know the job.)
"""

import contextlib
import ctypes
import email.utils
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import resource
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

from dali_pipes.cache.directory import LockFile
from dali_pipes.cache.extents import reserve
from dali_pipes.cache.free_space import (
    SHARED_MEMORY,
    FreeSpace,
    available_memory,
    check_directory,
    file_system,
    memory_limit,
)
from dali_pipes.cache.placement import CONTAINER_SHM_BYTES, default_directories
from dali_pipes.commands.options import format_bytes
from dali_pipes.commands.output import counted
from dali_pipes.errors import CacheError, StoreError, printable
from dali_pipes.processes.ranks import cores_of_rank, num_local_ranks
from dali_pipes.reader.aio_reader import Aio
from dali_pipes.store.cluster.token import Token, refusal_advice
from dali_pipes.store.http.client import NoAnswerError

PACKAGES = ("dali-pipes", "torch", "aistore", "webdataset", "numpy", "pillow")
DALI_PACKAGE = "nvidia-dali-cuda"
# Packages of the libraries of DALI: there is a build for each CUDA, -cu12 and -cu13, and all share a directory.
DALI_LIBRARIES = ("nvidia-libnvcomp", "nvidia-nvimgcodec", "nvidia-nvjpeg2k", "nvidia-nvtiff")
_CUDA_ERROR_NO_DEVICE = 100
NODES = Path("/sys/devices/system/node")
GPUS = Path("/proc/driver/nvidia/gpus")
# One that decodes, and one for the step and the loader's own work.
MIN_CORES = 2
# A loader has a descriptor for each segment and each connection, and torch has its own; the embedded node has one for
# each connection. Most systems allow 1,024.
MIN_FILES, ENOUGH_FILES = 256, 1024
# The smallest useful cache: two windows of one shard each; `prep pack` makes shards of 256 MiB.
MIN_CACHE_BYTES = 512 << 20
MIN_MEMORY_BYTES = 1 << 30
UNLIMITED = 1 << 59
# With a larger difference between the clocks, tokens and certificates are refused.
MAX_SKEW_S = 60.0
ANSWER_TIMEOUT_S = 5.0
# Not in the form of AIStore's own job ids, which are "srt-" and nine letters.
_NO_JOB = "srt-of-nobody"

Status = Literal["ok", "warn", "fail"]


class Finding(NamedTuple):
    """The result of one check. ``warn``: loaders work, but slowly or not in every case; ``fail``: they do not work."""

    name: str
    status: Status
    found: str
    advice: str = ""
    """The action to take; empty if none is needed."""


Findings = Iterator[Finding]


def ok(name: str, found: str) -> Finding:
    return Finding(name, "ok", found)


def warn(name: str, found: str, advice: str) -> Finding:
    return Finding(name, "warn", found, advice)


def fail(name: str, found: str, advice: str) -> Finding:
    return Finding(name, "fail", found, advice)


# The installed software and the GPUs


def check_python() -> Findings:
    cores, all_cores = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    shown = f"{cores} of {all_cores} cores" if cores < all_cores else counted(cores, "core")
    system = f"{platform.system()} {platform.release().partition('-')[0]} {platform.machine()}"
    yield ok("python", f"{platform.python_version()} on {system}, {shown}")


def check_packages() -> Findings:
    versions = {name: version_of(name) for name in PACKAGES}
    lacking = [name for name, version in versions.items() if version is None]
    there = ", ".join(f"{name} {version}" for name, version in versions.items() if version is not None)
    if lacking:
        yield fail("packages", f"{there}; not {', '.join(lacking)}", f"install: pip install {' '.join(lacking)}")
    else:
        yield ok("packages", there)


def check_dali() -> Findings:
    """Check that exactly one build of DALI is installed, and that it can be loaded."""
    builds = dali_builds()
    if not builds:
        advice = "install nvidia-dali-cuda120, or nvidia-dali-cuda130 on a CUDA 13 machine"
        yield fail("DALI", "not installed", advice)
        return
    named = ", ".join(f"{name} {version}" for name, version in builds.items())
    if len(builds) > 1:
        advice = f"they share one directory: pip uninstall -y {' '.join(builds)}, then install one of them again"
        yield fail("DALI", f"{named}, both", advice)
        return
    try:
        importlib.import_module("nvidia.dali")  # loads its libraries, touches no device
    except (ImportError, OSError) as exc:
        yield fail("DALI", f"{named} cannot be loaded: {' '.join(str(exc).split())}", "install it again")
        return
    yield ok("DALI", named)
    yield check_libraries(next(iter(builds)))


def check_libraries(dali_package: str) -> Finding:
    """Check that the libraries of a build of DALI are whole, and that those of another CUDA are not installed as well.

    Builds for two CUDA versions overwrite each other's files, and uninstalling one removes files of the other. DALI
    can then be imported, and fails or crashes when it decodes.
    """
    own = f"-cu{cuda_major(dali_package)}"
    installed = {name: version for base in DALI_LIBRARIES if (version := version_of(name := base + own)) is not None}
    builds = (f"{base}-cu{cuda}" for base in DALI_LIBRARIES for cuda in (11, 12, 13, 14))
    others = [name for name in builds if not name.endswith(own) and version_of(name) is not None]
    broken = [f"{name}=={version}" for name, version in installed.items() if others or _lacks_files(name)]
    restore = f"pip install --force-reinstall --no-deps {' '.join(broken)}"
    if others:
        found = f"installed beside those of {dali_package}: {', '.join(others)}"
        return fail("libraries", found, f"pip uninstall -y {' '.join(others)}{f' && {restore}' if broken else ''}")
    if broken:
        return fail("libraries", f"without some of their files: {', '.join(broken)}", restore)
    absent = [base + own for base in DALI_LIBRARIES if base + own not in installed]
    if absent:
        # Images of NVIDIA may have them in another place than pip's.
        advice = f"if a photo cannot be decoded: pip install --no-deps {' '.join(absent)}"
        return warn("libraries", f"not installed by pip: {', '.join(absent)}", advice)
    return ok("libraries", ", ".join(f"{name} {version}" for name, version in installed.items()))


def _lacks_files(package: str) -> bool:
    """Tell whether a library that this package has installed is gone; headers may be left out of an image."""
    files = importlib.metadata.files(package) or []
    return any(".so" in file.name and not Path(str(file.locate())).exists() for file in files)


def check_gpu() -> Findings:
    """Check the GPUs of this machine, and whether DALI, torch and the driver are of one CUDA."""
    builds = {f"DALI ({name})": cuda_major(name) for name in dali_builds()}
    built_for = torch_cuda()
    if built_for:
        builds[f"torch ({built_for})"] = int(built_for.partition(".")[0])
    if len(builds) == (2 if built_for else 1) and version_of("torch") is not None:
        yield cuda_fit(dali=next(iter(builds.values())), torch=built_for)
    devices, supported, problem = _cuda_devices()
    yield gpu_fit(
        devices=devices,
        supported=supported,
        problem=problem,
        kernel=_kernel_driver(),
        builds=builds,
        is_cpu_torch=not built_for and version_of("torch") is not None,
    )
    if devices:
        yield check_jpeg_engines()


def cuda_fit(*, dali: int, torch: str) -> Finding:
    """Compare the major version of CUDA that DALI is built for with torch's version of CUDA, empty for a CPU build."""
    if not torch:
        return ok("CUDA", f"DALI for CUDA {dali}, torch for the CPU alone")
    found = f"DALI for CUDA {dali}, torch for CUDA {torch}"
    major = int(torch.partition(".")[0])
    if major == dali:
        return ok("CUDA", f"{found}: they agree")
    advice = (
        f"needs a driver for CUDA {max(major, dali)}; for one CUDA, make an environment anew: make demo CUDA=12, or "
        "CUDA=13 (docs/how-to/install.md)"
    )
    return warn("CUDA", f"{found}: they differ", advice)


def check_jpeg_engines() -> Finding:
    """Check whether nvJPEG can use the GPU's JPEG engines: it needs a driver library that containers may lack."""
    try:
        ctypes.CDLL("libnvcuvid.so.1")
    except OSError:
        advice = (
            "in a container, set NVIDIA_DRIVER_CAPABILITIES=compute,utility,video; without the engines, CUDA and the "
            "CPU decode"
        )
        return warn("JPEG engines", "not usable: no libnvcuvid.so.1", advice)
    return ok("JPEG engines", "usable, if the GPU has any")


def gpu_fit(
    *,
    devices: Sequence[str],
    supported: int,
    problem: str,
    kernel: str | None,
    builds: Mapping[str, int],
    is_cpu_torch: bool,
) -> Finding:
    """Compare the driver with DALI and torch.

    ``builds`` has the major version of CUDA for which each was built. ``supported`` is the CUDA version of the driver,
    13020 for 13.2. ``problem`` says why programs cannot use the driver; it is empty if they can. ``kernel`` is the
    driver's version in the kernel, ``None`` without a driver.
    """
    built = ", ".join(f"{what} for CUDA {major}" for what, major in builds.items())
    if problem and kernel is None:
        suffix = f" ({built})" if built else ""
        return ok("GPU", f"none: no NVIDIA driver; loaders run with device='cpu'{suffix}")
    if problem:
        advice = "start a container with --gpus all; elsewhere install the driver's libcuda again"
        return fail("GPU", f"the kernel has driver {kernel}, but programs cannot use it: {problem}", advice)
    numbers = {name: list(devices).count(name) for name in devices}
    shown = ", ".join(f"{number} x {name}" if number > 1 else name for name, number in numbers.items())
    named = (
        f"{shown or 'none visible'}; driver {kernel or 'unknown'} for CUDA {supported // 1000}.{supported % 1000 // 10}"
    )
    if not devices:
        return warn("GPU", named, "CUDA_VISIBLE_DEVICES may hide them; loaders run with device='cpu'")
    unfit = [what for what, major in builds.items() if major > supported // 1000]
    if unfit:
        advice = (
            f"install a newer driver, or builds for CUDA {supported // 1000} or older: make demo CUDA=12 in a new "
            "environment (docs/how-to/install.md)"
        )
        return fail("GPU", f"{named}, too old for {', '.join(unfit)}", advice)
    if is_cpu_torch:
        advice = "install a torch that was built for CUDA: this one cannot take batches on the GPU"
        return fail("GPU", f"{named}; torch was built for the CPU alone", advice)
    return ok("GPU", f"{named}; {built}")


def torch_cuda() -> str:
    """Find the CUDA version for which torch was built; empty for a CPU build. Importing torch would take seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    try:
        text = (Path(spec.origin).parent / "version.py").read_text()
    except OSError:
        return ""
    match = re.search(r"^cuda\b[^=\n]*=\s*['\"]([0-9.]+)['\"]", text, re.MULTILINE)
    return match[1] if match else ""


def _kernel_driver() -> str | None:
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    match = re.search(r"\b([0-9]{3}\.[0-9.]+)\b", text)
    return match[1] if match else "unknown"


def _cuda_devices() -> tuple[list[str], int, str]:
    """Find the devices' names, the driver's CUDA version, and why programs cannot use the driver: see `gpu_fit`."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return [], 0, "no libcuda.so.1"
    version, count = ctypes.c_int(), ctypes.c_int()
    if cuda.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return [], 0, "libcuda does not give its version"
    code = cuda.cuInit(0)
    if code != 0:
        return [], version.value, "" if code == _CUDA_ERROR_NO_DEVICE else f"cuInit answers {code}"
    cuda.cuDeviceGetCount(ctypes.byref(count))
    names: list[str] = []
    for device in range(count.value):
        name = ctypes.create_string_buffer(256)
        cuda.cuDeviceGetName(name, len(name), device)
        names.append(name.value.decode(errors="replace"))
    return names, version.value, ""


def version_of(package: str) -> str | None:
    """Find the version of a package; ``None`` if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def dali_builds() -> dict[str, str]:
    """Find the installed builds of DALI -> version."""
    names = (f"{DALI_PACKAGE}{cuda}" for cuda in ("110", "120", "130", "140"))
    return {name: version for name in names if (version := version_of(name)) is not None}


def cuda_major(dali_package: str) -> int:
    """Return the major version of CUDA for which a build of DALI is.

    >>> cuda_major("nvidia-dali-cuda120")
    12
    """
    return int(dali_package.removeprefix(DALI_PACKAGE)) // 10


# Cores and this node


def check_cores(environment: Mapping[str, str], *, nodes: Path = NODES, gpus: Path = GPUS) -> Findings:
    """Compare the decoding threads of all ranks with the cores.

    The ranks are those that the launcher started on this host or, without a launcher, one for each GPU.
    """
    cores = os.sched_getaffinity(0)
    num_ranks = num_local_ranks(environment)
    if num_ranks > 1:
        threads, ranks = cores_of_rank(environment), f"{num_ranks} ranks of this job on this host"
    else:
        num_ranks = max(1, len(list(gpus.iterdir())) if gpus.is_dir() else 1)
        threads, ranks = max(1, len(cores) // num_ranks), f"{counted(num_ranks, 'rank')}, one for each GPU"
        ranks = ranks if gpus.is_dir() else "1 rank"
    used = [path for path in nodes.glob("node[0-9]*/cpulist") if _core_numbers(path.read_text()) & cores]
    found = (
        f"{counted(threads, 'decoding thread')} a rank by default, with {ranks}, {counted(len(cores), 'core')} and "
        f"{counted(len(used), 'NUMA node')}; on a GPU each decoder of the graph has as many threads again"
    )
    if threads < MIN_CORES and num_ranks > 1:
        yield warn(
            "cores", found, f"a rank needs {MIN_CORES} cores at least: start fewer ranks, or give the job more cores"
        )
    elif len(used) > 1 and num_ranks > 1:
        advice = (
            "bind each rank to the cores near its GPU (torchrun --numa-binding=exclusive): docs/dgx.md, 'Two sockets'"
        )
        yield warn("cores", f"{found}; this process is not bound to one of them", advice)
    else:
        yield ok("cores", found)


def _core_numbers(text: str) -> set[int]:
    """Read a list of cores as the kernel writes it.

    >>> sorted(_core_numbers("0-2,8"))
    [0, 1, 2, 8]
    """
    ranges = [part.partition("-") for part in text.strip().split(",") if part]
    return {core for first, _, last in ranges for core in range(int(first), int(last or first) + 1)}


def check_caches(directory: Path | None) -> Findings:
    """Check the named directory, or the default ones, of which one must be suitable for a cache."""
    if directory is not None:
        yield _check_cache(directory, is_named=True)
        return
    directories = default_directories()
    findings = [_check_cache(default, is_named=False) for default in directories]
    yield from findings
    if not any(finding.status == "ok" for finding in findings):
        found = f"no default directory is suitable: {', '.join(map(str, directories)) or 'none exists'}"
        yield fail("cache", found, "name one on tmpfs, ext4, XFS or btrfs: cache=Cache(directory=...)")


def check_memory() -> Findings:
    left, limit = available_memory(), memory_limit()
    bound = f"; the control group leaves {format_bytes(limit)}" if limit < UNLIMITED else "; no control group's limit"
    found = f"{format_bytes(left)} available{bound}"
    if left < MIN_MEMORY_BYTES:
        advice = f"caches in {SHARED_MEMORY} count as memory; raise the limit, or pass cache=Cache(directory=...)"
        yield warn("memory", found, f"under {format_bytes(MIN_MEMORY_BYTES)}: {advice}")
    else:
        yield ok("memory", found)


def check_open_files() -> Findings:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    shown = ["unlimited" if limit == resource.RLIM_INFINITY else str(limit) for limit in (soft, hard)]
    found = f"{shown[0]} open files, at most {shown[1]}"
    if soft != resource.RLIM_INFINITY and soft < ENOUGH_FILES:
        report = fail if soft < MIN_FILES else warn
        yield report("limits", found, f"raise it: ulimit -n {ENOUGH_FILES} or more")
    else:
        yield ok("limits", found)


def check_reader() -> Findings:
    """Check whether the system allows the calls by which loaders read batches from the cache file."""
    try:
        with contextlib.closing(Aio()):
            pass
    except OSError as exc:
        advice = (
            "loaders use DALI's reader, which takes more CPU time; allow io_setup, io_submit, io_getevents and "
            "io_destroy in the container's filter of system calls, or raise fs.aio-max-nr"
        )
        yield warn("reader", f"no asynchronous I/O of Linux ({exc.strerror})", advice)
    else:
        yield ok("reader", "asynchronous I/O of Linux works: a batch is read with one system call")


def _check_cache(directory: Path, *, is_named: bool) -> Finding:
    name = f"cache {directory}"
    try:
        check_directory(directory)
        _try_files(directory)
    except CacheError as exc:
        report = fail if is_named else warn
        found, _, advice = str(exc).rpartition("; ")
        return report(name, found or str(exc), advice if found else "")
    space = FreeSpace.of(directory)
    default_bytes = space.default_bytes(taken=0)
    pages = f", huge pages of {format_bytes(space.alignment)}" if space.alignment > 4096 else ""
    kind = f"memory{pages}" if space.is_memory else file_system(directory) or "an unknown file system"
    found = (
        f"{kind}, {format_bytes(space.free)} free of {format_bytes(space.total)}, a cache takes "
        f"{format_bytes(default_bytes)} by default; reserving and freeing blocks, and locks, work"
    )
    if space.is_memory and space.total <= CONTAINER_SHM_BYTES:
        return warn(name, found, "a container's default: start it with --shm-size=8g or --ipc=host")
    if default_bytes < MIN_CACHE_BYTES:
        few = f"less than {format_bytes(MIN_CACHE_BYTES)} holds few shards"
        return warn(name, found, f"{few}: free some space, or name another directory: cache=Cache(directory=...)")
    return ok(name, found)


def _try_files(directory: Path) -> None:
    """Try the operations that a cache file and its locks need.

    Raises:
        CacheError: If the file system does not support one of them.
    """
    advice = "pass a directory on tmpfs, ext4, XFS or btrfs"
    try:
        with tempfile.TemporaryFile(dir=directory) as stream:
            reserve(stream.fileno(), 1 << 20, 1 << 16)
    except OSError as exc:
        raise CacheError(f"its file system cannot reserve blocks ({exc.strerror}); {advice}") from exc
    try:
        with tempfile.NamedTemporaryFile(dir=directory, prefix=".doctor-") as stream:
            path = Path(stream.name)
            with contextlib.closing(LockFile(path)) as mine, contextlib.closing(LockFile(path)) as others:
                if not mine.try_lock(0) or others.try_lock(0):
                    raise CacheError(f"open-file-description locks do not exclude each other there; {advice}")
    except OSError as exc:
        raise CacheError(f"its file system has no open-file-description locks ({exc.strerror}); {advice}") from exc


# The cluster, and the HTTP proxies on the way to it


def check_cluster(endpoint: str | None) -> Findings:
    """Check the cluster at ``endpoint``: its version, nodes, clock, dSort and ETL."""
    if endpoint is None:
        yield ok("endpoint", "none given: commands on buckets start an embedded node on this machine")
        return
    from dali_pipes.store.cluster.endpoint import check_endpoint

    try:
        check_endpoint(endpoint)
    except (StoreError, ValueError) as exc:
        found, _, advice = str(exc).rpartition("; ")
        yield fail("endpoint", found or str(exc), advice if found else "")
        return
    status, described, date = _ask(endpoint, "daemon", {"what": "node_status"})
    version = str(described.get("ais_version", "")).rstrip(".") if isinstance(described, dict) else ""
    if status == 401:
        advice = refusal_advice(401, _said(described), method="GET", url="", token=Token.from_environment())
        refusal = f"{endpoint} answers, but refuses the request: {_said(described)}"
        yield fail("endpoint", refusal, advice.removeprefix("; "))
        return
    if status == 403:
        what = "AIStore; the token is accepted, but lacks the right SHOW-CLUSTER, so version and nodes are not known"
    elif status == 200:
        what = f"AIStore {version or 'of unknown version'}"
    elif status in (400, 404, 501):
        what = "the embedded node, or a similar server"
    else:
        what = f"is healthy, but does not describe itself ({status or 'no answer'})"
    yield ok("endpoint", f"{endpoint}: {what}{_nodes(endpoint)}")
    with contextlib.suppress(TypeError, ValueError):  # an answer without a date
        skew = time.time() - email.utils.parsedate_to_datetime(date).timestamp()
        if abs(skew) > MAX_SKEW_S:
            found = f"this machine's clock is {abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} the cluster's"
            yield warn("clock", found, "set both by NTP: tokens and certificates expire")
    yield _check_dsort(endpoint, version)
    yield _check_etl(endpoint)


def check_proxies(endpoint: str | None, environment: Mapping[str, str]) -> Findings:
    """Check the proxies that the environment names, and whether requests to the cluster go through one."""
    from requests.utils import should_bypass_proxies

    from dali_pipes.store.messages import is_loopback

    variables = ("http_proxy", "https_proxy", "all_proxy")
    named = {name: value for name, value in environment.items() if name.lower() in variables and value}
    if not named:
        return
    shown = ", ".join(f"{name}={_without_password(value)}" for name, value in sorted(named.items()))
    local = [name for name, value in named.items() if is_loopback(value if "://" in value else f"http://{value}")]
    if endpoint is None:
        if local:
            advice = "requests to other machines go through it; to reach their hosts directly, name them in NO_PROXY"
            yield warn("proxy", f"{shown}: on this machine's loopback", advice)
        else:
            yield ok("proxy", shown)
        return
    scheme, host = urlsplit(endpoint).scheme, urlsplit(endpoint).hostname or ""
    excepted = environment.get("no_proxy") or environment.get("NO_PROXY") or ""
    applies = any(name.lower() in (f"{scheme}_proxy", "all_proxy") for name in named)
    if not applies or is_loopback(endpoint) or should_bypass_proxies(endpoint, excepted):
        yield ok("proxy", f"{shown}: not used for {host}")
        return
    where = "a proxy on this machine's own loopback, which other machines and containers lack" if local else "a proxy"
    yield warn("proxy", f"{shown}: requests to {host} go through {where}", f"reach it directly: NO_PROXY={host}")


def _said(answer: object) -> str:
    return printable(str(answer.get("message", "") if isinstance(answer, dict) else answer), max_chars=80)


def _nodes(endpoint: str) -> str:
    status, answer, _ = _ask(endpoint, "daemon", {"what": "smap"})
    if status != 200 or not isinstance(answer, dict):
        return ""
    proxies, targets = (len(answer.get(which) or {}) for which in ("pmap", "tmap"))
    return f", {proxies} {'proxy' if proxies == 1 else 'proxies'}, {counted(targets, 'target')}"


def _check_dsort(endpoint: str, version: str) -> Finding:
    status, answer, _ = _ask(endpoint, "sort", {"uuid": _NO_JOB})
    advice = "dali-pipes prep shuffle can shuffle without it (--engine exchange)"
    if status == 404 and "does not exist" in str(answer):
        if version.startswith("5.0"):
            found = "available, but cannot start a job in AIStore 5.0 (400, 'stats.NodeStatus.Status')"
            return warn("dSort", found, f"{advice}; or use AIStore 4.9")
        return ok("dSort", "available")
    if status == 403:
        return warn("dSort", "the token lacks the right ADMIN, which dSort takes", advice)
    is_stub = status == 200 and answer == []
    is_missing = is_stub or status in (404, 501)
    return warn("dSort", "not built in (the tag 'dsort')" if is_missing else f"{status}: {_said(answer)}", advice)


def _check_etl(endpoint: str) -> Finding:
    status, answer, _ = _ask(endpoint, "etl", {})
    if status == 200:
        return ok("ETL", "available")
    text = _said(answer)
    reason = "it needs Kubernetes" if "ubernetes" in text else text or str(status)
    if status == 403:
        reason = "the token lacks the right ADMIN"
    # Not a warning: only one command needs ETLs.
    return ok("ETL", f"not available ({reason}); only prep etl needs it; prep transform does the same from here")


def _ask(endpoint: str, path: str, params: Mapping[str, str]) -> tuple[int, Any, str]:
    """Ask for status, answer (parsed JSON, or the start of its text) and the server's time; status 0: no answer."""
    from dali_pipes.store.cluster.client import ais_client

    client = ais_client(endpoint).cluster().client
    url = f"{endpoint.rstrip('/')}/v1/{path}"
    try:
        session = client.session_manager.session
        answer = session.get(url, params=dict(params), timeout=ANSWER_TIMEOUT_S)
    except (NoAnswerError, StoreError) as exc:
        return 0, " ".join(str(exc).split()), ""
    try:
        content = answer.json()
    except ValueError:
        content = answer.text[:200]
    return answer.status_code, content, answer.headers.get("Date", "")


def _without_password(proxy: str) -> str:
    head, mark, rest = proxy.rpartition("://")
    return f"{head}{mark}{rest.rpartition('@')[2]}"


def examine(
    *, endpoint: str | None, cache_dir: Path | None = None, environment: Mapping[str, str] = os.environ
) -> list[Finding]:
    """Run all checks; this takes less than three seconds if the endpoint answers or refuses at once."""
    checks: list[Callable[[], Findings]] = [
        check_python,
        check_packages,
        check_dali,
        check_gpu,
        lambda: check_cores(environment),
        lambda: check_cluster(endpoint),
        lambda: check_proxies(endpoint, environment),
        lambda: check_caches(cache_dir),
        check_memory,
        check_open_files,
        check_reader,
    ]
    findings: list[Finding] = []
    for check in checks:
        try:
            findings += check()
        except Exception as exc:  # noqa: BLE001 (the other checks are still useful)
            text = " ".join(f"{type(exc).__name__}: {exc}".split())
            findings.append(warn("doctor", f"a check failed: {text}", "report this text"))
    return findings
