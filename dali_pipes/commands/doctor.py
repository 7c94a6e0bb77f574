"""``dali-pipes doctor`` checks this machine; ``dali-pipes completion`` prints a script for a shell's tab completion.

The checks change nothing. A cluster is asked for its health and its version.
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
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

import click

from dali_pipes.cache.placement import (
    CONTAINER_SHM_BYTES,
    FreeSpace,
    available_memory,
    check_directory,
    default_directories,
    file_system,
)
from dali_pipes.commands.options import format_bytes, json_option
from dali_pipes.errors import CacheError, StoreError, printable
from dali_pipes.processes.ranks import cores_of_rank, num_local_ranks
from dali_pipes.progress import LINE_CHARS
from dali_pipes.store.cluster.access import Token, refusal_advice
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
_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


class Finding(NamedTuple):
    """The result of one check. ``warn``: loaders work, but slowly or not in every case; ``fail``: they do not work."""

    name: str
    status: Literal["ok", "warn", "fail"]
    found: str
    advice: str = ""
    """The action to take; empty if none is needed."""


def judged(name: str, found: str, *, warn: str = "", fail: str = "") -> Finding:
    """Make a finding: ``fail`` or ``warn`` is the action to take, if one is needed."""
    return Finding(name, "fail" if fail else "warn" if warn else "ok", found, fail or warn)


@click.command(short_help="Check this machine, its GPU, the cluster and the cache.")
@click.option(
    "--endpoint",
    envvar="AIS_ENDPOINT",
    show_envvar=True,
    help="AIStore's proxy. The command asks for its version, and changes nothing on it.",
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
        check_software,
        check_gpu,
        partial(check_cluster, endpoint, environment),
        partial(check_caches, cache_dir),
        partial(check_machine, environment),
    ]
    findings: list[Finding] = []
    for check in checks:
        try:
            findings += check()
        except Exception as exc:  # noqa: BLE001 (the other checks are still useful)
            text = " ".join(f"{type(exc).__name__}: {exc}".split())
            findings.append(judged("doctor", f"a check failed: {text}", warn="report this text"))
    return findings


# The installed software and the GPUs


def version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def dali_builds() -> list[str]:
    return [name for name in _DALI_BUILDS if version_of(name) is not None]


def check_software() -> Iterator[Finding]:
    """Check that the packages are there, and that exactly one build of DALI is, whole, and can be loaded."""
    versions = {name: version_of(name) for name in PACKAGES}
    found = f"Python {platform.python_version()} on {platform.system()} {platform.release()} {platform.machine()}, "
    found += ", ".join(f"{name} {version or 'missing'}" for name, version in versions.items())
    missing = " ".join(name for name, version in versions.items() if version is None)
    yield judged("packages", found, fail=f"install: pip install {missing}" if missing else "")
    builds = dali_builds()
    found = ", ".join(f"{name} {version_of(name)}" for name in builds) or "not installed"
    if len(builds) != 1:
        advice = "install nvidia-dali-cuda120, or nvidia-dali-cuda130 on a CUDA 13 machine"
        if builds:
            advice = f"they share one directory: pip uninstall -y {' '.join(builds)}; then {advice}"
        yield judged("DALI", found, fail=advice)
        return
    try:
        importlib.import_module("nvidia.dali")  # loads its libraries, touches no device
    except (ImportError, OSError) as exc:
        yield judged("DALI", f"{found} cannot be loaded: {' '.join(str(exc).split())}", fail="install it again")
        return
    yield judged("DALI", found)
    yield check_libraries(builds[0])


def check_libraries(dali_package: str) -> Finding:
    """Check that the libraries of a DALI build are complete, and that no libraries for another CUDA are installed.

    Builds for two CUDA versions overwrite each other's files, and uninstalling one removes files of the other. DALI
    can then be imported, and fails or crashes when it decodes.
    """
    suffix = f"-cu{_DALI_BUILDS[dali_package]}"
    names = [f"{base}-cu{major}" for major in _DALI_BUILDS.values() for base in DALI_LIBRARIES]
    installed = {name: version for name in names if (version := version_of(name))}
    needed = {name: version for name, version in installed.items() if name.endswith(suffix)}
    others = " ".join(name for name in installed if name not in needed)
    broken = " ".join(f"{name}=={version}" for name, version in needed.items() if others or _lacks_libraries(name))
    restore = f"pip install --force-reinstall --no-deps {broken}"
    if others:
        found = f"libraries of another CUDA beside those of {dali_package}: {others}"
        return judged("libraries", found, fail=f"pip uninstall -y {others} && {restore}")
    if broken:
        return judged("libraries", f"without some of their files: {broken}", fail=restore)
    return judged("libraries", ", ".join(f"{name} {version}" for name, version in needed.items()) or "not pip's")


def _lacks_libraries(package: str) -> bool:
    # Since Python 3.12, `importlib.metadata.files` leaves out missing files. An image may be without headers.
    found = importlib.metadata.distribution(package)
    files = [line.partition(",")[0] for line in (found.read_text("RECORD") or "").splitlines()]
    return any(".so" in Path(file).name and not Path(str(found.locate_file(file))).exists() for file in files)


def check_gpu() -> Iterator[Finding]:
    """Check the GPUs of this machine, and whether DALI, torch and the driver are of one CUDA."""
    builds = {f"DALI ({name})": _DALI_BUILDS[name] for name in dali_builds()}
    if built_for := torch_cuda():
        builds[f"torch ({built_for})"] = int(built_for.partition(".")[0])
    found = ", ".join(f"{name} for CUDA {major}" for name, major in builds.items())
    if len({*builds.values()}) > 1:
        advice = f"needs a driver for CUDA {max(builds.values())}; for one CUDA see docs/how-to/install.md"
        yield judged("CUDA", f"{found}: they differ", warn=advice)
    elif builds:
        yield judged("CUDA", found)
    has_driver = Path("/proc/driver/nvidia/version").exists()
    devices, supported, problem = _cuda_devices()
    yield gpu_fit(devices=devices, supported=supported, problem=problem, has_driver=has_driver, builds=builds)
    if devices:
        yield check_jpeg_engines()


def gpu_fit(
    *, devices: Sequence[str], supported: int, problem: str, has_driver: bool, builds: Mapping[str, int]
) -> Finding:
    """Compare the driver with DALI and torch.

    ``builds`` has the major version of CUDA for which each was built; a torch for the CPU is not among them.
    ``supported`` is the CUDA version of the driver, 13020 for 13.2. ``problem`` says why programs cannot use the
    driver; it is empty if they can.
    """
    if problem and not has_driver:
        return judged("GPU", "none: no NVIDIA driver; loaders run with device='cpu'")
    if problem:
        advice = "start a container with --gpus all; elsewhere install the driver's libcuda again"
        return judged("GPU", f"there is a driver, but programs cannot use it: {problem}", fail=advice)
    names = ", ".join(f"{devices.count(name)} x {name}" for name in dict.fromkeys(devices)) or "none visible"
    major = supported // 1000
    found = f"{names}; the driver is for CUDA {major}.{supported % 1000 // 10}"
    if not devices:
        return judged("GPU", found, warn="CUDA_VISIBLE_DEVICES may hide them; loaders run with device='cpu'")
    if too_new := [name for name, built_for in builds.items() if built_for > major]:
        advice = f"install a newer driver, or builds for CUDA {major} or older (docs/how-to/install.md)"
        return judged("GPU", f"{found}, too old for {', '.join(too_new)}", fail=advice)
    if not any(name.startswith("torch") for name in builds):
        advice = "install a torch that was built for CUDA: this one cannot take batches on the GPU"
        return judged("GPU", f"{found}; torch was built for the CPU alone", fail=advice)
    return judged("GPU", found)


def check_jpeg_engines() -> Finding:
    """Check whether nvJPEG can use the GPU's JPEG engines: it needs a driver library that containers may lack."""
    try:
        ctypes.CDLL("libnvcuvid.so.1")
    except OSError:
        advice = "in a container, set NVIDIA_DRIVER_CAPABILITIES=compute,utility,video; else CUDA and the CPU decode"
        return judged("JPEG engines", "not usable: no libnvcuvid.so.1", warn=advice)
    return judged("JPEG engines", "usable, if the GPU has any")


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
    version, count, name = ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(256)
    cuda.cuDriverGetVersion(ctypes.byref(version))
    if (code := cuda.cuInit(0)) != 0:
        return [], version.value, "" if code == _CUDA_ERROR_NO_DEVICE else f"cuInit answers {code}"
    cuda.cuDeviceGetCount(ctypes.byref(count))
    names: list[str] = []
    for device in range(count.value):
        cuda.cuDeviceGetName(name, len(name), device)
        names.append(name.value.decode(errors="replace"))
    return names, version.value, ""


# The cluster


def check_cluster(endpoint: str | None, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Check the cluster at ``endpoint``: its version and clock, and that no HTTP proxy is on the way to it."""
    from requests.utils import should_bypass_proxies

    from dali_pipes.store.cluster.ais import ais_client
    from dali_pipes.store.cluster.endpoint import check_endpoint
    from dali_pipes.store.http.client import is_loopback

    if endpoint is None:
        yield judged("endpoint", "none given: commands on buckets start an embedded node on this machine")
        return
    parts = urlsplit(endpoint)
    given = {name.lower(): value for name, value in environment.items() if value}
    proxies = {f"{parts.scheme}_proxy", "all_proxy"} & given.keys()
    if proxies and not is_loopback(endpoint) and not should_bypass_proxies(endpoint, given.get("no_proxy", "")):
        # Without the proxy's address, which may hold a password.
        found = f"by {', '.join(sorted(proxies))}, requests to {parts.hostname} go through a proxy"
        yield judged("proxy", found, warn=f"reach it directly: NO_PROXY={parts.hostname}")
    try:
        check_endpoint(endpoint)
    except (StoreError, ValueError) as exc:
        found, _, advice = str(exc).rpartition("; ")
        yield Finding("endpoint", "fail", found or str(exc), advice if found else "")
        return
    session = ais_client(endpoint).cluster().client.session_manager.session
    url, params = f"{endpoint.rstrip('/')}/v1/daemon", {"what": "node_status"}
    described: Any = {}
    status, date = 0, ""
    with contextlib.suppress(NoAnswerError, StoreError, ValueError):  # it has answered its health check
        answer = session.get(url, params=params, timeout=ANSWER_TIMEOUT_S)
        status, date = answer.status_code, answer.headers.get("Date", "")
        described = answer.json()
    described = described if isinstance(described, dict) else {}
    if status == 401:
        reason = printable(str(described.get("message", "")), max_chars=80)
        advice = refusal_advice(401, reason, Token.from_environment()).removeprefix("; ")
        yield judged("endpoint", f"{endpoint} answers, but refuses the request: {reason}", fail=advice)
        return
    version = str(described.get("ais_version", "")).rstrip(".")
    yield judged("endpoint", f"{endpoint}: {f'AIStore {version}' if version else 'of unknown version'}")
    with contextlib.suppress(TypeError, ValueError):  # an answer without a date
        skew = abs(time.time() - email.utils.parsedate_to_datetime(date).timestamp())
        if skew > MAX_SKEW_S:
            found = f"the clocks of this machine and the cluster differ by {skew:.0f} s"
            yield judged("clock", found, warn="set both by NTP: tokens and certificates expire")


# The caches and the limits of this machine


def check_caches(directory: Path | None) -> Iterator[Finding]:
    """Check the named directory, or the default ones, of which one must be suitable for a cache."""
    if directory is not None:
        yield _check_cache(directory, unfit="fail")
        return
    findings = [_check_cache(default, unfit="warn") for default in default_directories()]
    yield from findings
    if all(finding.status != "ok" for finding in findings):
        advice = "name one on tmpfs, ext4, XFS or btrfs: cache=Cache(directory=...)"
        yield judged("cache", "no default directory is suitable", fail=advice)


def _check_cache(directory: Path, *, unfit: Literal["warn", "fail"]) -> Finding:
    name = f"cache {directory}"
    try:
        check_directory(directory)
    except CacheError as exc:
        found, _, advice = str(exc).rpartition("; ")
        return Finding(name, unfit, found, advice)
    space = FreeSpace.of(directory)
    default_bytes = space.default_bytes(taken=0)
    found = (
        f"{file_system(directory) or 'an unknown file system'}, {format_bytes(space.free)} free of "
        f"{format_bytes(space.total)}, a cache takes {format_bytes(default_bytes)} by default"
    )
    advice = ""
    if space.is_memory and space.total <= CONTAINER_SHM_BYTES:
        advice = "a container's default: start it with --shm-size=8g or --ipc=host"
    elif default_bytes < MIN_CACHE_BYTES:
        advice = "holds few shards: free some space, or pass cache=Cache(directory=...)"
    return judged(name, found, warn=advice)


def check_machine(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Check the cores, the memory, the limit of open files, and the calls by which loaders read batches."""
    yield check_cores(environment)
    available = available_memory()
    advice = "caches in /dev/shm count as memory; raise the limit, or pass cache=Cache(directory=...)"
    found = f"{format_bytes(available)} available to this process"
    yield judged("memory", found, warn=advice if available < MIN_MEMORY_BYTES else "")
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY or limit >= ENOUGH_FILES:
        yield judged("limits", f"enough open files, {limit}")
    else:
        advice = f"raise it: ulimit -n {ENOUGH_FILES} or more"
        yield Finding("limits", "fail" if limit < MIN_FILES else "warn", f"only {limit} open files", advice)
    from dali_pipes.reader.aio_reader import Aio  # last: it needs a DALI that can be loaded

    try:
        Aio().close()
    except OSError as exc:
        advice = (
            "loaders use DALI's reader, which takes more CPU time; allow io_setup, io_submit, io_getevents and "
            "io_destroy in the container's filter of system calls, or raise fs.aio-max-nr"
        )
        yield judged("reader", f"no asynchronous I/O of Linux ({exc.strerror})", warn=advice)
    else:
        yield judged("reader", "asynchronous I/O of Linux works: a batch is read with one system call")


def check_cores(environment: Mapping[str, str], *, nodes: Path = NODES, gpus: Path = GPUS) -> Finding:
    """Compare the decoding threads of all ranks with the cores.

    The ranks are those that the launcher started on this host or, without a launcher, one for each GPU.
    """
    cores, num_ranks = len(os.sched_getaffinity(0)), num_local_ranks(environment)
    threads = cores_of_rank(environment)
    if num_ranks == 1 and gpus.is_dir():
        num_ranks = max(1, len(list(gpus.iterdir())))
        threads = max(1, cores // num_ranks)
    num_nodes = len(list(nodes.glob("node[0-9]*")))
    found = f"{threads} decoding threads a rank by default; ranks {num_ranks}, cores {cores}, NUMA nodes {num_nodes}"
    advice = ""
    if threads < MIN_CORES and num_ranks > 1:
        advice = f"a rank needs {MIN_CORES} cores at least: start fewer ranks, or give the job more cores"
    elif num_ranks > 1 < num_nodes and cores == os.cpu_count():
        found += "; this process is not bound to one of them"
        advice = "bind each rank to the cores near its GPU: docs/dgx.md, 'Two sockets'"
    return judged("cores", found, warn=advice)


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
    click.echo(kind(context.find_root().command, {}, "dali-pipes", "_DALI_PIPES_COMPLETE").source())
