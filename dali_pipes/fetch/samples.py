"""Stage some samples of each shard: a loader that reads few of them fetches these by range, and no whole shards.

The samples lie in the shard's extent where they lie in the whole shard, with holes between them, so readers see no
difference. The loader has a cache file of its own, which it shares with loaders of the same samples and components.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from dali_pipes.arrays import Int64s
from dali_pipes.cache.extents import EXTENT_ALIGNMENT, Extent
from dali_pipes.cache.share import CacheShare
from dali_pipes.errors import CacheError, DataError
from dali_pipes.formats.manifest import Manifest
from dali_pipes.formats.names import index_name
from dali_pipes.formats.shard_index import ComponentRange
from dali_pipes.store.http.answers import MissingObjectError

SPARSE_SHARE = 8
"""Samples are fetched by range if they take at most this part, 1/8, of the shards that have any of them: above, whole
shards came sooner from a real AIStore."""
# The blocks in which a sample's components begin and end hold other bytes, too.
_BLOCK_BYTES_PER_SAMPLE = 2 * EXTENT_ALIGNMENT


class Filled(NamedTuple):
    """What was brought of one shard."""

    taken_bytes: int
    """Bytes of blocks of the cache file."""
    fetched_bytes: int
    """Bytes that came from the store."""


class SomeSamples:
    """The samples that a loader reads of each shard. They are the same in every epoch.

    Args:
        manifest: The loader's shards.
        excluded: The other samples: ordinals, int64, sorted.
        shard_extents: Bytes that each whole shard would take of the cache, with its index: int64 [shards].
        read_ranges: See `dali_pipes.store.base.Store.read_ranges`.
    """

    def __init__(
        self,
        manifest: Manifest,
        excluded: Int64s,
        *,
        shard_extents: Int64s,
        read_ranges: Callable[[Sequence[ComponentRange]], list[bytes]],
    ) -> None:
        self._manifest, self._excluded = manifest, excluded
        self._read_ranges = read_ranges
        self.components: Sequence[str] = ()
        """The components that the graph reads, as it names them."""
        stops = manifest.sample_stops
        self._starts = stops - manifest.samples
        left_out = np.searchsorted(stops, excluded, side="right")
        kept = manifest.samples - np.bincount(left_out, minlength=manifest.num_shards)
        index_bytes = -(-manifest.index_bytes // EXTENT_ALIGNMENT) * EXTENT_ALIGNMENT
        means = manifest.shard_bytes // np.maximum(manifest.samples, 1) + _BLOCK_BYTES_PER_SAMPLE
        self.extent_bytes: Int64s = np.where(kept > 0, np.minimum(shard_extents, index_bytes + kept * means), 0)
        """About the bytes that each shard takes of the cache: int64 [shards]; its table learns the true number."""
        self.are_few = int(self.extent_bytes.sum()) * SPARSE_SHARE <= int(shard_extents[kept > 0].sum())

    @property
    def digest(self) -> str:
        """SHA-256, hexadecimal, of the samples and their components."""
        state = hashlib.sha256(f"{self._manifest.digest} {list(self.components)}".encode())
        state.update(np.ascontiguousarray(self._excluded, "<i8").data)
        return state.hexdigest()

    def ranges(self, shard: int, index: bytes) -> Iterator[ComponentRange]:
        """The places that a loader reads of a shard, by its index."""
        name, first = self._manifest.names[shard], int(self._starts[shard])
        places = self._manifest.shard_index(shard, index, where=index_name(name))
        start, stop = np.searchsorted(self._excluded, [first, first + places.num_samples])
        for row in np.delete(np.arange(places.num_samples), self._excluded[start:stop] - first).tolist():
            for component in self.components:
                if (one := places.range_of(component, row, shard=name)) is not None:
                    yield one

    def fill(self, shards: Sequence[int], share: CacheShare) -> tuple[dict[int, Filled], dict[int, Exception]]:
        """Bring the samples of these shards, whose indexes are there; returns what came, and the errors of others."""
        filled, errors = dict[int, Filled](), dict[int, Exception]()
        try:
            ranges = {shard: list(self.ranges(shard, share.index_extent(shard).read())) for shard in shards}
            found = iter(self._read_ranges([one for wanted in ranges.values() for one in wanted]))
        except (DataError, MissingObjectError) as exc:
            if len(shards) == 1:
                return {}, {shards[0]: exc}
            for shard in shards:  # which of them is it?
                more_filled, more_errors = self.fill([shard], share)
                filled |= more_filled
                errors |= more_errors
            return filled, errors
        for shard, wanted in ranges.items():
            extent, index = share.shard_extent(shard), share.index_extent(shard)
            pieces = [(one, next(found)) for one in wanted]
            parts = [extent_blocks(extent, one.start, one.size) for one in wanted]
            blocks = np.unique(np.concatenate([extent_blocks(index, 0, index.size), *parts]))
            try:
                share.reserve_blocks(shard, name=self._manifest.names[shard], blocks=blocks)
                for one, data in pieces:
                    extent.write(data, one.start)
            except CacheError as exc:
                errors[shard] = exc
                continue
            num_bytes = index.size + sum(one.size for one in wanted)
            filled[shard] = Filled(len(blocks) * EXTENT_ALIGNMENT, num_bytes)
        return filled, errors


def extent_blocks(extent: Extent, start: int, size: int) -> Int64s:
    """The blocks of the cache file in which these bytes lie, by number."""
    first = extent.start + start
    return np.arange(first // EXTENT_ALIGNMENT, -(-(first + size) // EXTENT_ALIGNMENT))
