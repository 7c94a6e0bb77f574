"""Find the values of each feature in the bytes of a ``tf.train.Example``.

It is a protocol buffer, read here without its compiler: Example {1: Features {1, a map: {1: name, 2: Feature {1: bytes,
2: floats, 3: integers}}}}; each list of a Feature is {1: values}.
"""

import struct
from collections.abc import Iterator, Mapping
from typing import Any

from dali_pipes.errors import DataError

# Wire types: the form of a field's content.
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5

FieldRange = tuple[int, int]
"""First byte, and the one after the last."""


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
