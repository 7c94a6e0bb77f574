"""Find faults of a mask by its header and checksums, or by decoding it."""

import struct
import zlib
from collections.abc import Callable
from typing import NamedTuple

from dali_pipes.formats.orientation import upright_size
from dali_pipes.formats.photo_header import MAX_PHOTO_BYTES, MAX_PIXELS, needed_chunks
from dali_pipes.formats.photo_rules import size_problem
from prep.photos.details import HEAD_BYTES, photo_details

HEADER_BYTES = 2048
"""Enough of most photos to know their size."""

# Column and row at which each pass of an interlaced PNG begins, and their steps.
_PASSES = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
_INFLATED_BYTES = 1 << 20

Reader = Callable[[int, int], bytes]
"""Takes an offset and a number of bytes, and returns the bytes there; at the end of the photo there may be fewer."""


class PhotoSize(NamedTuple):
    """Height and width of a photo, as stored and upright."""

    stored: tuple[int, int]
    upright: tuple[int, int]

    @classmethod
    def of(cls, height: int, width: int, orientation: int) -> "PhotoSize":
        return cls((height, width), upright_size(height, width, orientation))


def photo_size(read: Reader, num_bytes: int) -> PhotoSize | None:
    """Size by the header of a photo of ``num_bytes``; ``None`` if it has no readable header."""
    num_bytes = min(num_bytes, MAX_PHOTO_BYTES)
    head = read(0, HEADER_BYTES)
    if not head.startswith(b"\xff\xd8\xff"):
        head = read(0, num_bytes)  # a TIFF's header may be anywhere, and the EXIF data of a PNG or WEBP
    details = photo_details(head) or photo_details(read(0, HEAD_BYTES)) or photo_details(read(0, num_bytes))
    if details is None or not details.height or not details.width:
        return None
    return PhotoSize.of(details.height, details.width, details.orientation)


def mask_size_problem(photo: str, expected: PhotoSize, found: PhotoSize) -> str | None:
    """The reason why a mask does not fit its photo, as a text that follows its name; ``None`` if it fits.

    Both are turned upright, as loaders do by default.
    """
    if found.upright == expected.upright:
        return None
    fit_as_stored = found.stored == expected.stored
    return size_problem(photo, expected.upright, found.upright, fit_as_stored=fit_as_stored)


def mask_problem(data: bytes, *, decoded: bool) -> str | None:
    """The reason why an 8-bit grey PNG cannot be read, as a text that follows its name; ``None`` if it can be read.

    All chunks must be there, and the chunks of the pixels must have their checksums: 6 us.

    Args:
        data: The whole file; its header is known to be that of an 8-bit grey PNG.
        decoded: Also inflate the pixels, without keeping them: 0.2 ms for 200,000. Only a faulty encoder makes a whole
            PNG that fails here.
    """
    width, height, _, _, _, _, is_interlaced = struct.unpack(">IIBBBBB", data[16:29])
    if not width or not height:
        return f"announces {height} x {width} pixels"
    if decoded and width * height > MAX_PIXELS:
        return f"announces {height} x {width} pixels, expected at most {MAX_PIXELS}"
    kind = b""
    pixels: list[memoryview] = []
    try:
        for kind, content in needed_chunks(data):
            if kind == b"IDAT":
                pixels.append(content)
    except ValueError as exc:
        return f"is damaged: {exc}"
    if kind != b"IEND" or not pixels:
        missing = "pixels" if kind == b"IEND" else "end"
        return f"is cut off: it has no {missing}"
    return _inflating_problem(pixels, height, width, bool(is_interlaced)) if decoded else None


def _inflating_problem(pixels: list[memoryview], height: int, width: int, is_interlaced: bool) -> str | None:
    expected = height * (1 + width)  # a row is its filter's number and a byte for each pixel
    if is_interlaced:
        sizes = ((-(-(height - y) // by), -(-(width - x) // bx)) for x, y, bx, by in _PASSES)
        expected = sum(rows * (1 + columns) for rows, columns in sizes if rows > 0 and columns > 0)
    inflating, num = zlib.decompressobj(), 0
    try:
        for content in pixels:
            piece: bytes | memoryview = content
            # A piece at a time: a few bytes may inflate to gigabytes.
            while piece and num < expected:
                num += len(inflating.decompress(piece, _INFLATED_BYTES))
                piece = inflating.unconsumed_tail
        num += len(inflating.flush()) if num < expected else 0
    except zlib.error as exc:
        return f"cannot be decoded: {str(exc).rpartition(': ')[2]}"
    if num < expected:
        return f"cannot be decoded: {height} x {width} pixels are {expected} bytes, it holds {num}"
    return None
