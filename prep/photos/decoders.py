"""Decode all pixels of a photo, or find the reason why it cannot be decoded."""

import importlib.util
import io
import warnings
from collections.abc import Callable
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

from dali_pipes.errors import PipesError
from dali_pipes.formats.photo_header import PhotoHeader, read_photo_header
from prep.photos.details import end_problem

DecoderName = Literal["pillow", "dali"]
Output = Literal["rgb", "gray", "nothing"]
"""The form of the decoded pixels; gray is for 8-bit gray photos only."""
Pixels = npt.NDArray[np.uint8]
Decoder = Callable[[bytes, PhotoHeader, Output], Pixels]
"""Decodes all pixels of a photo of known format and allowed size, or raises `Undecodable`: uint8 [height, width, 3] of
RGB, [height, width] of gray, [0] of nothing."""

_SHOWN = 160
_PIXELS_AT_A_TIME = 1 << 20


class Undecodable(Exception):  # noqa: N818 (it describes the photo)
    """A photo that cannot be decoded. The text follows the photo's name: ``holds a GIF, ...``."""


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
    DALI's stricter rules of how a file must end are in `prep.photos.details.end_problem`.
    """
    return _Dali() if name == "dali" else _decode_by_pillow


def decode(decoder: Decoder, data: bytes, *, max_pixels: int, output: Output) -> tuple[PhotoHeader, Pixels]:
    """A photo's header and all its pixels.

    Raises:
        Undecodable: If the photo cannot be decoded, its header announces more than ``max_pixels``, or a loader would
            refuse it before DALI sees it.
    """
    if not data:
        raise Undecodable("is empty")
    header = read_photo_header(data)
    if header.format == "GIF":
        raise Undecodable("holds a GIF, expected JPEG, PNG or another format that DALI decodes")
    if header.format == "unknown":
        raise Undecodable(f"holds no photo of a known format (starts with {data[:4].hex(' ')})")
    if not isinstance(header.height, int) or header.height < 1 or header.width < 1:
        raise Undecodable(f"holds a {header.format} whose header cannot be read")
    if header.height * header.width > max_pixels:
        raise Undecodable(f"holds a photo of {header.height} x {header.width} pixels, expected at most {max_pixels}")
    if problem := end_problem(data, header.format):
        raise Undecodable(problem)
    return header, decoder(data, header, output)


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
