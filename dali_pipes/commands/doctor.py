"""``dali-pipes doctor`` checks this machine; ``dali-pipes completion`` prints a script for a shell's tab completion.

The checks change nothing. Test files in the cache directories are deleted at once. A cluster is asked for its health,
its version, a dSort job that does not exist, and a list of ETLs. (A build without dSort answers any question about jobs
with an empty list; a build with dSort answers that it does not know the job.)
"""

import contextlib
import ctypes
import email.utils
import importlib
import importlib.metadata
import importlib.util
import json
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

import click

from dali_pipes.cache.directory import LockFile
from dali_pipes.cache.extents import reserve
from dali_pipes.cache.free_space import FreeSpace, available_memory, check_directory, file_system
from dali_pipes.cache.placement import CONTAINER_SHM_BYTES, default_directories
from dali_pipes.commands.options import format_bytes, json_option
from dali_pipes.errors import CacheError, StoreError, printable
from dali_pipes.processes.ranks import cores_of_rank, num_local_ranks
from dali_pipes.progress import LINE_CHARS
from dali_pipes.reader.aio_reader import Aio
from dali_pipes.store.cluster.token import Token, refusal_advice
from dali_pipes.store.http.client import NoAnswerError

PACKAGES = ("dali-pipes", "torch", "aistore", "webdataset", "numpy", "pillow")
# Packages of the libraries of DALI: there is a build for each CUDA, -cu12 and -cu13, and all share a directory.
DALI_LIBRARIES = ("nvidia-libnvcomp", "nvidia-nvimgcodec", "nvidia-nvjpeg2k", "nvidia-nvtiff")
# The major version of CUDA of each build of DALI.
_DALI_BUILDS = {"nvidia-dali-cuda110": 11, "nvidia-dali-cuda120": 12, "nvidia-dali-cuda130": 13}
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
# With a larger difference between the clocks, tokens and certificates are refused.
MAX_SKEW_S = 60.0
ANSWER_TIMEOUT_S = 5.0
# Not in the form of AIStore's own job ids, which are "srt-" and nine letters.
_NO_JOB = "srt-of-nobody"
_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}
_PROGRAM, _VARIABLE = "dali-pipes", "_DALI_PIPES_COMPLETE"


class Finding(NamedTuple):
    """The result of one check. ``warn``: loaders work, but slowly or not in every case; ``fail``: they do not work."""

    name: str
    status: Literal["ok", "warn", "fail"]
    found: str
    advice: str = ""
    """The action to take; empty if none is needed."""


@click.command(short_help="Check this machine, its GPU, the cluster and the cache.")
@click.option(
    "--endpoint",
    envvar="AIS_ENDPOINT",
    show_envvar=True,
    help="AIStore's proxy. The command asks for its version, dSort and ETL, and changes nothing on it.",
)
@click.option(
    "--cache",
    "cache_dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Directory for cache files.  [default: /dev/shm, the directory for temporary files]",
)
@json_option
@click.pass_context
def doctor(context: click.Context, *, endpoint: str | None, cache_dir: Path | None, as_json: bool) -> None:
    """Check versions, the GPU's driver against DALI and torch, the endpoint, the cache and limits of this machine.

    Each finding is ok, warn or fail, and says what to do. A machine without a GPU is ok: loaders run on the CPU. The
    exit code is 1 if a finding is fail.
    """
    findings = examine(endpoint=endpoint, cache_dir=cache_dir)
    status = max((finding.status for finding in findings), key=list(_COLOURS).index)
    if as_json:
        click.echo(json.dumps({"status": status, "findings": [finding._asdict() for finding in findings]}))
        context.exit(int(status == "fail"))
    colour = False if os.environ.get("NO_COLOR") else None  # None: if stdout is a terminal
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        word = click.style(f"{finding.status:4}", fg=_COLOURS[finding.status])
        click.echo(f"{word}  {finding.name:<{width}}  {printable(finding.found, max_chars=LINE_CHARS)}", color=colour)
        if finding.advice:
            click.echo(f"{'':4}  {'':<{width}}  -> {printable(finding.advice, max_chars=LINE_CHARS)}")
    context.exit(int(status == "fail"))


def examine(
    *, endpoint: str | None, cache_dir: Path | None = None, environment: Mapping[str, str] = os.environ
) -> list[Finding]:
    """Run all checks; this takes less than three seconds if the endpoint answers or refuses at once."""
    checks: list[Callable[[], Iterator[Finding]]] = [
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
            findings.append(Finding("doctor", "warn", f"a check failed: {text}", "report this text"))
    return findings


# The installed software and the GPUs


def check_packages() -> Iterator[Finding]:
    versions = {name: version_of(name) for name in PACKAGES}
    found = f"Python {platform.python_version()} on {platform.system()} {platform.release()} {platform.machine()}, "
    found += ", ".join(f"{name} {version or 'missing'}" for name, version in versions.items())
    missing = [name for name, version in versions.items() if version is None]
    if missing:
        yield Finding("packages", "fail", found, f"install: pip install {' '.join(missing)}")
    else:
        yield Finding("packages", "ok", found)


def check_dali() -> Iterator[Finding]:
    """Check that exactly one build of DALI is installed, with its libraries, and that it can be loaded."""
    builds = dali_builds()
    named = ", ".join(f"{name} {version_of(name)}" for name in builds)
    if not builds:
        advice = "install nvidia-dali-cuda120, or nvidia-dali-cuda130 on a CUDA 13 machine"
        yield Finding("DALI", "fail", "not installed", advice)
        return
    if len(builds) > 1:
        advice = f"they share one directory: pip uninstall -y {' '.join(builds)}, then install one of them again"
        yield Finding("DALI", "fail", f"{named}, both", advice)
        return
    try:
        importlib.import_module("nvidia.dali")  # loads its libraries, touches no device
    except (ImportError, OSError) as exc:
        yield Finding("DALI", "fail", f"{named} cannot be loaded: {' '.join(str(exc).split())}", "install it again")
        return
    yield Finding("DALI", "ok", named)
    yield check_libraries(builds[0])


def check_libraries(dali_package: str) -> Finding:
    """Check that the libraries of a build of DALI are whole, and that those of another CUDA are not installed as well.

    Builds for two CUDA versions overwrite each other's files, and uninstalling one removes files of the other. DALI
    can then be imported, and fails or crashes when it decodes.
    """
    cuda = _DALI_BUILDS[dali_package]
    own = [name for base in DALI_LIBRARIES if version_of(name := f"{base}-cu{cuda}") is not None]
    others = [
        name
        for base in DALI_LIBRARIES
        for major in _DALI_BUILDS.values()
        if major != cuda and version_of(name := f"{base}-cu{major}") is not None
    ]
    broken = [name for name in own if others or _lacks_files(name)]
    pinned = " ".join(f"{name}=={version_of(name)}" for name in broken)
    restore = f"pip install --force-reinstall --no-deps {pinned}"
    if others:
        found = f"installed beside those of {dali_package}: {', '.join(others)}"
        advice = f"pip uninstall -y {' '.join(others)}{f' && {restore}' if broken else ''}"
        return Finding("libraries", "fail", found, advice)
    if broken:
        return Finding("libraries", "fail", f"without some of their files: {pinned}", restore)
    return Finding("libraries", "ok", ", ".join(f"{name} {version_of(name)}" for name in own) or "not pip's")


def _lacks_files(package: str) -> bool:
    """Tell whether a library that this package has installed is gone; headers may be left out of an image."""
    files = importlib.metadata.files(package) or []
    return any(".so" in file.name and not Path(str(file.locate())).exists() for file in files)


def check_gpu() -> Iterator[Finding]:
    """Check the GPUs of this machine, and whether DALI, torch and the driver are of one CUDA."""
    builds = {f"DALI ({name})": _DALI_BUILDS[name] for name in dali_builds()}
    built_for = torch_cuda()
    if built_for:
        builds[f"torch ({built_for})"] = int(built_for.partition(".")[0])
    found = ", ".join(f"{name} for CUDA {major}" for name, major in builds.items())
    if len({*builds.values()}) > 1:
        advice = f"needs a driver for CUDA {max(builds.values())}; for one CUDA see docs/how-to/install.md"
        yield Finding("CUDA", "warn", f"{found}: they differ", advice)
    elif builds:
        yield Finding("CUDA", "ok", found)
    devices, supported, problem = _cuda_devices()
    try:
        version = re.search(r"\b\d{3}\.[\d.]+\b", Path("/proc/driver/nvidia/version").read_text())
        kernel = version[0] if version else "unknown"
    except OSError:
        kernel = None
    yield gpu_fit(devices=devices, supported=supported, problem=problem, kernel=kernel, builds=builds)
    if devices:
        yield check_jpeg_engines()


def gpu_fit(
    *, devices: Sequence[str], supported: int, problem: str, kernel: str | None, builds: Mapping[str, int]
) -> Finding:
    """Compare the driver with DALI and torch.

    ``builds`` has the major version of CUDA for which each was built; a torch for the CPU is not among them.
    ``supported`` is the CUDA version of the driver, 13020 for 13.2. ``problem`` says why programs cannot use the
    driver; it is empty if they can. ``kernel`` is the driver's version in the kernel, ``None`` without a driver.
    """
    if problem and kernel is None:
        return Finding("GPU", "ok", "none: no NVIDIA driver; loaders run with device='cpu'")
    if problem:
        advice = "start a container with --gpus all; elsewhere install the driver's libcuda again"
        return Finding("GPU", "fail", f"the kernel has driver {kernel}, but programs cannot use it: {problem}", advice)
    shown = ", ".join(f"{devices.count(name)} x {name}" for name in dict.fromkeys(devices)) or "none visible"
    found = f"{shown}; driver {kernel} for CUDA {supported // 1000}.{supported % 1000 // 10}"
    if not devices:
        return Finding("GPU", "warn", found, "CUDA_VISIBLE_DEVICES may hide them; loaders run with device='cpu'")
    too_new = [name for name, major in builds.items() if major > supported // 1000]
    if too_new:
        advice = (
            f"install a newer driver, or builds for CUDA {supported // 1000} or older: make demo CUDA=12 in a new "
            "environment (docs/how-to/install.md)"
        )
        return Finding("GPU", "fail", f"{found}, too old for {', '.join(too_new)}", advice)
    if not any(name.startswith("torch") for name in builds):
        advice = "install a torch that was built for CUDA: this one cannot take batches on the GPU"
        return Finding("GPU", "fail", f"{found}; torch was built for the CPU alone", advice)
    return Finding("GPU", "ok", found)


def check_jpeg_engines() -> Finding:
    """Check whether nvJPEG can use the GPU's JPEG engines: it needs a driver library that containers may lack."""
    try:
        ctypes.CDLL("libnvcuvid.so.1")
    except OSError:
        advice = (
            "in a container, set NVIDIA_DRIVER_CAPABILITIES=compute,utility,video; without the engines, CUDA and the "
            "CPU decode"
        )
        return Finding("JPEG engines", "warn", "not usable: no libnvcuvid.so.1", advice)
    return Finding("JPEG engines", "ok", "usable, if the GPU has any")


def torch_cuda() -> str:
    """Find the CUDA version for which torch was built; empty for a CPU build. Importing torch would take seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    text = (Path(spec.origin).parent / "version.py").read_text()
    match = re.search(r"^cuda\b[^=\n]*=\s*['\"]([0-9.]+)['\"]", text, re.MULTILINE)
    return match[1] if match else ""


def _cuda_devices() -> tuple[list[str], int, str]:
    """Find the devices' names, the driver's CUDA version, and why programs cannot use the driver: see `gpu_fit`."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return [], 0, "no libcuda.so.1"
    version, count = ctypes.c_int(), ctypes.c_int()
    cuda.cuDriverGetVersion(ctypes.byref(version))
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


def dali_builds() -> list[str]:
    """Find the installed builds of DALI."""
    return [name for name in _DALI_BUILDS if version_of(name) is not None]


# Cores and this node


def check_cores(environment: Mapping[str, str], *, nodes: Path = NODES, gpus: Path = GPUS) -> Iterator[Finding]:
    """Compare the decoding threads of all ranks with the cores.

    The ranks are those that the launcher started on this host or, without a launcher, one for each GPU.
    """
    cores, num_ranks = len(os.sched_getaffinity(0)), num_local_ranks(environment)
    threads = cores_of_rank(environment)
    if num_ranks == 1 and gpus.is_dir():
        num_ranks = max(1, len(list(gpus.iterdir())))
        threads = max(1, cores // num_ranks)
    num_nodes = len(list(nodes.glob("node[0-9]*")))
    found = (
        f"{threads} decoding threads a rank by default; ranks {num_ranks}, cores {cores}, NUMA nodes {num_nodes}; on a "
        "GPU each decoder of the graph has as many threads again"
    )
    if threads < MIN_CORES and num_ranks > 1:
        advice = f"a rank needs {MIN_CORES} cores at least: start fewer ranks, or give the job more cores"
        yield Finding("cores", "warn", found, advice)
    elif num_ranks > 1 < num_nodes and cores == os.cpu_count():
        advice = (
            "bind each rank to the cores near its GPU (torchrun --numa-binding=exclusive): docs/dgx.md, 'Two sockets'"
        )
        yield Finding("cores", "warn", f"{found}; this process is not bound to one of them", advice)
    else:
        yield Finding("cores", "ok", found)


def check_caches(directory: Path | None) -> Iterator[Finding]:
    """Check the named directory, or the default ones, of which one must be suitable for a cache."""
    if directory is not None:
        yield _check_cache(directory, is_named=True)
        return
    findings = [_check_cache(default, is_named=False) for default in default_directories()]
    yield from findings
    if all(finding.status != "ok" for finding in findings):
        advice = "name one on tmpfs, ext4, XFS or btrfs: cache=Cache(directory=...)"
        yield Finding("cache", "fail", "no default directory is suitable", advice)


def _check_cache(directory: Path, *, is_named: bool) -> Finding:
    name = f"cache {directory}"
    try:
        check_directory(directory)
        _try_files(directory)
    except CacheError as exc:
        found, _, advice = str(exc).rpartition("; ")
        return Finding(name, "fail" if is_named else "warn", found, advice)
    space = FreeSpace.of(directory)
    default_bytes = space.default_bytes(taken=0)
    kind = "memory" if space.is_memory else file_system(directory) or "an unknown file system"
    found = (
        f"{kind}, {format_bytes(space.free)} free of {format_bytes(space.total)}, a cache takes "
        f"{format_bytes(default_bytes)} by default; reserving and freeing blocks, and locks, work"
    )
    if space.is_memory and space.total <= CONTAINER_SHM_BYTES:
        return Finding(name, "warn", found, "a container's default: start it with --shm-size=8g or --ipc=host")
    if default_bytes < MIN_CACHE_BYTES:
        few = f"less than {format_bytes(MIN_CACHE_BYTES)} holds few shards"
        advice = f"{few}: free some space, or name another directory: cache=Cache(directory=...)"
        return Finding(name, "warn", found, advice)
    return Finding(name, "ok", found)


def _try_files(directory: Path) -> None:
    """Try the operations that a cache file and its locks need; raise a `CacheError` if one is not supported."""
    try:
        with tempfile.NamedTemporaryFile(dir=directory, prefix=".doctor-") as stream:
            reserve(stream.fileno(), 1 << 20, 1 << 16)
            path = Path(stream.name)
            with contextlib.closing(LockFile(path)) as mine, contextlib.closing(LockFile(path)) as others:
                if mine.try_lock(0) and not others.try_lock(0):
                    return
        reason = "locks do not exclude each other"
    except OSError as exc:
        reason = f"{exc.strerror}"
    raise CacheError(
        f"its file system cannot reserve blocks or lock files ({reason}); pass a directory on tmpfs, ext4, XFS or btrfs"
    )


def check_memory() -> Iterator[Finding]:
    available = available_memory()
    found = f"{format_bytes(available)} available to this process"
    if available < MIN_MEMORY_BYTES:
        advice = "caches in /dev/shm count as memory; raise the limit, or pass cache=Cache(directory=...)"
        yield Finding("memory", "warn", f"{found}, under {format_bytes(MIN_MEMORY_BYTES)}", advice)
    else:
        yield Finding("memory", "ok", found)


def check_open_files() -> Iterator[Finding]:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY or limit >= ENOUGH_FILES:
        yield Finding("limits", "ok", f"enough open files, {limit}")
    else:
        status: Literal["fail", "warn"] = "fail" if limit < MIN_FILES else "warn"
        yield Finding("limits", status, f"only {limit} open files", f"raise it: ulimit -n {ENOUGH_FILES} or more")


def check_reader() -> Iterator[Finding]:
    """Check whether the system allows the calls by which loaders read batches from the cache file."""
    try:
        Aio().close()
    except OSError as exc:
        advice = (
            "loaders use DALI's reader, which takes more CPU time; allow io_setup, io_submit, io_getevents and "
            "io_destroy in the container's filter of system calls, or raise fs.aio-max-nr"
        )
        yield Finding("reader", "warn", f"no asynchronous I/O of Linux ({exc.strerror})", advice)
    else:
        yield Finding("reader", "ok", "asynchronous I/O of Linux works: a batch is read with one system call")


# The cluster, and the HTTP proxies on the way to it


def check_cluster(endpoint: str | None) -> Iterator[Finding]:
    """Check the cluster at ``endpoint``: its version, clock, dSort and ETL."""
    if endpoint is None:
        found = "none given: commands on buckets start an embedded node on this machine"
        yield Finding("endpoint", "ok", found)
        return
    from dali_pipes.store.cluster.endpoint import check_endpoint

    try:
        check_endpoint(endpoint)
    except (StoreError, ValueError) as exc:
        found, _, advice = str(exc).rpartition("; ")
        yield Finding("endpoint", "fail", found or str(exc), advice if found else "")
        return
    status, described, date = _ask(endpoint, "daemon", {"what": "node_status"})
    if status == 401:
        said = _said(described)
        advice = refusal_advice(401, said, Token.from_environment())
        found = f"{endpoint} answers, but refuses the request: {said}"
        yield Finding("endpoint", "fail", found, advice.removeprefix("; "))
        return
    version = str(described.get("ais_version", "")).rstrip(".") if isinstance(described, dict) else ""
    yield Finding("endpoint", "ok", f"{endpoint}: {f'AIStore {version}' if version else 'of unknown version'}")
    with contextlib.suppress(TypeError, ValueError):  # an answer without a date
        skew = time.time() - email.utils.parsedate_to_datetime(date).timestamp()
        if abs(skew) > MAX_SKEW_S:
            found = f"this machine's clock is {abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} the cluster's"
            yield Finding("clock", "warn", found, "set both by NTP: tokens and certificates expire")
    yield _check_dsort(endpoint, version)
    yield _check_etl(endpoint)


def _check_dsort(endpoint: str, version: str) -> Finding:
    status, answer, _ = _ask(endpoint, "sort", {"uuid": _NO_JOB})
    advice = "dali-pipes prep shuffle can shuffle without it (--engine exchange)"
    if status == 404 and "does not exist" in str(answer):
        if version.startswith("5.0"):
            found = "available, but cannot start a job in AIStore 5.0 (400, 'stats.NodeStatus.Status')"
            return Finding("dSort", "warn", found, f"{advice}; or use AIStore 4.9")
        return Finding("dSort", "ok", "available")
    if status == 403:
        return Finding("dSort", "warn", "the token lacks the right ADMIN, which dSort takes", advice)
    is_missing = status in (404, 501) or (status == 200 and answer == [])
    found = "not built in (the tag 'dsort')" if is_missing else f"{status}: {_said(answer)}"
    return Finding("dSort", "warn", found, advice)


def _check_etl(endpoint: str) -> Finding:
    status, answer, _ = _ask(endpoint, "etl", {})
    if status == 200:
        return Finding("ETL", "ok", "available")
    reason = "the token lacks the right ADMIN" if status == 403 else f"{status}: {_said(answer)}"
    # Not a warning: only one command needs ETLs.
    found = f"not available ({reason}); only prep etl needs it; prep transform does the same from here"
    return Finding("ETL", "ok", found)


def _said(answer: object) -> str:
    return printable(str(answer.get("message", "") if isinstance(answer, dict) else answer), max_chars=80)


def _ask(endpoint: str, path: str, params: Mapping[str, str]) -> tuple[int, Any, str]:
    """Ask for status, answer (parsed JSON, or the start of its text) and the server's time; status 0: no answer."""
    from dali_pipes.store.cluster.ais import ais_client

    client = ais_client(endpoint).cluster().client
    url = f"{endpoint.rstrip('/')}/v1/{path}"
    try:
        answer = client.session_manager.session.get(url, params=dict(params), timeout=ANSWER_TIMEOUT_S)
    except (NoAnswerError, StoreError) as exc:
        return 0, " ".join(str(exc).split()), ""
    try:
        content = answer.json()
    except ValueError:
        content = answer.text[:200]
    return answer.status_code, content, answer.headers.get("Date", "")


def check_proxies(endpoint: str | None, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Check the proxies that the environment names, and whether requests to the cluster go through one."""
    from requests.utils import should_bypass_proxies

    from dali_pipes.store.messages import is_loopback

    variables = ("http_proxy", "https_proxy", "all_proxy")
    proxies = {name: value for name, value in environment.items() if name.lower() in variables and value}
    if not proxies:
        return
    found = ", ".join(f"{name}={_without_password(value)}" for name, value in sorted(proxies.items()))
    parts = urlsplit(endpoint or "")
    excepted = environment.get("no_proxy") or environment.get("NO_PROXY") or ""
    applies = any(name.lower() in (f"{parts.scheme}_proxy", "all_proxy") for name in proxies)
    if endpoint is None or not applies or is_loopback(endpoint) or should_bypass_proxies(endpoint, excepted):
        yield Finding("proxy", "ok", found)
    else:
        advice = f"reach it directly: NO_PROXY={parts.hostname}"
        yield Finding("proxy", "warn", f"{found}: requests to {parts.hostname} go through a proxy", advice)


def _without_password(proxy: str) -> str:
    head, mark, rest = proxy.rpartition("://")
    return f"{head}{mark}{rest.rpartition('@')[2]}"


@click.command(short_help="Print the script for a shell's tab completion.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print a script with which SHELL completes the commands and options of dali-pipes. Put it here:

    \b
    bash  dali-pipes completion bash > ~/.local/share/bash-completion/completions/dali-pipes
    zsh   dali-pipes completion zsh > ~/.zfunc/_dali-pipes
          (with "fpath+=~/.zfunc" before "compinit" in ~/.zshrc)
    fish  dali-pipes completion fish > ~/.config/fish/completions/dali-pipes.fish
    """
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None, "click has all three"
    click.echo(kind(context.find_root().command, {}, _PROGRAM, _VARIABLE).source())
