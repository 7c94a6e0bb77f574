"""A loader's dealings with a cache file whose right bytes are known."""

import os
from pathlib import Path

import numpy as np

from dali_pipes.cache.cache import NodeCache, Take, Verify
from dali_pipes.cache.extents import extent_starts, reserve
from dali_pipes.cache.files import cache_root

PAGE = 4096
KEY, OTHER = "a" * 32, "b" * 32


class Member:
    """One loader's dealings with the cache, as `dali_pipes.cache.share.CacheShare`; it writes and reads real bytes."""

    def __init__(
        self,
        directory: Path,
        *,
        pages: int = 6,
        key: str = KEY,
        group: int = 1,
        reserved: int = 2,
        allowed: int = 4,
        keep: bool = True,
        verify: Verify = "first",
    ) -> None:
        """All sizes in pages."""
        self.starts = extent_starts([PAGE] * pages)
        self.key, self.directory = key, directory
        self.cache = NodeCache(directory)
        try:
            self.slot = self.cache.join(
                key,
                starts=self.starts,
                source="here",
                group=group,
                reserved=reserved * PAGE,
                cache_bytes=allowed * PAGE,
                keep=keep,
                verify=verify,
            )
        except BaseException:
            self.cache.close()
            raise
        self.file = self.cache.open_cache_file(self.slot)
        self.held: set[int] = set()

    def content(self, shard: int) -> bytes:
        size = int(self.starts[shard + 1] - self.starts[shard])
        return f"{self.key[0]}{shard:07d}".encode() * (size // 8)

    def read(self, shard: int) -> bytes:
        start, stop = self.starts[shard : shard + 2].tolist()
        return os.pread(self.file, stop - start, start)

    def write(self, shard: int, num_bytes: int | None = None) -> None:
        start, stop = self.starts[shard : shard + 2].tolist()
        reserve(self.file, start, stop - start)
        os.pwrite(self.file, self.content(shard)[:num_bytes], start)

    def take(self, *wanted: int) -> Take:
        taken = self.cache.take(self.slot, np.array(wanted, np.int64))
        self.held.update(taken.ready.tolist())
        self.held.update(taken.fill.tolist())
        return taken

    def fill(self, *shards: int) -> None:
        """Have all of these, filling what is not there."""
        for shard in shards:
            taken = self.take(shard)
            if len(taken.fill):
                if not (taken.is_there and self.read(shard) == self.content(shard)):
                    self.write(shard)
                self.cache.finish(self.slot, [shard])
            else:
                assert taken.ready.tolist() == [shard], f"shard {shard}: {taken}"
            assert self.read(shard) == self.content(shard)

    def release(self, *shards: int) -> None:
        self.cache.release(self.slot, shards)
        self.held.difference_update(shards)

    def close(self) -> None:
        try:
            self.cache.leave(self.slot)
        finally:
            self.die()

    def die(self) -> None:
        """As after SIGKILL: the locks go with the file, and nothing is said."""
        if self.file >= 0:
            os.close(self.file)
        self.file = -1
        self.cache.close()

    def states(self) -> list[int]:
        return [int(state) for state in self.cache._joined[self.slot].table.state]


def blocks(directory: Path) -> int:
    """Bytes of the blocks that all cache files in a directory have."""
    return sum(path.stat().st_blocks * 512 for path in cache_root(directory).glob("*.image"))
