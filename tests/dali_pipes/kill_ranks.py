"""Kill ranks at random moments, start them anew, hold every sample that any of them reads against what it must be.

Four rank processes read epoch after epoch of a windowed data set from one cache that holds two fifths of it. Each round
kills one of them with SIGKILL and starts it again.
Shards are written in two halves with a pause between, so that a kill finds extents half filled.
"""

from __future__ import annotations

import collections
import multiprocessing
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import dali_pipes as dp
import dali_pipes.store.local
from dali_pipes.cache.cache import NodeCache
from dali_pipes.cache.files import cache_root
from dali_pipes.order.plan import Plan
from dali_pipes.store.local import LocalFetcher
from tests import loaders
from tests.shards import Sample, make_samples, write_shards

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

    from dali_pipes.fetch.fetcher import Wanted

NUM_SAMPLES, PER_SHARD = 240, 4
WORLD_SIZE, BATCH_SIZE = 4, 3
PAUSE_S = 0.01
PROGRESS_WITHIN_S = 120.0


def make_all_samples() -> list[Sample]:
    """The samples of 60 small shards."""
    return make_samples([(40 + 7 * (i % 5), 33 + 5 * (i % 7)) for i in range(NUM_SAMPLES)])


def summed(components: dp.Components, random: dp.Random) -> dict[str, Any]:
    """Nothing is decoded: which sample it is, and the sums of its files' bytes."""
    from nvidia.dali import fn, types

    names = ("image.jpg", "trimap.png")
    return {
        "ordinal": components.array(lambda batch: batch.ordinals),
        "label": components.label,
        **{name: fn.cast(fn.reductions.sum(components[name], dtype=types.UINT64), dtype=types.INT64) for name in names},
        **{f"length of {name}": components[name].shape() for name in names},
    }


def expected(sample: Sample) -> dict[str, int]:
    """What `summed` gives of it."""
    found = {"label": int(sample.components["cls"])}
    for name in ("image.jpg", "trimap.png"):
        data = sample.components[name]
        found |= {name: sum(data), f"length of {name}": len(data)}
    return found


class HaltingFetcher(LocalFetcher):
    """Writes half of an object, pauses, and writes the whole."""

    def fetch(self, wanted: Sequence[Wanted], *, stopped: Callable[[], bool], num_connections: int = 1) -> bool:
        for one in wanted:
            data = (self._directory / one.name).read_bytes()
            one.extent.write(data[: len(data) // 2], 0)
            time.sleep(PAUSE_S)
            if not super().fetch([one], stopped=stopped):
                return False
        return True


def open_loader(shards: Path, cache_dir: Path, *, rank: int, cache_bytes: int, window: int) -> dp.Loader:
    """A rank's loader; no rank waits for another."""
    return loaders.open_loader(
        shards,
        summed,
        batch_size=BATCH_SIZE,
        rank=rank,
        world_size=WORLD_SIZE,
        seed=5,
        shuffle=dp.Shuffle(window_bytes=window),
        last_batch_policy="DROP",
        outputs=dp.Outputs(),
        cache=dp.Cache(fetchers=3, directory=cache_dir, max_bytes=cache_bytes, show_progress=False),
    )


def read_epoch(
    loader: dp.Loader, wanted: list[dict[str, int]], *, after_batch: Callable[[], None] = lambda: None
) -> None:
    """One epoch of one rank: its samples, each once, each with the bytes that it was packed with."""
    batches = iter(loader)  # starts the next epoch if one has ended
    manifest = loader.parts.inputs.manifest
    plan = Plan(
        shard_bytes=manifest.shard_bytes, shard_samples=manifest.samples, order=loader.delivery.current.feed.plan.order
    )
    steps = plan.steps(loader.parts.batching)
    planned = collections.Counter(np.concatenate([step.ordinals for step in steps]).tolist())
    seen: collections.Counter[int] = collections.Counter()
    for (batch,) in batches:
        for row, ordinal in enumerate(batch["ordinal"].tolist()):
            found = {name: int(batch[name].reshape(len(batch["ordinal"]), -1)[row, 0]) for name in wanted[ordinal]}
            if found != wanted[ordinal]:
                raise AssertionError(f"sample {ordinal}: expected {wanted[ordinal]}, found {found}")
            seen[ordinal] += 1
        after_batch()
    if seen != planned:
        raise AssertionError(f"planned and seen differ: {planned - seen} missing, {seen - planned} too many")


def run_rank(shards: Path, cache_dir: Path, work: Path, rank: int, cache_bytes: int, window: int) -> None:
    """Read epochs until there is a file ``stop``; each batch and each epoch is told by a line."""
    dali_pipes.store.local.LocalFetcher = HaltingFetcher  # type: ignore[misc]
    wanted = [expected(sample) for sample in make_all_samples()]
    with (
        (work / f"rank-{rank}-{os.getpid()}").open("a", buffering=1) as told,
        open_loader(shards, cache_dir, rank=rank, cache_bytes=cache_bytes, window=window) as loader,
    ):
        while not (work / "stop").exists():
            read_epoch(loader, wanted, after_batch=lambda: print("batch", file=told))
            print("epoch", file=told)


@dataclass
class Counts:
    """What was seen."""

    kills: int = 0
    epochs: int = 0
    peak_bytes: int = 0
    cache_bytes: int = 0
    errors: list[str] = field(default_factory=list)


class Ranks:
    """Four rank processes over one cache.

    Args:
        work: A directory for shards and notes.
        cache_dir: Directory of the cache.
    """

    def __init__(self, work: Path, cache_dir: Path) -> None:
        self.work, self.cache_dir = work, cache_dir
        self.shards = work / "shards"
        write_shards(self.shards, make_all_samples(), per_shard=PER_SHARD)
        total = sum(path.stat().st_size for path in self.shards.glob("*.tar"))
        self.cache_bytes, self._window = total * 2 // 5, total // 30
        # From a process that has imported what takes long: a start takes a tenth of a second.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["dali_pipes.iterator", "dali_pipes.graph.pipelines", "tests.loaders"])
        self.processes: dict[int, BaseProcess] = {}

    def start(self, rank: int) -> None:
        """Start a rank, or start it anew."""
        arguments = (self.shards, self.cache_dir, self.work, rank, self.cache_bytes, self._window)
        self.processes[rank] = self._context.Process(target=run_rank, args=arguments, daemon=True)
        self.processes[rank].start()

    def kill(self, rank: int) -> None:
        """Send SIGKILL to a rank, and wait until it has ended."""
        self.processes[rank].kill()
        self.processes[rank].join()

    def batches(self, rank: int) -> int:
        """Batches that the rank's present process has read."""
        path = self.work / f"rank-{rank}-{self.processes[rank].pid}"
        return path.read_text().count("batch") if path.exists() else 0

    def peak(self) -> int:
        """Bytes that the cache file takes now."""
        return sum(path.stat().st_blocks * 512 for path in cache_root(self.cache_dir).glob("*.image"))

    def wait_for_progress(self, counts: Counts) -> None:
        """Until every rank has read a batch more than it has now; an error says which does not, or has ended."""
        before = {rank: self.batches(rank) for rank in self.processes}
        deadline = time.monotonic() + PROGRESS_WITHIN_S
        while late := [rank for rank in self.processes if self.batches(rank) <= before[rank]]:
            counts.peak_bytes = max(counts.peak_bytes, self.peak())
            ended = [rank for rank in self.processes if not self.processes[rank].is_alive()]
            if ended or time.monotonic() > deadline:
                pids = {rank: self.processes[rank].pid for rank in late}
                raise AssertionError(f"ranks {ended} ended, ranks {pids} do not go on")
            time.sleep(0.005)

    def stop(self, counts: Counts) -> None:
        """Let all end their epoch, and themselves."""
        (self.work / "stop").touch()
        for rank, process in self.processes.items():
            process.join(PROGRESS_WITHIN_S)
            if process.exitcode != 0:
                counts.errors.append(f"rank {rank} ended with {process.exitcode}")
        counts.epochs = sum(path.read_text().count("epoch") for path in self.work.glob("rank-*"))

    def close(self) -> None:
        """Kill what is left."""
        for process in self.processes.values():
            if process.is_alive():
                process.kill()
                process.join()


def kill_rounds(work: Path, cache_dir: Path, *, rounds: int, seed: int) -> Counts:
    """Run the ranks, kill one of them ``rounds`` times.

    Raises:
        AssertionError: If a rank read something wrong, ended, or did not go on.
    """
    draw = random.Random(seed)
    ranks = Ranks(work, cache_dir)
    counts = Counts(cache_bytes=ranks.cache_bytes)
    try:
        for rank in range(WORLD_SIZE):
            ranks.start(rank)
        ranks.wait_for_progress(counts)
        for _ in range(rounds):
            deadline = time.monotonic() + draw.uniform(0, 1.0)
            while time.monotonic() < deadline:
                counts.peak_bytes = max(counts.peak_bytes, ranks.peak())
                time.sleep(0.002)
            rank = draw.randrange(WORLD_SIZE)
            ranks.kill(rank)
            counts.kills += 1
            ranks.start(rank)
            ranks.wait_for_progress(counts)
        ranks.stop(counts)
        # Nobody is there now: nothing is left half filled, and the blocks are those of whole shards.
        cache = NodeCache(cache_dir)
        (status,) = cache.status()
        cache.close()
        if status.num_held or status.pids or ranks.peak() != status.resident_bytes:
            counts.errors.append(f"left behind: {status}, {ranks.peak()} bytes of blocks")
    finally:
        ranks.close()
    return counts
