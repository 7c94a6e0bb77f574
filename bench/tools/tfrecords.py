"""Write the samples of shards as TFRecord files: a ``tf.train.Example`` per sample, and an index for DALI's reader.

A loop in one process, for `bench tfrecord`. TensorFlow is not needed. A record in a file is::

    length, 8 bytes   masked CRC32C of the length   data   masked CRC32C of the data     (little-endian)
"""

import itertools
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import google_crc32c

from bench.loaders.encoded import components_of, samples_of
from bench.loaders.protocol import LoaderOptions
from dali_pipes.store.shard_set import ShardSet

ENCODED, KEY, LABEL = "image/encoded", "image/filename", "image/class/label"
"""The features of photo, key and label. A mask has the name of its component."""

_LENGTH = struct.Struct("<Q")
_CRC = struct.Struct("<I")
# The number of the field of a Feature that holds its list: bytes or integers.
_BYTES, _INTEGERS = 1, 3


class RecordFiles(NamedTuple):
    """The files that were written, in order, and the number of their records."""

    paths: list[Path]
    index_paths: list[Path]
    num_samples: int


def write_tfrecords(shards: ShardSet, directory: Path, *, options: LoaderOptions) -> RecordFiles:
    """Write a file ``samples-000000.tfrecord`` and its index ``samples-000000.idx`` for each shard that has samples.

    Args:
        shards: The shards; photos and masks keep their bytes.
        directory: An empty directory.
        options: For the names of photo and mask.

    Raises:
        DataError: If a sample lacks its photo, mask or label, or a shard is not a complete tar.
    """
    paths: list[Path] = []
    num_samples = 0
    for _, samples in itertools.groupby(samples_of(shards), key=lambda found: found[0]):
        path = directory / f"samples-{len(paths):06d}.tfrecord"
        paths.append(path)
        sizes = []
        with path.open("wb") as stream:
            for where, sample in samples:
                photo, mask, label, key = components_of(sample, options, shard=where)
                features: dict[str, bytes | int] = {ENCODED: photo, KEY: key.encode(), LABEL: label}
                if options.mask is not None:
                    features[options.mask] = mask
                sizes.append(stream.write(framed(encode_example(features))))
        path.with_suffix(".idx").write_text(record_index(sizes))
        num_samples += len(sizes)
    return RecordFiles(paths, [path.with_suffix(".idx") for path in paths], num_samples)


def record_index(sizes: Sequence[int]) -> str:
    """Make the index of a TFRecord file like DALI's ``tfrecord2idx``: one line for each record, first byte and size.

    >>> record_index([100, 50])
    '0 100\\n100 50\\n'
    """
    starts = itertools.accumulate(sizes, initial=0)
    return "".join(f"{start} {size}\n" for start, size in zip(starts, sizes, strict=False))


def masked_crc32c(data: bytes) -> int:
    """TFRecord's checksum: CRC32C, rotated and with a constant added, because the data may contain CRCs of their own.

    >>> hex(masked_crc32c(b"123456789"))
    '0xc78ab0e5'
    """
    crc: int = google_crc32c.value(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def framed(data: bytes) -> bytes:
    """Return a record as a file holds it: length, checksum of the length, data, checksum of the data."""
    length = _LENGTH.pack(len(data))
    return length + _CRC.pack(masked_crc32c(length)) + data + _CRC.pack(masked_crc32c(data))


def encode_example(features: Mapping[str, bytes | int]) -> bytes:
    """Encode a ``tf.train.Example`` whose features have one value each.

    Example {1: Features {1, a map: {1: name, 2: Feature {kind: list {1: value}}}}}.
    """
    entries = []
    for name, value in features.items():
        kind, content = (_INTEGERS, _varint(value)) if isinstance(value, int) else (_BYTES, value)
        entries.append(_field(1, _field(1, name.encode()) + _field(2, _field(kind, _field(1, content)))))
    return _field(1, b"".join(entries))


def _field(number: int, content: bytes) -> bytes:
    """A field of bytes: its tag, the length, the bytes."""
    return bytes([number << 3 | 2]) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    """Encode a number with seven bits a byte, lowest bits first; a negative number as its 64 bits.

    >>> _varint(300)
    b'\\xac\\x02'
    """
    value &= (1 << 64) - 1
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])
