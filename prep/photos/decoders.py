"""Decode all pixels of a photo, or find the reason why it cannot be decoded.

Formats of which a broken photo can end the process are decoded by Pillow in a process that may die (`decode_apart`).
"""

import atexit
import contextlib
import functools
import importlib.util
import io
import os
import resource
import signal
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps, UnidentifiedImageError

from dali_pipes.errors import PipesError, printable
from dali_pipes.formats.orientation import UPRIGHT, is_surely_read, plain_copy
from dali_pipes.formats.photo_header import (
    PhotoHeader,
    PhotoRules,
    bytes_problem,
    needed_chunks,
    read_whole_photo_header,
)
from prep.workers import Report, WorkerDiedError, Workers

DecoderName = Literal["pillow", "dali"]
Output = Literal["rgb", "gray", "nothing"]
"""The form of the decoded pixels; gray is for 8-bit gray photos only."""
Pixels = npt.NDArray[np.uint8]
Decoder = Callable[[bytes, PhotoHeader, Output], Pixels]
"""Decodes all pixels of a photo of known format and allowed size, or raises `Undecodable`: uint8 [height, width, 3] of
RGB, [height, width] of gray, [0] of nothing."""

_SHOWN = 160
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

TIMEOUT_S = 60.0
"""A photo that takes longer is bad: Pillow decodes some 50 million pixels of JPEG 2000 in that time."""
# For each pixel of the largest photo Pillow may have 4 bytes in its buffers some times over; and Pillow itself.
_BYTES_PER_PIXEL = 32
_BASE_BYTES = 2 << 30


class Undecodable(Exception):  # noqa: N818 (it describes the photo)
    """A photo that cannot be decoded. The text follows the photo's name: ``cannot be decoded ...``."""


def choose_decoder(name: DecoderName | None) -> DecoderName:
    """The decoder of a name; ``None``: DALI's if it is installed, else Pillow's.

    Raises:
        PipesError: If it is not installed; before a process starts.
    """
    try:
        has_dali = importlib.util.find_spec("nvidia.dali") is not None
    except (ImportError, ValueError):  # no package "nvidia"
        has_dali = False
    if name is None:
        return "dali" if has_dali else "pillow"
    if name == "dali" and not has_dali:
        raise PipesError("decoder 'dali' needs DALI; install nvidia-dali-cuda120, or pass --decoder pillow")
    return name


def count_values(pixels: Pixels) -> npt.NDArray[np.int64]:
    """Count the pixels of each value in a photo's channel, uint8 [height, width]; returns int64 [256]."""
    return np.array(Image.fromarray(pixels).histogram(), np.int64)


def open_decoder(name: DecoderName) -> Decoder:
    """A decoder, for one thread.

    ``"dali"`` is DALI's decoder on the CPU, which loaders use; Pillow adds words to what it refuses. ``"pillow"`` needs
    only Pillow. Neither gets a photo that is cut off, or a PNG with a wrong checksum. Of 762 JPEGs with changed bytes
    the two judged 7 differently, of 52 odd and broken photos none.
    """
    return _Dali() if name == "dali" else _decode_by_pillow


def decode(decoder: Decoder, data: bytes, *, rules: PhotoRules, output: Output) -> tuple[PhotoHeader, Pixels]:
    """A photo's header and all its pixels.

    Raises:
        Undecodable: If the photo cannot be decoded, or a loader with these rules would refuse it before DALI sees it.
    """
    check_size(len(data))
    header = read_whole_photo_header(data)
    if problem := rules.problem(header):
        starts = f" (starts with {data[:4].hex(' ')})" if header.format == "unknown" else ""
        raise Undecodable(f"{problem}{starts}")
    return header, decoder(data, header, output)


def check_size(num_bytes: int) -> None:
    """Raise `Undecodable` for a file that is too large to be read as a photo, or empty."""
    if problem := bytes_problem(num_bytes):
        raise Undecodable(problem)


def _decode_by_pillow(data: bytes, header: PhotoHeader, output: Output) -> Pixels:
    with pillow_photo(data, header.format) as photo:
        photo.load()
        if output == "nothing":
            return np.empty(0, np.uint8)
        return np.asarray(photo if output == "gray" else to_rgb(photo))


@contextlib.contextmanager
def pillow_photo(data: bytes, format: str, *, with_notes: bool = False) -> Iterator[Any]:
    """A photo that Pillow has opened by one of its readers, without its pixel limit and warnings about metadata.

    Texts and profiles of a PNG are left out, unless ``with_notes``: only Pillow refuses it for a fault in these. What
    Pillow raises in the context becomes `Undecodable`.
    """
    limit = Image.MAX_IMAGE_PIXELS
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            Image.MAX_IMAGE_PIXELS = None
            plain = data if with_notes or format != "PNG" else png_of(needed_chunks(data))
            with Image.open(io.BytesIO(plain), formats=(format,)) as photo:
                yield photo
    except (Undecodable, PipesError):
        raise
    except UnidentifiedImageError as exc:
        raise Undecodable("cannot be decoded: Pillow cannot read its header") from exc
    except Exception as exc:  # (Pillow's readers raise all kinds, MemoryError too)
        text = " ".join(str(exc).split())[:_SHOWN]
        raise Undecodable(f"cannot be decoded: {text or type(exc).__name__}") from exc
    finally:
        Image.MAX_IMAGE_PIXELS = limit


def png_of(chunks: Iterable[tuple[bytes, bytes | memoryview]]) -> bytes:
    """A PNG of these chunks, kind and content."""
    pieces = (len(content).to_bytes(4) + kind + bytes(content) for kind, content in chunks)
    return b"\x89PNG\r\n\x1a\n" + b"".join(piece + zlib.crc32(piece[4:]).to_bytes(4) for piece in pieces)


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


def to_rgb(photo: Image.Image) -> Image.Image:
    """The pixels of a photo that Pillow has read as loaders give them: RGB of 8 bits, without alpha."""
    photo = eight_bits(photo)
    return photo if photo.mode == "RGB" else photo.convert("RGB")


class _Dali:
    """One pipeline for photos and one for masks, each with one photo at a time: a failure belongs to that photo."""

    def __init__(self) -> None:
        from nvidia.dali import fn, types
        from nvidia.dali.pipeline import Pipeline

        def build(output_type: Any) -> Any:
            pipeline = Pipeline(batch_size=1, num_threads=1, device_id=None, prefetch_queue_depth=1)
            with pipeline:
                encoded = fn.external_source(name="encoded", dtype=types.UINT8, ndim=1)
                pipeline.set_outputs(
                    fn.decoders.image(encoded, device="cpu", output_type=output_type, adjust_orientation=False)
                )
            pipeline.build()
            return pipeline

        self._photos, self._masks = build(types.RGB), build(types.GRAY)

    def __call__(self, data: bytes, header: PhotoHeader, output: Output) -> Pixels:
        pipeline = self._masks if output == "gray" else self._photos
        # As loaders do, which decode a copy.
        readable = data if is_surely_read(data, header.format) else plain_copy(data, header.format, UPRIGHT)
        try:
            pipeline.feed_input("encoded", [np.frombuffer(readable, np.uint8)])
            (decoded,) = pipeline.run()
            pixels = np.asarray(decoded.at(0))
        except RuntimeError as exc:
            # The reason stands between the stack's head and a text that says wrongly that the pipeline is broken.
            text = str(exc).rpartition("encountered:")[2].partition("Current pipeline object")[0]
            reason = f"DALI: {' '.join(text.split())[:_SHOWN] or type(exc).__name__}"
            try:  # often a number: Pillow adds words
                _decode_by_pillow(data, header, "nothing")
            except Undecodable as other:
                reason += f"; Pillow: {str(other).partition(': ')[2]}"
            raise Undecodable(f"cannot be decoded: {reason}") from exc
        return cast("Pixels", pixels[..., 0] if output == "gray" else pixels)


# In a process that may die


def decode_apart(
    data: bytes, header: PhotoHeader, orientation: int | None, *, max_pixels: int
) -> tuple[Pixels, bytes | None]:
    """Decode a photo with this header, or the first picture of an animation: uint8 [height, width] or [..., 3].

    It is turned upright by ``orientation``, as `dali_pipes.formats.orientation` describes it; ``None``: as its decoder
    says. The second result is the colour profile of an RGB photo. ``max_pixels`` is the size of the largest photo; the
    process may have memory in proportion to it. A process that died is replaced.

    Raises:
        Undecodable: If it is larger, Pillow cannot decode it, dies of it, or takes more than `TIMEOUT_S`.
    """
    reader = {"APNG": "PNG", "HEIC": "HEIF"}.get(header.format, header.format)
    task = (data, reader, orientation, max_pixels, TIMEOUT_S)
    try:
        (found,) = _process(max_pixels, os.getpid()).map(_decode, [task])
    except WorkerDiedError as exc:
        if exc.status == -signal.SIGALRM:
            raise Undecodable(f"cannot be decoded: Pillow takes longer than {TIMEOUT_S:g} s") from exc
        ended = signal.Signals(-exc.status).name if exc.status < 0 else f"exit status {exc.status}"
        raise Undecodable(f"cannot be decoded: Pillow's process ended by {ended}") from exc
    if isinstance(found, str):
        raise Undecodable(f"cannot be decoded by Pillow: {printable(found, max_chars=120)}")
    if isinstance(found, PhotoHeader):
        raise too_large(found.height, found.width, max_pixels)
    return found


def too_large(height: int, width: int, max_pixels: int) -> Undecodable:
    """The error for a photo of more pixels than are allowed."""
    return Undecodable(f"holds a photo of {height} x {width} pixels, expected at most {max_pixels}")


@functools.cache
def _process(max_pixels: int, owner: int) -> Workers:  # a forked worker starts its own
    # Tokens and certificates stay here: the process works on strangers' data.
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH") if name in os.environ}
    limit = _BASE_BYTES + _BYTES_PER_PIXEL * max_pixels
    workers = Workers(1, isolated=True, setup=partial(_limit, limit), environment=kept)
    atexit.register(workers.close)
    return workers


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


def _decode(
    task: tuple[bytes, str, int | None, int, float], report: Report
) -> tuple[Pixels, bytes | None] | PhotoHeader | str:
    """Decode a photo, or say why that fails: by its header if that says more pixels than are allowed."""
    data, reader, orientation, max_pixels, timeout_s = task
    signal.setitimer(signal.ITIMER_REAL, timeout_s)  # its signal ends the process
    try:
        # Other processes decode other photos; threads would need address space, which is limited.
        if reader == "HEIF":
            import pillow_heif  # type: ignore[import-untyped,unused-ignore]  # an extra

            pillow_heif.options.DECODE_THREADS = 1
            pillow_heif.register_heif_opener(thumbnails=False)
        if reader == "AVIF":
            from PIL import AvifImagePlugin

            AvifImagePlugin.DEFAULT_MAX_THREADS = 1
        with Image.open(io.BytesIO(data), formats=(reader,)) as photo:
            if photo.height * photo.width > max_pixels:
                return PhotoHeader(reader, photo.height, photo.width)
            photo.load()
            profile = photo.info.get("icc_profile") if photo.mode in ("RGB", "RGBA") else None
            pixels = eight_bits(ImageOps.exif_transpose(photo) if orientation is None else photo)
            return np.asarray(turned_upright(pixels, orientation or UPRIGHT)), profile
    except Exception as exc:  # noqa: BLE001 (Pillow's readers raise all kinds, MemoryError too)
        # Its text for an unknown format names an object in memory.
        return str(exc).partition(" <")[0] or type(exc).__name__
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
