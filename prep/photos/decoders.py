"""Decode all pixels of a photo, or find the reason why it cannot be decoded."""

import atexit
import functools
import importlib.util
import io
import threading
import warnings
from collections.abc import Callable
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

from dali_pipes.errors import PipesError
from dali_pipes.formats.photo_header import OTHER_FORMATS, PhotoHeader, read_whole_photo_header
from dali_pipes.formats.photo_rules import PhotoRules, bytes_problem
from dali_pipes.processes.pillow import PillowProcess
from dali_pipes.processes.pillow import Undecodable as Undecodable

DecoderName = Literal["pillow", "dali"]
Output = Literal["rgb", "gray", "nothing"]
"""The form of the decoded pixels; gray is for 8-bit gray photos only."""
Pixels = npt.NDArray[np.uint8]
Decoder = Callable[[bytes, PhotoHeader, Output], Pixels]
"""Decodes all pixels of a photo of known format and allowed size, or raises `Undecodable`: uint8 [height, width, 3] of
RGB, [height, width] of gray, [0] of nothing."""

ANY_FORMAT = PhotoRules(formats=tuple(OTHER_FORMATS))
"""For tools that show photos: all formats, in the default size."""

_SHOWN = 160
_PIXELS_AT_A_TIME = 1 << 20


def check_decoder(name: DecoderName) -> None:
    """Raise `PipesError`, before a process starts, if the decoder is not installed."""
    if name == "dali" and any(importlib.util.find_spec(module) is None for module in ("nvidia", "nvidia.dali")):
        raise PipesError("decoder 'dali' needs DALI; install nvidia-dali-cuda120, or pass --decoder pillow")


def count_values(pixels: Pixels) -> npt.NDArray[np.int64]:
    """Count the pixels of each value in a photo's channel, uint8 [height, width]; returns int64 [256]."""
    counts = np.zeros(256, np.int64)
    rows = max(1, _PIXELS_AT_A_TIME // max(1, pixels.shape[1]))
    # Count in pieces, because numpy takes 8 bytes of memory for each pixel that it counts.
    for start in range(0, len(pixels), rows):
        counts += np.bincount(pixels[start : start + rows].ravel(), minlength=256)
    return counts


def open_decoder(name: DecoderName) -> Decoder:
    """A decoder, for one thread.

    ``"pillow"`` needs only Pillow and describes in words what is wrong. ``"dali"`` is DALI's decoder on the CPU, which
    loaders use. On 52 odd and broken photos the two disagree on only one: a PNG with more text than Pillow unpacks.
    Neither gets a photo that is cut off.
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
    if header.format in OTHER_FORMATS.values():
        return header, _decode_apart(data, header, output, max_pixels=rules.max_pixels)
    return header, decoder(data, header, output)


def check_size(num_bytes: int) -> None:
    """Raise `Undecodable` for a file that is too large to be read as a photo, or empty."""
    if problem := bytes_problem(num_bytes):
        raise Undecodable(problem)


def _decode_apart(data: bytes, header: PhotoHeader, output: Output, *, max_pixels: int) -> Pixels:
    """Decode a photo as loaders do, in a process that may die of it."""
    with _apart:
        pnm = _process(max_pixels).decode(data, header)
    if output == "nothing":
        return np.empty(0, np.uint8)
    num_channels = 1 if pnm[1] == ord("5") else 3
    pixels = pnm[-header.height * header.width * num_channels :].reshape(header.height, header.width, num_channels)
    return pixels[..., 0] if output == "gray" else np.broadcast_to(pixels, (*pixels.shape[:2], 3))


_apart = threading.Lock()


@functools.cache
def _process(max_pixels: int) -> PillowProcess:
    process = PillowProcess(max_pixels=max_pixels)
    atexit.register(process.close)
    return process


def _decode_by_pillow(data: bytes, header: PhotoHeader, output: Output) -> Pixels:
    from PIL import Image, UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about odd metadata; only the pixels count
            # Pillow has the same names of formats. With a name, it tries only this one of its forty readers.
            with Image.open(io.BytesIO(data), formats=(header.format,)) as photo:
                photo.load()
                if output == "nothing":
                    return np.empty(0, np.uint8)
                return np.asarray(photo if output == "gray" else _rgb(photo))
    except UnidentifiedImageError as exc:
        raise Undecodable("cannot be decoded: Pillow cannot read its header") from exc
    except Exception as exc:  # (Pillow's readers raise all kinds, MemoryError too)
        text = " ".join(str(exc).split())[:_SHOWN]
        raise Undecodable(f"cannot be decoded: {text or type(exc).__name__}") from exc


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
        try:
            pipeline.feed_input("encoded", [np.frombuffer(data, np.uint8)])
            (decoded,) = pipeline.run()
            pixels = np.asarray(decoded.at(0))
        except RuntimeError as exc:
            raise Undecodable(f"cannot be decoded: {_dali_reason(exc)}") from exc
        return cast("Pixels", pixels[..., 0] if output == "gray" else pixels)


def _rgb(photo: Any) -> Any:
    if photo.mode.startswith("I;16"):  # Pillow does not convert it; DALI takes the high byte
        from PIL import Image

        photo = Image.fromarray((np.asarray(photo) >> 8).astype(np.uint8))
    return photo if photo.mode == "RGB" else photo.convert("RGB")


def _dali_reason(exc: RuntimeError) -> str:
    # The reason stands between the stack's head and a fixed text, which says wrongly that the pipeline is broken.
    text = str(exc).rpartition("encountered:")[2].partition("Current pipeline object")[0]
    return f"DALI: {' '.join(text.split())[:_SHOWN] or type(exc).__name__}"
