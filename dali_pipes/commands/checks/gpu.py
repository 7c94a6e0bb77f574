"""Check the GPUs, and their driver against what DALI and torch were built for."""

import ctypes
import importlib.util
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from dali_pipes.commands.checks.findings import Finding, Findings, fail, ok, warn
from dali_pipes.commands.checks.software import cuda_major, dali_builds, version_of

_CUDA_ERROR_NO_DEVICE = 100


def check_gpu() -> Findings:
    """The GPUs of this machine, and whether its driver serves DALI and torch."""
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


def check_jpeg_engines() -> Finding:
    """Whether nvJPEG can reach the GPU's JPEG engines: it needs a driver library that containers may lack."""
    try:
        ctypes.CDLL("libnvcuvid.so.1")
    except OSError:
        advice = (
            "in a container: NVIDIA_DRIVER_CAPABILITIES=compute,utility,video; decoding works without, on CUDA and CPU"
        )
        return warn("JPEG engines", "out of reach: no libnvcuvid.so.1", advice)
    return ok("JPEG engines", "within reach, where the GPU has any")


def gpu_fit(
    *,
    devices: Sequence[str],
    supported: int,
    problem: str,
    kernel: str | None,
    builds: Mapping[str, int],
    is_cpu_torch: bool,
) -> Finding:
    """Compare the driver with DALI and torch: ``builds`` has the major version of CUDA that each was built for.

    ``supported`` is the CUDA of the driver, 13020 for 13.2; ``problem`` why programs cannot use the driver, empty if
    they can; ``kernel`` the driver's version in the kernel, ``None`` without a driver.
    """
    built = ", ".join(f"{what} for CUDA {major}" for what, major in builds.items())
    if problem and kernel is None:
        none = "none: no NVIDIA driver; loaders run with device='cpu'"
        return ok("GPU", f"{none}{f' ({built})' if built else ''}")
    if problem:
        advice = "in a container, start it with --gpus all; else install the driver's libcuda again"
        return fail("GPU", f"the kernel has driver {kernel}, and programs cannot use it: {problem}", advice)
    numbers = {name: list(devices).count(name) for name in devices}
    shown = ", ".join(f"{number} x {name}" if number > 1 else name for name, number in numbers.items())
    named = f"{shown or 'none visible'}; driver {kernel or 'unknown'} for CUDA {_dotted(supported)}"
    if not devices:
        return warn("GPU", named, "CUDA_VISIBLE_DEVICES may hide them; loaders run with device='cpu'")
    unfit = [what for what, major in builds.items() if major > supported // 1000]
    if unfit:
        advice = (
            f"a driver serves builds up to its own CUDA; install a newer one, or builds for CUDA {supported // 1000} "
            "(nvidia-dali-cuda120, torch from its index for that CUDA)"
        )
        return fail("GPU", f"{named}, too old for {', '.join(unfit)}", advice)
    if is_cpu_torch:
        advice = "install a torch that was built for CUDA: batches on the GPU cannot be handed to this one"
        return fail("GPU", f"{named}; torch was built for the CPU alone", advice)
    return ok("GPU", f"{named}; {built}")


def torch_cuda() -> str:
    """The CUDA that torch was built for; empty for a build without. Torch is not imported: that takes seconds."""
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
        return [], 0, "libcuda gives no version"
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
