"""Break valid bytes in the ways in which files and messages break, or are broken on purpose.

Not by Hypothesis: drawing an input of 10 KB took it 3.1 CPU-ms, and checking the input 0.15.
"""

import re
from collections.abc import Callable, Sequence
from random import Random

MAX_CHANGES = 6
# Lengths and counts at which arithmetic goes wrong.
_NUMBERS = (0, 1, -1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 1 << 31, (1 << 31) - 1, (1 << 32) - 1, 1 << 62, (1 << 63) - 1)
_DIGITS = (b"0", b"-1", b"9", b"00000000000", b"4294967296", b"9223372036854775808", b"9" * 40, b"1e9", b"0x10")

# What readers of text stumble over: halves of characters, other types, nesting, numbers without an end.
_TOKENS = (
    b"\xff", b"\xed\xa0\x80", b'"\\ud800"', b"1e999", b"NaN", b"null", b"true", b"[]", b"{}", b'""', b"\x1b[2J", b"\n",
    b"9" * 5000, b"[" * 20_000, b'{"a":' * 20_000, b"{a,{b," * 2000,
)  # fmt: skip

Change = Callable[[Random, bytes, Sequence[bytes]], bytes]


def _flip_bit(draw: Random, data: bytes, seeds: Sequence[bytes]) -> bytes:
    at = draw.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :]


def _set_byte(draw: Random, data: bytes, seeds: Sequence[bytes]) -> bytes:
    at = draw.randrange(len(data))
    return data[:at] + draw.randbytes(1) + data[at + 1 :]


def _set_number(draw: Random, data: bytes, seeds: Sequence[bytes]) -> bytes:
    """Overwrite 2, 4 or 8 bytes with a number, in either byte order."""
    size = draw.choice((2, 4, 8))
    number = (draw.choice(_NUMBERS) % (1 << 8 * size)).to_bytes(size, draw.choice(("little", "big")))
    at = draw.randrange(max(1, len(data) - size))
    return data[:at] + number + data[at + size :]


def _set_digits(draw: Random, data: bytes, seeds: Sequence[bytes]) -> bytes:
    """Replace a number that is written in digits."""
    numbers = list(re.finditer(rb"[0-9]+", data))
    if not numbers:
        return _set_byte(draw, data, seeds)
    start, stop = draw.choice(numbers).span()
    return data[:start] + draw.choice(_DIGITS) + data[stop:]


def _cut(draw: Random, data: bytes, seeds: Sequence[bytes]) -> bytes:
    return data[: draw.randrange(len(data))]


def _delete(draw: Random, data: bytes, seeds: Sequence[bytes]) -> bytes:
    at = draw.randrange(len(data))
    return data[:at] + data[at + draw.randint(1, 64) :]


def _repeat(draw: Random, data: bytes, seeds: Sequence[bytes]) -> bytes:
    at = draw.randrange(len(data))
    return data[:at] + data[at : at + draw.randint(1, 600)] * draw.randint(2, 4) + data[at:]


def _insert(draw: Random, data: bytes, seeds: Sequence[bytes]) -> bytes:
    at = draw.randint(0, len(data))
    return data[:at] + draw.randbytes(draw.randint(1, 16)) + data[at:]


def _put_token(draw: Random, data: bytes, seeds: Sequence[bytes]) -> bytes:
    """Put a token in place of a few bytes, or between them."""
    at = draw.randint(0, len(data))
    return data[:at] + draw.choice(_TOKENS) + data[at + draw.choice((0, 0, 1, 2, 8)) :]


def _splice(draw: Random, data: bytes, seeds: Sequence[bytes]) -> bytes:
    """Go on with the end of another seed."""
    other = draw.choice(seeds)
    return data[: draw.randint(0, len(data))] + other[draw.randint(0, len(other)) :]


_CHANGES: Sequence[Change] = (
    _flip_bit, _set_byte, _set_number, _set_digits, _cut, _delete, _repeat, _insert, _put_token, _splice,
)  # fmt: skip


def mutant(draw: Random, seeds: Sequence[bytes]) -> bytes:
    """One of the seeds, with 1 to `MAX_CHANGES` changes; few are likelier, as one alone passes more checks."""
    data = draw.choice(seeds)
    for _ in range(min(draw.randint(1, MAX_CHANGES), draw.randint(1, MAX_CHANGES))):
        data = draw.choice(_CHANGES)(draw, data, seeds) if data else draw.randbytes(draw.randint(0, 16))
    return data
