"""Ask a GPU for the use of its engines, and for the number of its JPEG engines.

NVML, which comes with the driver, and nvJPEG, which comes with DALI, are called through ctypes: a few functions need no
package. Without a driver these calls fail, and the error says why.
"""

import contextlib
import ctypes
import ctypes.util
import statistics
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

# Seconds between samples. The GPU's own figures are means over a sixth of a second to a second.
SAMPLE_S = 0.1
SETTLED_S = 1.0
"""After this time those means do not include earlier work."""
_SUCCESS = 0


class _Utilization(ctypes.Structure):
    _fields_ = [("gpu", ctypes.c_uint), ("memory", ctypes.c_uint)]


class Nvml:
    """NVIDIA's management library, asked about one GPU; a context manager.

    Args:
        uuid: CUDA's id of the GPU; CUDA and NVML number GPUs differently.

    Raises:
        OSError: If the library is missing or fails; the text names the function and its code.
    """

    def __init__(self, uuid: str) -> None:
        self._library = ctypes.CDLL(ctypes.util.find_library("nvidia-ml") or "libnvidia-ml.so.1")
        _check("NVML", "nvmlInit", self._library.nvmlInit_v2())
        self._is_open = True
        self._device = ctypes.c_void_p()
        bare = uuid.removeprefix("GPU-").removeprefix("MIG-")
        # CUDA does not say whether a device is a GPU or a MIG instance.
        ask = self._library.nvmlDeviceGetHandleByUUID
        code = ask(f"GPU-{bare}".encode(), ctypes.byref(self._device))
        if code != _SUCCESS:
            code = ask(f"MIG-{bare}".encode(), ctypes.byref(self._device))
        _check("NVML", "nvmlDeviceGetHandleByUUID", code)

    def sample(self) -> dict[str, float]:
        """Return the present use of the GPU and of its JPEG engines, as shares; old drivers do not know the latter."""
        found: dict[str, float] = {}
        used = _Utilization()
        if self._library.nvmlDeviceGetUtilizationRates(self._device, ctypes.byref(used)) == _SUCCESS:
            found["gpu_share"] = used.gpu / 100
        percent, period = ctypes.c_uint(), ctypes.c_uint()
        ask = getattr(self._library, "nvmlDeviceGetJpgUtilization", None)
        if ask is not None and ask(self._device, ctypes.byref(percent), ctypes.byref(period)) == _SUCCESS:
            found["jpeg_share"] = percent.value / 100
        return found

    def driver_version(self) -> str:
        """Return the driver's version."""
        text = ctypes.create_string_buffer(96)
        code = self._library.nvmlSystemGetDriverVersion(text, len(text))
        _check("NVML", "nvmlSystemGetDriverVersion", code)
        return text.value.decode()

    def close(self) -> None:
        """Shut the library down. Can be called twice."""
        if self._is_open:
            self._is_open = False
            self._library.nvmlShutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _check(library: str, function: str, code: int) -> None:
    if code != _SUCCESS:
        raise OSError(f"{library}: {function} failed with code {code}")


def count_jpeg_engines() -> tuple[int, int]:
    """Count the JPEG engines of the current GPU and the cores of each, with nvJPEG.

    Raises:
        OSError: If nvJPEG or a GPU is missing.
    """
    library = _nvjpeg()
    handle = ctypes.c_void_p()
    _check("nvJPEG", "nvjpegCreateSimple", library.nvjpegCreateSimple(ctypes.byref(handle)))
    try:
        engines, cores = ctypes.c_uint(), ctypes.c_uint()
        code = library.nvjpegGetHardwareDecoderInfo(handle, ctypes.byref(engines), ctypes.byref(cores))
        _check("nvJPEG", "nvjpegGetHardwareDecoderInfo", code)
        return engines.value, cores.value
    finally:
        library.nvjpegDestroy(handle)


def _nvjpeg() -> ctypes.CDLL:
    """Load DALI's own library, from its package."""
    import nvidia

    for root in nvidia.__path__:
        # CUDA 12's wheels have a directory for each library, CUDA 13's wheels have one for all.
        for place in ("nvjpeg/lib", "cu*/lib"):
            for path in sorted(Path(root).glob(f"{place}/libnvjpeg.so.*")):
                return ctypes.CDLL(str(path))
    return ctypes.CDLL(ctypes.util.find_library("nvjpeg") or "libnvjpeg.so.13")


def has_video_library() -> bool:
    """Whether the driver's libnvcuvid exists, which nvJPEG needs for the JPEG engines.

    A container has it if it was started with the driver capability ``video``.
    """
    try:
        ctypes.CDLL("libnvcuvid.so.1")
    except OSError:
        return False
    return True


def describe_gpu(nvml: Nvml | None) -> dict[str, Any]:
    """Describe the current GPU for a record; what cannot be asked is ``None``, and ``nvjpeg`` then says why."""
    import torch

    found: dict[str, Any] = {
        "name": torch.cuda.get_device_name(),
        # Without this library the JPEG engines are not used, and there is no error.
        "video_library": has_video_library(),
    }
    if nvml is not None:
        with contextlib.suppress(OSError):
            found["driver"] = nvml.driver_version()
    try:
        found["jpeg_engines"], found["cores_per_jpeg_engine"] = count_jpeg_engines()
    except (AttributeError, OSError) as exc:  # nvJPEG is too old or missing; the measured times must not be lost
        found["jpeg_engines"], found["nvjpeg"] = None, str(exc)
    return found


@contextlib.contextmanager
def sampling(sample: Callable[[], Mapping[str, float]] | None, *, after_s: float = 0.0) -> Iterator[dict[str, float]]:
    """Call ``sample`` ten times a second, from ``after_s`` on; at the end the mapping has the means."""
    means: dict[str, float] = {}
    if sample is None:
        yield means
        return
    stopped = threading.Event()
    found: dict[str, list[float]] = {}

    def work() -> None:
        stopped.wait(after_s)
        while not stopped.wait(SAMPLE_S):
            for name, value in sample().items():
                found.setdefault(name, []).append(value)

    thread = threading.Thread(target=work, name="bench-gpu-sample", daemon=True)
    thread.start()
    try:
        yield means
    finally:
        stopped.set()
        thread.join()
        means |= {name: statistics.fmean(values) for name, values in found.items()}
