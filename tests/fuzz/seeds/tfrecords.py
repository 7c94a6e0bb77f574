"""TFRecord files, written by hand."""

import struct
from collections.abc import Sequence
from pathlib import Path

from prep.sources.tfrecord_files import masked_crc32c

Feature = bytes | str | int | float | list[int] | list[float] | list[bytes]


def varint(value: int) -> bytes:
    """A number in the protocol buffers' variable length."""
    value &= (1 << 64) - 1
    out = b""
    while value > 0x7F:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    return out + bytes([value])


def field(number: int, data: bytes) -> bytes:
    """A field of bytes."""
    return varint(number << 3 | 2) + varint(len(data)) + data


def example(features: dict[str, Feature], *, is_packed: bool = True) -> bytes:
    """A tf.train.Example, written by hand from the protocol buffers' definition."""
    entries = b""
    for name, value in features.items():
        values = value if isinstance(value, list) else [value]
        if not values or isinstance(values[0], bytes | str):
            texts = [text if isinstance(text, bytes) else str(text).encode() for text in values]
            kind, body = 1, b"".join(field(1, text) for text in texts)
        elif isinstance(values[0], float):
            packed = struct.pack(f"<{len(values)}f", *values)
            split = b"".join(b"\x0d" + packed[at : at + 4] for at in range(0, len(packed), 4))
            kind, body = 2, field(1, packed) if is_packed else split
        else:
            numbers = [varint(int(number)) for number in values]
            kind, body = 3, field(1, b"".join(numbers)) if is_packed else b"".join(b"\x08" + n for n in numbers)
        entries += field(1, field(1, name.encode()) + field(2, field(kind, body)))
    return field(1, entries)


def frame(data: bytes) -> bytes:
    """A record as a TFRecord file holds it: length, data, and the checksum of each."""
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", masked_crc32c(length)) + data + struct.pack("<I", masked_crc32c(data))


def write_tfrecord(path: Path, photos: Sequence[tuple[bytes, int]]) -> None:
    """A file of photos with their labels, in a folder that is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    records = (frame(example({"image/encoded": photo, "image/class/label": label})) for photo, label in photos)
    path.write_bytes(b"".join(records))
