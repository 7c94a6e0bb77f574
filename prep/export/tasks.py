"""Make the bytes of a TFRecord file, in a worker.

A module of its own, because the imports of `prep.export.export` (numpy among them) would cost every worker a tenth of a
second. Memory is 1 MiB, one record, and the keys and positions of the file's samples. A record is held whole, because
its checksum comes after its data and its length before.
"""

import os
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from dali_pipes.errors import DataError, StoreError
from dali_pipes.store.cluster.transfer import RemoteFile
from prep.pack.tasks import StreamTask
from prep.sources.tfrecord_files import masked_crc32c
from prep.tar.writer import CHUNK_BYTES

__all__ = [
    "BYTES",
    "FRAME_BYTES",
    "INTEGERS",
    "Feature",
    "FileTask",
    "ShardPart",
    "ValuePlace",
    "example_bytes",
    "varint",
]

# The field of a Feature that holds its list: bytes or integers.
BYTES, INTEGERS = 1, 3

_LENGTH = struct.Struct("<Q")
_CRC = struct.Struct("<I")
# Length, and checksums of length and data.
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
    """Bytes or a varint, as in the list, or where to read it."""


class ShardPart(NamedTuple):
    """A shard, and those of its samples that go into one file."""

    file: Path | RemoteFile
    records: Sequence[Sequence[Feature]]


@dataclass(frozen=True, kw_only=True)
class FileTask(StreamTask):
    """A file with its shards."""

    shards: Sequence[ShardPart]

    def stream(self, on_sample: Callable[[], None]) -> Iterator[memoryview]:
        """The file's bytes, in pieces of some 1 MiB, or of a record that is larger."""
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
    """The bytes of a shard's components; a context manager."""

    def __init__(self, file: Path | RemoteFile) -> None:
        self._remote = file if isinstance(file, RemoteFile) else None
        self._where = file.url if isinstance(file, RemoteFile) else str(file)
        self._descriptor = -1
        if not isinstance(file, RemoteFile):
            try:
                self._descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as exc:
                raise StoreError(f"cannot read '{file}': {exc.strerror or exc}") from exc

    def __enter__(self) -> "_Values":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Can be called twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        if self._remote is not None:
            self._remote.close()

    def read(self, place: ValuePlace) -> bytes:
        buffer = bytearray(place.size)
        view, filled = memoryview(buffer), 0
        while filled < place.size:
            num = self._read_into(view[filled:], place.offset + filled)
            if not num:
                raise DataError(
                    f"'{self._where}' ends at byte {place.offset + filled}: it was cut while it was exported; index it "
                    "anew: dali-pipes prep index URL"
                )
            filled += num
        return bytes(buffer)

    def _read_into(self, view: memoryview, offset: int) -> int:
        if self._remote is not None:
            return self._remote.read_into(view, offset=offset)
        try:
            return os.preadv(self._descriptor, [view], offset)
        except OSError as exc:
            raise StoreError(f"cannot read '{self._where}': {exc.strerror or exc}") from exc


# Example {1: Features {1, a map: {1: name, 2: Feature {kind: list {1: value}}}}}, as in `prep.sources.tfrecord_files`.


def example_bytes(features: Sequence[Feature]) -> int:
    """Bytes of `encode_example`, without reading any."""
    return _field_bytes(sum(_field_bytes(_entry_bytes(feature)) for feature in features))


def encode_example(features: Sequence[Feature], values: _Values) -> bytes:
    """A ``tf.train.Example``; its values are read from the shard in the shard's order."""
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
    """Bytes of a field that holds ``size`` bytes: tag (one byte for numbers below 16), length and content."""
    return 1 + max(1, -(-size.bit_length() // 7)) + size


def _tag(number: int, size: int) -> bytes:
    """Tag and length of a field of bytes."""
    return bytes((number << 3 | 2,)) + varint(size)


def varint(value: int) -> bytes:
    """A number, seven bits a byte, lowest first; a negative one as its 64 bits.

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
