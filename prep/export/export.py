"""Export shards as TFRecord files: a ``tf.train.Example`` per sample, and for each file an index for DALI's reader.

The shard indexes describe each record, so every sample is checked, and the sizes of all files are known, before
anything is written. Each file is one stream from a worker process; it appears complete or not at all. The same shards
give the same files, byte for byte, so an interrupted export is finished by running it again.

# Note [memory]: 8 bytes for each sample; for a worker see `prep.export.tasks`.

TensorFlow is not needed. `prep.sources.tfrecords` reads these files.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dali_pipes.formats.shard_index import ShardIndex
from dali_pipes.store.base import Store
from dali_pipes.store.shard_set import ShardSet
from prep.export.records import PHOTO_FEATURES, Records
from prep.export.tasks import FileTask, ShardPart
from prep.pack.plan import MAX_FILES
from prep.pack.target import FileWorkers, Target, check_limits
from prep.pack.tasks import Stored, StreamTarget, write_file
from prep.workers import Workers

# Starting processes takes half a second and more; one process writes about this many bytes in that time.
MIN_SHARED_BYTES = 256 << 20

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class _File:
    """A file to write: the samples ``[start, stop)``, counted over all shards."""

    name: str
    start: int
    stop: int
    num_bytes: int

    @property
    def num_samples(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, kw_only=True)
class ExportReport:
    """The result of an export."""

    url: str
    """The beginning of all names: ``ais://pets-tf/samples-``."""
    files: tuple[str, ...]
    """The TFRecord files, in order; the index of ``x.tfrecord`` is ``x.idx``."""
    num_written: int
    """Files that did not exist already with the same bytes."""
    num_samples: int
    num_bytes: int
    """Bytes of all files, without their indexes."""
    index_bytes: int
    features: tuple[str, ...]
    """The names of all features that occur, sorted."""
    elapsed_s: float


def export_tfrecords(
    shards: ShardSet,
    *,
    store: Store,
    prefix: str,
    photo: str | None = None,
    features: Mapping[str, str] | None = None,
    max_bytes: int | None = None,
    overwrite: bool = False,
    jobs: int | None = None,
    show_progress: bool = False,
) -> ExportReport:
    """Write ``PREFIX000000.tfrecord`` and then ``PREFIX000000.idx``, and so on; samples keep order and bytes.

    A record has ``image/encoded``, the photo; ``image/format`` (``JPEG``), ``image/height`` and ``image/width`` from
    its header; ``image/class/label``, if the sample has ``cls``, and ``image/class/text``, if the class has a name;
    ``image/filename``, the key; and the other components, as bytes.

    Args:
        shards: Indexed shards, in a bucket or a directory.
        store: The store of the files; a missing bucket is created.
        prefix: The beginning of the files' names.
        photo: The component that is the photo; ``"jpg;png"`` takes the first that a sample has. By default the first
            photo that is not a mask: see `is_mask_name`.
        features: Feature -> component that holds its bytes, if a sample has it. By default all components except the
            photo and ``cls``, under their own names: ``trimap.png``.
        max_bytes: The most bytes of a file; a larger record gets a separate file. By default there is one file for
            each shard.
        overwrite: Replace other files under these names, and delete files beyond the last one.
        jobs: Files that are written at a time, each by a worker process; by default the cores, at most 16.
        show_progress: Draw a bar.

    Raises:
        DataError: If the shards are not indexed or have changed since, a sample has no photo, a component is unknown,
            or a record would be larger than a protocol buffer can be. Then nothing was written.
        StoreError: If there are other files under the prefix and ``overwrite`` is false, or reading or writing fails.
            Complete files stay, and no file is partial; run the export again to finish it.
        ValueError: If an argument is out of range.
    """
    started = time.perf_counter()
    check_limits(prefix=prefix, max_bytes=max_bytes, jobs=jobs)
    if taken := next((name for name in features or {} if name in PHOTO_FEATURES), None):
        raise ValueError(f"feature '{taken}' already has a meaning in each record; give the component another name")
    store.check_name(prefix)
    source = Records(shards, photo=photo, features=features)
    sizes, names = source.look()
    # The number of samples up to the end of each shard.
    ends = np.cumsum(source.indexed.manifest.samples)
    planned = _plan(sizes, ends, prefix=prefix, max_bytes=max_bytes)
    target = Target(store, prefix, overwrite=overwrite, job="export", files="files", endings="tfrecord|idx")
    stale = target.stale(planned, companions=(_index_of(file.name) for file in planned))
    with Workers(jobs) as workers:
        file_workers = FileWorkers(workers=workers, min_shared_bytes=MIN_SHARED_BYTES, show_progress=show_progress)
        tasks = _Tasks(source, ends)
        missing = target.missing(planned, lambda file, stored: tasks.of(file, stored=stored), file_workers)
        target.create()
        # An old index must not stand beside a new file.
        target.delete(_index_of(file.name) for file in missing)
        to_write = (tasks.of(file, target=target.access) for file in missing)
        file_workers.run(write_file, to_write, missing, what="export")
    index_bytes = 0
    for file in planned:
        name, data = _index_of(file.name), record_index(sizes[file.start : file.stop].tolist())
        index_bytes += len(data)
        if not target.holds(name, data):
            store.write(name, data)
    target.delete(stale)
    return ExportReport(
        url=store.locate(prefix),
        files=tuple(file.name for file in planned),
        num_written=len(missing),
        num_samples=len(sizes),
        num_bytes=int(sizes.sum()),
        index_bytes=index_bytes,
        features=tuple(sorted(names)),
        elapsed_s=time.perf_counter() - started,
    )


def record_index(sizes: Sequence[int]) -> bytes:
    """Make the index of a TFRecord file like DALI's ``tfrecord2idx``: one line for each record, first byte and size.

    >>> record_index([100, 50])
    b'0 100\\n100 50\\n'
    """
    lines, offset = [], 0
    for size in sizes:
        lines.append(b"%d %d\n" % (offset, size))
        offset += size
    return b"".join(lines)


def _plan(sizes: Int64s, ends: Int64s, *, prefix: str, max_bytes: int | None) -> list[_File]:
    """Divide the samples among files."""
    if max_bytes is None:
        # A shard without samples gives no file.
        starts = sorted({0, *ends[ends < len(sizes)].tolist()})
    else:
        starts, filled = [0], 0
        for number, size in enumerate(sizes.tolist()):
            if filled and filled + size > max_bytes:
                starts.append(number)
                filled = 0
            filled += size
    if len(starts) > MAX_FILES:
        raise ValueError(f"{len(starts)} files, at most {MAX_FILES} can be named; use a larger --max-bytes")
    stops = [*starts[1:], len(sizes)]
    return [
        _File(name=f"{prefix}{number:06d}.tfrecord", start=start, stop=stop, num_bytes=int(sizes[start:stop].sum()))
        for number, (start, stop) in enumerate(zip(starts, stops, strict=True))
    ]


class _Tasks:
    """Makes the tasks that compare or write files."""

    def __init__(self, source: Records, ends: Int64s) -> None:
        self._source, self._ends = source, ends
        self._read: tuple[int, ShardIndex] | None = None

    def of(self, file: _File, *, target: StreamTarget | None = None, stored: Stored | None = None) -> FileTask:
        shards: list[ShardPart] = []
        number = file.start
        while number < file.stop:
            row = int(np.searchsorted(self._ends, number, side="right"))
            index = self._index(row)
            first = int(self._ends[row]) - index.num_samples
            stop = min(file.stop, int(self._ends[row]))
            records = [self._source.features(index, sample - first) for sample in range(number, stop)]
            shards.append(ShardPart(self._source.file(row), records))
            number = stop
        return FileTask(name=file.name, num_bytes=file.num_bytes, shards=shards, target=target, stored=stored)

    def _index(self, row: int) -> ShardIndex:
        # A file often begins in the shard in which the file before it ended.
        if self._read is None or self._read[0] != row:
            self._read = row, self._source.indexed.read(row)
        return self._read[1]


def _index_of(name: str) -> str:
    return f"{name.removesuffix('.tfrecord')}.idx"
