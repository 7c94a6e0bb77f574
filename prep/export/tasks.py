"""Make the bytes of a TFRecord file, in a worker.

It is a separate module, because the imports of `prep.export.export` (numpy among them) would cost every worker a tenth
of a second. A worker needs memory for 1 MiB, one record, and the keys and positions of the file's samples. It holds the
whole record, because the record's length stands before the data and the checksum after it.
"""

import os
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from dali_pipes.errors import DataError, StoreError
from dali_pipes.store.base import StoredFile
from prep.pack.tasks import StreamTask
from prep.sources.tfrecord_files import masked_crc32c
from prep.tar.writer import CHUNK_BYTES

# The number of the field of a Feature that holds its list: bytes or integers.
BYTES, INTEGERS = 1, 3

_LENGTH = struct.Struct("<Q")
_CRC = struct.Struct("<I")
# Length, checksum of the length, and checksum of the data.
FRAME_BYTES = _LENGTH.size + 2 * _CRC.size


class ValuePlace(NamedTuple):
    """Position of a value in its shard."""

    offset: int
    size: int


class Feature(NamedTuple):
    """One feature of a record."""

    name: str
    kind: int
    value: bytes | ValuePlace
    """The encoded item of the list, bytes or a varint; or where its bytes are."""


class ShardPart(NamedTuple):
    """A shard, and the features of those samples that are written to one file."""

    file: Path | StoredFile
    records: Sequence[Sequence[Feature]]


@dataclass(frozen=True, kw_only=True)
class FileTask(StreamTask):
    """A file with its shards."""

    shards: Sequence[ShardPart]

    def stream(self, on_sample: Callable[[], None]) -> Iterator[memoryview]:
        """The file's bytes, in pieces of about 1 MiB; a larger record is one piece."""
        pieces: list[bytes] = []
        held = 0
        for shard in self.shards:
            with _Values(shard.file) as values:
                for features in shard.records:
                    data = encode_example(features, values)
                    length = _LENGTH.pack(len(data))
                    pieces += (length, _CRC.pack(masked_crc32c(length)), data, _CRC.pack(masked_crc32c(data)))
                    held += FRAME_BYTES + len(data)
                    on_sample()
                    if held >= CHUNK_BYTES:
                        yield memoryview(b"".join(pieces))
                        pieces, held = [], 0
        if held:
            yield memoryview(b"".join(pieces))


class _Values:
    """Reads the components of a shard; a context manager."""

    def __init__(self, file: Path | StoredFile) -> None:
        self._file = file
        self._where = file.url if isinstance(file, StoredFile) else str(file)
        self._descriptor = -1

    def __enter__(self) -> "_Values":
        if not isinstance(self._file, StoredFile):
            try:
                self._descriptor = os.open(self._file, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as exc:
                raise StoreError(f"cannot read '{self._where}': {exc.strerror or exc}") from exc
        return self

    def __exit__(self, *_: object) -> None:
        if isinstance(self._file, StoredFile):
            self._file.close()
        else:
            os.close(self._descriptor)

    def read(self, place: ValuePlace) -> bytes:
        buffer = bytearray(place.size)
        view, filled = memoryview(buffer), 0
        while filled < place.size:
            num = self._read_into(view[filled:], place.offset + filled)
            if not num:
                raise DataError(
                    f"'{self._where}' ends at byte {place.offset + filled}: it became shorter during the export; index "
                    "it again: dali-pipes prep index URL"
                )
            filled += num
        return bytes(buffer)

    def _read_into(self, view: memoryview, offset: int) -> int:
        if isinstance(self._file, StoredFile):
            return self._file.read_into(view, offset=offset)
        try:
            return os.preadv(self._descriptor, [view], offset)
        except OSError as exc:
            raise StoreError(f"cannot read '{self._where}': {exc.strerror or exc}") from exc


# Example {1: Features {1, a map: {1: name, 2: Feature {kind: list {1: value}}}}}, as in `prep.sources.tfrecord_files`.


def example_bytes(features: Sequence[Feature]) -> int:
    """The number of bytes that `encode_example` returns; the shard is not read."""
    return _field_bytes(sum(_field_bytes(_entry_bytes(feature)) for feature in features))


def encode_example(features: Sequence[Feature], values: _Values) -> bytes:
    """Encode a ``tf.train.Example``; its values are read from the shard in the shard's order."""
    places = sorted({feature.value for feature in features if isinstance(feature.value, ValuePlace)})
    read = {place: values.read(place) for place in places}
    pieces = [b""]
    num_bytes = 0
    for feature in features:
        value = read[feature.value] if isinstance(feature.value, ValuePlace) else feature.value
        name = feature.name.encode()
        listed = _field_bytes(len(value))
        held = _field_bytes(listed)
        entry = _entry_bytes(feature)
        pieces += (
            _tag(1, entry), _tag(1, len(name)), name, _tag(2, held), _tag(feature.kind, listed),
            _tag(1, len(value)), value,
        )  # fmt: skip
        num_bytes += _field_bytes(entry)
    pieces[0] = _tag(1, num_bytes)
    return b"".join(pieces)


def _entry_bytes(feature: Feature) -> int:
    """Bytes of a feature's entry in the map, without its own tag and length."""
    size = feature.value.size if isinstance(feature.value, ValuePlace) else len(feature.value)
    return _field_bytes(len(feature.name.encode())) + _field_bytes(_field_bytes(_field_bytes(size)))


def _field_bytes(size: int) -> int:
    """Compute the encoded size of a field with ``size`` bytes of content: tag (one byte for numbers below 16), length,
    content.
    """
    return 1 + max(1, -(-size.bit_length() // 7)) + size


def _tag(number: int, size: int) -> bytes:
    """Tag and length of a field of bytes."""
    return bytes((number << 3 | 2,)) + varint(size)


def varint(value: int) -> bytes:
    """Encode a number with seven bits a byte, lowest bits first; a negative number as its 64 bits.

    >>> varint(300)
    b'\\xac\\x02'
    """
    value &= (1 << 64) - 1
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
