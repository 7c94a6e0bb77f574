"""Decode photos by Pillow in a process that may die, for formats of which a broken photo can end the process."""

import atexit
import functools
import io
import os
import resource
import signal
import threading
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from dali_pipes.errors import printable
from dali_pipes.formats.orientation import upright_size
from dali_pipes.formats.photo_header import PhotoHeader
from prep.workers import Report, WorkerDiedError, Workers

TIMEOUT_S = 60.0
"""A photo that takes longer is bad: Pillow decodes some 50 million pixels of JPEG 2000 in that time."""

# For each pixel of the largest photo Pillow may have 4 bytes in its buffers some times over; and Pillow itself.
_BYTES_PER_PIXEL = 32
_BASE_BYTES = 2 << 30
# Pillow's readers that have other names than our formats.
_READERS = {"APNG": "PNG"}
_CHARS = 120
_GRAY = ("1", "L", "LA", "La")
_COLOUR = ("RGB", "RGBA", "RGBa", "RGBX", "P", "PA", "CMYK", "YCbCr", "LAB", "HSV")
_TRANSPOSES = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

UInt8s = npt.NDArray[np.uint8]
_lock = threading.Lock()


class Undecodable(Exception):  # noqa: N818 (it describes the photo)
    """A photo that cannot be decoded. The text follows the photo's name: ``cannot be decoded ...``."""


def decode_apart(data: bytes, header: PhotoHeader, orientation: int, *, max_pixels: int) -> UInt8s:
    """Decode a photo with this header, or the first picture of an animation: uint8 [height, width] or [..., 3].

    It is turned upright by ``orientation``, as `dali_pipes.formats.orientation` describes it. ``max_pixels`` is the
    size of the largest photo; the process may have memory in proportion to it. A process that died is replaced.

    Raises:
        Undecodable: If Pillow cannot decode it, dies of it, takes more than `TIMEOUT_S`, or finds another size.
    """
    task = (data, _READERS.get(header.format, header.format), orientation, TIMEOUT_S)
    try:
        with _lock:
            (found,) = _process(max_pixels, os.getpid()).map(_decode, [task])
    except WorkerDiedError as exc:
        if exc.status == -signal.SIGALRM:
            raise Undecodable(f"cannot be decoded: Pillow takes longer than {TIMEOUT_S:g} s") from exc
        ended = signal.Signals(-exc.status).name if exc.status < 0 else f"exit status {exc.status}"
        raise Undecodable(f"cannot be decoded: Pillow's process ended by {ended}") from exc
    if isinstance(found, str):
        raise Undecodable(f"cannot be decoded by Pillow: {printable(found, max_chars=_CHARS)}")
    height, width = (int(side) for side in upright_size(header.height, header.width, orientation))
    # Pillow turns a TIFF upright itself.
    if found.shape[:2] != (height, width) and not (header.format == "TIFF" and found.shape[:2] == (width, height)):
        raise Undecodable(f"holds {found.shape[0]} x {found.shape[1]} pixels, its header says {height} x {width}")
    return found


def turned_upright(picture: Image.Image, orientation: int) -> Image.Image:
    """Turn a picture with this EXIF orientation."""
    return picture.transpose(_TRANSPOSES[orientation]) if orientation in _TRANSPOSES else picture


def eight_bits(photo: Any) -> Image.Image:
    """The pixels of a photo that Pillow has read, gray or RGB of 8 bits: as loaders give them, without alpha.

    Raises:
        ValueError: If the pixels are of another kind, such as numbers of 32 bits.
    """
    if photo.mode in _GRAY:
        return photo.convert("L")  # type: ignore[no-any-return]
    if photo.mode in _COLOUR:
        return photo.convert("RGB")  # type: ignore[no-any-return]
    if photo.mode.startswith("I;16"):  # Pillow does not convert it; DALI takes the high byte of 16
        return Image.fromarray((np.asarray(photo) >> 8).astype(np.uint8))
    raise ValueError(f"its pixels are of Pillow's mode {photo.mode}, expected 8 or 16 bits")


@functools.cache
def _process(max_pixels: int, owner: int) -> Workers:  # a forked worker starts its own
    # Tokens and certificates stay here: the process works on strangers' data.
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH") if name in os.environ}
    limit = _BASE_BYTES + _BYTES_PER_PIXEL * max_pixels
    workers = Workers(1, isolated=True, setup=partial(_limit, limit), environment=kept)
    atexit.register(workers.close)
    return workers


# In the process


def _limit(num_bytes: int) -> None:
    """Take no more memory than this, and be quiet."""
    _, allowed = resource.getrlimit(resource.RLIMIT_AS)
    if allowed != resource.RLIM_INFINITY:
        num_bytes = min(num_bytes, allowed)  # more is refused
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    warnings.simplefilter("ignore")  # about odd metadata; only the pixels count
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)  # libtiff and others print a line for each odd tag
    Image.MAX_IMAGE_PIXELS = None  # the parent has compared the header with its own limit


def _decode(task: tuple[bytes, str, int, float], report: Report) -> UInt8s | str:
    """Decode a photo, or say why that fails."""
    data, reader, orientation, timeout_s = task
    signal.setitimer(signal.ITIMER_REAL, timeout_s)  # its signal ends the process
    try:
        with Image.open(io.BytesIO(data), formats=(reader,)) as photo:
            photo.load()
            return np.asarray(turned_upright(eight_bits(photo), orientation))
    except Exception as exc:  # noqa: BLE001 (Pillow's readers raise all kinds, MemoryError too)
        # Its text for an unknown format names an object in memory.
        return str(exc).partition(" <")[0] or type(exc).__name__
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
