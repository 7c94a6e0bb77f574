"""Shards in, figures out: the same samples as tars and as TFRecord files, written, read and decoded, taking turns.

Written: `prep export tfrecord`, and `prep pack tars` with its index, of the same shards into one directory. Read and
decoded: by our loader from tars, by `fn.readers.webdataset` from the same tars and by `fn.readers.tfrecord` from the
TFRecord files, the last two in plain pipelines (`bench.loaders.dali_readers`). All three give what Pillow and
torchvision make of the shards, sample for sample, before anything is timed. Ours comes in a shuffled order, from bytes
whose checksums it has taken; the plain readers come in the order of the files and check nothing.
"""

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import bench.loaders.dali
from bench.environment import describe_environment
from bench.loaders import Loader, LoaderOptions
from bench.loaders.dali_readers import ReaderFiles, open_loader, open_reader, write_webdataset_indexes
from bench.loaders.workers import endpoint_of, shard_urls
from bench.outputs import Comparison, Reference, compare_epoch, tolerance_of
from bench.reports.report import Spread
from bench.reports.tables import format_rows
from bench.scenarios.warm import touch_memory
from bench.timing.processes import ProcessTree
from bench.timing.turn import delivered
from dali_pipes.cache.free_space import file_system
from dali_pipes.commands.options import format_bytes
from dali_pipes.data_set.indexing import listed_sizes
from dali_pipes.errors import DataError
from dali_pipes.progress import bar
from dali_pipes.store.local import LocalStore
from dali_pipes.store.urls import ShardSet, resolve_shards
from prep.export.export import export_tfrecords
from prep.index import index_shards
from prep.inspect.info import IndexedSet
from prep.pack.pack import pack
from prep.sources.tars import tars

if TYPE_CHECKING:
    from prep.export.export import ExportReport

__all__ = ["READER_NAMES", "TfrecordOptions", "format_tfrecord", "run_tfrecord"]

MIB = 1 << 20
READ_S = 1.0
"""Epochs are read until so much time has passed, where nothing is decoded: one takes a few hundredths."""
OURS, WEBDATASET, TFRECORD = READER_NAMES = ("tar, dali_pipes", "tar, readers.webdataset", "tfrecord, readers.tfrecord")
WRITER_NAMES = ("export tfrecord", "pack tars and index")


@dataclass(frozen=True, kw_only=True)
class TfrecordOptions:
    """How often, how long, and what loaders share."""

    loaders: LoaderOptions = field(default_factory=LoaderOptions)
    repeats: int = 6
    """Turns of each writer and reader; a multiple of the readers has each come first as often as the others."""
    epochs: int = 2
    """Timed of each loader in each turn, after one that is not."""
    max_bytes: int = 256 << 20
    """Of a tar; TFRecord files are one for each tar."""
    cache: Path = Path("/dev/shm")  # noqa: S108 (a directory of our own is made there)
    """Where tars and TFRecord files are written, and read from."""

    def __post_init__(self) -> None:
        for name in ("repeats", "epochs", "max_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not self.cache.is_dir():
            raise ValueError(f"--cache '{self.cache}': no such directory; name one with room for all samples, twice")


class _Turn(NamedTuple):
    num_samples: int
    wall_s: float
    cpu_s: float


class _Made(NamedTuple):
    """What is read."""

    shards: ShardSet
    files: dict[str, ReaderFiles]
    """Of the two plain readers."""
    num_bytes: dict[str, tuple[int, int]]
    """Of each reader: data, and index."""


def run_tfrecord(options: TfrecordOptions, shards: ShardSet) -> dict[str, Any]:
    """Write both formats, compare what the readers make of them, then time them.

    Args:
        options: See there.
        shards: Indexed, in a bucket or a directory.

    Returns:
        ``{"records": [one a reader], "writers": [one a format], ...}``, for JSON.

    Raises:
        DataError: If the shards are not indexed, or lack photo, mask or label somewhere.
        OutputError: If a reader does not yield what the shards hold; nothing is timed then.
        ValueError: If there is too little room.
    """
    tree = ProcessTree()
    total = sum(listed_sizes(shards))
    _check_room(options, total)
    with tempfile.TemporaryDirectory(prefix="dali-pipes-bench-tfrecord-", dir=options.cache) as folder:
        wrote, made = _write(Path(folder), shards, options, tree)
        outputs = _compare(made, options.loaders)
        read: dict[str, list[_Turn]] = {name: [] for name in READER_NAMES}
        decoded: dict[str, list[_Turn]] = {name: [] for name in READER_NAMES}
        with bar(what="time readers", total=2 * options.repeats * len(READER_NAMES), unit="turn") as drawn:
            for turn in range(options.repeats):
                # Each is the first as often as the others: what came before it is not always the same.
                first = turn % len(READER_NAMES)
                names = (*READER_NAMES[first:], *READER_NAMES[:first])
                for name in names:
                    read[name].append(_read_turn(name, made, options, tree))
                    drawn.update(1)
                for name in names:
                    decoded[name].append(_decode_turn(name, made, options, tree))
                    drawn.update(1)
        num_samples = decoded[OURS][0].num_samples // options.epochs
        return {
            "records": [
                _record(name, read[name], decoded[name], outputs[name], made.num_bytes[name]) for name in READER_NAMES
            ],
            "writers": [_writer(name, wrote[name], total) for name in WRITER_NAMES],
            "num_samples": num_samples,
            "num_shards": len(shards.names),
            "shard_bytes": total,
            "options": {
                **asdict(options.loaders),
                "repeats": options.repeats,
                "epochs": options.epochs,
                "read_s": READ_S,
                "max_bytes": options.max_bytes,
            },
            "cache": file_system(options.cache),
            "source": "local files" if endpoint_of(shards) is None else "AIStore",
            "environment": describe_environment(),
        }


def _check_room(options: TfrecordOptions, total: int) -> None:
    # Tars and TFRecord files here, and the loader's own copy, which by default is in memory as well.
    free = shutil.disk_usage(options.cache).free
    if 3 * total > free:
        raise ValueError(
            f"--cache '{options.cache}' has {format_bytes(free)} free, some {format_bytes(3 * total)} are needed; name "
            "another directory, or fewer shards"
        )


# Writing


def _write(
    folder: Path, shards: ShardSet, options: TfrecordOptions, tree: ProcessTree
) -> tuple[dict[str, list[_Turn]], _Made]:
    """Each format ``repeats`` times, into an empty directory; the last ones stay."""
    turns: dict[str, list[_Turn]] = {name: [] for name in WRITER_NAMES}
    places = {name: folder / word for name, word in zip(WRITER_NAMES, ("tfrecord", "tar"), strict=True)}
    total = sum(listed_sizes(shards))
    with bar(what="write", total=options.repeats * len(WRITER_NAMES), unit="turn") as drawn:
        for _ in range(options.repeats):
            for name, place in places.items():
                shutil.rmtree(place, ignore_errors=True)
                place.mkdir()
                touch_memory(total)  # Note [cold memory]
                cpu_start, start = tree.cpu_s(), perf_counter()
                if name == WRITER_NAMES[0]:
                    exported = export_tfrecords(
                        shards, store=LocalStore(place), prefix="samples-", photo=options.loaders.photo
                    )
                    num_samples = exported.num_samples
                else:
                    num_samples = pack(
                        tars(shards), store=LocalStore(place), on_bad="keep", max_bytes=options.max_bytes
                    ).num_samples
                    index_shards(resolve_shards(place, endpoint=None))
                turns[name].append(_Turn(num_samples, perf_counter() - start, tree.cpu_s() - cpu_start))
                drawn.update(1)
    _check_features(exported, options.loaders, shards)
    return turns, _made(folder, places, exported)


def _check_features(exported: "ExportReport", options: LoaderOptions, shards: ShardSet) -> None:
    for feature, what in ((options.mask, f"mask '{options.mask}'"), ("image/class/label", "label 'cls'")):
        if feature not in exported.features:
            raise DataError(
                f"'{shards.url}': no sample has the {what}, and no record a feature '{feature}' "
                f"(found: {', '.join(exported.features)})"
            )


def _made(folder: Path, places: dict[str, Path], exported: "ExportReport") -> _Made:
    tfrecords, packed = (places[name] for name in WRITER_NAMES)
    shards = resolve_shards(packed, endpoint=None)
    indexed = IndexedSet(shards)
    (folder / "index").mkdir()
    indexes = write_webdataset_indexes(indexed, folder / "index")
    paths = [tfrecords / name for name in exported.files]
    tar_bytes = indexed.manifest.total_bytes
    # All that lies beside the tars describes them.
    beside = sum(path.stat().st_size for path in packed.iterdir()) - tar_bytes
    return _Made(
        shards=shards,
        files={
            WEBDATASET: ReaderFiles(
                kind="webdataset",
                paths=[Path(shards.store.locate(name)) for name in shards.names],
                index_paths=indexes,
            ),
            TFRECORD: ReaderFiles(
                kind="tfrecord", paths=paths, index_paths=[path.with_suffix(".idx") for path in paths]
            ),
        },
        num_bytes={
            OURS: (tar_bytes, beside),
            WEBDATASET: (tar_bytes, sum(path.stat().st_size for path in indexes)),
            TFRECORD: (exported.num_bytes, exported.index_bytes),
        },
    )


# Reading
#
# Note [mapped]: without decoding, `fn.readers.webdataset` as it comes does no more than walk its index: samples are
# views of the mapped tar. `fn.readers.tfrecord` parses and copies each record, and ours reads with `pread`, since a
# mapped hole of its image would be a SIGBUS. So the column compares what a pipeline pays before its decoders, no more.


def _open(name: str, made: _Made, options: LoaderOptions) -> AbstractContextManager[Loader]:
    if name == OURS:
        return bench.loaders.dali.open_loader(made.shards, options=options)
    return open_loader(made.files[name], options=options)


@contextlib.contextmanager
def _open_ours_reading(made: _Made, options: LoaderOptions) -> Iterator[Callable[[], int]]:
    """Our loader up to the seam: order, segments, reader, labels; the graph takes the bytes and decodes nothing."""
    import dali_pipes as dp

    def graph(components: Any, random: Any) -> dict[str, Any]:
        photo, mask = components[options.photo], components[options.mask]
        return {"photo_bytes": photo.shape(), "mask_bytes": mask.shape(), "label": components.label}

    with dp.loader(
        shard_urls(made.shards),
        graph,
        batch_size=options.batch_size,
        seed=options.seed,
        last_batch_policy="PARTIAL",
        device="cpu",
        num_threads=options.num_threads,
    ) as loader:

        def epoch() -> int:
            num_samples = sum(len(batch["label"]) for (batch,) in loader)
            loader.reset()
            return num_samples

        yield epoch


def _compare(made: _Made, options: LoaderOptions) -> dict[str, Comparison]:
    outputs = {}
    with Reference.open(made.shards, options=options) as reference:
        for name in READER_NAMES:
            with _open(name, made, options) as loader:
                tolerance = tolerance_of(decode=loader.decode, device=loader.device)
                show = f"compare {name}"
                outputs[name] = compare_epoch(loader.epoch(), reference, loader=name, tolerance=tolerance, show=show)
    return outputs


def _read_turn(name: str, made: _Made, options: TfrecordOptions, tree: ProcessTree) -> _Turn:
    opened = (
        _open_ours_reading(made, options.loaders)
        if name == OURS
        else open_reader(made.files[name], options=options.loaders)
    )
    with opened as epoch:
        epoch()  # staged, or in the page cache
        num_samples = 0
        cpu_start, start = tree.cpu_s(), perf_counter()
        while perf_counter() - start < READ_S:
            num_samples += epoch()
        return _Turn(num_samples, perf_counter() - start, tree.cpu_s() - cpu_start)


def _decode_turn(name: str, made: _Made, options: TfrecordOptions, tree: ProcessTree) -> _Turn:
    with _open(name, made, options.loaders) as loader:
        for _ in delivered(loader):
            pass
        num_samples = 0
        cpu_start, start = tree.cpu_s(), perf_counter()
        for _ in range(options.epochs):
            num_samples += sum(len(batch["key"]) for batch in delivered(loader))
        return _Turn(num_samples, perf_counter() - start, tree.cpu_s() - cpu_start)


# Figures


def _record(
    name: str, read: Sequence[_Turn], decoded: Sequence[_Turn], outputs: Comparison, num_bytes: tuple[int, int]
) -> dict[str, Any]:
    figures = {
        "read_samples_per_s": [turn.num_samples / turn.wall_s for turn in read],
        "read_cpu_ms_per_sample": [1000 * turn.cpu_s / turn.num_samples for turn in read],
        "samples_per_s": [turn.num_samples / turn.wall_s for turn in decoded],
        "cpu_ms_per_sample": [1000 * turn.cpu_s / turn.num_samples for turn in decoded],
    }
    return {
        "reader": name,
        "data_bytes": num_bytes[0],
        "index_bytes": num_bytes[1],
        **_spreads(figures),
        "outputs": outputs.to_json(),
        "repeats": {"read": [turn._asdict() for turn in read], "decoded": [turn._asdict() for turn in decoded]},
    }


def _writer(name: str, turns: Sequence[_Turn], total: int) -> dict[str, Any]:
    figures = {
        "wall_s": [turn.wall_s for turn in turns],
        "samples_per_s": [turn.num_samples / turn.wall_s for turn in turns],
        "mib_per_s": [total / MIB / turn.wall_s for turn in turns],
        "cpu_ms_per_sample": [1000 * turn.cpu_s / turn.num_samples for turn in turns],
    }
    return {"writer": name, **_spreads(figures), "repeats": [turn._asdict() for turn in turns]}


def _spreads(figures: dict[str, list[float]]) -> dict[str, Any]:
    spreads = {name: Spread.of(values) for name, values in figures.items()}
    return {
        **{name: spread.median for name, spread in spreads.items()},
        "spread": {name: [spread.min, spread.max] for name, spread in spreads.items()},
    }


def format_tfrecord(report: dict[str, Any]) -> str:
    """A table of the readers, one of the writers."""
    readers = [["reader", "on disk", "index", "read samples/s", "decoded samples/s", "CPU-ms/sample"]]
    readers += [
        [
            record["reader"],
            format_bytes(record["data_bytes"]),
            format_bytes(record["index_bytes"]),
            _spread_text(record, "read_samples_per_s", digits=0),
            _spread_text(record, "samples_per_s", digits=0),
            _spread_text(record, "cpu_ms_per_sample", digits=2),
        ]
        for record in report["records"]
    ]
    writers = [["writer", "s", "samples/s", "MiB/s", "CPU-ms/sample"]]
    writers += [
        [
            record["writer"],
            _spread_text(record, "wall_s", digits=2),
            _spread_text(record, "samples_per_s", digits=0),
            _spread_text(record, "mib_per_s", digits=0),
            _spread_text(record, "cpu_ms_per_sample", digits=2),
        ]
        for record in report["writers"]
    ]
    notes = [
        f"{report['num_samples']} samples of each reader are those of the shards: keys, labels and masks equal, photos "
        "within tolerance.",
        # Note [mapped] in words.
        "Reading alone, readers.webdataset hands out mapped files and touches no byte of them; the others copy all.",
    ]
    return "\n".join([format_rows(readers), "", format_rows(writers), "", *notes])


def _spread_text(record: dict[str, Any], figure: str, *, digits: int) -> str:
    low, high = record["spread"][figure]
    return f"{record[figure]:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"
