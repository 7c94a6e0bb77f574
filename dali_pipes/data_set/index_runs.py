"""Index a run of shards: read each tar once, keep its shard index, and return the little that the manifest needs.

A run is a task that a worker does on any machine. `dali_pipes.data_set.indexing.join_runs` makes the manifest of all.

# Note [indexed before]: a command that was interrupted goes on when it is run again: a shard index that is there is
taken over, and its shard not read, if it is surely the one that would be written. It is that of the shard's bytes as
they are now by AIStore's checksum, or, where a store has none, because it was written after the shard's last change. If
the manifest lists the same bytes, it lists this index. And it is in the form that this release writes.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dali_pipes.data_set.tar_index import index_shard
from dali_pipes.errors import DataError
from dali_pipes.formats.manifest import UNSIZED, Manifest, checksum
from dali_pipes.formats.names import LABEL_COMPONENT, index_name
from dali_pipes.formats.orientation import UPRIGHT, values_of
from dali_pipes.formats.photo_header import PHOTO_FORMATS
from dali_pipes.formats.sample_columns import ColumnsBuilder, SampleColumns
from dali_pipes.formats.shard_index import ShardIndex
from dali_pipes.store.checksums import XXH64_TYPES
from dali_pipes.store.entries import ObjectEntry
from dali_pipes.store.patience import PatientThreads
from dali_pipes.store.shard_set import ShardSet, check_bytes

# Shards read at a time. Parsing holds the GIL, so more gain nothing.
NUM_READERS = 4
Int64s = npt.NDArray[np.int64]
UInt64s = npt.NDArray[np.uint64]


@dataclass(frozen=True, kw_only=True)
class Before:
    """What is known of a shard index that is in the store already."""

    entry: ObjectEntry
    listed: tuple[int, int, int] | None = None
    """The shard's checksum, and bytes and checksum of its index, as the manifest has them; ``None``: it does not list
    the shard."""


@dataclass(frozen=True, kw_only=True)
class IndexRun:
    """Shards to be indexed, one after the other; pickles."""

    shards: ShardSet
    entries: Sequence[ObjectEntry]
    """The store's entry of each shard."""
    classes: Mapping[int, str] | None
    is_indexed: bool = False
    """Read the shard indexes in the store, which must be there, and not the shards."""
    before: Sequence[Before | None] = ()
    """For each shard the index that may be taken over: see Note [indexed before]; empty: all shards are read."""
    is_first: bool = True
    """Whether no other shards of the data set come before these."""


class RunSums(NamedTuple):
    """Numbers of each shard of a run, by the names of the manifest's attributes."""

    shard_bytes: Int64s
    checksums: UInt64s
    samples: Int64s
    index_bytes: Int64s
    index_checksums: UInt64s

    @classmethod
    def empty(cls, num_shards: int = 0) -> "RunSums":
        """Zeros."""
        return cls(
            shard_bytes=np.zeros(num_shards, np.int64),
            checksums=np.zeros(num_shards, np.uint64),
            samples=np.zeros(num_shards, np.int64),
            index_bytes=np.zeros(num_shards, np.int64),
            index_checksums=np.zeros(num_shards, np.uint64),
        )


class IndexedRun(NamedTuple):
    """The result of `index_run`."""

    sums: RunSums
    totals: "Totals"
    components: Sequence[str]
    """The components of ``columns``, in the order in which they were found."""
    columns: SampleColumns | None
    """``None`` if they lack components, because there are too many, and it matters which."""
    num_before: int
    """The number of shard indexes that were taken over."""


def index_run(run: IndexRun, keep: Callable[[str, bytes], None], on_done: Callable[[int], object]) -> IndexedRun:
    """Index shards, and pass each shard index that is made, with its object's name, to ``keep``.

    Args:
        run: The shards.
        keep: Called in the shards' order.
        on_done: Called with the bytes of each shard that is done; with 1 if an ETL gives the shards.
    """
    names = run.shards.names
    num, num_before = len(names), 0
    sums = RunSums.empty(num)
    totals, columns = Totals(), ColumnsBuilder()
    with PatientThreads(NUM_READERS) as readers:
        # Only a few ahead, because finished indexes wait in memory.
        ahead = deque(readers.submit(_index_one, run, row) for row in range(min(2 * NUM_READERS, num)))
        for row, name in enumerate(names):
            index, data, is_new = ahead.popleft().result()
            if row + 2 * NUM_READERS < num:
                ahead.append(readers.submit(_index_one, run, row + 2 * NUM_READERS))
            if is_new:
                keep(index_name(name), data)
            num_before += not is_new
            sums.shard_bytes[row], sums.checksums[row] = index.shard_bytes, index.shard_checksum
            sums.index_bytes[row], sums.index_checksums[row] = len(data), checksum(data)
            sums.samples[row] = index.num_samples
            totals.add(index)
            columns.add(index)
            on_done(1 if run.shards.store.etl else index.shard_bytes)
    whole = run.is_first or not columns.is_cut
    return IndexedRun(sums, totals, list(columns.components), columns.finish() if whole else None, num_before)


def known_before(manifest: Manifest | None, row: int, entry: ObjectEntry) -> Before:
    """What is known of the stored index ``entry`` of the shard in this row of the manifest; negative: in none."""
    if manifest is None or row < 0:
        return Before(entry=entry)
    numbers = (manifest.checksums[row], manifest.index_bytes[row], manifest.index_checksums[row])
    shard_checksum, index_bytes, index_checksum = map(int, numbers)
    return Before(entry=entry, listed=(shard_checksum, index_bytes, index_checksum))


def _index_one(run: IndexRun, row: int) -> tuple[ShardIndex, bytes, bool]:
    """A shard's index, its bytes, and whether it is to be written."""
    store, name, entry = run.shards.store, run.shards.names[row], run.entries[row]
    if run.is_indexed:
        return *_stored_index(run.shards, entry, name), False
    before = run.before[row] if run.before else None
    if before is not None and (found := _taken_over(run, name, entry, before)) is not None:
        return *found, False
    try:
        with store.open(name) as stream:
            # The size of a transformed shard is not known before it is read.
            size = None if store.etl else entry.size
            index = index_shard(stream, shard=name, size=size, classes=run.classes)
        check_bytes(store, entry, index.shard_checksum)
    except DataError as exc:
        if not store.etl:
            raise
        # If a transform fails halfway, its shard looks cut off.
        raise DataError(f"{exc} (as ETL '{store.etl}' returned it)") from exc
    return index, index.to_bytes(), True


def _taken_over(run: IndexRun, name: str, entry: ObjectEntry, before: Before) -> tuple[ShardIndex, bytes] | None:
    """The stored index of a shard, and its bytes, if it is what would be written: see Note [indexed before]."""
    store = run.shards.store
    kind, known = store.access().known_checksum(entry) or ("", "")
    if store.etl or not (kind in XXH64_TYPES or _is_newer(before.entry, entry)):
        return None
    data = store.find(index_name(name))
    if data is None:
        return None
    try:
        index = ShardIndex.from_bytes(data, where=store.locate(index_name(name)))
    except DataError:
        return None
    if (index.shard, index.shard_bytes) != (name, entry.size) or index.to_bytes() != data:
        return None
    if kind in XXH64_TYPES and known != f"{index.shard_checksum:016x}":
        return None
    listed = before.listed
    if listed is not None and listed[0] == index.shard_checksum and listed[1:] != (len(data), checksum(data)):
        return None
    if run.classes and index.labels is not None:
        labels = np.unique(index.labels[index.offsets[LABEL_COMPONENT] >= 0])
        if any(int(label) not in run.classes for label in labels):
            return None  # reading the shard tells the sample
    return index, data


def _is_newer(index: ObjectEntry, shard: ObjectEntry) -> bool:
    """Whether the index was surely written after the shard's last change."""
    return index.written_ns is not None and shard.written_ns is not None and index.written_ns[0] > shard.written_ns[1]


def _stored_index(shards: ShardSet, entry: ObjectEntry, name: str) -> tuple[ShardIndex, bytes]:
    """The shard index that is stored beside a shard, and its bytes.

    Raises:
        DataError: If there is none, or it is not the one of this shard, by size and, if the store knows it, checksum.
    """
    where = shards.store.locate(index_name(name))
    again = f"index the shard again: {shards.index_command} --part I/N, with the I and N of its part, or without --part"
    data = shards.store.find(index_name(name))
    if data is None:
        raise DataError(f"'{where}' does not exist: not all parts are indexed; {again}")
    index = ShardIndex.from_bytes(data, where=where)
    if shards.store.etl:
        return index, data  # the transformed shard's size and checksum are not known
    if index.shard_bytes != entry.size:
        raise DataError(f"'{where}' is of a shard of {index.shard_bytes} bytes, the shard has {entry.size}; {again}")
    kind, known = shards.store.access().known_checksum(entry) or ("", "")
    if kind in XXH64_TYPES and known != f"{index.shard_checksum:016x}":
        raise DataError(
            f"'{where}' is of a shard with the checksum {index.shard_checksum:016x}, the shard has {known}; {again}"
        )
    return index, data


@dataclass(kw_only=True)
class Totals:
    """Sums over all shard indexes, for the manifest."""

    components: dict[str, int] = field(default_factory=dict)
    labels: dict[str, int] = field(default_factory=dict)
    turned: dict[str, int] = field(default_factory=dict)
    """`Manifest.turned`."""
    _formats: dict[str, Int64s] = field(default_factory=dict)
    """component -> int64 [number of formats + 1]; the last counts photos without a size."""

    def add(self, index: ShardIndex) -> None:
        is_there = {component: offsets >= 0 for component, offsets in index.offsets.items()}
        for component, rows in is_there.items():
            self.components[component] = self.components.get(component, 0) + int(rows.sum())
        for component, photo in index.photos.items():
            rows = is_there[component]
            counts = self._formats.setdefault(component, np.zeros(len(PHOTO_FORMATS) + 1, np.int64))
            counts[:-1] += np.bincount(photo.format[rows], minlength=len(PHOTO_FORMATS))
            counts[-1] += np.count_nonzero(photo.height[rows] == 0)
            if photo.orientation is not None and (
                num := np.count_nonzero(values_of(photo.orientation[rows]) != UPRIGHT)
            ):
                self.turned[component] = self.turned.get(component, 0) + int(num)
        if index.labels is not None:
            # At least one sample has the label, or the component would not be listed.
            labels = index.labels[is_there[LABEL_COMPONENT]]
            self.labels["min"] = min(int(labels.min()), self.labels.get("min", 2**63))
            self.labels["max"] = max(int(labels.max()), self.labels.get("max", -(2**63)))

    def merge(self, other: "Totals") -> None:
        """Add the sums of the shards that follow."""
        for ours, theirs in ((self.components, other.components), (self.turned, other.turned)):
            for name, num in theirs.items():
                ours[name] = ours.get(name, 0) + num
        for name, counts in other._formats.items():
            self._formats[name] = self._formats.get(name, 0) + counts
        if other.labels:
            self.labels["min"] = min(other.labels["min"], self.labels.get("min", 2**63))
            self.labels["max"] = max(other.labels["max"], self.labels.get("max", -(2**63)))

    def sums(self) -> dict[str, Any]:
        """The sums of a manifest, by the names of its attributes."""
        return {
            "components": self.components,
            "photos": self.format_counts(),
            "labels": self.labels,
            "turned": self.turned,
        }

    def format_counts(self) -> dict[str, dict[str, int]]:
        """`Manifest.photos`."""
        photos = {}
        for component, counts in self._formats.items():
            photos[component] = {PHOTO_FORMATS[code]: int(counts[code]) for code in np.flatnonzero(counts[:-1])}
            if counts[-1] != photos[component].get("unknown", 0):
                photos[component][UNSIZED] = int(counts[-1])
        return photos
