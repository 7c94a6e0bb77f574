"""Read a photo's format, height and width from its first bytes, without decoding it."""

import importlib
import io
import struct
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
    try:
        if name == "PNG":
            # The format fixes the first chunk: after its length and type comes IHDR.
            width, height = struct.unpack(">II", data[16:24]) if data[12:16] == b"IHDR" else (0, 0)
        elif name == "GIF":
            width, height = struct.unpack("<HH", data[6:10])
        elif name in _PILLOW:
            module, reader = _PILLOW[name]
            width, height = getattr(importlib.import_module(f"PIL.{module}"), reader)(io.BytesIO(data)).size
        else:
            width, height = 0, 0
    except Exception:  # noqa: BLE001 (Pillow's readers raise anything, also for decompression bombs)
        width, height = 0, 0
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
# Format -> the module and the class of Pillow's reader, imported at its first photo.
_PILLOW = {
    "JPEG": ("JpegImagePlugin", "JpegImageFile"),
    "WEBP": ("WebPImagePlugin", "WebPImageFile"),
    "TIFF": ("TiffImagePlugin", "TiffImageFile"),
    "BMP": ("BmpImagePlugin", "BmpImageFile"),
    "PPM": ("PpmImagePlugin", "PpmImageFile"),
    "JPEG2000": ("Jpeg2KImagePlugin", "Jpeg2KImageFile"),
}
