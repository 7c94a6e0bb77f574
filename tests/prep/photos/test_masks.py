"""Masks before they are packed: every PNG that Pillow decodes is taken, and none that it does not."""

import struct
import zlib

import pytest

from dali_pipes.formats.photo_header import MAX_PIXELS
from prep.pack.check import mask_problem
from tests.shards import encode_mask
from tests.turned_photos import png_chunk

SIGNATURE = b"\x89PNG\r\n\x1a\n"


def _png(height: int, width: int, *pixels: bytes) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    chunks = [png_chunk(b"IHDR", header), *(png_chunk(b"IDAT", part) for part in pixels), png_chunk(b"IEND", b"")]
    return SIGNATURE + b"".join(chunks)


ROWS = bytes(3 * 5)
NO_HEADER = "holds a PNG whose header cannot be read"


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (_png(3, 4, zlib.compress(ROWS[:-1])), "cannot be decoded: "),
        (_png(3, 4, zlib.compress(ROWS)[:-8]), "cannot be decoded: "),
        (_png(3, 4, b"no zlib"), "cannot be decoded: "),
        (_png(3, 4), NO_HEADER),  # no pixels
        (encode_mask()[:40], NO_HEADER),
        (_png(0, 4, zlib.compress(b"")), NO_HEADER),
        (encode_mask()[:-1], "is cut off: it has no whole IEND chunk"),
        (_png(3, 4, zlib.compress(ROWS))[:-15] + b"\1" + encode_mask()[-14:], "is damaged: "),
        # By what it announces: nothing is inflated.
        (_png(40_000, 40_000, b""), f"holds a photo of 40000 x 40000 pixels, expected at most max_pixels={MAX_PIXELS}"),
    ],
)
def test_mask_that_is_damaged_is_found(data: bytes, problem: str) -> None:
    assert (mask_problem(data) or "").startswith(problem)


def test_mask_with_what_no_decoder_looks_at_is_good() -> None:
    """More pixels than are announced, and a text of another checksum."""
    assert mask_problem(_png(3, 4, zlib.compress(bytes(1 << 26)))) is None
    text = bytearray(png_chunk(b"tEXt", b"a\0b"))
    text[-1] ^= 1
    mask = encode_mask()
    assert mask_problem(mask[:33] + bytes(text) + mask[33:]) is None
