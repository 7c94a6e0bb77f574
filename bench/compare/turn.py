"""Take one turn of one loader: one process for each rank, which open a loader and draw its epochs as a training does.

`run_turn` runs in the command's process. It starts the ranks' processes (`bench.engine.turn_process`), lets them begin
and end together, and watches their memory. Its own memory and time are not part of any figure.

`_run_rank` runs in the process of a rank, with a clock at every step. The times are those that a training step would
see: a batch has arrived when it lies on the step's device and one value of each of its parts was read.
"""

import contextlib
import importlib
import os
import statistics
import threading
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
import torch

from bench.compare.settings import DataFacts, TurnSetting
from bench.engine.turn_process import DONE, PRELOAD, Meet, TurnProcess, end_of, fork_server, meet, move_on
from bench.loaders.protocol import PARTS, BenchBatch, BenchLoader, LoaderOptions, num_rows
from bench.loaders.registry import LOADERS, LoaderSpec, Prepared, open_loader
from bench.tools.gateway import read_counter
from bench.tools.processes import ProcessTree, shared_memory_bytes
from bench.tools.step import Step, open_step
from dali_pipes.errors import PipesError
from dali_pipes.store.urls import resolve_shards

TIMEOUT_S = 1800.0
"""Default limit of a turn: a hundred times what one takes on the few thousand samples that most runs read."""
WATCH_S = 1.0
"""Seconds between two looks at memory. One look costs 50 ms of a core for each process, so timed epochs have none."""
MIB = 1 << 20


class RankPace(NamedTuple):
    """Two barriers of all ranks; it is sent to their processes when these start.

    DLIO has the same: a barrier after each step (argonne-lcf/dlio_benchmark 2.0.0, ``dlio_benchmark/main.py``,
    ``_train``). There all ranks have the same number of steps. Here loaders may cut a rank's last batches otherwise, so
    ranks wait for each other until the first one has no more batches.
    """

    starts: Barrier
    steps: Barrier

    @classmethod
    def of(cls, num_ranks: int, context: ForkServerContext) -> "RankPace | None":
        """Return the pace of this many ranks; ``None`` if a single one waits for nobody."""
        return cls(context.Barrier(num_ranks), context.Barrier(num_ranks)) if num_ranks > 1 else None

    def begin_epoch(self) -> None:
        if self.starts.wait() == 0:
            self.steps.reset()
        self.starts.wait()

    def end_step(self) -> None:
        """Wait until all ranks have taken the step, if all are still in their epoch."""
        with contextlib.suppress(threading.BrokenBarrierError):
            self.steps.wait()

    def end_epoch(self) -> None:
        """Let the other ranks take their last steps alone."""
        self.steps.abort()


@dataclass(frozen=True, kw_only=True)
class TurnJob:
    """The task of a turn, as it is sent to the turn's processes."""

    spec: LoaderSpec
    setting: TurnSetting
    options: LoaderOptions
    """The options of the run, before those of the setting and the loader."""
    epochs: int
    """Timed epochs after the first; a cold turn has none."""
    urls: tuple[str, ...]
    """All shards. Each rank reads every ``ranks``-th one: no loader distributes samples, all take shards."""
    prepared: tuple[Prepared | None, ...]
    endpoint: str | None = None
    counter: Path | None = None
    """The file in which the gateway counts bytes, if there is a gateway."""
    in_step: bool = False

    def __str__(self) -> str:
        return f"loader '{self.spec}' ({self.setting})"

    def urls_of(self, rank: int) -> tuple[str, ...]:
        return self.urls[rank :: self.setting.ranks]


class TimedEpoch(NamedTuple):
    num_samples: int
    elapsed_s: float
    """From asking for the first batch to learning that the epoch is over."""
    waits_s: tuple[float, ...]
    """Seconds for each batch, from the request to its arrival. A first epoch's first wait starts before the loader is
    made."""
    end_s: float
    """From asking for a further batch to learning that the epoch is over."""
    first_samples: int
    first_step_s: float
    computed_s: float
    """How long the emulated steps really took, the first one included."""


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """The measurements of one rank over one or more epochs."""

    epochs: tuple[TimedEpoch, ...]
    cpu_s: float | None = None
    """CPU time of all processes of the turn; only the first rank measures it."""
    num_bytes: int | None = None
    """Bytes of all answers through the gateway, if there is one; only the first rank measures it."""

    @property
    def num_samples(self) -> int:
        return sum(epoch.num_samples for epoch in self.epochs)

    @property
    def elapsed_s(self) -> float:
        return sum(epoch.elapsed_s for epoch in self.epochs)

    @property
    def waits_s(self) -> list[float]:
        return [wait for epoch in self.epochs for wait in epoch.waits_s]


@dataclass(frozen=True, kw_only=True)
class RankTurn:
    first: Drawn
    steady: Drawn | None
    """The timed epochs after the first; ``None`` in a cold turn."""
    num_workers: int
    decode: str
    device: str
    gives: tuple[str, ...]

    @property
    def timed(self) -> Drawn:
        return self.steady or self.first


@dataclass(frozen=True, kw_only=True)
class LoaderTurn:
    """The measurements of all ranks, and the memory that they used together."""

    ranks: tuple[RankTurn, ...]
    start_mib: float
    """Memory of all processes before the loader was made; pages that they share are divided among them."""
    peak_mib: float
    """The largest value that was seen: once a second in the first epoch of a warm turn, and after the last epoch."""
    shared_memory_mib: float
    """The largest growth of ``/dev/shm``: cache files, and batches on their way from workers."""


def run_turn(job: TurnJob, *, bystanders: Collection[int] = (), timeout_s: float | None = None) -> LoaderTurn:
    """Take one turn. An error names loader, setting and rank."""
    ends = end_of(timeout_s)
    tree = ProcessTree(bystanders={*bystanders, os.getpid()})

    def look() -> tuple[int, int]:
        return tree.pss_bytes(), shared_memory_bytes()

    with contextlib.ExitStack() as stack:
        pace = RankPace.of(job.setting.ranks, fork_server()) if job.in_step else None
        ranks = [
            stack.enter_context(
                TurnProcess(_run_rank, job, rank, os.getpid(), tuple(bystanders), pace, name=f"rank {rank} of {job}")
            )
            for rank in range(job.setting.ranks)
        ]

        def gather(place: str) -> None:
            if not meet(ranks, place, until=ends):
                late = next(rank for rank in ranks if rank.at != place)
                raise PipesError(
                    f"{late.name} did not come to '{place}' within {timeout_s:g} s of the turn's start; it hangs or "
                    "needs more time: raise --timeout-s, or leave the loader out"
                )

        gather("open")
        looks = [look()]
        move_on(ranks)
        is_warm = job.setting.cache == "warm"
        while is_warm and time.monotonic() < ends and not meet(ranks, "drawn", until=min(end_of(WATCH_S), ends)):
            looks.append(look())
        # Do not look at memory between epochs: a loader that reads ahead would decode meanwhile, outside the clock.
        for place in ("drawn", "steady", "end") if is_warm else ("drawn",):
            gather(place)
            move_on(ranks)
        # Here CPU time is already measured, and the loader is still open.
        gather("close")
        looks.append(look())
        move_on(ranks)
        gather(DONE)
        start, start_shared = looks[0]
        return LoaderTurn(
            ranks=tuple(rank.result for rank in ranks),
            start_mib=start / MIB,
            peak_mib=max(memory for memory, _ in looks) / MIB,
            shared_memory_mib=(max(shared for _, shared in looks) - start_shared) / MIB,
        )


def _run_rank(
    meet: Meet, job: TurnJob, rank: int, main_pid: int, bystanders: tuple[int, ...], pace: RankPace | None
) -> RankTurn:
    """Draw a first epoch, and in a warm turn the timed epochs: the main function of a rank's process.

    It meets the other ranks at ``open``, ``drawn``, ``steady``, ``end`` and ``close``; a cold turn does not come to
    ``steady`` and ``end``. Without a ``pace`` each rank takes its own steps.
    """
    # Import what the loader needs before the clock starts; most of it was imported by the fork server.
    entry = LOADERS[job.spec.name]
    for module in (entry.module, *entry.requires, *(() if entry.decodes else PRELOAD)):
        importlib.import_module(module)
    if job.options.device != "cpu" and torch.cuda.is_available():
        # As in a training, each rank takes a GPU of its own before it opens a loader, if there are enough.
        torch.cuda.set_device(rank % torch.cuda.device_count())
        torch.cuda.synchronize()
    tree = ProcessTree(root=main_pid, bystanders={*bystanders, main_pid}) if rank == 0 else None
    shards = resolve_shards(list(job.urls_of(rank)), endpoint=job.endpoint)
    options = job.spec.apply(job.setting.apply(job.options))
    step = open_step(job.setting.compute_ms / 1000, device=options.delivery_device)

    def spent() -> tuple[float | None, int | None]:
        """CPU seconds so far, and bytes through the gateway, on the rank that measures."""
        if tree is None:
            return None, None
        return tree.cpu_s(), None if job.counter is None else read_counter(job.counter)

    def drawn(start: tuple[float | None, int | None], num_epochs: int, began: float | None = None) -> Drawn:
        epochs = _draw(loader, step, options.batch_size, num_epochs=num_epochs, started=began, pace=pace)
        meet("drawn" if began else "end")
        (cpu_start, bytes_start), (cpu_end, bytes_end) = start, spent()
        return Drawn(
            epochs=tuple(epochs),
            cpu_s=None if cpu_start is None or cpu_end is None else cpu_end - cpu_start,
            num_bytes=None if bytes_start is None or bytes_end is None else bytes_end - bytes_start,
        )

    meet("open")
    start, began = spent(), time.perf_counter()
    with open_loader(job.spec.name, shards, options=options, prepared=job.prepared[rank]) as loader:
        first, steady = drawn(start, 1, began), None
        if job.setting.cache == "warm":
            meet("steady")
            steady = drawn(spent(), job.epochs)
        meet("close")
        return RankTurn(
            first=first,
            steady=steady,
            num_workers=loader.num_workers,
            decode=loader.decode,
            device=loader.device,
            gives=tuple(sorted(LOADERS[job.spec.name].gives & PARTS[options.recipe])),
        )


def _draw(
    loader: BenchLoader,
    step: Step,
    batch_size: int,
    *,
    num_epochs: int,
    started: float | None,
    pace: RankPace | None,
) -> list[TimedEpoch]:
    """Draw epochs, with a step after each batch; the device is idle before and after each epoch.

    ``started`` is the time before the loader was made, for a first epoch, which includes that.
    """
    epochs: list[TimedEpoch] = []
    for _ in range(num_epochs):
        if pace is not None:
            pace.begin_epoch()
        _synchronise()
        waits: list[float] = []
        num_samples, first_samples, first_step_s, computed_s = 0, 0, 0.0, 0.0
        asked = began = time.perf_counter() if started is None else started
        batches = loader.epoch()
        while (batch := next(batches, None)) is not None:
            rows = _deliver(batch, loader.device)
            arrived = time.perf_counter()
            waits.append(arrived - asked)
            step(rows / batch_size)
            asked = stepped = time.perf_counter()
            if not num_samples:
                first_samples, first_step_s = rows, stepped - began
            num_samples += rows
            computed_s += stepped - arrived
            if pace is not None:
                pace.end_step()
                asked = time.perf_counter()
        _synchronise()
        ended = time.perf_counter()
        if pace is not None:
            pace.end_epoch()
        times = ended - began, tuple(waits), ended - asked
        epochs.append(TimedEpoch(num_samples, *times, first_samples, first_step_s, computed_s))
    return epochs


def delivered(loader: BenchLoader) -> Iterator[BenchBatch]:
    """Yield an epoch's batches as a training step gets them; the device is idle before and after the epoch."""
    _synchronise()
    for batch in loader.epoch():
        _deliver(batch, loader.device)
        yield batch
    _synchronise()


def _deliver(batch: BenchBatch, device: str) -> int:
    """Move a batch to the step's device, wait until it is there, and return its number of samples."""
    parts = cast("dict[str, object]", batch)
    for name, part in parts.items():
        if isinstance(part, torch.Tensor):
            moved = part.to(device, non_blocking=True)
            # Read one value of each sample: that fails, or waits, if the data is not there.
            column = moved if name != "encoded" else moved[batch["cu_seqlens"][:-1].long().to(moved.device)]
            while column.ndim > 1:
                column = column[:, 0]
            column.sum()
            parts[name] = moved
    _synchronise()
    return num_rows(batch)


def _synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def figures_of(turn: LoaderTurn, *, setting: TurnSetting, facts: DataFacts) -> dict[str, float | None]:
    """Compute the figures of one turn, by the names of `FIGURES`; ``None`` for those that were not measured."""
    firsts, timed = [rank.first for rank in turn.ranks], [rank.timed for rank in turn.ranks]
    assert timed[0].cpu_s is not None, "the first rank measures"
    num_samples = sum(drawn.num_samples for drawn in timed)
    elapsed_s = max(drawn.elapsed_s for drawn in timed)
    waits_s = [wait for drawn in timed for wait in drawn.waits_s]
    # The smallest wait that at least 50 or 99 percent of the waits do not exceed.
    p50_s, p99_s = np.percentile(waits_s, (50, 99), method="inverted_cdf").tolist()
    waiting_s = sum(waits_s) + sum(epoch.end_s for drawn in timed for epoch in drawn.epochs)
    growth = turn.peak_mib - turn.start_mib
    # AU = total compute time / total running time (mlcommons/storage v2.0, Submission_guidelines.md, "Performance
    # Metrics"), mean of the ranks. Compute time is nominal; running time leaves out the wait for the first batch.
    step_s = setting.compute_ms / 1000
    utilisations = [
        drawn.num_samples / setting.batch_size * step_s / (drawn.elapsed_s - drawn.waits_s[0]) for drawn in timed
    ]
    return {
        "samples_per_s": num_samples / elapsed_s,
        "mib_per_s": len(timed[0].epochs) * facts.shard_bytes / MIB / elapsed_s,
        "cpu_ms_per_sample": 1000 * timed[0].cpu_s / num_samples,
        "time_to_first_batch_s": max(drawn.waits_s[0] for drawn in firsts),
        "batch_p50_ms": 1000 * p50_s,
        "batch_p99_ms": 1000 * p99_s,
        "batch_max_ms": 1000 * max(waits_s),
        "wait_share": waiting_s / sum(drawn.elapsed_s for drawn in timed),
        "accelerator_utilisation": statistics.fmean(utilisations) if step_s > 0 else None,
        "peak_memory_mib": turn.peak_mib,
        "loader_memory_mib": growth,
        "memory_mib_per_sample": growth / (setting.batch_size * setting.ranks),
        "shared_memory_mib": turn.shared_memory_mib,
        "fetched_ratio": _fetched(timed[0], facts),
        "first_fetched_ratio": _fetched(firsts[0], facts),
        "first_epoch_s": max(drawn.elapsed_s for drawn in firsts),
    }


def _fetched(drawn: Drawn, facts: DataFacts) -> float | None:
    return None if drawn.num_bytes is None else drawn.num_bytes / len(drawn.epochs) / facts.needed_bytes
