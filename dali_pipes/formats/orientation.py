"""Read a photo's EXIF orientation from its bytes, and turn sizes by it.

A camera stores the pixels as its sensor lies, and beside them a number, tag 274 of the first directory of the EXIF
data: how a viewer must turn the photo so that it stands upright. `PIL.ImageOps.exif_transpose` turns it so, and
DALI's decoders do with ``adjust_orientation=True``:

=====  ========================================================
value  the upright photo is the stored one, ...
=====  ========================================================
1      unchanged
2      mirrored: left and right change places
3      turned by 180 degrees
4      mirrored: top and bottom change places
5      with rows and columns exchanged (transposed)
6      turned by 90 degrees clockwise
7      transposed about the other diagonal
8      turned by 90 degrees counterclockwise
=====  ========================================================

Decoders agree on what encoders usually write, and differ on odd EXIF data: DALI 2.4 takes the size from one of several
EXIF blocks and the turn from another, and ignores data with a text that ends outside; Pillow also looks for a value in
XMP. So this module has the one rule, and says which photos are *plain*: those whose headers DALI is sure to read, see
Note [parallel parsers], and on whose orientation it is sure to agree. Of any other photo DALI gets a copy with plain
EXIF data, see `plain_copy`.

The rule: the first EXIF block counts (JPEG: APP1 before the first scan; PNG: ``eXIf``; WEBP: ``EXIF``, if the header
announces it), in it the first entry of tag 274 in the first directory, if it is one whole number from 1 to 8. In any
other case the value is 1. XMP and text chunks are not read. An animated PNG has the orientation of a PNG. Other formats
have none here: Pillow turns a TIFF itself.

# Note [parallel parsers]: DALI 2.4 parses the headers of a batch of more than 4 x (threads + 1) samples in several
threads. If nvImageCodec's parser refuses one of them, the process ends (SIGSEGV, see `docs/parallel-parsers.md`). So a
photo joins a batch only if its header is surely read: if it has what the rules of this module ask for, or if DALI has
read it alone (`dali_pipes.graph.photos`).
"""

import re
import struct
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from dali_pipes.formats.photo_header import JPEG_FRAMES, WEBP_HEADER_BYTES

UPRIGHT = 1
"""The orientation of a photo that is stored as it is seen."""
ORIENTATION_TAG = 274

# Entries whose text or fractions DALI's parser looks up where they point to: one outside, and it drops the whole block.
# Tag -> bytes of a value; a text's are counted by the entry.
TEXT_TAGS = (0x010E, 0x010F, 0x0110, 0x0131, 0x0132, 0x8298)
FRACTION_BYTES = {0x011A: 8, 0x011B: 8, 0x013E: 16, 0x013F: 48, 0x0211: 24, 0x0214: 48}

EXIF_MARK = b"Exif\0\0"
# Types of whole numbers: unsigned and signed, of 16 and 32 bits.
_NUMBERS = {3: "H", 4: "I", 8: "h", 9: "i"}
_SHORT = 3
_SOS, _APP1 = 0xDA, 0xE1
_CHUNK = struct.Struct(">I4s")
# Segments or chunks of a file that are looked at; no encoder writes so many. A photo with more is not plain.
_MAX_PARTS = 1 << 16
# Where EXIF data may stand first.
_FIRST_PARTS = {"JPEG": 2, "PNG": 8 + 25, "WEBP": WEBP_HEADER_BYTES}
_HAS_EXIF = 0x08

PNG_START = b"\0\0\0\x0dIHDR"
"""The length and the name of a PNG's first chunk."""
PNG_KINDS = frozenset(
    bytes([bits, colours])
    for colours, depths in ((0, (1, 2, 4, 8, 16)), (2, (8, 16)), (3, (1, 2, 4, 8)), (4, (8, 16)), (6, (8, 16)))
    for bits in depths
)
"""The two bytes behind the size of a PNG: bits of a value, and kind of colours."""
JPEG_CHANNELS = (1, 3, 4)
JPEG_TAIL_BYTES = 18
"""A segment's fields that are read, without asking for its length, end so many bytes behind its length at the most."""
_BMP_BYTES = 14 + 40
_OS2_HEADER = 12
_BITFIELDS = 3
# A PNM has a third number after its size. In a PBM it stands for the first pixels, which need not be a number.
_SPACE = rb"(?:\s|#[^\n]*\n)*"
_PNM = re.compile(
    rb"P[1-6]\s" + _SPACE + rb"\d{1,9}\s" + _SPACE + rb"\d{1,9}\s" + _SPACE + rb"(?:[^\s#\d]|\d{1,9}[^#\d])"
)
_PNM_BYTES = 4096

Data = bytes | memoryview
Size = TypeVar("Size", int, npt.NDArray[np.int32], npt.NDArray[np.int64])


class Orientation(NamedTuple):
    """What the EXIF data of a photo say."""

    value: int = UPRIGHT
    """1 to 8."""
    is_plain: bool = True
    """Whether DALI's decoders are sure to read the photo's header, and to find this value."""


class _Place(NamedTuple):
    """Where an EXIF block stands in a file."""

    start: int
    """Of the segment or chunk that holds it."""
    block: int
    stop: int
    """Of the block."""
    end: int
    """Of the segment or chunk."""


class _Places(NamedTuple):
    places: list[_Place]
    is_sure: bool = True
    """Whether DALI surely reads the header, and sees the same blocks."""


def upright_size(height: Size, width: Size, orientation: int | npt.NDArray[np.integer]) -> tuple[Size, Size]:
    """Height and width of the upright photo, from those of the stored one: numbers, or arrays [N].

    >>> upright_size(40, 60, 6), upright_size(40, 60, 3)
    ((60, 40), (40, 60))
    """
    is_turned = orientation >= 5
    if isinstance(height, int) and isinstance(width, int):
        return (width, height) if is_turned else (height, width)
    return np.where(is_turned, width, height), np.where(is_turned, height, width)


def read_orientation(data: Data, format: str) -> Orientation:
    """The orientation of a photo, from all its bytes; 1 for other formats than JPEG, PNG and WEBP. Never raises."""
    places, is_sure = _exif_places(data, format)
    if not places:
        return Orientation(UPRIGHT, is_sure)
    found = exif_orientation(data[places[0].block : places[0].stop])
    return Orientation(found.value, found.is_plain and is_sure and len(places) == 1)


def is_surely_read(data: Data, format: str) -> bool:
    """Whether DALI surely reads the header of a photo, whatever it finds in it, see Note [parallel parsers]."""
    return _exif_places(data, format).is_sure


def exif_orientation(block: Data) -> Orientation:
    """The orientation in one EXIF block, which begins with the byte order; 1 without one."""
    is_plain = block[:6] != EXIF_MARK  # some programs write the mark of a JPEG's block in a PNG or WEBP, too
    if not is_plain:
        block = block[6:]
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(bytes(block[:4]))
    if order is None or len(block) < 10:
        return Orientation(UPRIGHT, False)
    (start,) = struct.unpack_from(f"{order}I", block, 4)
    if start + 2 > len(block):
        return Orientation(UPRIGHT, False)
    (num,) = struct.unpack_from(f"{order}H", block, start)
    stop = start + 2 + 12 * num
    value, is_found = UPRIGHT, False
    is_plain &= stop <= len(block)
    for at in range(start + 2, min(stop, len(block) - 11), 12):
        tag, type, count, where = struct.unpack_from(f"{order}HHII", block, at)
        if tag in TEXT_TAGS:
            is_plain &= count <= 4 or where + count <= len(block)
        elif tag in FRACTION_BYTES:
            is_plain &= where + FRACTION_BYTES[tag] <= len(block)
        elif tag == ORIENTATION_TAG and not is_found:
            is_found = True
            is_plain &= type == _SHORT and count == 1
            if type in _NUMBERS and count == 1:
                (found,) = struct.unpack_from(f"{order}{_NUMBERS[type]}", block, at + 8)
                value = found if 1 <= found <= 8 else UPRIGHT
    return Orientation(value, is_plain)


def plain_copy(data: Data, format: str, orientation: int) -> bytes:
    """A copy of a photo that is not plain with this orientation, in EXIF data that all decoders read alike.

    All other EXIF data are left out; the pixels are as they were. A photo that cannot have EXIF data stays as it is.
    """
    if format not in _FIRST_PARTS or (format == "WEBP" and data[12:16] != b"VP8X"):
        return bytes(data)
    block = b"II*\0" + struct.pack("<IHHHIHHI", 8, 1, ORIENTATION_TAG, _SHORT, 1, orientation, 0, 0)
    start = _FIRST_PARTS[format]
    pieces, at = [bytes(data[:start]), _as_part(block, format)], start
    for place in _exif_places(data, format).places:
        pieces.append(bytes(data[at : place.start]))
        at = place.end
    pieces.append(bytes(data[at:]))
    copy = b"".join(pieces)
    if format == "WEBP":  # the file's length stands after its first four bytes
        copy = copy[:4] + struct.pack("<I", len(copy) - 8) + copy[8:]
    return copy


def _as_part(block: bytes, format: str) -> bytes:
    if format == "JPEG":
        return b"\xff\xe1" + struct.pack(">H", 2 + len(EXIF_MARK) + len(block)) + EXIF_MARK + block
    if format == "PNG":
        import zlib

        return struct.pack(">I", len(block)) + b"eXIf" + block + struct.pack(">I", zlib.crc32(b"eXIf" + block))
    return b"EXIF" + struct.pack("<I", len(block)) + block


def _exif_places(data: Data, format: str) -> _Places:
    if format == "JPEG":
        return _in_jpeg(data)
    if format in ("PNG", "APNG"):
        return _in_png(data)
    if format == "WEBP":
        has_header = len(data) >= WEBP_HEADER_BYTES
        is_announced = has_header and data[12:16] == b"VP8X" and data[20] & _HAS_EXIF
        return _in_webp(data) if is_announced else _Places([], has_header)
    is_sure = {"BMP": _is_sure_bmp, "PPM": _is_sure_pnm}.get(format)
    return _Places([], is_sure is None or is_sure(data))


def _in_jpeg(data: Data) -> _Places:
    places: list[_Place] = []
    at, last, is_sure, num_frames = 2, len(data) - JPEG_TAIL_BYTES - 4, True, 0
    for _ in range(_MAX_PARTS):
        while at <= last and data[at] == 0xFF == data[at + 1]:
            at += 1  # fill
        if at > last or data[at] != 0xFF:
            break
        marker = data[at + 1]
        if marker == _SOS:
            return _Places(places, is_sure and num_frames == 1)
        if marker == 0x01 or 0xD0 <= marker <= 0xD9:  # without a length: DALI takes the bytes after it for one
            is_sure = False
            at += 2
            continue
        end = at + 2 + (data[at + 2] << 8 | data[at + 3])
        if marker == _APP1 and data[at + 4 : at + 10] == EXIF_MARK:
            places.append(_Place(at, at + 10, min(end, len(data)), end))
            is_sure &= at + 10 <= end
        elif marker in JPEG_FRAMES:
            num_frames += 1
            is_sure &= data[at + 9] in JPEG_CHANNELS
        is_sure &= marker != 0
        at = end
    return _Places(places, False)


def _in_png(data: Data) -> _Places:
    places: list[_Place] = []
    at, last = 8, len(data) - 8
    for _ in range(_MAX_PARTS):
        if at > last:
            break
        size, kind = _CHUNK.unpack_from(data, at)
        if kind == b"eXIf":
            places.append(_Place(at, at + 8, min(at + 8 + size, len(data)), min(at + 12 + size, len(data))))
        elif kind == b"IEND":
            is_sure = data[8:16] == PNG_START and bytes(data[24:26]) in PNG_KINDS
            return _Places(places, is_sure)
        at += 12 + size
    return _Places(places, False)


def _in_webp(data: Data) -> _Places:
    places: list[_Place] = []
    at, is_sure = 12, True
    for _ in range(_MAX_PARTS):
        if at + 8 > len(data):
            break
        kind, size = bytes(data[at : at + 4]), int.from_bytes(data[at + 4 : at + 8], "little")
        end = min(at + 8 + size + size % 2, len(data))
        if kind == b"EXIF":
            places.append(_Place(at, at + 8, min(at + 8 + size, len(data)), end))
            is_sure &= at + 8 + size <= len(data)
        elif not places:
            is_sure &= size % 2 == 0  # DALI does not skip the byte that fills up a chunk of odd length
        at = end
    return _Places(places, is_sure and bool(places))  # DALI looks for what the header announces, to the file's end


def _is_sure_bmp(data: Data) -> bool:
    """Whether a BMP has a header of a kind that is surely read."""
    if len(data) < _BMP_BYTES:
        return False
    size, os2_bits, bits, compression, colours = struct.unpack_from("<I6xHxxHI12xI", data, 14)
    if size == _OS2_HEADER:
        bits, compression, colours = os2_bits, 0, 0
    elif size < 40 or 14 + size > len(data):
        return False
    if compression == _BITFIELDS:
        return bits in (16, 32)
    return compression in (0, 1) and (bits in (24, 32) or (bits in (1, 4, 8) and colours <= 1 << bits))


def _is_sure_pnm(data: Data) -> bool:
    """Whether a PNM begins with numbers that are surely read."""
    return bool(_PNM.match(bytes(data[:64])) or _PNM.match(bytes(data[:_PNM_BYTES])))
