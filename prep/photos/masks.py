"""A mask's bytes, and its photo's, to what is wrong with the mask: by headers and checksums, or decoded."""

import struct
import zlib
from collections.abc import Callable, Iterator

from dali_pipes.formats.photo_header import MAX_PIXELS, read_photo_header

__all__ = ["HEADER_BYTES", "mask_problem", "photo_size"]

HEADER_BYTES = 2048
"""Of a photo: with these most say how large they are."""

# A JPEG's frame headers: of them all but those of tables (DHT, JPG, DAC).
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
# Markers that stand alone, without a length: TEM, RST0 to RST7, SOI.
_ALONE = frozenset({0x01, *range(0xD0, 0xD9)})
_SCAN, _END = 0xDA, 0xD9

_SIGNATURE_BYTES = 8
# Column and row at which each pass of an interlaced PNG begins, and their steps.
_PASSES = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
_INFLATED_BYTES = 1 << 20

Reader = Callable[[int, int], bytes]
"""So many bytes from an offset on; fewer at the end."""


def photo_size(read: Reader, num_bytes: int) -> tuple[int, int] | None:
    """Height and width as a photo's header has them; ``None`` where it says none.

    Args:
        read: Of the photo.
        num_bytes: The photo's.
    """
    head = read(0, HEADER_BYTES)
    if head.startswith(b"\xff\xd8"):
        return _jpeg_size(read, head)
    if not head.startswith(b"\x89PNG"):
        head = read(0, num_bytes)  # a TIFF's header may be anywhere
    header = read_photo_header(head)
    return (header.height, header.width) if header.height > 0 and header.width > 0 else None


def mask_problem(data: bytes, *, decoded: bool) -> str | None:
    """Why an 8-bit grey PNG cannot be read, to stand after its name; ``None`` where it can.

    All its chunks must be there, those of its pixels with the checksums that they carry: 6 us.

    Args:
        data: The whole file; its header is known to be that of an 8-bit grey PNG.
        decoded: Inflate its pixels, too, without keeping them: 0.2 ms of 200,000. Only a faulty encoder makes a PNG
            that is whole and fails at this.
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


def _jpeg_size(read: Reader, head: bytes) -> tuple[int, int] | None:
    offset, start = 2, 0
    while True:
        if offset - start + 9 > len(head):
            head, start = read(offset, HEADER_BYTES), offset
            if len(head) < 9:
                return None
        at = offset - start
        if head[at] != 0xFF:
            return None
        marker = head[at + 1]
        if marker == 0xFF:  # a fill byte
            offset += 1
        elif marker in _ALONE:
            offset += 2
        elif marker in _FRAMES:
            height, width = struct.unpack_from(">HH", head, at + 5)
            return (height, width) if height and width else None
        elif marker in (_SCAN, _END):
            return None
        else:
            offset += 2 + int.from_bytes(head[at + 2 : at + 4])


def _chunks(data: bytes) -> Iterator[tuple[bytes, memoryview]]:
    """Kind and content of each, up to the one that says it is the end.

    Raises:
        ValueError: If a checksum is not that of the bytes.
    """
    view, at = memoryview(data), _SIGNATURE_BYTES
    while at + 12 <= len(data):
        stop = at + 8 + int.from_bytes(data[at : at + 4])
        if stop + 4 > len(data):
            return
        kind = data[at + 4 : at + 8]
        # A small letter: of text and the like, which no decoder looks at.
        is_needed = not kind[0] & 0x20
        if is_needed and zlib.crc32(view[at + 4 : stop]) != int.from_bytes(data[stop : stop + 4]):
            raise ValueError(f"the {kind.decode('latin-1')!r} at byte {at} has another checksum than it says")
        yield kind, view[at + 8 : stop]
        if kind == b"IEND":
            return
        at = stop + 4


def _inflating_problem(pixels: list[memoryview], height: int, width: int, is_interlaced: bool) -> str | None:
    expected = height * (1 + width)  # a row is its filter's number, and a byte a pixel
    if is_interlaced:
        sizes = ((-(-(height - y) // by), -(-(width - x) // bx)) for x, y, bx, by in _PASSES)
        expected = sum(rows * (1 + columns) for rows, columns in sizes if rows > 0 and columns > 0)
    inflating, num = zlib.decompressobj(), 0
    try:
        for content in pixels:
            piece: bytes | memoryview = content
            # A piece at a time: a few bytes may stand for gigabytes.
            while piece and num < expected:
                num += len(inflating.decompress(piece, _INFLATED_BYTES))
                piece = inflating.unconsumed_tail
        num += len(inflating.flush()) if num < expected else 0
    except zlib.error as exc:
        return f"cannot be decoded: {str(exc).rpartition(': ')[2]}"
    if num < expected:
        return f"cannot be decoded: {height} x {width} pixels are {expected} bytes, it holds {num}"
    return None
