"""Ask a GPU for the use and number of its engines, and nvImageCodec's log which decoder decoded each photo.

NVML, which comes with the driver, and nvJPEG, which comes with DALI, are called through ctypes: a few functions need no
package. Without a driver these calls fail, and the error says why.
"""

import contextlib
import ctypes
import ctypes.util
import gc
import os
import re
import statistics
import sys
import tempfile
import threading
from collections import Counter
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


# Note [who decodes]: nvImageCodec reads ``DALI_NVIMGCODEC_LOG_LEVEL`` whenever a decoder is made, and writes to
# stderr. From level 3 on it logs, among others, these lines of a batch of four (colours removed)::
#
#     [INFO] [nvimgcodec] create nvjpeg_hw_decoder load_hint 0.65 load_hint_policy 1
#     [INFO] [nvimgcodec] ImageGenericDecoder::decode num_samples=4
#     [INFO] [nvimgcodec] nvjpeg_hw_decoder failed #2. Trying next: nvjpeg_cuda_decoder
#     [INFO] [nvimgcodec] 3: nvjpeg_cuda_decoder process #2
#     [INFO] [nvimgcodec] 0: libjpeg_turbo_decoder process #0
#
# Decoders that take a photo at a time have a line for each photo. The JPEG engines take a batch, and a release build
# logs no line for it: they decoded the photos that no other decoder has a line for, here #1 and #3. Seen on a CPU: the
# lines ``create``, ``decode``, ``process`` and ``Framework is registering decoder``. The others were read in
# nvImageCodec's sources, versions 0.8 (``src/image_generic_codec.h``) and, as texts in the library, 0.9.
LOG_LEVEL = "DALI_NVIMGCODEC_LOG_LEVEL"
ENGINES = "nvjpeg_hw_decoder"
HYBRID = "nvjpeg_cuda_decoder"

# Threads write at the same time: a message is whole, but another one may follow it in the same line. A number is glued
# to the thread number of such a message: "process #1" and "13: ..." give "process #113: ...".
_GLUED = r"(?P<{0}>(?=: ))?"
_EVENT = re.compile(
    r"registering decoder \(id:(?P<registered>\w+) codec:(?P<codec>\w+)\)"
    r"|create (?P<created>[a-z0-9_]+) load_hint"
    r"|(?P<call>::)?decode num_samples=(?P<batch>\d+)"
    + _GLUED.format("glued_batch")
    + r"|: (?P<decoder>[a-z0-9_]+_decoder) process #(?P<sample>\d+)"
    + _GLUED.format("glued_sample")
    + r"|Sample #\d+ (?P<refused>can't be processed)"
)


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    """Collect what the decoders that are made and closed meanwhile log; the list gets the text at the end.

    Everything that this process writes to stderr meanwhile is collected, too, instead of shown.
    """
    found: list[str] = []
    before = os.environ.get(LOG_LEVEL)
    sys.stderr.flush()
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as log:
        os.dup2(log.fileno(), 2)
        os.environ[LOG_LEVEL] = "4"
        try:
            yield found
        finally:
            gc.collect()  # a decoder in a cycle would go on logging
            sys.stderr.flush()
            os.dup2(stderr, 2)
            os.close(stderr)
            os.environ.pop(LOG_LEVEL)
            if before is not None:
                os.environ[LOG_LEVEL] = before
            log.seek(0)
            found.append(log.read().decode(errors="replace"))


def who_decoded(log: str) -> dict[str, int]:
    """Count the photos and masks in a log, by decoder.

    Returns:
        ``num_photos``; ``engines``, ``hybrid``, ``cpu``: photos of each; ``masks``: samples of the PNG decoder;
        ``failed``: samples that no decoder took; ``unknown``: samples without a line, although there were no engines.

    >>> who_decoded("::decode num_samples=2\\n1: nvjpeg_cuda_decoder process #0\\n")["unknown"]
    1
    """
    codecs: dict[str, str] = {}
    created: set[str] = set()
    batches: list[int] = []
    failed = 0
    # A second line of the same sample means that the decoder before it failed. Photos and masks have calls of their
    # own, which may overlap, so a sample is told by its codec, too.
    decoded: dict[tuple[str, int, int | str], str] = {}
    for event in _EVENT.finditer(log):
        if registered := event["registered"]:
            codecs[registered] = event["codec"]
        elif event["created"]:
            created.add(event["created"])
        elif event["batch"]:
            if event["call"]:
                batches.append(0)
            # The same number comes again, without the colons.
            if event["glued_batch"] is None:
                batches[-1] = int(event["batch"])
        elif decoder := event["decoder"]:
            sample = int(event["sample"]) if event["glued_sample"] is None else f"at {event.start()}"
            decoded[codecs.get(decoder, decoder), len(batches), sample] = decoder
        elif event["refused"]:
            failed += 1
    by_decoder = Counter(decoded.values())
    num_samples = sum(batches)
    rest = num_samples - len(decoded) - failed
    masks = sum(count for decoder, count in by_decoder.items() if codecs.get(decoder) == "png")
    has_engines = ENGINES in created
    return {
        "num_photos": num_samples - masks,
        "engines": rest if has_engines else 0,
        "hybrid": by_decoder[HYBRID],
        "cpu": len(decoded) - by_decoder[HYBRID] - masks,
        "masks": masks,
        "failed": failed,
        "unknown": 0 if has_engines else rest,
    }
