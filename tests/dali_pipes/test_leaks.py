"""Loaders leave nothing behind, however they end: no thread, process, descriptor, mapping, nor hold in the cache."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import dali_pipes as dp
from bench.tools.processes import child_pids
from dali_pipes.cache.cache import NodeCache
from dali_pipes.store.cluster import embedded_node
from dali_pipes.store.cluster.ais import AisStore
from tests.shards import fill_bucket

# Threads are joined and children reaped a moment later than what owns them is gone.
SETTLE_S = 120.0


@dataclass(frozen=True)
class Left:
    """What the process, and the cache that it uses, hold now."""

    threads: int
    """Python's."""
    tasks: int
    """The kernel's: DALI's and torch's threads as well."""
    processes: int
    descriptors: int
    mappings: int
    """Of the cache's files: images and state tables."""
    holds: tuple[int, int]
    """Shards that are held, and loaders that are in the cache."""

    @classmethod
    def of(cls, cache_dir: Path) -> Left:
        return cls(
            threads=threading.active_count(),
            tasks=len(list(Path("/proc/self/task").iterdir())),
            processes=len(child_pids()),
            descriptors=len(list(Path("/proc/self/fd").iterdir())),
            mappings=sum(str(cache_dir) in line for line in Path("/proc/self/maps").read_text().splitlines()),
            holds=holds_of(cache_dir),
        )

    def is_within(self, other: Left) -> bool:
        return all(getattr(self, name) <= getattr(other, name) for name in vars(self))


def holds_of(cache_dir: Path) -> tuple[int, int]:
    with contextlib.closing(NodeCache(cache_dir)) as cache:
        shares = cache.status()
    return sum(share.num_held for share in shares), sum(len(share.pids) for share in shares)


Open = Callable[..., Any]


def end_early(open_loader: Open) -> None:
    loader = open_loader()
    for _ in loader:
        break
    loader.close()


def end_two(open_loader: Open) -> None:
    one, other = open_loader(), open_loader(seed=2, batch_size=4)
    for _ in zip(one, other, strict=False):
        pass
    one.close()
    next(other, None)
    other.close()


def end_with(open_loader: Open) -> None:
    with open_loader() as loader:
        assert sum(len(batch["label"]) for (batch,) in loader) == 23


def end_dropped(open_loader: Open) -> None:
    loader: Any = open_loader()
    next(loader)
    # A cycle: it is for the garbage collector.
    held = [loader]
    held.append(held)
    del loader, held
    gc.collect()


def end_in_error(open_loader: Open) -> None:
    with contextlib.suppress(KeyError):
        loader = open_loader()
        for _ in loader:
            raise KeyError("in the loop")
    del loader


def end_resumed(open_loader: Open) -> None:
    with open_loader() as loader:
        next(loader)
        state = loader.state_dict()
        list(loader)
        loader.load_state_dict(state)
        next(loader)
        loader.load_state_dict(state)
        next(loader)
        state = loader.state_dict()
        assert state["delivered"] == 10
    with open_loader(state=state) as loader:
        next(loader)
        assert loader.state_dict()["delivered"] == 15
    with contextlib.suppress(dp.StateError):
        open_loader(state=state | {"selection": "another"})


@pytest.fixture(scope="module")
def node_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("node")


@pytest.fixture(scope="module")
def in_bucket(small_shards: Path, node_dir: Path) -> Iterator[dict[str, Any]]:
    """The same shards in a bucket of a node."""
    with embedded_node.start(node_dir) as node:
        fill_bucket(AisStore(node.endpoint, "small"), small_shards)
        yield {"shards": "ais://small/s-", "endpoint": node.endpoint}


def check(ends: Sequence[Callable[[Open], None]], cache_dir: Path, **options: Any) -> None:
    """Run all endings twice to create DALI's pools and the like, then twice again: the second time leaves nothing."""
    settings = {
        "graph": dp.segmentation(crop=16),
        "batch_size": 5,
        "device": "cpu",
        "decode": dp.Decode(threads=2),
        "seed": 1,
    }

    def open_loader(**changes: Any) -> dp.Loader:
        return dp.loader(**(settings | {"cache": dp.Cache(directory=cache_dir)} | options | changes))

    for end in [*ends, *ends]:
        end(open_loader)
    before = settled(cache_dir)
    for end in [*ends, *ends]:
        end(open_loader)
    after = settled(cache_dir, within=before)
    assert after.is_within(before), f"loaders left {after}, before them there was {before}"
    assert after.holds == (0, 0)
    assert after.mappings == 0


def settled(cache_dir: Path, *, within: Left | None = None) -> Left:
    """What is left when nothing changes any more, or is no more than ``within``."""
    deadline, last = time.monotonic() + SETTLE_S, None
    while True:
        # What the SDK keeps of a cluster's connections is a cycle, and ends with the garbage.
        gc.collect()
        found = Left.of(cache_dir)
        if (found.is_within(within) if within is not None else found == last) or time.monotonic() > deadline:
            return found
        last = found
        time.sleep(0.1)


def test_loaders_over_a_directory_leave_nothing(small_shards: Path, tmp_path: Path) -> None:
    ends = [end_early, end_two, end_with, end_dropped, end_in_error, end_resumed]
    check(ends, tmp_path, shards=small_shards)


def test_loaders_over_a_bucket_leave_nothing(in_bucket: dict[str, Any], tmp_path: Path) -> None:
    """Connections, too; in windows, so that shards come and go."""
    check([end_dropped, end_resumed], tmp_path, shuffle=dp.Shuffle(window_bytes=30_000), **in_bucket)
