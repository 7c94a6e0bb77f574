"""Run a part of a turn in a process of its own, which is started for it, watched from here, and gone afterwards.

By default its process is forked from a server that has loaded torch, DALI and the loaders' libraries, has used none of
them and started no thread. So a turn meets nothing that an earlier one left behind, and pays neither for imports nor
for their garbage collection.
"""

import contextlib
import math
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.reduction import ForkingPickler
from typing import Any, TypeVar, cast

from bench.loaders.registry import LOADERS, available_loaders
from bench.tools.processes import end_with_main
from dali_pipes.errors import PipesError
from dali_pipes.progress import follow_parent

PRELOAD = (
    "bench.engine.surviving_server",
    "torch",
    "torchvision",
    "webdataset",
    "aistore",
    "nvidia.dali.fn",
    "nvidia.nvimgcodec",
    "dali_pipes.iterator",
    "dali_pipes.graph.pipelines",
    "bench.loaders.transforms",
)
DONE = "done"
END_S = 10.0
"""A process has this long to end by itself before it is killed."""

Meet = Callable[[str], None]
"""Called in the process with the name of a place; returns when all processes of the turn have come there."""
Result = TypeVar("Result")


def fork_server() -> ForkServerContext:
    """Start the server that turns are forked from. It also forks the workers of loaders that use a fork server."""
    context = multiprocessing.get_context("forkserver")
    installed = [LOADERS[name] for name, missing in available_loaders().items() if missing is None]
    modules = [module for entry in installed for module in (entry.module, *entry.requires)]
    context.set_forkserver_preload([*PRELOAD, *modules])
    with _ctrl_c_is_ours():
        forkserver.ensure_running()
    return context


@contextlib.contextmanager
def _ctrl_c_is_ours() -> Iterator[None]:
    """Processes that start inside never receive Ctrl-C, not even while they import: the command ends them.

    The command itself receives it afterwards.
    """
    resource_tracker.ensure_running()  # it would let the signal through when it is started
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # started processes inherit it
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class TurnProcess:
    """One process of a turn and the pipe to it; a context manager that ends it.

    In the process ``function(meet, *arguments)`` is called; both go through pickle. ``name`` is for errors. ``fresh``
    starts a new interpreter instead of a fork of the server: for benchmarks that measure memory.
    """

    def __init__(self, function: Callable[..., Any], *arguments: Any, name: str, fresh: bool = False) -> None:
        context: ForkServerContext | SpawnContext
        context = multiprocessing.get_context("spawn") if fresh else fork_server()
        self.name = name
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=_run,
            args=(theirs, os.getpid(), {} if fresh else server_state(), function, arguments),
            name="bench-turn",
        )
        try:
            with _ctrl_c_is_ours():
                self.process.start()
        except BaseException:  # Ctrl-C came meanwhile: no `with` block ends the process
            if self.process.pid is not None:
                self.process.kill()
            raise
        theirs.close()
        self.at: str | None = None
        self.result: Any = None

    def hear(self) -> None:
        """Receive the next message: the place that the process has come to, its result, or its error to raise."""
        try:
            what, value = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            self.process.join(END_S)
            raise PipesError(
                f"{self.name} ended with exit status {self.process.exitcode} before it finished; -9 means that it was "
                "killed, for example because memory ran out"
            ) from None
        if what == "failed":
            raise value
        self.at, self.result = what, value

    def __enter__(self) -> "TurnProcess":
        return self

    def __exit__(self, *_: object) -> None:
        if self.at == DONE:
            self.pipe.close()
            self.process.join(END_S)
        if self.process.is_alive():
            self.process.terminate()
            self.process.join(END_S)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.pipe.close()


def end_of(timeout_s: float | None) -> float:
    """The time of ``time.monotonic()`` at which a limit from now ends; ``None``: never."""
    return math.inf if timeout_s is None else time.monotonic() + timeout_s


def call_apart(
    function: Callable[..., Result], *arguments: Any, name: str, timeout_s: float | None = None, fresh: bool = False
) -> Result:
    """Call an importable function in a process of its own; its arguments and its result go through pickle.

    Raises:
        PipesError: If the process ends early or takes too long, or for an unexpected exception in it; names it.
        Exception: A project's error or ``ValueError`` that the function raised.
    """
    ends = end_of(timeout_s)
    with TurnProcess(_call, function, name, arguments, name=name, fresh=fresh) as process:
        if not meet([process], DONE, until=ends):
            raise PipesError(f"{name} did not finish within {timeout_s:g} s; it hangs or needs more time")
        return cast("Result", process.result)


def meet(processes: Sequence[TurnProcess], place: str, *, until: float = math.inf) -> bool:
    """Wait until all processes are at ``place``; return false if they are not there at the time ``until``."""
    while away := {process.pipe: process for process in processes if process.at != place}:
        heard = wait(list(away), timeout=None if math.isinf(until) else max(0.0, until - time.monotonic()))
        if not heard:
            return False
        # A process that failed is heard before the others that only wait for it.
        for pipe in heard:
            away[pipe].hear()  # type: ignore[index]
    return True


def move_on(processes: Sequence[TurnProcess]) -> None:
    """Let processes go on from the place where they met."""
    for process in processes:
        process.at = None
        process.pipe.send(None)


def _call(meet: Meet, function: Callable[..., Any], name: str, arguments: Sequence[Any]) -> Any:
    try:
        return function(*arguments)
    except (PipesError, ValueError):
        raise
    except Exception as exc:
        raise PipesError(f"{name} failed: {type(exc).__name__}: {exc}") from exc


def _run(
    pipe: Connection,
    main_pid: int,
    state: dict[str, Any],
    function: Callable[..., Any],
    arguments: Sequence[Any],
) -> None:
    """The main function of a turn's process."""
    follow_parent()
    take_server(state)
    end_with_main(main_pid)

    def meet(place: str) -> None:
        pipe.send((place, None))
        pipe.recv()

    message: tuple[str, Any]
    try:
        message = (DONE, function(meet, *arguments))
    except Exception as exc:  # noqa: BLE001 (whatever it is, the command reports it)
        message = ("failed", exc)
        try:
            ForkingPickler.loads(ForkingPickler.dumps(exc))
        except Exception:  # noqa: BLE001 (it cannot be sent: any class may fail in its own way; send its text)
            message = ("failed", PipesError(f"{type(exc).__name__}: {exc}"))
    with contextlib.suppress(EOFError, OSError):  # the command may be gone
        pipe.send(message)
        pipe.recv()  # until the command has it


# Note [one fork server]: a process that was forked from the server does not know where the server is, and would start
# one of its own for its workers, with seconds of imports in the time to the first batch. Python has no public way to
# tell it. So we pass the address on, and leave out the check whether the server still runs, which only its parent may
# make. With a Python that keeps these elsewhere, a process starts its own server again. Python 3.11, 3.12 and 3.13 have
# the address; the key came after them.
_SERVER_FIELDS = ("_forkserver_address", "_forkserver_authkey")


def server_state() -> dict[str, Any]:
    """Return what a forked process must know of the server that it came from."""
    server = forkserver._forkserver
    return {name: getattr(server, name) for name in _SERVER_FIELDS if hasattr(server, name)}


def take_server(state: dict[str, Any]) -> None:
    """Make this process fork its workers from the given server."""
    if "_forkserver_address" not in state:
        return
    server = forkserver._forkserver
    for name, value in state.items():
        setattr(server, name, value)
    server.ensure_running = lambda: None  # type: ignore[method-assign]
