"""Check the installed software: Python, packages, DALI's build, and the driver of the GPUs."""

import ctypes
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from dali_pipes.commands.checks.findings import Finding, Findings, counted, fail, ok, warn

PACKAGES = ("dali-pipes", "torch", "aistore", "webdataset", "numpy", "pillow", "safetensors")
DALI_PACKAGE = "nvidia-dali-cuda"
# Packages of the libraries of DALI: there is a build for each CUDA, -cu12 and -cu13, and all share a directory.
DALI_LIBRARIES = ("nvidia-libnvcomp", "nvidia-nvimgcodec", "nvidia-nvjpeg2k", "nvidia-nvtiff")
_CUDA_ERROR_NO_DEVICE = 100


def check_python() -> Findings:
    """Report Python, the system, and the cores that this process may use."""
    cores, all_cores = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    shown = f"{cores} of {all_cores} cores" if cores < all_cores else counted(cores, "core")
    system = f"{platform.system()} {platform.release().partition('-')[0]} {platform.machine()}"
    yield ok("python", f"{platform.python_version()} on {system}, {shown}")


def check_packages() -> Findings:
    """Check the packages that loaders need."""
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
    others = [name for base in DALI_LIBRARIES for name in _builds_of(base) if name != base + own]
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


def _builds_of(package: str) -> list[str]:
    return [name for cuda in (11, 12, 13, 14) if version_of(name := f"{package}-cu{cuda}") is not None]


def _lacks_files(package: str) -> bool:
    """Tell whether a library that this package has installed is gone; headers may be left out of an image."""
    files = importlib.metadata.files(package) or []
    return any(".so" in file.name and not Path(str(file.locate())).exists() for file in files)


def check_gpu() -> Findings:
    """Check the GPUs of this machine, and whether its driver fits DALI and torch."""
    builds = {f"DALI ({name})": cuda_major(name) for name in dali_builds()}
    built_for = torch_cuda()
    if built_for:
        builds[f"torch ({built_for})"] = int(built_for.partition(".")[0])
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


def check_cuda() -> Findings:
    """Check that DALI and torch are built for the same CUDA."""
    builds = dali_builds()
    if len(builds) == 1 and version_of("torch") is not None:
        yield cuda_fit(dali=cuda_major(next(iter(builds))), torch=torch_cuda())


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
    named = f"{shown or 'none visible'}; driver {kernel or 'unknown'} for CUDA {_dotted(supported)}"
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


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


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
