"""One loader's share of a cache file: the shards that it holds there, and where they lie.

The cache file is sparse. Each shard owns a fixed extent in it, so a sample's address never changes. The extent has the
shard and, from the next multiple of `EXTENT_ALIGNMENT` on, its shard index: both are staged and evicted together. A
share numbers shards as the loader's own manifest does, which may be a part of the cache file's manifest.
"""

import hashlib
import os
from collections.abc import Sequence

import numpy as np

from dali_pipes.arrays import Int64s
from dali_pipes.cache.cache import NodeCache, Take, Verify
from dali_pipes.cache.extents import EXTENT_ALIGNMENT, Extent, extent_starts, reserve
from dali_pipes.cache.placement import FreeSpace
from dali_pipes.errors import CacheError
from dali_pipes.formats.manifest import Manifest


def cache_file_key(manifest: Manifest, *, alignment: int = EXTENT_ALIGNMENT) -> str:
    """Compute the key of a manifest's cache file: 32 hexadecimal digits of the SHA-256 of everything in it.

    Another size or checksum of any shard or index gives another cache file, so new bytes never mix with old ones.
    Neither do stored shards and the same shards transformed by an ETL: the manifest's digest covers the ETL's name.
    """
    state = hashlib.sha256(f"{manifest.shards_digest} {alignment}".encode())
    for column in (manifest.index_bytes, manifest.index_checksums):
        state.update(np.ascontiguousarray(column).tobytes())
    return state.hexdigest()[:32]


class CacheShare:
    """One loader's share of a cache file: shards that it holds stay until it releases them or is closed.

    Args:
        manifest: Of all shards that were indexed together.
        rows: The row in ``manifest`` of each of the loader's shards: int64 [shards].
        space: The free space of the cache file's directory, and its path.
        source, group, reserved, cache_bytes, keep, verify: See `NodeCache.join`.
        alignment: The alignment of extents, in bytes. It must not be smaller than the file system's: extents would then
            share blocks, and take more of them than are counted.

    Raises:
        CacheError: If ``reserved`` bytes do not fit, or no cache file can be made there.
    """

    def __init__(
        self,
        manifest: Manifest,
        rows: Int64s,
        *,
        space: FreeSpace,
        source: str,
        group: int,
        reserved: int,
        cache_bytes: int,
        keep: bool,
        verify: Verify = "first",
        alignment: int = EXTENT_ALIGNMENT,
    ) -> None:
        self.space, self.cache_bytes, self.reserved = space, cache_bytes, reserved
        self._rows = rows
        # Views instead of copies if the loader has all shards.
        is_whole = len(rows) == manifest.num_shards and bool((rows == np.arange(len(rows))).all())
        chosen = slice(None) if is_whole else rows
        # The loader's shard of each row, to translate the cache's answers; -1 for rows that the loader does not have.
        self._shard_of_row = np.full(manifest.num_shards, -1, np.int64)
        self._shard_of_row[rows] = np.arange(len(rows))
        starts = extent_starts(manifest.shard_bytes, manifest.index_bytes, alignment=alignment)
        self.starts = starts[:-1][chosen]
        """Where each shard starts in the cache file: int64 [shards]."""
        self.extent_bytes = np.diff(starts)[chosen]
        """Bytes that each shard takes of the cache, with its index: int64 [shards]."""
        key = cache_file_key(manifest, alignment=alignment)
        self._cache = NodeCache(space.directory)
        try:
            self._slot = self._cache.join(
                key,
                starts=starts,
                source=source,
                group=group,
                reserved=reserved,
                cache_bytes=cache_bytes,
                keep=keep,
                verify=verify,
            )
            try:
                self._file = self._cache.open_cache_file(self._slot)
            except BaseException:
                self._cache.leave(self._slot)
                raise
        except BaseException:
            self._cache.close()
            raise
        self._shard_bytes, self._index_bytes = manifest.shard_bytes[chosen], manifest.index_bytes[chosen]

    @property
    def path(self) -> str:
        """A path that opens the cache file, in this process only."""
        return f"/proc/self/fd/{self._file}"

    @property
    def taken_bytes(self) -> int:
        """Bytes that the blocks of the whole cache file occupy now, on disk or in memory; 0 if the share is closed."""
        try:
            return os.fstat(self._file).st_blocks * 512
        except OSError:
            return 0

    def shard_extent(self, shard: int) -> Extent:
        return Extent(self._file, int(self.starts[shard]), int(self._shard_bytes[shard]))

    def index_extent(self, shard: int) -> Extent:
        aligned = -(-int(self._shard_bytes[shard]) // EXTENT_ALIGNMENT) * EXTENT_ALIGNMENT
        return Extent(self._file, int(self.starts[shard]) + aligned, int(self._index_bytes[shard]))

    def take(self, wanted: Sequence[int], *, most: int = 1, most_bytes: int = 0) -> Take:
        """Hold the ready shards of ``wanted``, which begins with the most urgent, and take others to fill them.

        See `NodeCache.take`.
        """
        rows = self._rows[np.asarray(wanted, np.int64)]
        taken = self._cache.take(self._slot, rows, most=most, most_bytes=most_bytes)
        return taken._replace(ready=self._shard_of_row[taken.ready], fill=self._shard_of_row[taken.fill])

    def reserve_blocks(self, shard: int, *, name: str) -> None:
        """Allocate the extent's blocks before anything is written there.

        Raises:
            CacheError: If files outside the cache have taken the space.
        """
        try:
            reserve(self._file, int(self.starts[shard]), int(self.extent_bytes[shard]))
        except OSError as exc:
            raise CacheError(
                f"no space for shard '{name}' in '{self.space.directory}': {self.extent_bytes[shard]} bytes needed, "
                f"{FreeSpace.of(self.space.directory).free} free ({exc.strerror}); lower "
                "cache=dali_pipes.Cache(max_bytes=...) (--cache-bytes), or free some space there"
            ) from exc

    def finish(self, shards: Sequence[int], *, are_new: bool = True) -> None:
        """Let all loaders read these shards and their indexes, which are whole and checked.

        ``are_new`` is ``False`` if nothing was written, so that nothing has to reach the disk before.
        """
        if are_new and not self.space.is_memory:
            try:
                os.fdatasync(self._file)
            except OSError as exc:
                raise CacheError(f"the disk of '{self.space.directory}' failed: {exc.strerror}") from exc
        self._cache.finish(self._slot, self._rows[np.asarray(shards, np.int64)])

    def fail(self, shards: Sequence[int]) -> None:
        """Free the blocks of shards that could not be filled."""
        self._cache.fail(self._slot, self._rows[np.asarray(shards, np.int64)])

    def release(self, shards: Sequence[int]) -> None:
        """End the holds of these shards. Call it when the last reader that names them is closed: readers prefetch."""
        self._cache.release(self._slot, self._rows[np.asarray(shards, np.int64)])

    def filled_by(self, shard: int) -> int | None:
        """The process that brings or drops a shard now: see `NodeCache.filled_by`."""
        return self._cache.filled_by(self._slot, int(self._rows[shard]))

    def is_stuck(self) -> bool:
        """Whether all loaders that share the cache wait for space that none of them will free."""
        return self._cache.is_stuck(self._slot)

    def reserve_more(self, reserved: int) -> None:
        """Reserve ``reserved`` bytes, more than before.

        Raises:
            CacheError: If they cannot be reserved.
        """
        self._cache.reserve(self._slot, reserved)
        self.reserved = reserved

    def read_ahead(self, starts: Int64s, sizes: Int64s) -> None:
        """Make the kernel read these bytes of the cache file from its disk soon; return at once."""
        if self.space.is_memory:
            return
        for start, size in zip(starts.tolist(), sizes.tolist(), strict=True):
            if size:  # 0 would stand for the rest of the file
                os.posix_fadvise(self._file, start, size, os.POSIX_FADV_WILLNEED)

    def close(self) -> None:
        """Release all shards. Can be called twice; readers that have the cache file open can still read it."""
        file, self._file = self._file, -1
        if file < 0:
            return
        os.close(file)
        try:
            self._cache.leave(self._slot)
        finally:
            self._cache.close()
