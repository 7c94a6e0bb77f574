"""Random damage to a cache directory, and a loader that checks what it finds there."""

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np

from dali_pipes.cache.cache import NodeCache, Verify
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
            taken = self.cache.take(self.slot, np.array(remaining), most=4, most_bytes=4 * PAGE)
            fill = taken.fill.tolist()
            assert fill or len(taken.ready), f"nothing to be had: {taken}"
            for shard in fill:
                if not (taken.is_there and self.read(shard) == self.content(shard)):
                    self.write(shard)
                    num_written += 1
            if fill:
                self.cache.finish(self.slot, fill)
            remaining = [shard for shard in remaining if shard not in {*fill, *taken.ready.tolist()}]
        return num_written


def fill(directory: Path, *keys: str) -> None:
    """Leave a full cache file of each key."""
    for key in keys:
        loader = Loader(directory, key)
        loader.hold_all()
        loader.close()


def replace_by(kind: str, path: Path) -> None:
    """Put something else in a file's place."""
    path.unlink()
    if kind == "empty":
        path.touch()
    elif kind == "other":
        path.write_bytes(b"\x81" * 70_000)
    else:
        assert kind == "nothing", kind


KINDS = ["empty", "other", "nothing"]
_NUMBERS = [0, 1, -1, 2, 7, 255, 256, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, -(2**63)]


def change(path: Path, draw: random.Random) -> str:
    """Change some bytes or numbers of a file, mostly at the beginning of its columns, or its length."""
    size = path.stat().st_size
    how = draw.choice(["flip", "flip", "flip", "number", "number", "cut", "extend"])
    if how in ("cut", "extend"):
        to = draw.randrange(size) if how == "cut" else size + draw.randrange(1, 10_000)
        os.truncate(path, to)
        return f"{path.name}: {size} bytes -> {to}"
    done = []
    with path.open("r+b") as stream:
        for _ in range(draw.choice([1, 1, 1, 2, 5, 40])):
            page = draw.randrange(max(1, min(size // PAGE, 10))) * PAGE
            position = min(page + draw.choice([draw.randrange(64), draw.randrange(PAGE)]), max(0, size - 8))
            stream.seek(position)
            old = stream.read(8)
            new = bytearray(old)
            if how == "flip" and new:
                new[0] ^= 1 << draw.randrange(8)
            elif how == "number":
                new[:] = draw.choice(_NUMBERS).to_bytes(8, "little", signed=True)[: len(new)] if new else b""
            stream.seek(position)
            stream.write(new)
            done.append(f"{position}: {old.hex()} -> {bytes(new).hex()}")
    return f"{path.name}: {'; '.join(done)}"


def copy(source: Path, target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target, symlinks=True)


def damage(root: Path, draw: random.Random) -> str:
    """Damage one file of a cache directory, or two; returns what was done."""
    told = []
    for _ in range(draw.choice([1, 1, 1, 2])):
        names = sorted(root.iterdir())
        weights = [6 if path.suffix == ".table" else 5 if path.name == "slots" else 1 for path in names]
        (path,) = draw.choices(names, weights)
        if path.stat().st_size and draw.random() < 0.85:
            told.append(change(path, draw))
        else:
            kind = draw.choice(KINDS)
            replace_by(kind, path)
            told.append(f"{path.name}: {kind}")
    return ", ".join(told)


def trial(template: Path, directory: Path, seed: int, keys: tuple[str, str]) -> None:
    """Damage a copy of a cache directory, and run a loader of each key there."""
    draw = random.Random(seed)
    copy(template, directory)
    (root,) = directory.iterdir()
    told = damage(root, draw)
    order = draw.sample(keys, 2)
    close: list[Callable[[], None]] = []
    for key in order:
        loader = Loader(directory, key)
        loader.hold_all()
        assert loader.wrong() == [], f"seed {seed}: {told}"
        if draw.random() < 0.5:
            close.append(loader.close)
        else:
            draw.choice([loader.close, loader.die])()
    for each in close:
        each()
    cache = NodeCache(directory)
    cache.status()
    cache.clear()
    cache.close()
