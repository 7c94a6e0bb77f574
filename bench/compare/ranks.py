"""Take one turn of one loader: a process for each rank, begun and ended together, watched from here.

The processes are those of `bench.engine.turn_process`. This process waits meanwhile; its own memory and time are in no
figure.
"""

import contextlib
import importlib
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.engine.turn_process import PRELOAD, Meet, TimeLimit, TurnProcess, meet, move_on
from bench.loaders.registry import LOADERS
from bench.reports.summary import setting_text
from bench.tools.processes import ProcessTree, shared_memory_bytes
from dali_pipes.errors import PipesError

if TYPE_CHECKING:
    from bench.compare.turn import RankTurn, TurnJob


TIMEOUT_S = 1800.0
"""Of a turn, by default: a hundred times what one takes on the few thousand samples that most runs read."""
PLACES = {
    "open": "where it opens the loader",
    "drawn": "the end of its first epoch",
    "steady": "the start of the timed epochs",
    "end": "their end",
    "close": "where it closes the loader",
    "done": "its end",
}
"""Where ranks wait for each other, in their order, for errors."""
WATCH_S = 1.0
"""Between two looks at memory, in epochs that are not timed: a look takes 50 ms a process, from one of the cores."""
MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What all ranks measured, and the memory that they took together."""

    ranks: tuple["RankTurn", ...]
    start_mib: float
    """Of all processes before the loader was made, shared pages divided among them."""
    peak_mib: float
    """The most that was seen in the first epoch, once a second, and when all epochs are over; cold: then only."""
    shared_memory_mib: float
    """How much fuller ``/dev/shm`` was at most: cache files, batches on their way from workers."""


def run_turn(jobs: Sequence["TurnJob"], *, bystanders: Collection[int] = (), timeout_s: float | None = None) -> Turn:
    """Take one turn.

    Args:
        jobs: One a rank.
        bystanders: Processes below this one that are no part of it; see `ProcessTree`.
        timeout_s: How long it may take, from the start of its processes; ``None``: as long as it takes.

    Raises:
        PipesError: If a rank ends before it is through, or takes too long; names loader and setting.
        Exception: What a rank raised.
    """
    limit = TimeLimit(timeout_s)
    tree = ProcessTree(bystanders={*bystanders, os.getpid()})
    with contextlib.ExitStack() as stack:
        ranks = [
            stack.enter_context(
                TurnProcess(
                    _run_rank, job, rank, os.getpid(), tuple(bystanders),
                    name=f"rank {rank} of loader '{job.spec}' ({setting_text(job.setting.to_json())})",
                )
            )
            for rank, job in enumerate(jobs)
        ]  # fmt: skip
        _gather(ranks, "open", limit)
        start, start_shared = tree.pss_bytes(), shared_memory_bytes()
        peak, peak_shared = start, start_shared
        move_on(ranks)
        is_warm = jobs[0].setting.cache == "warm"
        while is_warm and limit.left_s() and not meet(ranks, "drawn", timeout_s=min(WATCH_S, limit.left_s())):
            peak, peak_shared = max(peak, tree.pss_bytes()), max(peak_shared, shared_memory_bytes())
        _gather(ranks, "drawn", limit)
        move_on(ranks)
        # Nothing is looked at between epochs: a loader that is ahead of them would decode meanwhile, off the clock.
        for place in ("steady", "end") if is_warm else ():
            _gather(ranks, place, limit)
            move_on(ranks)
        # What was spent is known by then, and the loader is open.
        _gather(ranks, "close", limit)
        peak, peak_shared = max(peak, tree.pss_bytes()), max(peak_shared, shared_memory_bytes())
        move_on(ranks)
        _gather(ranks, "done", limit)
        return Turn(
            ranks=tuple(rank.result for rank in ranks),
            start_mib=start / MIB,
            peak_mib=peak / MIB,
            shared_memory_mib=(peak_shared - start_shared) / MIB,
        )


def _gather(ranks: Sequence[TurnProcess], place: str, limit: TimeLimit) -> None:
    if not meet(ranks, place, timeout_s=limit.left_s()):
        late = next(rank for rank in ranks if rank.at != place)
        raise PipesError(
            f"{late.name} hangs, or needs longer: {limit.timeout_s:g} s after the turn began it had not come to "
            f"'{place}', {PLACES[place]}; give turns more with --timeout-s, or leave the loader out"
        )


def _run_rank(meet: Meet, job: "TurnJob", rank: int, main_pid: int, bystanders: tuple[int, ...]) -> "RankTurn":
    """The part of one rank, in its process."""
    _import_libraries(job.spec.name)
    _take_device(job.options.device, rank)
    from bench.compare.turn import time_rank

    tree = ProcessTree(root=main_pid, bystanders={*bystanders, main_pid}) if rank == 0 else None
    return time_rank(job, meet=meet, tree=tree)


def _import_libraries(name: str) -> None:
    """What the loader will import, before the clock starts; most is there already."""
    entry = LOADERS[name]
    importlib.import_module(entry.module)
    for package in (*entry.requires, *(() if entry.decodes else PRELOAD)):
        importlib.import_module(package)


def _take_device(device: str, rank: int) -> None:
    """Start on a GPU of the rank's own, where there are as many, as a training's rank does before it opens a loader."""
    import torch

    if device != "cpu" and torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())
        torch.cuda.synchronize()
