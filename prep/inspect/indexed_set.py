"""Read the manifest and the shard indexes of shards, or make them if the shards are not indexed."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from dali_pipes.data_set.indexing import find_manifest, index_in_memory
from dali_pipes.errors import DataError
from dali_pipes.formats.manifest import checksum
from dali_pipes.formats.names import index_name, manifest_name
from dali_pipes.formats.photo_names import ComponentCounts, photo_roles
from dali_pipes.formats.shard_index import ShardIndex
from dali_pipes.store.patience import PatientThreads
from dali_pipes.store.shard_set import ShardSet

NUM_READERS = 16
"""Objects and ranges that are requested at a time, to hide the store's latency."""


class IndexedSet:
    """Shards with their manifest and indexes, which are read from the store or made in memory.

    Samples that were removed from the data set are neither in the indexes nor in the manifest's numbers of samples.

    Raises:
        DataError: If the manifest or a shard cannot be read, or the manifest does not list a shard.
    """

    def __init__(self, shards: ShardSet, *, show_progress: bool = False) -> None:
        self.shards = shards
        found = find_manifest(shards)
        self.is_indexed = found is not None
        self._made: Mapping[str, bytes] = {}
        if found is None:
            found, self._made, _ = index_in_memory(shards, show_progress=show_progress)
        self.roles = photo_roles(ComponentCounts(found.components, found.num_samples))
        """Which components are photos, and which masks, judged by the whole data set, as loaders do."""
        stored = self._stored = found.select(shards.names, where=shards.store.locate(manifest_name(shards.prefix)))
        self.manifest = replace(stored, samples=stored.samples - stored.num_removed, removed=np.empty(0, np.int64))

    def read(self, row: int) -> ShardIndex:
        """The index of one shard.

        Raises:
            DataError: If it is not the index for which the manifest was made, or is that of another shard.
        """
        name = index_name(self.manifest.names[row])
        data, where = self._made.get(name) or self.shards.store.read(name), self.shards.store.locate(name)
        if len(data) != self.manifest.index_bytes[row] or checksum(data) != self.manifest.index_checksums[row]:
            raise DataError(
                f"'{where}' is not the index that the manifest was made with; find out what is wrong: "
                "dali-pipes prep verify URL; then index the shards again: dali-pipes prep index URL"
            )
        index = self._stored.shard_index(row, data, where=where)
        removed = self._stored.removed_in(row)
        return index.take(np.delete(np.arange(index.num_samples), removed)) if len(removed) else index

    def each(self) -> Iterator[tuple[int, ShardIndex]]:
        """Yield row and index of all shards, in order. The next indexes are read in threads."""
        num_shards, num = self.manifest.num_shards, 4 * NUM_READERS
        with PatientThreads(NUM_READERS) as threads:
            for start in range(0, num_shards, num):  # so many are in memory
                yield from enumerate(threads.map(self.read, range(start, min(start + num, num_shards))), start)
