"""Time the same samples as tars and as TFRecord files: written, then read and decoded, in turns.

The writers are `bench.loaders.peers.dali_readers`, a loop in one process, and `prep pack tars` with its index; both
write the same shards into one directory. The readers are our loader and `fn.readers.webdataset` from the same tars, and
`fn.readers.tfrecord` from the TFRecord files, the last two in plain pipelines.
Before anything is timed, all three must give what Pillow and torchvision make of the shards, sample for sample. Ours
gives the samples in a shuffled order, and verifies the checksums of the bytes; the plain readers give them in the order
of the files and check nothing.
"""

import functools
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, NamedTuple

import bench.loaders.dali
from bench.compare.outputs import Comparison, Reference, compare_epoch, tolerance_of
from bench.compare.turn import delivered
from bench.engine.options import at_least, cache_option, option
from bench.engine.scenario import Measured, Rounds
from bench.loaders.peers.dali_readers import (
    ReaderFiles,
    open_loader,
    write_tfrecords,
    write_webdataset_indexes,
)
from bench.loaders.protocol import BenchLoader, LoaderOptions
from bench.loaders.recipe import ChosenRecipe, choose_recipe
from bench.scenarios.on_shards import FORMS, ShardsScenario
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


class Work(NamedTuple):
    """A writer, or a reader with its decoders."""

    work: Literal["write", "decode"]
    loader: str


class WrittenFiles(NamedTuple):
    """The files of all readers, and the directory of the writers."""

    place: Path
    shards: ShardSet
    files: Mapping[str, ReaderFiles]
    """The files that the two plain readers read."""
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
    max_bytes: int = 256 << 20
    """The largest size of a tar; there is one TFRecord file for each tar."""
    photo: str | None = option(help="Component that holds the photo.  [default: the only one]")
    mask: str | None = option(help="Component that holds the mask.  [default: the only one]")
    seed: int = option(7, type=at_least(0), help="Order of the shards and samples, for loaders that have one.")
    work: Path | None = cache_option("Where tars and TFRecord files are written, and read from.")

    @property
    def options(self) -> LoaderOptions:
        names = ("batch_size", "num_threads", "crop", "device", "seed")
        return LoaderOptions(photo=self._chosen.photo, mask=self._chosen.mask, **{n: getattr(self, n) for n in names})

    @functools.cached_property
    def _chosen(self) -> ChosenRecipe:
        return choose_recipe(self.given, recipe="segmentation", photo=self.photo, mask=self.mask)

    @property
    def given(self) -> ShardSet:
        assert self.shards is not None, "the command names them"
        return self.shards

    @property
    def num_bytes(self) -> int:
        """Bytes of the given shards."""
        return sum(entry.size for entry in self.given.entries())

    def prepare(self, folder: RunFolder, stack: ExitStack) -> WrittenFiles:
        """Write both formats, and compare the readers' outputs."""
        if find_manifest(self.given) is None:
            raise DataError(f"'{self.given.url}' is not indexed: dali-pipes prep index {self.given.url}")
        # Tars, TFRecord files, the files of a writer in its turn, and the loader's own copy, which by default is in
        # memory as well.
        needed = 4 * self.num_bytes
        check_room(folder.parent, needed, what="writing both formats", option="--cache", less="take fewer shards")
        self._write_records(records := folder.new())
        self._pack(packed := folder.new())
        made = _files(records, packed, indexes=folder.new(), place=folder.new())
        return made._replace(outputs=self._compare(made))

    def _write_records(self, place: Path) -> int:
        return write_tfrecords(self.given, place, options=self.options)

    def _pack(self, place: Path) -> int:
        store = LocalStore(place)
        job = PackJob(store=store, on_bad="keep", max_bytes=self.max_bytes)
        num_samples = pack(tars(self.given), job).num_samples
        index_shards(resolve_shards(place, endpoint=None))
        return num_samples

    def _compare(self, made: WrittenFiles) -> dict[str, Comparison]:
        outputs = {}
        with Reference.open(made.shards, options=self.options) as reference:
            for name in READER_NAMES:
                with _open(name, made, self.options) as loader:
                    outputs[name] = compare_epoch(
                        loader.epoch(),
                        reference,
                        loader=name,
                        tolerance=tolerance_of(decode=loader.decode, device=loader.device),
                        show=f"compare {name}",
                    )
        return outputs

    def subjects(self, made: WrittenFiles) -> Sequence[Work]:
        return [*(Work("write", name) for name in WRITER_NAMES), *(Work("decode", name) for name in READER_NAMES)]

    def name_of(self, subject: Work) -> str:
        return f"{subject.work} '{subject.loader}'"

    def measure(self, made: WrittenFiles, subject: Work, number: int) -> Measured:
        name = subject.loader
        if subject.work == "write":
            place = made.place / "written"
            place.mkdir()
            touch_memory(self.num_bytes)  # Note [cold memory]
            write = self._write_records if name == RECORDS else self._pack
            figures = _timed(lambda: write(place))
            shutil.rmtree(place)
            return figures
        with _open(name, made, self.options) as loader:

            def decode(num_epochs: int) -> int:
                return sum(len(batch["key"]) for _ in range(num_epochs) for batch in delivered(loader))

            decode(1)
            return _timed(lambda: decode(self.epochs))

    def record(self, made: WrittenFiles, subject: Work, rows: Sequence[Measured]) -> dict[str, Any]:
        record = super().record(made, subject, rows)
        compared = {} if subject.work == "write" else {"outputs": asdict(made.outputs[subject.loader])}
        return record | compared

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
    return {
        "figures": {"samples_per_s": num_samples / wall_s, "cpu_ms_per_sample": 1000 * cpu_s / num_samples},
        "num_samples": num_samples,
    }


def _files(records: Path, packed: Path, *, indexes: Path, place: Path) -> WrittenFiles:
    shards = resolve_shards(packed, endpoint=None)
    indexed = IndexedSet(shards)
    index_paths = write_webdataset_indexes(indexed, indexes)
    tar_paths = [Path(shards.store.locate(name)) for name in shards.names]
    tar_bytes = indexed.manifest.total_bytes
    record_paths, record_indexes = (sorted(records.glob(f"*.{ending}")) for ending in ("tfrecord", "idx"))
    # All other files beside the tars describe them.
    beside = _total_bytes(packed.iterdir()) - tar_bytes
    return WrittenFiles(
        place=place,
        shards=shards,
        files={
            WEBDATASET: ReaderFiles(kind="webdataset", paths=tar_paths, index_paths=index_paths),
            TFRECORD: ReaderFiles(kind="tfrecord", paths=record_paths, index_paths=record_indexes),
        },
        num_bytes={
            OURS: (tar_bytes, beside),
            WEBDATASET: (tar_bytes, _total_bytes(index_paths)),
            TFRECORD: (_total_bytes(record_paths), _total_bytes(record_indexes)),
        },
        outputs={},
    )


def _total_bytes(paths: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in paths)


def _open(name: str, made: WrittenFiles, options: LoaderOptions) -> AbstractContextManager[BenchLoader]:
    if name == OURS:
        return bench.loaders.dali.open_loader(made.shards, options=options)
    return open_loader(made.files[name], options=options)
