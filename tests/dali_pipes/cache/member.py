"""A loader's dealings with a cache file whose right bytes are known."""

import fcntl
import os
import struct
from pathlib import Path

import numpy as np

from dali_pipes.cache.cache import NodeCache, Verify
from dali_pipes.cache.extents import extent_starts, reserve
from dali_pipes.cache.files import cache_root
from dali_pipes.cache.placement import FreeSpace, Placement
from dali_pipes.cache.share import CacheShare, Take

PAGE = 4096
KEY, OTHER = "a" * 32, "b" * 32


class Member:
    """One loader's share of the cache; it writes and reads real bytes."""

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
        sizes = np.full(pages, PAGE)
        self.cache = CacheShare(
            Placement(space=FreeSpace.of(directory), cache_bytes=allowed * PAGE, keep=keep),
            key=key,
            starts=self.starts,
            sizes=sizes,
            rows=np.arange(pages),
            shard_bytes=sizes,
            index_bytes=0 * sizes,
            source="here",
            group=group,
            reserved=reserved * PAGE,
            verify=verify,
        )
        self.file = self.cache._file
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
        taken = self.cache.take(wanted)
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
                self.cache.finish([shard])
            else:
                assert taken.ready.tolist() == [shard], f"shard {shard}: {taken}"
            assert self.read(shard) == self.content(shard)

    def release(self, *shards: int) -> None:
        self.cache.release(shards)
        self.held.difference_update(shards)

    def close(self) -> None:
        self.cache.close()

    def die(self) -> None:
        """As after SIGKILL: the locks go with the file, and nothing is said."""
        if self.cache._file >= 0:
            os.close(self.cache._file)
            self.cache._file = -1
        NodeCache.close(self.cache)
        self.cache._opened.close()

    def states(self) -> list[int]:
        return [int(state) for state in self.cache._opened.table.state]


def blocks(directory: Path) -> int:
    """Bytes of the blocks that all cache files in a directory have."""
    return sum(map(_allocated, cache_root(directory).glob("*.image")))


def _allocated(path: Path) -> int:
    """As ``st_blocks``, but without the block in which ext4 lists more than four extents of a file."""
    request = bytearray(struct.pack("=QQIIII", 0, 2**64 - 1, 1, 0, 512, 0) + bytes(512 * 56))
    with path.open("rb") as file:
        try:
            fcntl.ioctl(file, 0xC020660B, request)  # FS_IOC_FIEMAP of linux/fiemap.h
        except OSError:
            return path.stat().st_blocks * 512  # shared memory has no such list
    (number,) = struct.unpack_from("=I", request, 20)
    return sum(struct.unpack_from("=Q", request, 32 + 56 * at + 16)[0] for at in range(number))
