"""Damage to a cache directory, and a loader that checks what it finds there."""

import shutil
from pathlib import Path

import numpy as np

from dali_pipes.cache.cache import Verify
from tests.dali_pipes.cache.member import PAGE, Member

NUM_SHARDS = 6


class Loader(Member):
    """A loader of ``NUM_SHARDS`` shards of one page, which checks what is there before it believes it."""

    def __init__(self, directory: Path, key: str, *, verify: Verify = "first") -> None:
        super().__init__(
            directory, pages=NUM_SHARDS, key=key, reserved=NUM_SHARDS, allowed=4 * NUM_SHARDS, verify=verify
        )

    def wrong(self) -> list[int]:
        """The shards whose bytes are not there."""
        return [shard for shard in range(NUM_SHARDS) if self.read(shard) != self.content(shard)]

    def hold_all(self) -> int:
        """Hold all shards; returns the number of those that had to be written."""
        remaining, num_written = list(range(NUM_SHARDS)), 0
        while remaining:
            taken = self.cache.take(np.array(remaining), most=4, most_bytes=4 * PAGE)
            fill = taken.fill.tolist()
            assert fill or len(taken.ready), f"nothing to be had: {taken}"
            for shard in fill:
                if not (taken.is_there and self.read(shard) == self.content(shard)):
                    self.write(shard)
                    num_written += 1
            if fill:
                self.cache.finish(fill)
            remaining = [shard for shard in remaining if shard not in {*fill, *taken.ready.tolist()}]
        return num_written


def fill(directory: Path, *keys: str) -> None:
    """Leave a full cache file of each key."""
    for key in keys:
        loader = Loader(directory, key)
        loader.hold_all()
        loader.close()


def copy(source: Path, target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target, symlinks=True)
