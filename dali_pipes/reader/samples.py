"""Find what is known of samples by their ordinals, in the indexes of their shards.

The index of a shard is read when a segment first names the shard, and forgotten with its window: memory is that of the
windows that are read, whatever the size of the data set.
"""

from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from dali_pipes.errors import DataError
from dali_pipes.formats.manifest import Manifest
from dali_pipes.formats.names import index_name
from dali_pipes.formats.shard_index import ShardIndex
from dali_pipes.reader.batch import Rows
from dali_pipes.reader.shard_table import SampleRules, ShardTable

Int64s = npt.NDArray[np.int64]


class Samples:
    """The samples of a data set.

    Args:
        manifest: The loader's shards.
        read_index: A shard's number -> its index's bytes, already checked.
        rules: How samples are read.
    """

    def __init__(
        self, manifest: Manifest, read_index: Callable[[int], bytes], *, rules: SampleRules | None = None
    ) -> None:
        self.manifest, self.rules = manifest, rules or SampleRules()
        self._read_index = read_index
        self._stops = np.cumsum(manifest.samples, dtype=np.int64)
        self._starts = self._stops - manifest.samples
        self._class_ids = np.array(sorted(manifest.classes), np.int64)
        self._tables: dict[int, ShardTable] = {}

    def __len__(self) -> int:
        return int(self._stops[-1]) if len(self._stops) else 0

    def shard_of(self, ordinals: Int64s) -> Int64s:
        """The shard of each ordinal: int64 [N]."""
        return np.searchsorted(self._stops, ordinals, side="right").astype(np.int64)

    def rows(self, ordinals: Int64s) -> Rows:
        """These samples, in this order. The indexes of their shards must be readable, and are kept.

        Raises:
            DataError: If an index does not fit the manifest.
        """
        tables = [self._table(int(shard)) for shard in np.unique(self.shard_of(ordinals))]
        return Rows(ordinals, tables, max_pixels=self.rules.max_pixels)

    def forget(self, shards: Iterable[int]) -> None:
        """Drop the indexes of these shards; one that is wanted again is read again."""
        for shard in shards:
            self._tables.pop(shard, None)

    def _table(self, shard: int) -> ShardTable:
        if shard not in self._tables:
            self._tables[shard] = self._load(shard)
        return self._tables[shard]

    def _load(self, shard: int) -> ShardTable:
        name = self.manifest.names[shard]
        index = ShardIndex.from_bytes(self._read_index(shard), where=index_name(name))
        expected = (int(self.manifest.samples[shard]), int(self.manifest.shard_bytes[shard]))
        if (index.num_samples, index.shard_bytes) != expected:
            raise DataError(
                f"index '{index_name(name)}' lists {index.num_samples} samples in {index.shard_bytes} bytes, the "
                f"manifest says {expected[0]} in {expected[1]}; rebuild it: dali-pipes prep index URL"
            )
        first = int(self._starts[shard])
        return ShardTable(shard, name=name, first=first, index=index, rules=self.rules, class_ids=self._class_ids)
