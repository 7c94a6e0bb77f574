"""Time the same samples as tars and as TFRecord files: written, then read and decoded, in turns.

The writers are a loop in one process, and `prep pack tars` with its index; both write the same shards into one
directory. The readers are our loader and `fn.readers.webdataset` from the same tars, and `fn.readers.tfrecord` from the
TFRecord files, the last two in plain pipelines. Before anything is timed, all three must give what Pillow and
torchvision make of the shards, sample for sample. Ours gives the samples in a shuffled order, and verifies the
checksums of the bytes; the plain readers give them in the order of the files and check nothing.
"""

import functools
import itertools
import shutil
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, NamedTuple

import google_crc32c

from bench.compare.outputs import Comparison, Reference, compare_epoch, tolerance_of
from bench.compare.turn import delivered
from bench.engine.options import FORMS, at_least, cache_option, option
from bench.engine.scenario import Measured, Rounds
from bench.loaders.encoded import components_of, samples_of, shard_urls
from bench.loaders.ours import open_dali
from bench.loaders.peers.dali_readers import (
    ENCODED,
    KEY,
    LABEL,
    ReaderFiles,
    open_loader,
    write_webdataset_indexes,
)
from bench.loaders.protocol import BenchLoader, LoaderOptions
from bench.loaders.recipe import choose_recipe
from bench.scenarios.on_shards import ShardsScenario
from bench.tools.folders import RunFolder, check_room
from bench.tools.processes import ProcessTree, touch_memory
from dali_pipes.commands.options import format_bytes
from dali_pipes.data_set.indexing import find_manifest
from dali_pipes.errors import DataError
from dali_pipes.store.local import LocalStore
from dali_pipes.store.shard_set import ShardSet
from dali_pipes.store.urls import resolve_shards
from prep.index import index_shards
from prep.inspect.indexed_set import IndexedSet
from prep.pack.pack import PackJob, pack
from prep.sources.tars import tars

OURS, WEBDATASET, TFRECORD = READER_NAMES = ("tar, dali_pipes", "tar, readers.webdataset", "tfrecord, readers.tfrecord")
RECORDS, PACK = WRITER_NAMES = ("tfrecord, one process", "pack tars and index")
MAX_BYTES = 256 << 20
"""The largest size of a tar; there is one TFRecord file for each tar that is read."""


class Work(NamedTuple):
    work: Literal["write", "decode"]
    loader: str


class WrittenFiles(NamedTuple):
    """The files of all readers, and the directory of the writers."""

    place: Path
    shards: ShardSet
    files: Mapping[str, ReaderFiles]
    num_bytes: Mapping[str, tuple[int, int]]
    """Bytes of data and of index, for each reader."""
    outputs: Mapping[str, Comparison]


@dataclass(frozen=True, kw_only=True)
class TfrecordScenario(ShardsScenario[WrittenFiles, Work, Measured]):
    """Write the same samples as tars and as TFRecord files, then read and decode them: ours, and DALI's own readers.

    Reads --shards, which must be indexed. Each reader's outputs are compared with Pillow's and torchvision's before
    anything is timed. Writes into a directory under --cache, which is deleted at the end, and the file that --json
    names.
    """

    kind = "tfrecord"
    title = "time writers and readers"
    ratio_to = OURS

    shards: ShardSet | None = option(required=True, help=f"What to write and read: {FORMS}")
    repeats: int = option(6, help="Turns of each writer and reader.")
    epochs: int = option(2, help="Epochs that are decoded in each turn.")
    photo: str | None = option(help="Component that holds the photo.  [default: the only one]")
    mask: str | None = option(help="Component that holds the mask.  [default: the only one]")
    seed: int = option(7, type=at_least(0), help="Order of the shards and samples, for loaders that have one.")
    work: Path | None = cache_option("Where tars and TFRecord files are written, and read from.")

    @functools.cached_property
    def options(self) -> LoaderOptions:
        chosen = choose_recipe(self.given, recipe="segmentation", photo=self.photo, mask=self.mask)
        names = ("batch_size", "num_threads", "crop", "device", "seed")
        return LoaderOptions(**chosen._asdict(), **{name: getattr(self, name) for name in names})

    @property
    def given(self) -> ShardSet:
        assert self.shards is not None, "the command names them"
        return self.shards

    @property
    def num_bytes(self) -> int:
        return sum(entry.size for entry in self.given.entries())

    def prepare(self, folder: RunFolder, stack: ExitStack) -> WrittenFiles:
        if find_manifest(self.given) is None:
            raise DataError(f"'{self.given.url}' is not indexed: dali-pipes prep index {self.given.url}")
        # Tars, TFRecord files, the files of a writer in its turn, and the loader's own copy, which by default is in
        # memory as well.
        needed = 4 * self.num_bytes
        check_room(folder.parent, needed, what="writing both formats", option="--cache", less="take fewer shards")
        write_tfrecords(self.given, records := folder.new(), options=self.options)
        self._pack(packed := folder.new())
        shards = resolve_shards(packed, endpoint=None)
        indexed = IndexedSet(shards)
        indexes = write_webdataset_indexes(indexed, folder.new())
        tar_bytes = indexed.manifest.total_bytes
        record_paths, record_indexes = (sorted(records.glob(f"*.{ending}")) for ending in ("tfrecord", "idx"))
        made = WrittenFiles(
            place=folder.new(),
            shards=shards,
            files={
                WEBDATASET: ReaderFiles(kind="webdataset", paths=shard_urls(shards), index_paths=indexes),
                TFRECORD: ReaderFiles(kind="tfrecord", paths=record_paths, index_paths=record_indexes),
            },
            num_bytes={
                OURS: (tar_bytes, _total_bytes(packed.glob(".dali-pipes/*"))),
                WEBDATASET: (tar_bytes, _total_bytes(indexes)),
                TFRECORD: (_total_bytes(record_paths), _total_bytes(record_indexes)),
            },
            outputs={},
        )
        return made._replace(outputs=self._compare(made))

    def _pack(self, place: Path) -> int:
        job = PackJob(store=LocalStore(place), on_bad="keep", max_bytes=MAX_BYTES)
        num_samples = pack(tars(self.given), job).num_samples
        index_shards(resolve_shards(place, endpoint=None))
        return num_samples

    def _compare(self, made: WrittenFiles) -> dict[str, Comparison]:
        outputs = {}
        with Reference.open(made.shards, options=self.options) as reference:
            for name in READER_NAMES:
                with self._open(name, made) as loader:
                    outputs[name] = compare_epoch(
                        loader.epoch(),
                        reference,
                        loader=name,
                        tolerance=tolerance_of(decode=loader.decode, device=loader.device),
                        show=f"compare {name}",
                    )
        return outputs

    def _open(self, name: str, made: WrittenFiles) -> AbstractContextManager[BenchLoader]:
        if name == OURS:
            return open_dali(made.shards, options=self.options)
        return open_loader(made.files[name], options=self.options)

    def subjects(self, made: WrittenFiles) -> Sequence[Work]:
        return [*(Work("write", name) for name in WRITER_NAMES), *(Work("decode", name) for name in READER_NAMES)]

    def name_of(self, subject: Work) -> str:
        return f"{subject.work} '{subject.loader}'"

    def measure(self, made: WrittenFiles, subject: Work, number: int) -> Measured:
        if subject.work == "write":
            place = made.place / "written"
            place.mkdir()
            touch_memory(self.num_bytes)  # Note [cold memory]
            if subject.loader == RECORDS:
                figures = _timed(lambda: write_tfrecords(self.given, place, options=self.options))
            else:
                figures = _timed(lambda: self._pack(place))
            shutil.rmtree(place)
            return figures
        with self._open(subject.loader, made) as loader:

            def decode(num_epochs: int) -> int:
                return sum(len(batch["key"]) for _ in range(num_epochs) for batch in delivered(loader))

            decode(1)
            return _timed(lambda: decode(self.epochs))

    def record(self, made: WrittenFiles, subject: Work, rows: Sequence[Measured]) -> dict[str, Any]:
        compared = {} if subject.work == "write" else {"outputs": asdict(made.outputs[subject.loader])}
        return super().record(made, subject, rows) | compared

    def data(self, made: WrittenFiles) -> list[dict[str, Any]]:
        num_samples = made.outputs[OURS].num_samples
        return [{"num_samples": num_samples, "num_shards": len(self.given.names), "shard_bytes": self.num_bytes}]

    def notes(self, made: WrittenFiles, rounds: Rounds[Work, Measured]) -> list[str]:
        sizes = (
            f"{name}: {format_bytes(data)} and {format_bytes(index)}" for name, (data, index) in made.num_bytes.items()
        )
        return [
            f"{made.outputs[OURS].num_samples} samples of each reader are those of the shards: keys, labels and masks "
            "equal, photos within tolerance.",
            f"Bytes on disk and of the index: {'; '.join(sizes)}.",
        ]


def _timed(work: Callable[[], int]) -> Measured:
    """Return the figures of work, which returns its number of samples."""
    tree = ProcessTree()
    cpu_start, started = tree.cpu_s(), perf_counter()
    num_samples = work()
    wall_s, cpu_s = perf_counter() - started, tree.cpu_s() - cpu_start
    figures = {"samples_per_s": num_samples / wall_s, "cpu_ms_per_sample": 1000 * cpu_s / num_samples}
    return {"figures": figures, "num_samples": num_samples}


def _total_bytes(paths: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in paths)


# A record in a TFRecord file holds a ``tf.train.Example`` for each sample (TensorFlow is not needed)::
#
#     length, 8 bytes   masked CRC32C of the length   data   masked CRC32C of the data     (little-endian)


def write_tfrecords(shards: ShardSet, directory: Path, *, options: LoaderOptions) -> int:
    """Write a file ``samples-000000.tfrecord`` and its index ``samples-000000.idx`` for each shard that has samples.

    Photos and masks keep their bytes. An index is that of DALI's ``tfrecord2idx``: a line for each record, first byte
    and size. Returns the number of samples.
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
                data = encode_example(features)
                length = struct.pack("<Q", len(data))
                sizes.append(stream.write(b"".join([length, masked_crc32c(length), data, masked_crc32c(data)])))
        starts = itertools.accumulate(sizes, initial=0)
        lines = (f"{start} {size}\n" for start, size in zip(starts, sizes, strict=False))
        path.with_suffix(".idx").write_text("".join(lines))
        num_samples += len(sizes)
    return num_samples


def masked_crc32c(data: bytes) -> bytes:
    """TFRecord's checksum: CRC32C, rotated and with a constant added, because the data may contain CRCs of their own.

    >>> masked_crc32c(b"123456789").hex()
    'e5b08ac7'
    """
    crc: int = google_crc32c.value(data)
    return struct.pack("<I", (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF)


def encode_example(features: Mapping[str, bytes | int]) -> bytes:
    """Encode a ``tf.train.Example`` whose features have one value each.

    Example {1: Features {1, a map: {1: name, 2: Feature {kind: list {1: value}}}}}; the kind of bytes is 1, of integers
    3.
    """
    entries = []
    for name, value in features.items():
        kind, content = (3, _varint(value)) if isinstance(value, int) else (1, value)
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
