"""Recognise masks by their names, and find faults of a mask by its header and checksums, or by decoding it."""

import re
import struct
import zlib
from collections.abc import Callable, Iterator, Set

from dali_pipes.formats.photo_header import MAX_PHOTO_BYTES, MAX_PIXELS
from prep.photos.details import HEAD_BYTES, photo_details

HEADER_BYTES = 2048
"""Enough of most photos to know their size."""

_MASK_WORDS = frozenset({"mask", "masks", "seg", "segmentation", "trimap", "label", "labels", "annotation"})

_SIGNATURE_BYTES = 8
# Column and row at which each pass of an interlaced PNG begins, and their steps.
_PASSES = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
_INFLATED_BYTES = 1 << 20

Reader = Callable[[int, int], bytes]
"""Takes an offset and a number of bytes, and returns the bytes there; at the end of the photo there may be fewer."""


def is_mask_name(component: str, photos: Set[str]) -> bool:
    """Whether a photo component is a mask, by its name and the names of the sample's other photos.

    It is a mask if a word of its name says so (``seg.png``, ``trimap.png``, ``left-mask.png``), or if it is a PNG and
    another photo is not. The only photo of a sample is never a mask.

    >>> is_mask_name("trimap.png", {"image.jpg", "trimap.png"}), is_mask_name("png", {"png"})
    (True, False)
    >>> is_mask_name("mask.jpg", {"jpg", "mask.jpg"}), is_mask_name("masked.jpg", {"jpg", "masked.jpg"})
    (True, False)
    """
    if len(photos) < 2:
        return False
    stem, _, extension = component.rpartition(".")
    if not _MASK_WORDS.isdisjoint(re.split(r"[._-]", stem)):
        return True
    return extension == "png" and any(not photo.endswith("png") for photo in photos)


def photo_size(read: Reader, num_bytes: int) -> tuple[int, int] | None:
    """Height and width by the header of a photo of ``num_bytes``; ``None`` if it has no readable header."""
    num_bytes = min(num_bytes, MAX_PHOTO_BYTES)
    head = read(0, HEADER_BYTES)
    if not head.startswith((b"\xff\xd8\xff", b"\x89PNG")):
        head = read(0, num_bytes)  # a TIFF's header may be anywhere
    details = photo_details(head) or photo_details(read(0, HEAD_BYTES)) or photo_details(read(0, num_bytes))
    return (details.height, details.width) if details and details.height > 0 and details.width > 0 else None


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
        for kind, content in _chunks(data):
            if kind == b"IDAT":
                pixels.append(content)
    except ValueError as exc:
        return f"is damaged: {exc}"
    if kind != b"IEND" or not pixels:
        missing = "pixels" if kind == b"IEND" else "end"
        return f"is cut off: it has no {missing}"
    return _inflating_problem(pixels, height, width, bool(is_interlaced)) if decoded else None


def _chunks(data: bytes) -> Iterator[tuple[bytes, memoryview]]:
    """Yield kind and content of each chunk, up to the end chunk; raise `ValueError` if a checksum is wrong."""
    view, at = memoryview(data), _SIGNATURE_BYTES
    while at + 12 <= len(data):
        stop = at + 8 + int.from_bytes(data[at : at + 4])
        if stop + 4 > len(data):
            return
        kind = data[at + 4 : at + 8]
        # A small letter marks chunks that decoders do not need, such as text.
        is_needed = not kind[0] & 0x20
        if is_needed and zlib.crc32(view[at + 4 : stop]) != int.from_bytes(data[stop : stop + 4]):
            raise ValueError(f"the {kind.decode('latin-1')!r} at byte {at} has another checksum than it says")
        yield kind, view[at + 8 : stop]
        if kind == b"IEND":
            return
        at = stop + 4


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
