"""Read the manifest and the shard indexes of shards, or make them if the shards are not indexed."""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from dali_pipes.data_set.indexing import (
    IndexedRun,
    IndexRun,
    find_manifest,
    index_bar,
    index_run,
    join_runs,
    read_class_table,
)
from dali_pipes.errors import DataError
from dali_pipes.formats.column_spool import ColumnsBuilder
from dali_pipes.formats.manifest import checksum
from dali_pipes.formats.names import index_name, manifest_name
from dali_pipes.formats.photo_names import ComponentCounts, photo_roles
from dali_pipes.formats.shard_index import ShardIndex
from dali_pipes.store.shard_set import ShardSet
from prep.index import divided_runs, name_of_run
from prep.threads import in_threads
from prep.workers import Report, Workers

if TYPE_CHECKING:
    from dali_pipes.formats.manifest import Manifest


NUM_READERS = 16
"""Objects and ranges that are requested at a time, to hide the store's latency."""

# A task that indexes shards begins no other shard after so many bytes.
_RUN_BYTES = 256 << 20


class IndexedSet:
    """Shards with their manifest and indexes, which are read from the store or made in memory.

    Samples that were removed from the data set are neither in the indexes nor in the manifest's numbers of samples.

    Raises:
        DataError: If the manifest or a shard cannot be read, or the manifest does not list a shard.
    """

    def __init__(self, shards: ShardSet, *, workers: Workers | None = None, show_progress: bool = False) -> None:
        self.shards = shards
        found = find_manifest(shards)
        self.is_indexed = found is not None
        """Whether there is a manifest."""
        self._made: Mapping[str, bytes] = {}
        if found is None:
            found, self._made = _index_in_memory(shards, workers or Workers(1), show_progress=show_progress)
        self.roles = photo_roles(ComponentCounts(found.components, found.num_samples))
        """Which components are photos, and which masks, judged by the whole data set, as loaders do."""
        self._stored = found.select(shards.names, where=shards.store.locate(manifest_name(shards.prefix)))
        self.manifest: Manifest = _without_removed(self._stored)

    def part(self, rows: Sequence[int]) -> "IndexedSet":
        """Some of the shards, in the order given. It pickles, and is as small as they are few."""
        own = copy.copy(self)
        own._stored = self._stored.take(np.array(rows, np.int64))
        own.manifest = _without_removed(own._stored)
        own._made = {name: self._made[name] for name in map(index_name, own.manifest.names) if name in self._made}
        own.shards = replace(
            self.shards, names=tuple(own.manifest.names), manifest=None, manifest_prefix=self.shards.prefix
        )
        return own

    def read(self, row: int) -> ShardIndex:
        """The index of one shard.

        Raises:
            DataError: If it is not the index for which the manifest was made, or is that of another shard.
        """
        name = index_name(self.manifest.names[row])
        data = self._made[name] if name in self._made else self.shards.store.read(name)
        if len(data) != self.manifest.index_bytes[row] or checksum(data) != self.manifest.index_checksums[row]:
            raise DataError(
                f"'{self.shards.store.locate(name)}' is not the index that the manifest was made with; find out what "
                "is wrong: dali-pipes prep verify URL; then index the shards again: dali-pipes prep index URL"
            )
        index = self._stored.shard_index(row, data, where=self.shards.store.locate(name))
        removed = self._stored.removed_in(row)
        return index.take(np.delete(np.arange(index.num_samples), removed)) if len(removed) else index

    def each(self) -> Iterator[tuple[int, ShardIndex]]:
        """Yield row and index of all shards, in order. The next indexes are read in threads."""
        yield from enumerate(in_threads(self.read, range(self.manifest.num_shards), NUM_READERS))


def _index_in_memory(
    shards: ShardSet, workers: Workers, *, show_progress: bool
) -> tuple["Manifest", Mapping[str, bytes]]:
    """The manifest, and the shard indexes by their objects' names, of shards that are read in full, by the workers."""
    classes, entries = read_class_table(shards.store, shards.prefix), shards.entries()
    runs = divided_runs(IndexRun(shards=shards, entries=(), classes=classes), entries, num_bytes=_RUN_BYTES)
    indexes: dict[str, bytes] = {}

    def kept(results: Iterable[tuple[IndexedRun, Mapping[str, bytes]]]) -> Iterator[IndexedRun]:
        for run, made in results:
            indexes.update(made)
            yield run

    with index_bar(shards, entries, shown=show_progress) as drawn:
        results = workers.map(_index_run, runs, on_progress=drawn.update, name=name_of_run)
        return join_runs(shards, kept(results), ColumnsBuilder(), classes=classes), indexes


def _index_run(run: IndexRun, report: Report) -> tuple[IndexedRun, Mapping[str, bytes]]:
    made: dict[str, bytes] = {}
    return index_run(run, made.__setitem__, report), made


def _without_removed(stored: "Manifest") -> "Manifest":
    if not len(stored.removed):
        return stored
    return replace(stored, samples=stored.samples - stored.num_removed, removed=np.empty(0, np.int64))
