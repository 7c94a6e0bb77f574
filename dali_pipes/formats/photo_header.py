"""A photo's first bytes to its format, height and width, without decoding it."""

import io
import struct
from collections.abc import Callable
from typing import NamedTuple

__all__ = ["MAX_PIXELS", "PHOTO_EXTENSIONS", "PHOTO_FORMATS", "PhotoHeader", "is_photo", "read_photo_header"]

MAX_PIXELS = 89_478_485
"""Most pixels of a photo that is not bad: Pillow's ``MAX_IMAGE_PIXELS``, a quarter of a GiB of 8-bit RGB."""

PHOTO_FORMATS = ("unknown", "JPEG", "PNG", "WEBP", "TIFF", "BMP", "PPM", "JPEG2000", "GIF")
"""What a photo's first bytes say it is, whatever its name says. Append only: shard indexes store the position."""

PHOTO_EXTENSIONS = frozenset(
    {"jpg", "jpeg", "jpe", "png", "webp", "tif", "tiff", "bmp", "ppm", "pgm", "pbm", "pnm", "jp2", "j2k", "gif"}
)


class PhotoHeader(NamedTuple):
    """What the header says; ``("unknown", 0, 0)`` where there is none that can be read."""

    format: str
    height: int
    """Rows as stored, before any EXIF rotation."""
    width: int


def is_photo(component: str) -> bool:
    """Whether a component's name is a photo's or a mask's: by what follows its last dot.

    >>> is_photo("trimap.png"), is_photo("cls")
    (True, False)
    """
    return component.rpartition(".")[2].lower() in PHOTO_EXTENSIONS


def read_photo_header(data: bytes) -> PhotoHeader:
    """Format and size of a photo from its bytes; never raises, whatever the bytes are.

    Pillow's readers are called one by one and not through `Image.open`, which refuses a header that announces a very
    large picture: here the size of exactly such a picture is wanted.
    """
    name = _sniff(data)
    reader = _READERS.get(name)
    if reader is None:
        return PhotoHeader(name, 0, 0)
    try:
        width, height = reader(data)
    except Exception:  # noqa: BLE001 (Pillow's readers raise what they meet, decompression bombs included)
        return PhotoHeader(name, 0, 0)
    return PhotoHeader(name, height, width)


def _sniff(data: bytes) -> str:
    for magic, name in _MAGIC:
        if data.startswith(magic):
            return name
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    if data[:1] == b"P" and data[1:2] in b"123456":
        return "PPM"
    return "unknown"


def _jpeg(data: bytes) -> tuple[int, int]:
    from PIL.JpegImagePlugin import JpegImageFile

    return JpegImageFile(io.BytesIO(data)).size


def _png(data: bytes) -> tuple[int, int]:
    # Chunk length and type before it, fixed by the format: IHDR is always first.
    if data[12:16] != b"IHDR":
        raise ValueError("no IHDR")
    width, height = struct.unpack(">II", data[16:24])
    return width, height


def _webp(data: bytes) -> tuple[int, int]:
    from PIL.WebPImagePlugin import WebPImageFile

    return WebPImageFile(io.BytesIO(data)).size


def _tiff(data: bytes) -> tuple[int, int]:
    from PIL.TiffImagePlugin import TiffImageFile

    return TiffImageFile(io.BytesIO(data)).size


def _bmp(data: bytes) -> tuple[int, int]:
    from PIL.BmpImagePlugin import BmpImageFile

    return BmpImageFile(io.BytesIO(data)).size


def _ppm(data: bytes) -> tuple[int, int]:
    from PIL.PpmImagePlugin import PpmImageFile

    return PpmImageFile(io.BytesIO(data)).size


def _jpeg2000(data: bytes) -> tuple[int, int]:
    from PIL.Jpeg2KImagePlugin import Jpeg2KImageFile

    return Jpeg2KImageFile(io.BytesIO(data)).size


def _gif(data: bytes) -> tuple[int, int]:
    width, height = struct.unpack("<HH", data[6:10])
    return width, height


_MAGIC = (
    (b"\xff\xd8\xff", "JPEG"),
    (b"\x89PNG\r\n\x1a\n", "PNG"),
    (b"GIF87a", "GIF"),
    (b"GIF89a", "GIF"),
    (b"II*\0", "TIFF"),
    (b"MM\0*", "TIFF"),
    (b"BM", "BMP"),
    (b"\xff\x4f\xff\x51", "JPEG2000"),
    (b"\0\0\0\x0cjP  \r\n\x87\n", "JPEG2000"),
)
_READERS: dict[str, Callable[[bytes], tuple[int, int]]] = {
    "JPEG": _jpeg,
    "PNG": _png,
    "WEBP": _webp,
    "TIFF": _tiff,
    "BMP": _bmp,
    "PPM": _ppm,
    "JPEG2000": _jpeg2000,
    "GIF": _gif,
}
