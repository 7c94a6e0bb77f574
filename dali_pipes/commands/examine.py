"""A machine to what fits on it and what does not: versions, GPU, cluster, cache, limits, each with what to do.

Nothing is written but files that are gone at once, in the cache's directories, and nothing on the cluster is changed:
it is asked for its health, its description, a dSort job that never was and a list of ETLs. A build without dSort
answers any question about jobs with an empty list; one that has it says that it does not know the job.
"""

import contextlib
import ctypes
import datetime
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from dali_pipes.cache.blocks import reserve
from dali_pipes.cache.free_space import (
    SHARED_MEMORY,
    FreeSpace,
    available_memory,
    check_directory,
    file_system,
    memory_limit,
)
from dali_pipes.cache.locks import LockFile
from dali_pipes.cache.placement import CONTAINER_SHM_BYTES, default_directories
from dali_pipes.errors import CacheError, StoreError

__all__ = ["Finding", "Status", "examine", "gpu_fit", "worst"]

Status = Literal["ok", "warn", "fail"]

PACKAGES = ("dali-pipes", "torch", "aistore", "webdataset", "numpy", "pillow", "safetensors")
DALI_PACKAGE = "nvidia-dali-cuda"
# A loader has a descriptor for each segment and each connection, its process torch's own; the embedded node one for
# each connection. What most systems give, and what they give with servers in mind.
LEAST_FILES, ENOUGH_FILES = 256, 1024
# Least that a cache is of use with: two windows of a shard each, as `prep pack` makes them.
LEAST_CACHE_BYTES = 512 << 20
# A clock that is off by more has its tokens and certificates refused.
MOST_SKEW_S = 60.0
# No build of this project is older: a clock before that was never set.
EARLIEST = datetime.datetime(2025, 1, 1, tzinfo=datetime.UTC)
ANSWER_TIMEOUT_S = 5.0
UNLIMITED = 1 << 59
# A job that never was: AIStore's own begin with "srt-" and nine letters.
_NO_JOB = "srt-of-nobody"
_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was looked at."""

    name: str
    status: Status
    found: str
    advice: str = ""
    """What to do; empty where there is nothing to."""


def examine(
    *, endpoint: str | None, cache_dir: Path | None = None, environment: Mapping[str, str] = os.environ
) -> list[Finding]:
    """Look at this machine; under three seconds where the endpoint answers or refuses at once.

    Args:
        endpoint: AIStore's proxy; ``None``: none is asked.
        cache_dir: Where images are to lie; ``None``: where they lie by themselves.
        environment: Of the process, for proxies.
    """
    checks: list[Callable[[], Iterator[Finding]]] = [
        _python,
        _packages,
        _dali,
        _gpu,
        lambda: _cluster(endpoint, environment),
        lambda: _proxies(endpoint, environment),
        lambda: _caches(cache_dir),
        _memory,
        _files,
        _clock,
    ]
    found: list[Finding] = []
    for check in checks:
        try:
            found += check()
        except Exception as exc:  # noqa: BLE001 (the others are still of use)
            text = " ".join(f"{type(exc).__name__}: {exc}".split())
            found.append(
                Finding(name="doctor", status="warn", found=f"a check failed: {text}", advice="report what it says")
            )
    return found


# Software


def _python() -> Iterator[Finding]:
    cores, all_cores = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    few = f", {cores} of {all_cores} cores" if cores < all_cores else f", {_count(cores, 'core')}"
    system = f"{platform.system()} {platform.release().partition('-')[0]} {platform.machine()}"
    yield Finding(name="python", status="ok", found=f"{platform.python_version()} on {system}{few}")


def _packages() -> Iterator[Finding]:
    versions = {name: _version(name) for name in PACKAGES}
    lacking = [name for name, version in versions.items() if version is None]
    there = ", ".join(f"{name} {version}" for name, version in versions.items() if version is not None)
    if lacking:
        advice = f"install: pip install {' '.join(lacking)}"
        yield Finding(name="packages", status="fail", found=f"{there}; not {', '.join(lacking)}", advice=advice)
    else:
        yield Finding(name="packages", status="ok", found=there)


def _dali() -> Iterator[Finding]:
    builds = _dali_builds()
    if not builds:
        advice = "install nvidia-dali-cuda120, or nvidia-dali-cuda130 on a CUDA 13 machine"
        yield Finding(name="DALI", status="fail", found="not installed", advice=advice)
        return
    named = ", ".join(f"{name} {version}" for name, version in builds.items())
    if len(builds) > 1:
        advice = f"they share one directory; keep one: pip uninstall {' '.join(builds)}, then install that one again"
        yield Finding(name="DALI", status="fail", found=f"{named}, both", advice=advice)
        return
    try:
        importlib.import_module("nvidia.dali")  # its libraries are loaded, no device is touched
    except (ImportError, OSError) as exc:
        text = " ".join(str(exc).split())
        yield Finding(name="DALI", status="fail", found=f"{named} cannot be loaded: {text}", advice="install it again")
        return
    yield Finding(name="DALI", status="ok", found=named)


def _gpu() -> Iterator[Finding]:
    builds = {f"DALI ({name})": major for name in _dali_builds() if (major := _cuda_major(name))}
    torch_cuda = _torch_cuda()
    if torch_cuda:
        builds[f"torch ({torch_cuda})"] = int(torch_cuda.partition(".")[0])
    devices, supported, problem = _cuda_devices()
    yield gpu_fit(
        devices=devices,
        supported=supported,
        problem=problem,
        kernel=_kernel_driver(),
        builds=builds,
        is_cpu_torch=not torch_cuda and _version("torch") is not None,
    )
    if devices:
        yield _jpeg_engines()


def _jpeg_engines() -> Finding:
    """Whether nvJPEG can reach the GPU's JPEG engines: by a library of the driver that containers may lack."""
    try:
        ctypes.CDLL("libnvcuvid.so.1")
    except OSError:
        advice = (
            "in a container: NVIDIA_DRIVER_CAPABILITIES=compute,utility,video; decoding works without, on CUDA and CPU"
        )
        return Finding(name="JPEG engines", status="warn", found="out of reach: no libnvcuvid.so.1", advice=advice)
    return Finding(name="JPEG engines", status="ok", found="within reach, where the GPU has any")


def gpu_fit(
    *,
    devices: Sequence[str],
    supported: int,
    problem: str,
    kernel: str | None,
    builds: Mapping[str, int],
    is_cpu_torch: bool,
) -> Finding:
    """Driver, DALI and torch held against each other.

    Args:
        devices: Names of the GPUs that programs see.
        supported: The CUDA that the driver supports: 13020 for 13.2.
        problem: Why programs cannot use the driver; empty where they can.
        kernel: The driver's version in the kernel; ``None`` without one.
        builds: What was built for CUDA -> its major version.
        is_cpu_torch: Whether torch is there, and was built without CUDA.
    """
    built = ", ".join(f"{what} for CUDA {major}" for what, major in builds.items())
    if problem and kernel is None:
        text = "none: no NVIDIA driver; loaders run with device='cpu'"
        return Finding(name="GPU", status="ok", found=f"{text}{f' ({built})' if built else ''}")
    if problem:
        advice = "in a container, start it with --gpus all; else install the driver's libcuda anew"
        found = f"the kernel has driver {kernel}, and programs cannot use it: {problem}"
        return Finding(name="GPU", status="fail", found=found, advice=advice)
    counted = {name: list(devices).count(name) for name in devices}
    shown = ", ".join(f"{number} x {name}" if number > 1 else name for name, number in counted.items())
    named = f"{shown or 'none visible'}; driver {kernel or 'unknown'} for CUDA {_dotted(supported)}"
    if not devices:
        advice = "CUDA_VISIBLE_DEVICES may hide them; loaders run with device='cpu'"
        return Finding(name="GPU", status="warn", found=named, advice=advice)
    unfit = [what for what, major in builds.items() if major > supported // 1000]
    if unfit:
        advice = (
            f"a driver serves builds up to its own CUDA; install a newer one, or builds for CUDA {supported // 1000} "
            "(nvidia-dali-cuda120, torch from its index for that CUDA)"
        )
        return Finding(name="GPU", status="fail", found=f"{named}, too old for {', '.join(unfit)}", advice=advice)
    if is_cpu_torch:
        advice = "install a torch that was built for CUDA: batches on the GPU cannot be handed to this one"
        return Finding(name="GPU", status="fail", found=f"{named}; torch was built for the CPU alone", advice=advice)
    return Finding(name="GPU", status="ok", found=f"{named}; {built}")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _dali_builds() -> dict[str, str]:
    """Installed builds of DALI -> version."""
    names = (f"{DALI_PACKAGE}{cuda}" for cuda in ("110", "120", "130", "140"))
    return {name: version for name in names if (version := _version(name)) is not None}


def _cuda_major(package: str) -> int:
    """``nvidia-dali-cuda120`` -> 12."""
    digits = package.removeprefix(DALI_PACKAGE)
    return int(digits) // 10 if digits.isdecimal() else 0


def _torch_cuda() -> str:
    """The CUDA that torch was built for; empty for a build without. Torch is not imported, which takes seconds."""
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
    """The version of the driver in the kernel."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    match = re.search(r"\b([0-9]{3}\.[0-9.]+)\b", text)
    return match[1] if match else "unknown"


def _cuda_devices() -> tuple[list[str], int, str]:
    """Names of the devices, the CUDA that the driver supports, and why programs cannot use it: see `gpu_fit`."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return [], 0, "no libcuda.so.1"
    version, count = ctypes.c_int(), ctypes.c_int()
    if cuda.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return [], 0, "libcuda does not tell its version"
    if (code := cuda.cuInit(0)) == 100:  # CUDA_ERROR_NO_DEVICE
        return [], version.value, ""
    if code != 0:
        return [], version.value, f"cuInit answers {code}"
    cuda.cuDeviceGetCount(ctypes.byref(count))
    names: list[str] = []
    for device in range(count.value):
        name = ctypes.create_string_buffer(256)
        cuda.cuDeviceGetName(name, len(name), device)
        names.append(name.value.decode(errors="replace"))
    return names, version.value, ""


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


# The cluster


def _cluster(endpoint: str | None, environment: Mapping[str, str]) -> Iterator[Finding]:
    if endpoint is None:
        text = "none named: commands on buckets start an embedded node on this machine"
        yield Finding(name="endpoint", status="ok", found=text)
        return
    from dali_pipes.store.ais import check_endpoint

    try:
        check_endpoint(endpoint)
    except (StoreError, ValueError) as exc:
        where, _, advice = str(exc).rpartition("; ")
        yield Finding(name="endpoint", status="fail", found=where or str(exc), advice=advice if where else "")
        return
    status, described, date = _ask(endpoint, "daemon", {"what": "node_status"})
    version = str(described.get("ais_version", "")).rstrip(".") if isinstance(described, dict) else ""
    nodes = _nodes(endpoint)
    secret = "" if environment.get("AIS_AUTHN_TOKEN") or environment.get("AIS_AUTHN_TOKEN_FILE") else " and no token"
    if status in (401, 403):
        advice = f"the cluster wants a token ({status}){secret and ', none is set'}; set AIS_AUTHN_TOKEN_FILE"
        yield Finding(name="endpoint", status="fail", found=f"{endpoint} answers, and refuses", advice=advice)
        return
    if status == 200:
        what = f"AIStore {version or 'of no version'}"
    elif status in (400, 404, 501):
        what = "the embedded node, or one like it"
    else:
        what = f"is healthy, and does not describe itself ({status or 'no answer'})"
    yield Finding(name="endpoint", status="ok", found=f"{endpoint}: {what}{nodes}")
    yield from _skew(date)
    yield _dsort(endpoint, version)
    yield _etl(endpoint)


def _nodes(endpoint: str) -> str:
    status, answer, _ = _ask(endpoint, "daemon", {"what": "smap"})
    if status != 200 or not isinstance(answer, dict):
        return ""
    proxies, targets = (len(answer.get(which) or {}) for which in ("pmap", "tmap"))
    return f", {proxies} {'proxy' if proxies == 1 else 'proxies'}, {_count(targets, 'target')}"


def _dsort(endpoint: str, version: str) -> Finding:
    status, answer, _ = _ask(endpoint, "sort", {"uuid": _NO_JOB})
    advice = "dali-pipes prep shuffle does it on this machine (--engine client)"
    if status == 404 and "does not exist" in str(answer):
        if version.startswith("5.0"):
            found = "there, and starts no job in AIStore 5.0 (400, 'stats.NodeStatus.Status')"
            return Finding(name="dSort", status="warn", found=found, advice=f"{advice}; or take AIStore 4.9")
        return Finding(name="dSort", status="ok", found="there")
    is_stub = status == 200 and answer == []
    found = "not built in (the tag 'dsort')" if is_stub or status in (404, 501) else f"answers {status}: {answer!s:.80}"
    return Finding(name="dSort", status="warn", found=found, advice=advice)


def _etl(endpoint: str) -> Finding:
    status, answer, _ = _ask(endpoint, "etl", {})
    if status == 200:
        return Finding(name="ETL", status="ok", found="there")
    text = str(answer.get("message", "")) if isinstance(answer, dict) else ""
    reason = "it needs Kubernetes" if "ubernetes" in text else text or str(status)
    # Nothing here needs it: not a warning.
    return Finding(
        name="ETL",
        status="ok",
        found=f"not there ({reason:.80}); only prep etl needs it; prep transform does the same from here",
    )


def _skew(date: str) -> Iterator[Finding]:
    try:
        skew = time.time() - email.utils.parsedate_to_datetime(date).timestamp()
    except (TypeError, ValueError):
        return
    if abs(skew) > MOST_SKEW_S:
        found = f"this machine's is {abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} the cluster's"
        yield Finding(
            name="clock", status="warn", found=found, advice="set both by NTP: tokens and certificates expire"
        )


def _ask(endpoint: str, path: str, params: Mapping[str, str]) -> tuple[int, Any, str]:
    """Status, what was answered (from JSON, or the first of its text) and the server's time; 0 without an answer."""
    import requests

    from dali_pipes.store.ais import ais_client

    client = ais_client(endpoint).cluster().client
    headers = {"Authorization": f"Bearer {client.token}"} if client.token else {}
    url = f"{endpoint.rstrip('/')}/v1/{path}"
    try:
        session = client.session_manager.session
        answer = session.get(url, params=dict(params), headers=headers, timeout=ANSWER_TIMEOUT_S)
    except requests.RequestException as exc:
        return 0, " ".join(str(exc).split()), ""
    try:
        content = answer.json()
    except ValueError:
        content = answer.text[:200]
    return answer.status_code, content, answer.headers.get("Date", "")


def _proxies(endpoint: str | None, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Proxies that the environment names, and whether the cluster would be asked through one."""
    from requests.utils import should_bypass_proxies

    from dali_pipes.store.messages import is_loopback

    named = {
        name: value
        for name, value in environment.items()
        if name.lower() in ("http_proxy", "https_proxy", "all_proxy") and value
    }
    if not named:
        return
    shown = ", ".join(f"{name}={_without_password(value)}" for name, value in sorted(named.items()))
    scheme, host = (urlsplit(endpoint).scheme, urlsplit(endpoint).hostname or "") if endpoint else ("", "")
    is_used = (
        bool(endpoint)
        and not is_loopback(endpoint or "")
        and any(name.lower() in (f"{scheme}_proxy", "all_proxy") for name in named)
    )
    excepted = environment.get("no_proxy") or environment.get("NO_PROXY") or ""
    if is_used and should_bypass_proxies(endpoint or "", excepted):
        is_used = False
    local = [name for name, value in named.items() if is_loopback(value if "://" in value else f"http://{value}")]
    if is_used:
        where = (
            "a proxy on this machine's own loopback, which no other machine or container has" if local else "a proxy"
        )
        found = f"{shown}: {host} is asked through {where}"
        yield Finding(name="proxy", status="warn", found=found, advice=f"reach it directly: NO_PROXY={host}")
    elif local and endpoint is None:
        found = f"{shown}: on this machine's loopback"
        advice = "buckets on another machine are asked through it; name their hosts in NO_PROXY, to reach them directly"
        yield Finding(name="proxy", status="warn", found=found, advice=advice)
    else:
        yield Finding(name="proxy", status="ok", found=f"{shown}: not for {host}" if host else shown)


def _without_password(proxy: str) -> str:
    head, mark, rest = proxy.rpartition("://")
    return f"{head}{mark}{rest.rpartition('@')[2]}"


# This node


def _caches(cache_dir: Path | None) -> Iterator[Finding]:
    directories = [cache_dir] if cache_dir is not None else default_directories()
    found = [_cache(directory, is_named=cache_dir is not None) for directory in directories]
    yield from found
    if cache_dir is None and not any(finding.status == "ok" for finding in found):
        text = f"no directory is fit for one: {', '.join(map(str, directories)) or 'none is there'}"
        yield Finding(name="cache", status="fail", found=text, advice="pass cache_dir= on tmpfs, ext4, XFS or btrfs")


def _cache(directory: Path, *, is_named: bool) -> Finding:
    name, bad = f"cache {directory}", "fail" if is_named else "warn"
    status: Status = "fail" if bad == "fail" else "warn"
    try:
        check_directory(directory)
        _try_file(directory)
    except CacheError as exc:
        text, _, advice = str(exc).rpartition("; ")
        return Finding(name=name, status=status, found=text or str(exc), advice=advice if text else "")
    space = FreeSpace.of(directory)
    pages = f", huge pages of {_amount(space.alignment)}" if space.alignment > 4096 else ""
    kind = f"memory{pages}" if space.is_memory else file_system(directory) or "a file system of no name"
    found = (
        f"{kind}, {_amount(space.free)} free of {_amount(space.total)}, a cache takes "
        f"{_amount(space.default_bytes(taken=0))} by itself; holes, reserving and locks work"
    )
    if space.is_memory and space.total <= CONTAINER_SHM_BYTES:
        advice = "a container's default: start it with --shm-size=8g or --ipc=host"
        return Finding(name=name, status="warn", found=found, advice=advice)
    if space.default_bytes(taken=0) < LEAST_CACHE_BYTES:
        advice = f"less than {_amount(LEAST_CACHE_BYTES)} holds few shards: free some, or pass cache_dir= elsewhere"
        return Finding(name=name, status="warn", found=found, advice=advice)
    return Finding(name=name, status="ok", found=found)


def _try_file(directory: Path) -> None:
    """What an image and its locks need, tried on files that are gone afterwards.

    Raises:
        CacheError: If the file system cannot do it.
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
        raise CacheError(f"it has no open-file-description locks ({exc.strerror}); {advice}") from exc


def _memory() -> Iterator[Finding]:
    left, limit = available_memory(), memory_limit()
    bound = f"; the control group leaves {_amount(limit)}" if limit < UNLIMITED else "; no limit by a control group"
    found = f"{_amount(left)} can be had{bound}"
    if left < _GIB:
        advice = (
            f"under {_amount(_GIB)}: caches in {SHARED_MEMORY} count as memory; raise the limit, or pass cache_dir="
        )
        yield Finding(name="memory", status="warn", found=found, advice=advice)
    else:
        yield Finding(name="memory", status="ok", found=found)


def _files() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    shown = ["unlimited" if limit == resource.RLIM_INFINITY else str(limit) for limit in (soft, hard)]
    found = f"{shown[0]} open files, at most {shown[1]}"
    if soft != resource.RLIM_INFINITY and soft < ENOUGH_FILES:
        status: Status = "fail" if soft < LEAST_FILES else "warn"
        yield Finding(name="limits", status=status, found=found, advice=f"raise it: ulimit -n {ENOUGH_FILES} or more")
    else:
        yield Finding(name="limits", status="ok", found=found)


def _clock() -> Iterator[Finding]:
    now = datetime.datetime.now(datetime.UTC)
    if now < EARLIEST:
        advice = "set it: certificates and tokens are not valid yet"
        yield Finding(name="clock", status="warn", found=f"says {now:%Y-%m-%d}, which is over", advice=advice)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _amount(num_bytes: int) -> str:
    from dali_pipes.commands.options import format_bytes

    return format_bytes(num_bytes)


def worst(findings: Sequence[Finding]) -> Status:
    """``fail`` where one of them is, else ``warn``, else ``ok``.

    >>> worst([Finding(name="a", status="ok", found=""), Finding(name="b", status="warn", found="")])
    'warn'
    """
    order: tuple[Status, ...] = ("ok", "warn", "fail")
    return max((finding.status for finding in findings), key=order.index, default="ok")
