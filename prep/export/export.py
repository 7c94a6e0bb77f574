"""Shards to TFRecord files: a ``tf.train.Example`` a sample, and the index of each file that DALI's reader wants.

What a record is made of is in the shard indexes, its bytes alone are in the shards: sizes of all files are known, and
every sample has been looked at, before anything is written. Each file is then one stream, made by a process of its own,
that appears whole or not at all. The same shards give the same files, byte for byte, so an export that was interrupted
is finished by running it again.

# Note [memory]: 8 bytes a sample; what a process takes is in `prep.export.tasks`.

Nothing of TensorFlow is needed; `prep.sources.tfrecords` reads what is written here.
"""

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dali_pipes.errors import StoreError, shown
from dali_pipes.formats.shard_index import ShardIndex
from dali_pipes.progress import bar
from dali_pipes.store.ais import AisStore
from dali_pipes.store.base import ObjectEntry, Store
from dali_pipes.store.checksums import DEFAULT_CHECKSUM_TYPE
from dali_pipes.store.local import LocalStore
from dali_pipes.store.transfer import BucketAccess, RemoteFile
from dali_pipes.store.urls import ShardSet, check_object_name
from prep.export.records import ENCODED, KEY, LABEL, PHOTO_FEATURES, Records
from prep.export.tasks import FileTask, ShardPart, is_stored, write_file
from prep.pack.tasks import StreamTarget, digest_of
from prep.workers import Report, Workers, default_jobs

__all__ = ["ENCODED", "KEY", "LABEL", "PHOTO_FEATURES", "ExportReport", "export_tfrecords", "record_index"]

# Below this, starting processes takes longer than writing: half a second and more, in which one writes as much.
MIN_SHARED_BYTES = 256 << 20
# Files are numbered by six digits.
MAX_FILES = 1_000_000

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class _File:
    """A file to be: the samples ``[start, stop)``, counted over all shards."""

    name: str
    start: int
    stop: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class ExportReport:
    """What an export did."""

    url: str
    """``ais://pets-tf/samples-``: what all the names start with."""
    files: tuple[str, ...]
    """The TFRecord files, in order; the index of ``x.tfrecord`` is ``x.idx``."""
    num_written: int
    """Those that were not there already, byte for byte."""
    num_samples: int
    num_bytes: int
    """Of all the files, their indexes not counted."""
    index_bytes: int
    features: tuple[str, ...]
    """The names that features have, in at least one record, sorted."""
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
    """Write ``PREFIX000000.tfrecord`` and, after it, ``PREFIX000000.idx``, ...; samples keep order and bytes.

    A record has ``image/encoded``, the photo; ``image/format`` (``JPEG``), ``image/height`` and ``image/width`` as its
    header has them; ``image/class/label``, where the sample has ``cls``, and ``image/class/text``, where the class has
    a name; ``image/filename``, the key; and the other components, as bytes.

    Args:
        shards: Indexed, in a bucket or a directory.
        store: Where to; a bucket that is not there is made.
        prefix: What the names start with.
        photo: The component that is the photo; ``"jpg;png"`` takes the first that a sample has. By default the first
            that is no mask, by the names of the photos in the data set.
        features: Feature -> component whose bytes it is, of a sample that has it. By default each component but the
            photo and ``cls`` under its own name, ``trimap.png``.
        max_bytes: Bytes a file at most; a record that is larger gets a file of its own. By default there is a file for
            each shard.
        overwrite: Replace other files under these names, and delete those beyond the last one.
        jobs: Files in flight, each written by a process; by default the cores, at most 16.
        show_progress: Draw a bar.

    Raises:
        DataError: If the shards are not indexed or have changed since, a sample has no photo, a component is not known,
            or a record would be larger than a protocol buffer can be. Nothing has been written then.
        StoreError: If there are other files under the prefix and ``overwrite`` is false, or reading or writing fails.
            Files that were complete by then stay, none is half there; running again finishes the export.
        ValueError: If an argument cannot be.
    """
    started = time.perf_counter()
    jobs = default_jobs() if jobs is None else jobs
    _check_arguments(prefix=prefix, features=features, max_bytes=max_bytes, jobs=jobs)
    if isinstance(store, AisStore):
        check_object_name(prefix, url=store.locate(prefix))
    source = Records(shards, photo=photo, features=features)
    sizes, names = source.look()
    # One past the last sample of each shard.
    ends = np.cumsum(source.indexed.manifest.samples)
    planned = _plan(sizes, ends, prefix=prefix, max_bytes=max_bytes)
    target = _Target(store, prefix, overwrite=overwrite)
    with Workers(jobs) as workers:
        tasks = _Tasks(source, target, workers, ends, show_progress=show_progress)
        stale = target.check(planned)
        missing = tasks.missing(planned)
        if isinstance(store, AisStore) and not store.exists():
            store.create()
        tasks.write(missing)
    index_bytes = target.finish(planned, sizes, stale)
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
    """The index of a TFRecord file, as DALI's ``tfrecord2idx`` makes it: a line a record, its first byte and its bytes.

    >>> record_index([100, 50])
    b'0 100\\n100 50\\n'
    """
    lines, offset = [], 0
    for size in sizes:
        lines.append(b"%d %d\n" % (offset, size))
        offset += size
    return b"".join(lines)


def _check_arguments(*, prefix: str, features: Mapping[str, str] | None, max_bytes: int | None, jobs: int) -> None:
    if not prefix or prefix.endswith("/") or prefix[-1].isdigit():
        raise ValueError(
            f"prefix must end in a name's start that is no digit, such as 'train/samples-', got '{prefix}'"
        )
    if taken := next((name for name in features or {} if name in PHOTO_FEATURES), None):
        raise ValueError(f"feature '{taken}' is written of each sample as it is; give component another name")
    if max_bytes is not None and max_bytes < 1:
        raise ValueError(f"max_bytes must be positive, got {max_bytes}")
    if jobs < 1:
        raise ValueError(f"jobs must be positive, got {jobs}")


def _plan(sizes: Int64s, ends: Int64s, *, prefix: str, max_bytes: int | None) -> list[_File]:
    """Which samples go into which file."""
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
        raise ValueError(f"{len(starts)} files, names count to {MAX_FILES}; use a larger --max-bytes")
    stops = [*starts[1:], len(sizes)]
    return [
        _File(name=f"{prefix}{number:06d}.tfrecord", start=start, stop=stop, num_bytes=int(sizes[start:stop].sum()))
        for number, (start, stop) in enumerate(zip(starts, stops, strict=True))
    ]


# Where it goes


class _Target:
    """The store, while it is written to."""

    def __init__(self, store: Store, prefix: str, *, overwrite: bool) -> None:
        self._store, self._prefix, self._overwrite = store, prefix, overwrite
        is_there = not isinstance(store, AisStore) or store.exists()
        self._existing: dict[str, ObjectEntry] = {e.name: e for e in store.list(prefix)} if is_there else {}

    def check(self, planned: Sequence[_File]) -> list[str]:
        """The files beyond the last one, to be deleted at the end.

        Raises:
            StoreError: If there are such, or files of another size in the place of ours, without ``overwrite``.
        """
        expected = {file.name: file.num_bytes for file in planned}
        known = {*expected, *map(_index_of, expected)}
        ours = re.compile(rf"{re.escape(self._prefix)}[0-9]+\.(tfrecord|idx)")
        stale = [name for name in self._existing if ours.fullmatch(name) and name not in known]
        others = [name for name, size in expected.items() if self.size(name) not in (None, size)]
        if (stale or others) and not self._overwrite:
            raise StoreError(
                f"'{self._store.locate(self._prefix)}' holds files of another export: {shown(others + stale)}; "
                "--overwrite replaces them, or export under another prefix"
            )
        return stale

    def refuse(self, names: Sequence[str]) -> None:
        """Files that have our sizes and are other ones."""
        if names and not self._overwrite:
            more = f", and {len(names) - 1} more are" if len(names) > 1 else ""
            raise StoreError(
                f"'{self._store.locate(names[0])}' is there with other content{more}; "
                "--overwrite replaces it, or export under another prefix"
            )

    def forget_index(self, name: str) -> None:
        """Delete the index of a file that is about to be replaced: it must not stand beside another."""
        if _index_of(name) in self._existing:
            self._store.delete(_index_of(name))
            del self._existing[_index_of(name)]

    def finish(self, planned: Sequence[_File], sizes: Int64s, stale: Sequence[str]) -> int:
        """Write the indexes that are not there; their bytes."""
        total = 0
        for file in planned:
            name, data = _index_of(file.name), record_index(sizes[file.start : file.stop].tolist())
            total += len(data)
            if self.size(name) != len(data) or self._store.read(name) != data:
                self._store.write(name, data)
        for name in stale:
            self._store.delete(name)
        return total

    def size(self, name: str) -> int | None:
        entry = self._existing.get(name)
        return None if entry is None else entry.size

    def access(self) -> "BucketAccess | LocalStore":
        """The store, as a worker has it."""
        assert isinstance(self._store, AisStore | LocalStore), "there are no other stores"
        return self._store.access() if isinstance(self._store, AisStore) else self._store

    def stored(self, name: str) -> "tuple[str, str] | Path | RemoteFile":
        """What is there, to compare with."""
        entry = self._existing[name]
        if isinstance(access := self.access(), BucketAccess):
            # Of a cloud's object the cluster may know what is no checksum of its bytes.
            kind = access.checksum_type if access.provider == "ais" else DEFAULT_CHECKSUM_TYPE
            if entry.checksum and len(entry.checksum) == len(digest_of((), kind)):
                return kind, entry.checksum
            return RemoteFile(access, entry.name, entry.size)
        return Path(self._store.locate(name))


class _Tasks:
    """Files to be, handed to workers."""

    def __init__(
        self, source: Records, target: _Target, workers: Workers, ends: Int64s, *, show_progress: bool
    ) -> None:
        self._source, self._target, self._workers = source, target, workers
        self._ends, self._show_progress = ends, show_progress
        self._read: tuple[int, ShardIndex] | None = None

    def missing(self, files: Sequence[_File]) -> list[_File]:
        """Those that the store does not have, byte for byte."""
        suspects = [file for file in files if self._target.size(file.name) == file.num_bytes]
        made = (self._task(file, stored=self._target.stored(file.name)) for file in suspects)
        same = self._map(is_stored, made, suspects, what="compare") if suspects else []
        there = {file.name for file, is_same in zip(suspects, same, strict=True) if is_same}
        self._target.refuse([file.name for file in suspects if file.name not in there])
        return [file for file in files if file.name not in there]

    def write(self, files: Sequence[_File]) -> None:
        if not files:
            return
        access = self._target.access()
        for file in files:
            self._target.forget_index(file.name)
        self._map(write_file, (self._task(file, target=access) for file in files), files, what="export")

    def _map(
        self,
        function: Callable[[FileTask, Report], bool],
        tasks: Iterable[FileTask],
        files: Sequence[_File],
        *,
        what: str,
    ) -> list[bool]:
        num_samples = sum(file.stop - file.start for file in files)
        is_small = len(files) == 1 or sum(file.num_bytes for file in files) < MIN_SHARED_BYTES
        with bar(what=what, total=num_samples, unit="samples", shown=self._show_progress) as drawn:
            return self._workers.map(function, tasks, inline=lambda _: is_small, on_progress=drawn.update)

    def _task(
        self,
        file: _File,
        *,
        target: StreamTarget | None = None,
        stored: "tuple[str, str] | Path | RemoteFile | None" = None,
    ) -> FileTask:
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
        return FileTask(file.name, file.num_bytes, shards, target, stored)

    def _index(self, row: int) -> ShardIndex:
        # Files follow each other through the shards, so the next one mostly begins in the shard of the last.
        if self._read is None or self._read[0] != row:
            self._read = row, self._source.indexed.read(row)
        return self._read[1]


def _index_of(name: str) -> str:
    return f"{name.removesuffix('.tfrecord')}.idx"
