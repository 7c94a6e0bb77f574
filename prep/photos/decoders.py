"""Decode all pixels of a photo, or find the reason why it cannot be decoded."""

import contextlib
import importlib.util
import io
import warnings
import zlib
from collections.abc import Callable, Iterator
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt
from PIL import Image, UnidentifiedImageError

from dali_pipes.errors import PipesError
from dali_pipes.formats.orientation import UPRIGHT, is_surely_read, plain_copy
from dali_pipes.formats.photo_header import (
    PhotoHeader,
    PhotoRules,
    bytes_problem,
    needed_chunks,
    read_whole_photo_header,
)
from prep.photos.apart import Undecodable as Undecodable
from prep.photos.apart import eight_bits

DecoderName = Literal["pillow", "dali"]
Output = Literal["rgb", "gray", "nothing"]
"""The form of the decoded pixels; gray is for 8-bit gray photos only."""
Pixels = npt.NDArray[np.uint8]
Decoder = Callable[[bytes, PhotoHeader, Output], Pixels]
"""Decodes all pixels of a photo of known format and allowed size, or raises `Undecodable`: uint8 [height, width, 3] of
RGB, [height, width] of gray, [0] of nothing."""

_SHOWN = 160


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
            plain = data if with_notes or format != "PNG" else _without_notes(data)
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


def _without_notes(png: bytes) -> bytes:
    chunks = (len(content).to_bytes(4) + kind + bytes(content) for kind, content in needed_chunks(png))
    return png[:8] + b"".join(chunk + zlib.crc32(chunk[4:]).to_bytes(4) for chunk in chunks)


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
            raise Undecodable(f"cannot be decoded: {_dali_reason(exc)}{_in_words(data, header)}") from exc
        return cast("Pixels", pixels[..., 0] if output == "gray" else pixels)


def to_rgb(photo: Image.Image) -> Image.Image:
    """The pixels of a photo that Pillow has read as loaders give them: RGB of 8 bits, without alpha."""
    photo = eight_bits(photo)
    return photo if photo.mode == "RGB" else photo.convert("RGB")


def _in_words(data: bytes, header: PhotoHeader) -> str:
    """What Pillow says of a photo that DALI refuses, because DALI's own reason is often a number."""
    try:
        _decode_by_pillow(data, header, "nothing")
    except Undecodable as exc:
        return f"; Pillow: {str(exc).partition(': ')[2]}"
    return ""


def _dali_reason(exc: RuntimeError) -> str:
    # The reason stands between the stack's head and a fixed text, which says wrongly that the pipeline is broken.
    text = str(exc).rpartition("encountered:")[2].partition("Current pipeline object")[0]
    return f"DALI: {' '.join(text.split())[:_SHOWN] or type(exc).__name__}"
