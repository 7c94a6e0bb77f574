"""Tell which headers the parser of DALI's decoders is sure to read; it reads more than these.

# Note [parallel parsers]: DALI 2.4 parses the headers of a batch of more than 4 x (threads + 1) samples in several
threads. If nvImageCodec's parser refuses one of them, the process ends (SIGSEGV, see `docs/parallel-parsers.md`). So a
photo joins a batch only if its header is surely read: if it has what these rules and those of
`dali_pipes.formats.orientation` ask for, or if DALI has read it alone (`dali_pipes.graph.photos`).
"""

import re
import struct

Data = bytes | memoryview

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
WEBP_HEADER_BYTES = 30

_BMP_BYTES = 14 + 40
_OS2_HEADER = 12
_BITFIELDS = 3
# A PNM has a third number after its size. In a PBM it stands for the first pixels, which need not be a number.
_SPACE = rb"(?:\s|#[^\n]*\n)*"
_PNM = re.compile(
    rb"P[1-6]\s" + _SPACE + rb"\d{1,9}\s" + _SPACE + rb"\d{1,9}\s" + _SPACE + rb"(?:[^\s#\d]|\d{1,9}[^#\d])"
)
_PNM_BYTES = 4096


def is_sure_bmp(data: Data) -> bool:
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


def is_sure_pnm(data: Data) -> bool:
    """Whether a PNM begins with numbers that are surely read."""
    return bool(_PNM.match(bytes(data[:64])) or _PNM.match(bytes(data[:_PNM_BYTES])))
