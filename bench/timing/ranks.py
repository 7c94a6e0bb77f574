"""A turn in fresh processes, one a rank: begun and ended together, watched from here, gone when it is over.

Each turn starts from the same state: a process forked from a server that has torch, DALI and the loaders' libraries
loaded, has used none of them and started no thread. So no turn finds what an earlier one left behind, neither memory
that was not given back nor a library's first use, and no loader pays for imports. This process waits meanwhile; its own
memory and time are in no figure.
"""

import contextlib
import importlib
import math
import multiprocessing
import os
import signal
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from typing import TYPE_CHECKING, Any

from bench.loaders import LOADERS, available_loaders
from bench.timing.processes import ProcessTree, end_with_main, shared_memory_bytes
from bench.timing.settings import setting_text
from dali_pipes.errors import PipesError

if TYPE_CHECKING:
    from bench.timing.turn import RankTurn, TurnJob

__all__ = ["TIMEOUT_S", "Turn", "rank_context", "run_turn"]

PRELOAD = (
    "torch",
    "torchvision",
    "webdataset",
    "aistore",
    "nvidia.dali.fn",
    "dali_pipes.open_loader",
    "dali_pipes.graph.pipelines",
    "bench.transforms",
    "bench.timing.turn",
)
TIMEOUT_S = 1800.0
"""Of a turn, unless told otherwise: a hundred times what one takes on the few thousand samples that most runs read."""
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
END_S = 10.0
MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Turn:
    """All ranks' parts, and the memory that they took together."""

    ranks: tuple["RankTurn", ...]
    start_mib: float
    """Of all processes before the loader was made, shared pages divided among them."""
    peak_mib: float
    """The most that was seen in the first epoch, once a second, and when all epochs are over; cold: then only."""
    shared_memory_mib: float
    """How much fuller ``/dev/shm`` was at most: images, batches on their way from workers."""


def rank_context() -> ForkServerContext:
    """The server that ranks are forked from, running; workers that loaders start by a fork server come from it too."""
    context = multiprocessing.get_context("forkserver")
    # Workers that peers start are forked from it, too, and then import nothing either.
    installed = [LOADERS[name].module for name, missing in available_loaders().items() if missing is None]
    context.set_forkserver_preload([*PRELOAD, *installed])
    forkserver.ensure_running()
    return context


def run_turn(jobs: Sequence["TurnJob"], *, bystanders: Collection[int] = (), timeout_s: float | None = None) -> Turn:
    """Do one turn.

    Args:
        jobs: One a rank.
        bystanders: Processes below this one that are no part of it; see `ProcessTree`.
        timeout_s: How long it may take, from the start of its processes; ``None``: as long as it takes.

    Raises:
        PipesError: If a rank ends before it is through, or takes too long; names loader and setting.
        Exception: What a rank raised.
    """
    context = rank_context()
    limit = _Limit(timeout_s)
    tree = ProcessTree(bystanders={*bystanders, os.getpid()})
    with contextlib.ExitStack() as stack:
        ranks = [stack.enter_context(_Rank(context, job, rank, tuple(bystanders))) for rank, job in enumerate(jobs)]
        _meet(ranks, "open", limit)
        start, start_shared = tree.pss_bytes(), shared_memory_bytes()
        peak, peak_shared = start, start_shared
        _go(ranks)
        is_warm = jobs[0].setting.cache == "warm"
        while is_warm and limit.left_s() and not _met(ranks, "drawn", timeout_s=min(WATCH_S, limit.left_s())):
            peak, peak_shared = max(peak, tree.pss_bytes()), max(peak_shared, shared_memory_bytes())
        _meet(ranks, "drawn", limit)
        _go(ranks)
        # Nothing is looked at between epochs: a loader that is ahead of them would decode meanwhile, off the clock.
        for place in ("steady", "end") if is_warm else ():
            _meet(ranks, place, limit)
            _go(ranks)
        # What was spent is known by then, and the loader is open.
        _meet(ranks, "close", limit)
        peak, peak_shared = max(peak, tree.pss_bytes()), max(peak_shared, shared_memory_bytes())
        _go(ranks)
        _meet(ranks, "done", limit)
        return Turn(
            ranks=tuple(rank.result for rank in ranks),
            start_mib=start / MIB,
            peak_mib=peak / MIB,
            shared_memory_mib=(peak_shared - start_shared) / MIB,
        )


class _Limit:
    """How long a turn may take, from now."""

    def __init__(self, timeout_s: float | None) -> None:
        self.timeout_s = math.inf if timeout_s is None else timeout_s
        self._ends = time.monotonic() + self.timeout_s

    def left_s(self) -> float:
        """Infinite where there is none; 0 when it is over."""
        return max(0.0, self._ends - time.monotonic())


class _Rank:
    """A rank's process and the pipe to it; a context manager that ends it."""

    def __init__(self, context: ForkServerContext, job: "TurnJob", rank: int, bystanders: tuple[int, ...]) -> None:
        self.name = f"rank {rank} of loader '{job.spec}' ({setting_text(job.setting.to_json())})"
        self.pipe, theirs = context.Pipe()
        arguments = (theirs, job, rank, os.getpid(), bystanders, _server_state())
        self.process = context.Process(target=_run_rank, args=arguments, name=f"bench-rank-{rank}")
        self.process.start()
        theirs.close()
        self.at: str | None = None
        self.result: Any = None

    def hear(self) -> None:
        """Take the next message: where it is, what it has got or what went wrong.

        Raises:
            PipesError: If it has ended.
        """
        try:
            what, value = self.pipe.recv()
        except EOFError:
            self.process.join(END_S)
            raise PipesError(
                f"{self.name} ended with exit status {self.process.exitcode} before it was through; -9 is a kill, for "
                "want of memory say"
            ) from None
        if what == "failed":
            raise value
        self.at = what
        if what == "done":
            self.result = value

    def __enter__(self) -> "_Rank":
        return self

    def __exit__(self, *_: object) -> None:
        if self.at == "done":
            self.pipe.close()
            self.process.join(END_S)
        if self.process.is_alive():
            self.process.terminate()
            self.process.join(END_S)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.pipe.close()


def _meet(ranks: Sequence[_Rank], place: str, limit: _Limit) -> None:
    if not _met(ranks, place, timeout_s=limit.left_s()):
        late = next(rank for rank in ranks if rank.at != place)
        raise PipesError(
            f"{late.name} hangs, or needs longer: {limit.timeout_s:g} s after the turn began it had not come to "
            f"'{place}', {PLACES[place]}; give turns more with --timeout-s, or leave the loader out"
        )


def _met(ranks: Sequence[_Rank], place: str, *, timeout_s: float) -> bool:
    """Whether all ranks are at ``place``, after so much time at most."""
    deadline_s = time.monotonic() + timeout_s
    while away := {rank.pipe: rank for rank in ranks if rank.at != place}:
        left_s = max(0.0, deadline_s - time.monotonic())
        heard = wait(list(away), timeout=None if math.isinf(left_s) else left_s)
        if not heard:
            return False
        # One that failed is heard before those that only miss it.
        for pipe in heard:
            away[pipe].hear()  # type: ignore[index]
    return True


def _go(ranks: Sequence[_Rank]) -> None:
    for rank in ranks:
        rank.at = None
        rank.pipe.send(None)


def _run_rank(
    pipe: Connection,
    job: "TurnJob",
    rank: int,
    main_pid: int,
    bystanders: tuple[int, ...],
    server_state: dict[str, Any],
) -> None:
    """The process of one rank, from its imports to its last batch."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the command's; it ends us
    _take_server(server_state)
    end_with_main(main_pid)
    try:
        _import_libraries(job.spec.name)
        _take_device(job.options.device, rank)
        from bench.timing.turn import time_rank

        def meet(place: str) -> None:
            pipe.send((place, None))
            pipe.recv()

        tree = ProcessTree(root=main_pid, bystanders={*bystanders, main_pid}) if rank == 0 else None
        result = time_rank(job, meet=meet, tree=tree)
    except Exception as exc:  # noqa: BLE001 (whatever it is, the command says it)
        pipe.send(("failed", _portable(exc)))
    else:
        pipe.send(("done", result))
    with contextlib.suppress(EOFError, OSError):
        pipe.recv()  # until the command has it


# Note [one fork server]: a process that was forked from the server does not know where it is, and would start one of
# its own for its workers, seconds of imports, in the time to the first batch. Python has no public way to tell it. So
# the address is handed on, and the look whether the server still runs, which only its parent may take, is left out;
# with a Python that keeps these elsewhere a rank starts its own again. Python 3.11, 3.12 and 3.13 were seen to have the
# address; the key came after them.
_SERVER_FIELDS = ("_forkserver_address", "_forkserver_authkey")


def _server_state() -> dict[str, Any]:
    server = forkserver._forkserver
    return {name: getattr(server, name) for name in _SERVER_FIELDS if hasattr(server, name)}


def _take_server(state: dict[str, Any]) -> None:
    if "_forkserver_address" not in state:
        return
    server = forkserver._forkserver
    for name, value in state.items():
        setattr(server, name, value)
    server.ensure_running = lambda: None  # type: ignore[method-assign]


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


def _portable(exc: Exception) -> Exception:
    """The exception, or what it says where it cannot be sent."""
    from multiprocessing.reduction import ForkingPickler

    try:
        ForkingPickler.loads(ForkingPickler.dumps(exc))
    except Exception:  # noqa: BLE001 (any class may have its own trouble)
        return PipesError(f"{type(exc).__name__}: {exc}")
    return exc
