"""Hold the data set's shards in one sparse file, shared by a node: shard i owns a fixed extent, so a sample's address
never changes.

In a shard's extent lies the shard and, from the next page on, its shard index: they come and go together. This is a
loader's view of one image: shards are numbered as in the loader's own manifest, which may be a part of the image's.
"""

import hashlib
import os
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dali_pipes.cache.blocks import read_ahead, reserve
from dali_pipes.cache.cache import NodeCache, Take
from dali_pipes.cache.extents import EXTENT_ALIGNMENT, Extent, extent_starts
from dali_pipes.cache.free_space import FreeSpace
from dali_pipes.errors import CacheError
from dali_pipes.formats.manifest import Manifest

__all__ = ["CacheShare", "cache_file_key"]

Int64s = npt.NDArray[np.int64]


def cache_file_key(manifest: Manifest, *, alignment: int = EXTENT_ALIGNMENT) -> str:
    """Which image belongs to a manifest: 32 hexadecimal digits of the SHA-256 of all that lies in it.

    Another size or checksum of any shard or index gives another image, so new bytes never meet old ones; nor do those
    that an ETL gives meet those that are stored: the manifest's digest covers its name.
    """
    state = hashlib.sha256(f"{manifest.digest} {alignment}".encode())
    for column in (manifest.index_bytes, manifest.index_checksums):
        state.update(np.ascontiguousarray(column).tobytes())
    return state.hexdigest()[:32]


class CacheShare:
    """One loader's share in an image: what it holds stays, where it was, until it is released or closed.

    Args:
        manifest: Of all shards that were indexed together.
        rows: For each of the loader's shards its row in ``manifest``: int64 [shards].
        room: Where the image lies.
        source: The shards' URL.
        group: Loaders of one group hold the same shards at about the same time. Note [promises] in
            `dali_pipes.cache.cache`.
        reserved: Bytes that the group must be able to hold at a time.
        cache_bytes: What all images in that directory may take.
        keep: Whether it stays there for the next job.
        alignment: Of the extents; at least the room's, or more blocks are taken than are counted.

    Raises:
        CacheError: If there is no room for ``reserved`` bytes, or no image can be made there.
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
        alignment: int = EXTENT_ALIGNMENT,
    ) -> None:
        self.space, self.cache_bytes, self.reserved = space, cache_bytes, reserved
        self._rows = rows
        # Row -> the loader's shard, for what the cache answers; -1 for rows that are none of the loader's.
        self._shard_of_row = np.full(manifest.num_shards, -1, np.int64)
        self._shard_of_row[rows] = np.arange(len(rows))
        starts = extent_starts(manifest.shard_bytes, manifest.index_bytes, alignment=alignment)
        self.starts = starts[rows]
        """Where each shard starts in the image: int64 [shards]."""
        self.extent_bytes = starts[rows + 1] - self.starts
        """What each shard takes of the cache, with its index: int64 [shards]."""
        self._shard_bytes, self._index_bytes = manifest.shard_bytes[rows], manifest.index_bytes[rows]
        key = cache_file_key(manifest, alignment=alignment)
        self._cache = NodeCache(space.directory)
        try:
            self._slot = self._cache.join(
                key, starts=starts, source=source, group=group, reserved=reserved, cache_bytes=cache_bytes, keep=keep
            )
            try:
                self._file = self._cache.open_cache_file(self._slot)
            except BaseException:
                self._cache.leave(self._slot)
                raise
        except BaseException:
            self._cache.close()
            raise

    @property
    def path(self) -> str:
        """A path that opens the image, in this process only."""
        return f"/proc/self/fd/{self._file}"

    def shard_extent(self, shard: int) -> Extent:
        """Where the shard lies."""
        return Extent(self._file, int(self.starts[shard]), int(self._shard_bytes[shard]))

    def index_extent(self, shard: int) -> Extent:
        """Where its shard index lies."""
        aligned = -(-int(self._shard_bytes[shard]) // EXTENT_ALIGNMENT) * EXTENT_ALIGNMENT
        return Extent(self._file, int(self.starts[shard]) + aligned, int(self._index_bytes[shard]))

    def take(self, wanted: Sequence[int]) -> Take:
        """Hold what is ready of ``wanted``, the most urgent first, and begin to fill one that is not there."""
        taken = self._cache.take(self._slot, self._rows[np.asarray(wanted, np.int64)])
        fill = None if taken.fill is None else int(self._shard_of_row[taken.fill])
        return taken._replace(ready=self._shard_of_row[taken.ready], fill=fill)

    def reserve_blocks(self, shard: int, *, name: str) -> None:
        """Allocate the extent's blocks before anything is written there.

        Raises:
            CacheError: If there is no room after all: somebody else has taken it.
        """
        try:
            reserve(self._file, int(self.starts[shard]), int(self.extent_bytes[shard]))
        except OSError as exc:
            raise CacheError(
                f"no room for shard '{name}' in '{self.space.directory}': {self.extent_bytes[shard]} bytes needed, "
                f"{FreeSpace.of(self.space.directory).free} free ({exc.strerror}); lower --cache-bytes, or make room there"
            ) from exc

    def finish(self, shard: int) -> None:
        """The shard and its index are whole and checked: everybody may read them.

        Raises:
            CacheError: If the disk did not take them.
        """
        if not self.space.is_memory:
            try:
                os.fdatasync(self._file)
            except OSError as exc:
                raise CacheError(f"the disk of '{self.space.directory}' failed: {exc.strerror}") from exc
        self._cache.finish(self._slot, int(self._rows[shard]))

    def fail(self, shard: int) -> None:
        """The shard could not be filled."""
        self._cache.fail(self._slot, int(self._rows[shard]))

    def release(self, shards: Sequence[int]) -> None:
        """These need not stay. Only after the last reader that names them is gone: readers prefetch."""
        self._cache.release(self._slot, self._rows[np.asarray(shards, np.int64)])

    def is_stuck(self) -> bool:
        """Whether all loaders that share the cache wait for room that none will give up."""
        return self._cache.is_stuck(self._slot)

    def reserve_more(self, reserved: int) -> None:
        """Be promised more than before.

        Raises:
            CacheError: If there is not that much.
        """
        self._cache.reserve(self._slot, reserved)
        self.reserved = reserved

    def read_ahead(self, starts: Int64s, sizes: Int64s) -> None:
        """Have these bytes of the image read from the disk; nothing to do where it is memory."""
        if self.space.is_memory:
            return
        for start, size in zip(starts.tolist(), sizes.tolist(), strict=True):
            read_ahead(self._file, start, size)

    def close(self) -> None:
        """Release all. Can be called twice; readers that have the image open still read it."""
        file, self._file = self._file, -1
        if file < 0:
            return
        os.close(file)
        try:
            self._cache.leave(self._slot)
        finally:
            self._cache.close()
