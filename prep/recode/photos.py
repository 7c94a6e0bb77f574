"""Resize a photo, or make a JPEG of a photo that loaders do not decode.

A JPEG is decoded at 1/2, 1/4 or 1/8 of its size where that is not smaller than the new one: libjpeg then computes fewer
pixels, each of which is an average. The rest of the way, pixels are averaged by Pillow's Hamming window, which weighs
every pixel that a new one covers: as fast as a bilinear window, sharper, and without the steps that a box leaves when
the ratio is not a whole number.

The pixels are those that a loader delivers: without alpha, 16-bit values by their high byte, CMYK as RGB. Values are
not converted to another colour space, because loaders do not do that either: the colour profile stays beside them,
unless it says sRGB or describes other channels. An EXIF orientation stays too, without the other EXIF data; a photo
that is converted is turned upright. Of TIFF, JPEG 2000, GIF and animated PNG no profile stays: they are decoded in a
process that may die of a broken photo.
"""

import contextlib
import io
import re
from collections.abc import Iterator
from typing import Any

from PIL import Image, ImageOps

from dali_pipes.errors import PipesError
from dali_pipes.formats.orientation import UPRIGHT, plain_copy, read_orientation
from dali_pipes.formats.photo_header import PhotoHeader
from dali_pipes.formats.photo_rules import PhotoRules
from prep.photos.apart import Undecodable, decode_apart
from prep.photos.decoders import only_pixels, to_rgb, without_notes
from prep.recode.jpegs import is_srgb_profile
from prep.recode.settings import Recoding

# A JPEG's sides are 16-bit numbers; libjpeg takes up to this.
MAX_SIDE = 65_500


def resized(data: bytes, header: PhotoHeader, recoding: Recoding) -> bytes:
    """A photo that is larger than ``recoding`` allows, as a JPEG of the new size; its mask is resized to the same.

    Raises:
        Undecodable: If it cannot be decoded.
    """
    size = recoding.new_size(header.height, header.width)
    assert size is not None, "the photo is larger"
    try:
        return _resized(data, data, header.format, size, recoding.quality)
    except Undecodable:
        if header.format != "PNG":
            raise
    # Pillow refuses a PNG for a fault in a text or a profile, which loaders do not read.
    with _reading():
        plain = without_notes(data, header.format)
    return _resized(plain, data, header.format, size, recoding.quality)


def _resized(photo_data: bytes, source: bytes, format: str, size: tuple[int, int], quality: int) -> bytes:
    """The photo of some bytes, with the orientation of ``source``."""
    orientation = read_orientation(source, format).value
    with _reading(), Image.open(io.BytesIO(photo_data), formats=(format,)) as photo:
        # The box is the photo's edge in the smaller pixels, which may end in a part of one.
        drafted = photo.draft(None, (size[1], size[0])) if format == "JPEG" else None
        photo.load()
        profile = photo.info.get("icc_profile")
        return _encoded(photo, size, profile, orientation, quality, box=drafted[1] if drafted else None)


def converted(
    data: bytes, header: PhotoHeader, recoding: Recoding, *, rules: PhotoRules
) -> tuple[bytes, tuple[int, int]]:
    """A photo of `CONVERTIBLE_FORMATS` as an upright JPEG, resized if ``recoding`` says so, and its upright size.

    Raises:
        Undecodable: If it cannot be decoded, or has too many pixels.
        PipesError: If the library that decodes it is not installed.
    """
    if header.format not in ("HEIC", "AVIF"):
        if not header.height or not header.width:
            raise Undecodable(f"holds a {header.format} whose header cannot be read")
        _check_size(header.height, header.width, rules)
        orientation = read_orientation(data, header.format).value
        upright = Image.fromarray(decode_apart(data, header, orientation, max_pixels=rules.max_pixels))
        return _converted(upright, None, recoding)
    with _reading(), _open_converted(data, header.format) as photo:
        _check_size(photo.height, photo.width, rules)
        photo.load()
        return _converted(ImageOps.exif_transpose(photo), photo.info.get("icc_profile"), recoding)


def _check_size(height: int, width: int, rules: PhotoRules) -> None:
    if height * width > rules.max_pixels or max(height, width) > MAX_SIDE:
        raise Undecodable(f"holds a photo of {height} x {width} pixels, expected at most {rules.max_pixels}")


def _converted(upright: Any, profile: bytes | None, recoding: Recoding) -> tuple[bytes, tuple[int, int]]:
    before = upright.height, upright.width
    return _encoded(upright, recoding.new_size(*before) or before, profile, UPRIGHT, recoding.quality), before


def check_converters() -> None:
    """Raise `PipesError` if this Pillow cannot read AVIF."""
    from PIL import features

    if not features.check("avif"):
        raise PipesError("--convert needs a Pillow that reads AVIF: pip install 'pillow>=12', from a wheel")


def _open_converted(data: bytes, format: str) -> Any:
    if format == "AVIF":
        return Image.open(io.BytesIO(data), formats=("AVIF",))
    try:
        import pillow_heif  # type: ignore[import-untyped,unused-ignore]  # an extra
    except ImportError as exc:
        raise PipesError(
            "--convert needs pillow-heif for HEIC photos; install it: pip install 'dali-pipes[heif]'"
        ) from exc
    pillow_heif.register_heif_opener(thumbnails=False)
    return Image.open(io.BytesIO(data), formats=("HEIF",))


def _encoded(
    photo: Any,
    size: tuple[int, int],
    profile: bytes | None,
    orientation: int,
    quality: int,
    box: tuple[float, float, float, float] | None = None,
) -> bytes:
    """A baseline JPEG of 4:2:0, or grey, as all decoders of JPEG read it, of the part of the photo in ``box``."""
    is_grey = photo.mode == "L"
    if photo.mode not in ("L", "RGB", "RGBA", "RGBX"):
        profile = None  # it may describe other channels, such as CMYK
    pixels = photo if is_grey else to_rgb(photo)
    if pixels.size != (size[1], size[0]):
        pixels = pixels.resize((size[1], size[0]), Image.Resampling.HAMMING, box=box)
    if profile and is_srgb_profile(profile):
        profile = None
    stream = io.BytesIO()
    # Without a comment: Pillow writes the one of the photo that it read.
    pixels.info = {}
    pixels.save(stream, "JPEG", quality=quality, subsampling="4:2:0", icc_profile=profile)
    data = stream.getvalue()
    return data if orientation == UPRIGHT else plain_copy(data, "JPEG", orientation)


@contextlib.contextmanager
def _reading() -> Iterator[None]:
    """Turn what Pillow raises on a damaged photo into `Undecodable`."""
    try:
        with only_pixels():
            yield
    except (Undecodable, PipesError):
        raise
    except Exception as exc:  # (Pillow's readers raise all kinds, MemoryError too)
        # Pillow names the object that it read from.
        text = re.sub(r"(cannot identify image file) <.*>", r"\1", " ".join(str(exc).split()))[:160]
        raise Undecodable(f"cannot be decoded: {text or type(exc).__name__}") from exc
