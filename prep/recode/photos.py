"""Resize a photo or its mask, make a JPEG of a photo that loaders do not decode, or rewrite a JPEG without loss.

A JPEG is decoded at 1/2, 1/4 or 1/8 of its size where that is not smaller than the new one: libjpeg then computes fewer
pixels, each of which is an average. The rest of the way, pixels are averaged by Pillow's Hamming window: as fast as a
bilinear window, sharper, and without the steps that a box leaves when the ratio is not a whole number.

The pixels are those that a loader delivers: without alpha, 16-bit values by their high byte, CMYK as RGB. Values are
not converted to another colour space, because loaders do not do that either: the colour profile stays beside them,
unless it says sRGB or describes other channels. An EXIF orientation stays too, without the other EXIF data; a photo
that is converted is turned upright, and decoded in a process that may die of a broken photo. Masks are resized by the
nearest neighbour, and written as PNGs that are inflated quickly.
"""

import importlib.util
import io
import re
import shutil
import struct
import subprocess
import zlib
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, Literal, cast

from PIL import Image, ImageCms

from dali_pipes.errors import PipesError
from dali_pipes.formats.orientation import UPRIGHT, plain_copy, read_orientation
from dali_pipes.formats.photo_header import JPEG_FRAMES, PhotoHeader, PhotoRules, read_photo_header
from prep.photos.decoders import Undecodable, decode_apart, pillow_photo, png_of, to_rgb, too_large
from prep.photos.details import SCAN, JpegSegment, jpeg_segments

# A JPEG's sides are 16-bit numbers; libjpeg takes up to this.
MAX_SIDE = 65_500

DEFAULT_QUALITY = 90
"""The JPEG quality in which resized photos are usually kept; FFCV's published sizes have it, too."""


@dataclass(frozen=True, kw_only=True)
class Recoding:
    """Settings of `prep.recode.stage.recode_source`."""

    short_side: int | None = None
    """The largest shorter side of a photo, in pixels. A photo that is not larger keeps its bytes."""
    max_side: int | None = None
    """The largest longer side of a photo, in pixels; with ``short_side``, both hold."""
    quality: int = DEFAULT_QUALITY
    """The JPEG quality of photos that are resized or converted, 1 to 100."""
    masks: Literal["nearest"] | None = None
    """How masks are resized to their photo's new size: by the nearest neighbour. ``None``: there must be none."""
    optimize: bool = False
    """Rewrite JPEGs and masks without loss, so that they are decoded faster."""
    convert: bool = False
    """Make JPEGs of photos that loaders do not decode: HEIC, AVIF, TIFF, JPEG 2000, GIF and animated PNG."""

    @property
    def resizes(self) -> bool:
        return self.short_side is not None or self.max_side is not None

    @property
    def is_on(self) -> bool:
        """Whether anything is to be done."""
        return self.resizes or self.optimize or self.convert

    def new_size(self, height: int, width: int) -> tuple[int, int] | None:
        """Height and width of a photo after it was resized; ``None`` if it stays: no photo is enlarged.

        >>> Recoding(short_side=256).new_size(375, 500), Recoding(max_side=256).new_size(375, 500)
        ((256, 341), (192, 256))
        >>> Recoding(short_side=256).new_size(256, 9000)
        """
        limits = ((self.short_side, min(height, width)), (self.max_side, max(height, width)))
        ratios = [(limit, side) for limit, side in limits if limit is not None and limit < side]
        if not ratios:
            return None
        limit, side = min(ratios, key=lambda ratio: ratio[0] / ratio[1])
        # Rounded half up, in whole numbers.
        rows, columns = ((2 * pixels * limit + side) // (2 * side) for pixels in (height, width))
        return max(1, rows), max(1, columns)

    def as_settings(self) -> dict[str, int | str | bool]:
        """The settings that are on, by name, as the manifest keeps them."""
        encodes = self.resizes or self.convert
        values = asdict(self) | {"quality": self.quality if encodes else None}
        return {name: value for name, value in values.items() if value not in (None, False)}


def resized(data: bytes, header: PhotoHeader, recoding: Recoding) -> bytes:
    """A photo that is larger than ``recoding`` allows, as a JPEG of the new size; its mask is resized to the same.

    Raises:
        Undecodable: If it cannot be decoded.
    """
    size = recoding.new_size(header.height, header.width)
    assert size is not None, "the photo is larger"
    orientation = read_orientation(data, header.format).value

    def resize(*, with_notes: bool) -> bytes:
        with pillow_photo(data, header.format, with_notes=with_notes) as photo:
            # The box is the photo's edge in the smaller pixels, which may end in a part of one.
            drafted = photo.draft(None, (size[1], size[0])) if header.format == "JPEG" else None
            photo.load()
            profile = photo.info.get("icc_profile")
            return _encoded(photo, size, profile, orientation, recoding.quality, box=drafted[1] if drafted else None)

    try:
        return resize(with_notes=True)
    except Undecodable:
        return resize(with_notes=False)


def converted(
    data: bytes, header: PhotoHeader, recoding: Recoding, *, rules: PhotoRules
) -> tuple[bytes, tuple[int, int]]:
    """A photo of `CONVERTIBLE_FORMATS` as an upright JPEG, resized if ``recoding`` says so, and its upright size.

    Raises:
        Undecodable: If it cannot be decoded, or has too many pixels.
        PipesError: If the library that decodes it is not installed.
    """
    orientation = None
    if header.format == "HEIC" and importlib.util.find_spec("pillow_heif") is None:
        raise PipesError("--convert needs pillow-heif for HEIC photos; install it: pip install 'dali-pipes[heif]'")
    if header.format not in ("HEIC", "AVIF"):  # whose decoders turn them, and know their size
        _check_size(header.height, header.width, rules)
        orientation = read_orientation(data, header.format).value
    pixels, profile = decode_apart(data, header, orientation, max_pixels=rules.max_pixels)
    upright = Image.fromarray(pixels)
    before = upright.height, upright.width
    _check_size(*before, rules)  # the header of a GIF may give a smaller size
    size = recoding.new_size(*before) or before
    return _encoded(upright, size, profile, UPRIGHT, recoding.quality), before


def _check_size(height: int, width: int, rules: PhotoRules) -> None:
    if height * width > rules.max_pixels or max(height, width) > MAX_SIDE:
        raise too_large(height, width, rules.max_pixels)


@lru_cache(maxsize=16)
def is_srgb_profile(profile: bytes) -> bool:
    """Whether a colour profile says that it is sRGB: then viewers show the photo alike without it."""
    try:
        name = ImageCms.getProfileDescription(ImageCms.ImageCmsProfile(io.BytesIO(profile)))
    except (ImageCms.PyCMSError, OSError, ValueError, TypeError):
        return False
    return name.startswith("sRGB")


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


# JPEGs without loss

BASELINE = 0xC0
_APP0, _APP2, _APP14, _APP15, _COM = 0xE0, 0xE2, 0xEE, 0xEF, 0xFE
_ICC = b"ICC_PROFILE\0"
# After the header of a scan: the next marker that is neither a stuffed byte, nor a restart, nor fill.
_NEXT_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")
# More scans than an encoder writes: they would cost time and change nothing.
_MAX_SCANS = 200
# KiB; the coefficients of a photo take 2 bytes for each value.
_MAX_MEMORY_KIB = 1 << 20
_TIMEOUT_S = 120.0


class NotJpegError(ValueError):
    """The bytes are not those of a whole JPEG, or it cannot be rewritten without loss."""


def optimized(data: bytes) -> bytes:
    """The same photo as a baseline JPEG of one scan, without needless markers; the same bytes if it is one already.

    The coefficients and the tables of quantisation stay, so all decoders give the same pixels. These segments stay:
    JFIF's and Adobe's (they say which colours the channels are), a colour profile other than sRGB, and the EXIF
    orientation, alone. All others go, and what follows the end of the photo.

    Raises:
        NotJpegError: If it is damaged.
        PipesError: If jpegtran is not installed.
    """
    segments, scan, is_last = _segments_and_scan(data)
    frames = [segment.marker for segment in segments if segment.marker in JPEG_FRAMES]
    if frames != [BASELINE] or not is_last:
        data = _transcoded(data)
        segments, scan, is_last = _segments_and_scan(data)
        if not is_last:
            raise NotJpegError("it has several scans, or no end")
    orientation = read_orientation(data, "JPEG").value
    profile = [segment for segment in segments if segment.marker == _APP2 and _content(data, segment).startswith(_ICC)]
    is_srgb = profile and is_srgb_profile(_content(data, profile[0])[len(_ICC) + 2 :])
    kept = [segment for segment in segments if _is_needed(data, segment) or (segment in profile and not is_srgb)]
    pieces = [data[segment.start : segment.stop] for segment in kept]
    copy = b"".join((data[:2], *pieces, data[scan.start : scan.stop + 2]))
    return copy if orientation == UPRIGHT else plain_copy(copy, "JPEG", orientation)


def check_jpegtran() -> None:
    """Raise `PipesError` if jpegtran is not installed."""
    if shutil.which("jpegtran") is None:
        raise PipesError(
            "no program 'jpegtran' in PATH, which --optimize runs for progressive JPEGs; it comes with libjpeg-turbo: "
            "apt-get install libjpeg-turbo-progs, or conda install libjpeg-turbo"
        )


def _content(data: bytes, segment: JpegSegment) -> bytes:
    return data[segment.start + 4 : segment.stop]


def _is_needed(data: bytes, segment: JpegSegment) -> bool:
    if segment.marker in (_APP0, _APP14):
        return _content(data, segment).startswith((b"JFIF\0", b"Adobe"))
    return not (_APP0 <= segment.marker <= _APP15 or segment.marker == _COM)


def _segments_and_scan(data: bytes) -> tuple[list[JpegSegment], JpegSegment, bool]:
    """The segments before the first scan, the scan with its header, and whether the photo ends after it."""
    segments, is_cut = jpeg_segments(data)
    if is_cut or not segments or segments[-1].marker != SCAN:
        raise NotJpegError("its segments are damaged")
    *others, header = segments
    end = _NEXT_MARKER.search(data, header.stop)
    if end is None:
        raise NotJpegError("it has no end")
    return others, header._replace(stop=end.start()), data.startswith(b"\xff\xd9", end.start())


def _transcoded(data: bytes) -> bytes:
    command = ["jpegtran", "-strict", "-copy", "all", "-optimize", "-maxmemory", str(_MAX_MEMORY_KIB)]
    command += ["-maxscans", str(_MAX_SCANS)]
    try:
        done = subprocess.run(command, input=data, capture_output=True, timeout=_TIMEOUT_S, check=False)  # noqa: S603
    except subprocess.TimeoutExpired:
        raise NotJpegError(f"jpegtran took more than {_TIMEOUT_S:.0f} s") from None
    except OSError as exc:
        check_jpegtran()
        raise PipesError(f"cannot run jpegtran: {exc.strerror or exc}") from exc
    if done.returncode:
        raise NotJpegError(f"jpegtran: {done.stderr.decode(errors='replace').strip()[:100] or done.returncode}")
    return done.stdout


# Masks

_LEVEL = 6
# Chunks that say what the pixels' values mean.
_KEPT = (b"PLTE", b"tRNS")
_MODES = {0: "L", 3: "P"}  # by the colour type


def resized_mask(data: bytes, height: int, width: int) -> bytes:
    """A mask with another height and width; each of its pixels has the value of the nearest pixel before.

    Raises:
        Undecodable: If it cannot be decoded, or is not a PNG of 8 bits with one channel.
    """
    if not is_plain_mask(data):
        raise Undecodable(
            "is no PNG of 8 bits with one channel, grey or with a palette; it cannot be resized as a mask"
        )
    return _mask_png(_decoded(data).resize((width, height), Image.Resampling.NEAREST), data)


def optimized_mask(data: bytes) -> bytes:
    """The same mask as a PNG that is inflated quickly; PNGs of other kinds than `is_plain_mask` keep their bytes.

    Pixels and palette stay, and so does the meaning of the values; other chunks go.

    Raises:
        Undecodable: If it cannot be decoded.
    """
    return data if not is_plain_mask(data) else _mask_png(_decoded(data), data)


def is_plain_mask(data: bytes) -> bool:
    """Whether a photo is a PNG of 8 bits with one channel: a value for each pixel, or an index into a palette."""
    return read_photo_header(data).format == "PNG" and data[24:26] in (b"\x08\0", b"\x08\3")


def _decoded(data: bytes) -> Image.Image:
    with pillow_photo(data, "PNG") as mask:
        mask.load()
        if mask.mode != _MODES[data[25]]:
            raise Undecodable(f"is decoded to pixels of another kind, '{mask.mode}'")
        return cast("Image.Image", mask)


def _mask_png(mask: Image.Image, source: bytes) -> bytes:
    """A PNG of the mask's bytes, with the palette of the PNG ``source``."""
    width, height = mask.size
    pixels = mask.tobytes()
    rows = b"".join(b"\0" + pixels[row * width : (row + 1) * width] for row in range(height))
    header = struct.pack(">IIBBBBB", width, height, 8, source[25], 0, 0, 0)
    chunks = [(b"IHDR", header), *_kept_chunks(source), (b"IDAT", zlib.compress(rows, _LEVEL)), (b"IEND", b"")]
    return png_of(chunks)


def _kept_chunks(data: bytes) -> list[tuple[bytes, bytes]]:
    found, at = [], 8
    while at + 8 <= len(data):
        size, kind = struct.unpack_from(">I4s", data, at)
        if kind in (b"IDAT", b"IEND"):
            break
        if kind in _KEPT:
            found.append((kind, data[at + 8 : at + 8 + size]))
        at += 12 + size
    return found
