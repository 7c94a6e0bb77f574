"""Ask NVML, which comes with the driver, for the use of a GPU and of its JPEG engines; it is called through ctypes.

Without a driver these calls fail, and the error says why.
"""

import contextlib
import ctypes
import ctypes.util
import statistics
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

# Seconds between samples. The GPU's own figures are means over a sixth of a second to a second.
SAMPLE_S = 0.1
SETTLED_S = 1.0
"""After this time those means do not include earlier work."""
_SUCCESS = 0


class _Utilization(ctypes.Structure):
    _fields_ = [("gpu", ctypes.c_uint), ("memory", ctypes.c_uint)]


class Nvml:
    """NVIDIA's management library, asked about the GPU with CUDA's id ``uuid``; a context manager.

    CUDA and NVML number GPUs differently. An ``OSError`` names the function that failed and its code.
    """

    def __init__(self, uuid: str) -> None:
        self._library = ctypes.CDLL(ctypes.util.find_library("nvidia-ml") or "libnvidia-ml.so.1")
        _check("nvmlInit", self._library.nvmlInit_v2())
        self._device = ctypes.c_void_p()
        bare = uuid.removeprefix("GPU-").removeprefix("MIG-")
        # CUDA does not say whether a device is a GPU or a MIG instance.
        for name in (f"GPU-{bare}", f"MIG-{bare}"):
            code = self._library.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(self._device))
            if code == _SUCCESS:
                break
        _check("nvmlDeviceGetHandleByUUID", code)

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
        text = ctypes.create_string_buffer(96)
        _check("nvmlSystemGetDriverVersion", self._library.nvmlSystemGetDriverVersion(text, len(text)))
        return text.value.decode()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._library.nvmlShutdown()


def _check(function: str, code: int) -> None:
    if code != _SUCCESS:
        raise OSError(f"NVML: {function} failed with code {code}")


def has_video_library() -> bool:
    """Whether the driver's libnvcuvid exists, which nvJPEG needs for the JPEG engines.

    A container has it if it was started with the driver capability ``video``. Without it the JPEG engines are not used,
    and there is no error.
    """
    try:
        ctypes.CDLL("libnvcuvid.so.1")
    except OSError:
        return False
    return True


def describe_gpu(nvml: Nvml | None) -> dict[str, Any]:
    import torch

    found: dict[str, Any] = {"name": torch.cuda.get_device_name(), "video_library": has_video_library()}
    with contextlib.suppress(OSError):
        found["driver"] = None if nvml is None else nvml.driver_version()
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
