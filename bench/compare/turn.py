"""Take one rank's part of a turn: open a loader, draw its epochs as a training does, with a clock at every step.

The times are those that a training step would see: a batch has arrived when it lies on the step's device and a value of
each of its parts was read. All ranks begin an epoch together; `bench.compare.ranks` starts them.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch

from bench.compare.settings import TurnSetting
from bench.loaders.opening import delivery_device, open_loader
from bench.loaders.protocol import BenchBatch, BenchLoader, LoaderOptions, Prepared, num_rows
from bench.loaders.selection import LoaderSpec
from bench.tools.gateway import Traffic, read_traffic
from bench.tools.processes import ProcessTree
from bench.tools.step import Step, open_step
from dali_pipes.store.urls import resolve_shards


@dataclass(frozen=True, kw_only=True)
class TurnJob:
    """The task of one rank, which is sent to its process."""

    spec: LoaderSpec
    urls: tuple[str, ...]
    """Of this rank's shards."""
    endpoint: str | None
    options: LoaderOptions
    setting: TurnSetting
    epochs: int
    """Timed, after the first; none of a cold turn."""
    prepared: Prepared | None = None
    counters: Path | None = None
    """Of the gateway, where there is one."""


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """One or more epochs of one rank."""

    num_samples: int
    num_epochs: int
    elapsed_s: float
    waits_s: tuple[float, ...]
    """One a batch, from asking for it to having it; the first of a first epoch from before the loader is made."""
    ends_s: float
    """Waiting to learn that an epoch is over, all epochs together."""


@dataclass(frozen=True, kw_only=True)
class Spent:
    """CPU time of all processes of the turn, and the traffic through the gateway."""

    cpu_s: float
    traffic: Traffic | None


@dataclass(frozen=True, kw_only=True)
class RankTurn:
    """One rank's measurements. The first rank measures what all of them spent."""

    first: Drawn
    steady: Drawn | None
    """The timed epochs after the first; ``None`` in a cold turn."""
    first_spent: Spent | None
    steady_spent: Spent | None
    num_workers: int
    decode: str
    device: str
    gives: tuple[str, ...]


def time_rank(job: TurnJob, *, meet: Callable[[str], None], tree: ProcessTree | None) -> RankTurn:
    """Draw a first epoch, and in a warm turn those that are timed.

    Args:
        job: What to do.
        meet: Called with a place, it returns when all ranks have come there: ``open``, before the loader is made;
            ``drawn``, after the first epoch; in a warm turn ``steady`` and ``end``, before and after the timed epochs;
            and ``close``, before the loader is closed.
        tree: For the rank that measures what all of them spend; ``None`` for the others.
    """
    shards = resolve_shards(list(job.urls), endpoint=job.endpoint)
    options = job.spec.apply(job.setting.apply(job.options))
    step = open_step(job.setting.compute_ms / 1000, device=delivery_device(options.device))
    meet("open")
    before, started = _spent(job, tree), time.perf_counter()
    with open_loader(job.spec.name, shards, options=options, prepared=job.prepared) as loader:
        first = draw_epoch(loader, step, batch_size=options.batch_size, started=started)
        meet("drawn")
        first_spent = _since(before, _spent(job, tree))
        steady = steady_spent = None
        if job.setting.cache == "warm":
            meet("steady")
            before = _spent(job, tree)
            steady = _joined([draw_epoch(loader, step, batch_size=options.batch_size) for _ in range(job.epochs)])
            meet("end")
            steady_spent = _since(before, _spent(job, tree))
        meet("close")
        return RankTurn(
            first=first,
            steady=steady,
            first_spent=first_spent,
            steady_spent=steady_spent,
            num_workers=loader.num_workers,
            decode=loader.decode,
            device=loader.device,
            gives=tuple(sorted(loader.gives)),
        )


def draw_epoch(loader: BenchLoader, step: Step, *, batch_size: int, started: float | None = None) -> Drawn:
    """Draw one epoch, with a step after each batch; the device is idle at both ends.

    Args:
        loader: Open.
        step: What is done with a batch.
        batch_size: Of a whole one.
        started: What the clock showed when the loader was about to be made, for an epoch that includes that.
    """
    _synchronise()
    asked = began = time.perf_counter() if started is None else started
    waits: list[float] = []
    num_samples = 0
    batches = loader.epoch()
    while (batch := next(batches, None)) is not None:
        rows = _deliver(batch, loader.device)
        arrived = time.perf_counter()
        waits.append(arrived - asked)
        num_samples += rows
        step(rows / batch_size)
        asked = time.perf_counter()
    _synchronise()
    ended = time.perf_counter()
    return Drawn(
        num_samples=num_samples,
        num_epochs=1,
        elapsed_s=ended - began,
        waits_s=tuple(waits),
        ends_s=ended - asked,
    )


def delivered(loader: BenchLoader) -> Iterator[BenchBatch]:
    """An epoch's batches as a training step finds them: on its device, and touched; the device is idle at both ends."""
    _synchronise()
    for batch in loader.epoch():
        _deliver(batch, loader.device)
        yield batch
    _synchronise()


def _joined(epochs: list[Drawn]) -> Drawn:
    return Drawn(
        num_samples=sum(epoch.num_samples for epoch in epochs),
        num_epochs=len(epochs),
        elapsed_s=sum(epoch.elapsed_s for epoch in epochs),
        waits_s=tuple(wait for epoch in epochs for wait in epoch.waits_s),
        ends_s=sum(epoch.ends_s for epoch in epochs),
    )


def _deliver(batch: BenchBatch, device: str) -> int:
    """Bring a batch to where a training step wants it, and read enough of it to find one that is not there yet.

    Returns:
        Its samples.
    """
    parts = cast("dict[str, object]", batch)
    for name, part in parts.items():
        if isinstance(part, torch.Tensor):
            moved = part.to(device, non_blocking=True)
            # One value of each sample.
            column = moved
            while column.ndim > 1:
                column = column[:, 0]
            column.sum()
            parts[name] = moved
    _synchronise()
    return num_rows(batch)


def _spent(job: TurnJob, tree: ProcessTree | None) -> Spent | None:
    if tree is None:
        return None
    return Spent(cpu_s=tree.cpu_s(), traffic=None if job.counters is None else read_traffic(job.counters))


def _since(before: Spent | None, after: Spent | None) -> Spent | None:
    if before is None or after is None:
        return None
    traffic = None if before.traffic is None or after.traffic is None else after.traffic - before.traffic
    return Spent(cpu_s=after.cpu_s - before.cpu_s, traffic=traffic)


def _synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
