"""Write TFRecord files and indexes, and load them with DALI's own readers, like a script without `dali_pipes`.

One pipeline has reader, decoders and crop (`plain_dali`). Samples come in the order of the files in each epoch: nothing
is shuffled.

The registry does not list this loader: its files must be made first, see `bench.scenarios.tfrecord`.
"""

import contextlib
import itertools
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import google_crc32c

from bench.loaders.encoded import components_of, samples_of
from bench.loaders.peers.plain_dali import (
    PlainEpochs,
    decoded_outputs,
    padded_keys,
    padded_text,
    plain_pipeline,
)
from bench.loaders.protocol import BenchLoader, LoaderOptions
from dali_pipes.errors import DataError
from dali_pipes.formats.names import split_key
from dali_pipes.store.shard_set import ShardSet

if TYPE_CHECKING:
    from dali_pipes.formats.shard_index import ShardIndex
    from prep.inspect.indexed_set import IndexedSet


# A record in a TFRecord file, which holds a ``tf.train.Example`` for each sample (TensorFlow is not needed)::
#
#     length, 8 bytes   masked CRC32C of the length   data   masked CRC32C of the data     (little-endian)
ENCODED, KEY, LABEL = "image/encoded", "image/filename", "image/class/label"
"""The features of photo, key and label. A mask has the name of its component."""

_LENGTH = struct.Struct("<Q")
_CRC = struct.Struct("<I")
# The number of the field of a Feature that holds its list: bytes or integers.
_BYTES, _INTEGERS = 1, 3


def write_tfrecords(shards: ShardSet, directory: Path, *, options: LoaderOptions) -> int:
    """Write a file ``samples-000000.tfrecord`` and its index ``samples-000000.idx`` for each shard that has samples.

    Photos and masks keep their bytes.

    Returns:
        The number of samples.
    """
    num_samples = 0
    for row, (_, samples) in enumerate(itertools.groupby(samples_of(shards), key=lambda found: found[0])):
        path = directory / f"samples-{row:06d}.tfrecord"
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
    return num_samples


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


READER = "reader"


@dataclass(frozen=True, kw_only=True)
class ReaderFiles:
    """The files that one of DALI's readers reads."""

    kind: str
    """``webdataset`` or ``tfrecord``."""
    paths: Sequence[Path | str]
    """Paths, or URLs if the reader takes them."""
    index_paths: Sequence[Path]
    """One for each of ``paths``."""
    prefetch_queue_depth: int = 1
    """Batches that the reader keeps ready; DALI's default."""


def webdataset_index(index: "ShardIndex") -> str:
    """Return a shard's index of all its components for `fn.readers.webdataset`, version 1.2."""
    lines = []
    for row, key in enumerate(index.keys):
        if key.split() != [key]:
            raise DataError(f"shard '{index.shard}', key '{key}': DALI's index cannot hold a name with white space")
        places = [(c, int(index.offsets[c][row]), int(index.sizes[c][row])) for c in index.offsets]
        lines.append(" ".join(f"{c} {offset} {size} {key}.{c}" for c, offset, size in places if offset >= 0))
    return "\n".join([f"v1.2 {len(lines)}", *lines, ""])


def write_webdataset_indexes(indexed: "IndexedSet", directory: Path) -> list[Path]:
    """Write the `webdataset_index` of each shard to a file in ``directory``."""
    paths = []
    for row, index in indexed.each():
        paths.append(directory / f"{row:06d}.idx")
        paths[-1].write_text(webdataset_index(index))
    return paths


def open_loader(files: ReaderFiles, *, options: LoaderOptions) -> contextlib.AbstractContextManager[BenchLoader]:
    """Read, decode and crop; each sample comes once an epoch."""
    from nvidia.dali import fn

    device = options.delivery_device
    pipeline = plain_pipeline(device, options)
    with pipeline:
        photo, mask, label, key = reader_nodes(files, options)
        decoded = decoded_outputs(photo, mask, options, device=device)
        # The rows of a tensor must have one length.
        pipeline.set_outputs(*decoded, fn.pad(label), fn.pad(key))
    return contextlib.closing(
        PlainEpochs(pipeline, options=options, labels=_labels_of(files), keys=keys_of(files), reader_name=READER)
    )


def reader_nodes(files: ReaderFiles, options: LoaderOptions, **arguments: Any) -> tuple[Any, Any, Any, Any]:
    """Return the nodes of photo, mask (``None`` if the recipe takes none), label and key.

    ``arguments`` are further ones of the reader.
    """
    from nvidia.dali import fn, tfrecord

    paths = [str(path) for path in files.paths]
    index_paths = [str(path) for path in files.index_paths]
    masks = [] if options.mask is None else [options.mask]
    arguments = {"pad_last_batch": True, "name": READER, **arguments}
    if files.kind == "webdataset":
        photo, *mask, label = fn.readers.webdataset(
            paths=paths,
            index_paths=index_paths,
            ext=[options.photo, *masks, "cls"],
            missing_component_behavior="error",
            prefetch_queue_depth=files.prefetch_queue_depth,
            **arguments,
        )
        return photo, next(iter(mask), None), label, fn.get_property(photo, key="source_info")
    of_bytes = tfrecord.FixedLenFeature((), tfrecord.string, "")
    label_feature = tfrecord.FixedLenFeature([1], tfrecord.int64, -1)
    read = fn.readers.tfrecord(
        path=paths,
        index_path=index_paths,
        features={**dict.fromkeys((ENCODED, *masks, KEY), of_bytes), LABEL: label_feature},
        **arguments,
    )
    return read[ENCODED], next((read[name] for name in masks), None), read[LABEL], read[KEY]


def _labels_of(files: ReaderFiles) -> Callable[[Any], Any]:
    """Return the function that converts the reader's padded labels to int64 [B]."""
    import torch

    if files.kind == "tfrecord":
        return lambda labels: labels.reshape(-1)
    return lambda digits: torch.tensor([int(padded_text(row)) for row in digits.numpy()])


def keys_of(files: ReaderFiles) -> Callable[[Any], list[str]]:
    """Return the function that converts padded names, keys or ``PATH:OFFSET:KEY.COMPONENT``, to keys."""
    if files.kind == "tfrecord":
        return padded_keys
    starts = tuple(f"{path}:" for path in files.paths)

    def key_of(text: str) -> str:
        start = next(start for start in starts if text.startswith(start))
        names = split_key(text[len(start) :].partition(":")[2])
        assert names is not None, "our index names members of samples"
        return names[0]

    return lambda rows: [key_of(text) for text in padded_keys(rows)]
