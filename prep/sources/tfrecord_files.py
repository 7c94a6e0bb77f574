"""Find TFRecord files, read their records with all checksums verified, and find features. TensorFlow is not needed.

A record in a file is::

    length, 8 bytes   masked CRC32C of the length   data   masked CRC32C of the data     (little-endian)

Its data are a ``tf.train.Example``, a protocol buffer, read here without its compiler: Example {1: Features {1, a map:
{1: name, 2: Feature {1: bytes, 2: floats, 3: integers}}}}; each list of a Feature is {1: values}.
"""

import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import google_crc32c

from dali_pipes.errors import DataError

_LENGTH = struct.Struct("<QI")
_CRC = struct.Struct("<I")
LENGTH_BYTES = _LENGTH.size
"""Bytes before a record's data: its length, and the length's checksum."""
FRAME_BYTES = _LENGTH.size + _CRC.size
"""Bytes of a record without its data."""
# A record is in memory while it is read. A protocol buffer has less than 2 GiB.
MAX_RECORD_BYTES = 1 << 31

# Wire types: the form of a field's content.
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5

FieldRange = tuple[int, int]
"""First byte, and the one after the last."""


def find_tfrecords(paths: Sequence[Path]) -> list[Path]:
    """The named files, and of a directory its files with ``tfrecord`` in their names, sorted."""
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            # An .idx file is DALI's index of such a file.
            inside = sorted(
                entry
                for entry in path.iterdir()
                if "tfrecord" in entry.name.lower() and entry.suffix != ".idx" and entry.is_file()
            )
            if not inside:
                raise DataError(f"directory '{path}' holds no file with 'tfrecord' in its name; name the files")
            files += inside
        elif path.is_file():
            files.append(path)
        else:
            raise DataError(f"no such file or directory: '{path}'")
    return files


def masked_crc32c(data: bytes) -> int:
    """TFRecord's checksum: CRC32C, rotated and with a constant added, because the data may contain CRCs of their own.

    >>> hex(masked_crc32c(b"123456789"))
    '0xc78ab0e5'
    """
    crc: int = google_crc32c.value(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def read_frames(stream: BinaryIO, num_bytes: int) -> Iterator[tuple[int, bytes, str | None]]:
    """Yield each record's offset, data and fault, if it has one. A wrong length ends the search."""
    offset = 0
    while head := stream.read(_LENGTH.size):
        if len(head) < _LENGTH.size:
            yield offset, head, f"the file ends after {len(head)} of its first {_LENGTH.size} bytes"
            return
        length, crc = _LENGTH.unpack(head)
        if (found := masked_crc32c(head[:8])) != crc:
            problem = (
                f"its length has the checksum {found:08x}, the file says {crc:08x}; this and the rest of the file, "
                f"{num_bytes - offset} bytes, cannot be read"
            )
            yield offset, head, problem
            return
        stop = offset + _LENGTH.size + length + _CRC.size
        if length > MAX_RECORD_BYTES or stop > num_bytes:
            yield offset, head, f"it claims bytes {offset} to {stop}, the file has {num_bytes}: it was cut off"
            return
        data = stream.read(length)
        (crc,) = _CRC.unpack(stream.read(_CRC.size))
        is_good = (found := masked_crc32c(data)) == crc
        yield offset, data, None if is_good else f"its data have the checksum {found:08x}, the file says {crc:08x}"
        offset = stop


def file_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as exc:
        raise DataError(f"cannot read '{path}': {exc.strerror or exc}") from exc


# Examples


def find_features(data: bytes) -> dict[str, FieldRange]:
    """Feature name -> the range of its message."""
    features: dict[str, FieldRange] = {}
    for outer in _messages(data, (0, len(data))):
        for entry in _messages(data, outer):
            name, message = b"", (0, 0)
            for number, wire, span in _fields(data, entry):
                if (number, wire) == (1, _BYTES):
                    name = data[slice(*span)]
                elif (number, wire) == (2, _BYTES):
                    message = span
            features[name.decode(errors="replace")] = message
    if not features:
        raise DataError("is not a tf.train.Example, or has no features")
    return features


def list_of(features: Mapping[str, FieldRange], data: bytes, feature: str) -> tuple[int, list[FieldRange]]:
    """The kind of a feature's list (1 bytes, 2 floats, 3 integers), and the ranges of its values' fields."""
    if feature not in features:
        raise DataError(f"no feature '{feature}' (found: {', '.join(sorted(features))})")
    for kind, wire, span in _fields(data, features[feature]):
        if wire == _BYTES and kind in (1, 2, 3):
            return kind, [value for _, _, value in _fields(data, span)]
    return 0, []


def values_of(features: Mapping[str, FieldRange], data: bytes, feature: str) -> list[Any]:
    """The values of a feature: bytes, floats or integers; an empty list without values."""
    kind, spans = list_of(features, data, feature)
    values: list[Any] = []
    for first, stop in spans:
        # Numbers are packed into one field, or have a field each: the bytes are the same.
        if kind == 1:
            values.append(data[first:stop])
        elif kind == 2:
            if (stop - first) % 4:
                raise DataError(f"feature '{feature}': floats of {stop - first} bytes")
            values += struct.unpack(f"<{(stop - first) // 4}f", data[first:stop])
        else:
            while first < stop:
                value, first = _varint(data, first, stop)
                values.append(value - (1 << 64) if value >> 63 else value)
    return values


def _messages(data: bytes, span: FieldRange) -> Iterator[FieldRange]:
    """The ranges of the messages in field 1."""
    return (content for number, wire, content in _fields(data, span) if (number, wire) == (1, _BYTES))


def _fields(data: bytes, span: FieldRange) -> Iterator[tuple[int, int, FieldRange]]:
    """Number, wire type and bytes of each field of a message."""
    at, stop = span
    while at < stop:
        tag, at = _varint(data, at, stop)
        number, wire = tag >> 3, tag & 7
        if wire == _VARINT:
            _, end = _varint(data, at, stop)
        elif wire == _BYTES:
            length, at = _varint(data, at, stop)
            end = at + length
        elif wire in (_FIXED64, _FIXED32):
            end = at + (8 if wire == _FIXED64 else 4)
        else:
            raise DataError(f"is not a tf.train.Example: wire type {wire} at its byte {at}")
        if end > stop:
            raise DataError(f"is not a tf.train.Example: a field claims bytes {at} to {end} of {stop}")
        yield number, wire, (at, end)
        at = end


def _varint(data: bytes, at: int, stop: int) -> tuple[int, int]:
    """A number, and the position after it."""
    value = shift = 0
    while at < stop and shift < 70:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, at
        shift += 7
    raise DataError(f"is not a tf.train.Example: the number before its byte {at} has no end")
