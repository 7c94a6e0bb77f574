"""Read a photo's format, height and width from its first bytes, without decoding it."""

import io
import struct
from collections.abc import Callable
from typing import NamedTuple

MAX_PIXELS = 89_478_485
"""Photos of more pixels are bad. It is Pillow's ``MAX_IMAGE_PIXELS``: a quarter of a GiB of 8-bit RGB."""

PHOTO_FORMATS = ("unknown", "JPEG", "PNG", "WEBP", "TIFF", "BMP", "PPM", "JPEG2000", "GIF")
"""The formats that a photo's first bytes can show; its name does not matter. Only append: shard indexes store the
position."""

PHOTO_EXTENSIONS = frozenset(
    {"jpg", "jpeg", "jpe", "png", "webp", "tif", "tiff", "bmp", "ppm", "pgm", "pbm", "pnm", "jp2", "j2k", "gif"}
)


class PhotoHeader(NamedTuple):
    """Format and size from the header; ``("unknown", 0, 0)`` if there is no readable header."""

    format: str
    height: int
    """Rows as stored, before any EXIF rotation."""
    width: int


def is_photo(component: str) -> bool:
    """Whether a component is a photo or a mask, by the extension of its name.

    >>> is_photo("trimap.png"), is_photo("cls")
    (True, False)
    """
    return component.rpartition(".")[2].lower() in PHOTO_EXTENSIONS


def read_photo_header(data: bytes) -> PhotoHeader:
    """Format and size of a photo from its bytes. Never raises.

    Pillow's readers are called directly, because `Image.open` refuses a header that announces a very large picture, and
    exactly the size of such a picture is needed here.
    """
    name = _sniff(data)
    reader = _READERS.get(name)
    if reader is None:
        return PhotoHeader(name, 0, 0)
    try:
        width, height = reader(data)
    except Exception:  # noqa: BLE001 (Pillow's readers raise anything, also for decompression bombs)
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
    # The format fixes the first chunk: after its length and type comes IHDR.
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
