"""Photos with EXIF data, usual and odd ones."""

import io
import struct
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps

from dali_pipes.formats.orientation import EXIF_MARK, ORIENTATION_TAG

Pixels = npt.NDArray[np.uint8]
Entry = tuple[int, int, int, int]
"""Tag, type, count and value of an entry of a directory; the value takes four bytes."""

ORIENTATIONS = range(1, 9)


def slope(height: int = 40, width: int = 64) -> Pixels:
    """Pixels of which no two orientations are alike, and which JPEG keeps nearly as they are: [height, width, 3]."""
    row, column = np.mgrid[:height, :width]
    return np.stack([row * 250 // height, column * 250 // width, (row + column) % 97], -1).astype(np.uint8)


def exif_block(value: int, *, order: str = "<", type: int = 3, count: int = 1, before: Sequence[Entry] = ()) -> bytes:
    """An EXIF block whose first directory has an orientation, after the entries ``before``."""
    as_bytes = struct.pack(f"{order}HH", value, 0) if type in (3, 8) else struct.pack(f"{order}I", value)
    entries = b"".join(struct.pack(f"{order}HHII", *entry) for entry in before)
    entries += struct.pack(f"{order}HHI", ORIENTATION_TAG, type, count) + as_bytes
    head = {"<": b"II*\0", ">": b"MM\0*"}[order] + struct.pack(f"{order}IH", 8, 1 + len(before))
    return head + entries + bytes(4)


def with_exif(photo: bytes, *blocks: bytes, at: int | None = None) -> bytes:
    """A JPEG, PNG or WEBP with these EXIF blocks: after its header, or at this byte; a WEBP's come at its end."""
    if photo.startswith(b"\xff\xd8"):
        parts = [_segment(0xE1, EXIF_MARK + block) for block in blocks]
        at = 2 if at is None else at
    elif photo.startswith(b"\x89PNG"):
        parts = [png_chunk(b"eXIf", block) for block in blocks]
        at = 33 if at is None else at
    else:
        return _webp_with_exif(photo, blocks)
    return photo[:at] + b"".join(parts) + photo[at:]


def xmp(orientation: int) -> bytes:
    """A segment of a JPEG with XMP data that name an orientation."""
    text = f'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="{orientation}"/></x:xmpmeta>'
    return _segment(0xE1, b"http://ns.adobe.com/xap/1.0/\0" + text.encode())


def stored_photo(pixels: Pixels, format: str = "JPEG", **options: Any) -> bytes:
    """A photo of these pixels; a WEBP keeps them all."""
    stream = io.BytesIO()
    defaults = {"JPEG": {"quality": 95}, "WEBP": {"lossless": True}}.get(format, {})
    Image.fromarray(pixels).save(stream, format, **(defaults | options))
    return stream.getvalue()


def turned_photo(pixels: Pixels, orientation: int, format: str = "JPEG", **options: Any) -> bytes:
    """A photo of these stored pixels that is seen with an orientation."""
    return with_exif(stored_photo(pixels, format, **options), exif_block(orientation))


def upright(photo: bytes) -> Image.Image:
    """The photo as Pillow turns it."""
    return ImageOps.exif_transpose(Image.open(io.BytesIO(photo)))


def turned(pixels: Pixels, orientation: int) -> Pixels:
    """Stored pixels as they are seen, by Pillow: of a PNG, which keeps them all."""
    return np.asarray(upright(turned_photo(pixels, orientation, "PNG")))


def _segment(marker: int, content: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, marker, 2 + len(content)) + content


def png_chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def _webp_with_exif(photo: bytes, blocks: Sequence[bytes]) -> bytes:
    if photo[12:16] != b"VP8X":
        width, height = Image.open(io.BytesIO(photo)).size
        sizes = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
        photo = photo[:12] + b"VP8X" + struct.pack("<II", 10, 0x08) + sizes + photo[12:]
    photo = photo[:20] + bytes([photo[20] | 0x08]) + photo[21:]
    photo += b"".join(b"EXIF" + struct.pack("<I", len(block)) + block + bytes(len(block) % 2) for block in blocks)
    return photo[:4] + struct.pack("<I", len(photo) - 8) + photo[8:]
