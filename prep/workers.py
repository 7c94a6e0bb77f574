"""Tasks to results, in processes of our own: no thread holds another's interpreter, and a caller needs no guard.

`multiprocessing` starts a process by importing the caller's script again, which a script without ``if __name__ ==
"__main__"`` does not survive, or by forking, which a process with threads or a GPU does not. These are interpreters
that import this module. What they are sent is pickled: functions by their names, so only those of modules.

# Note [ends]: Ctrl-C is the owner's, in a process group of their own they do not hear it. They are ended by SIGTERM,
# which unwinds what they are at, so that no half-written file is left. If the owner is killed they notice within half
# a second, by their parent's number.
"""

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self, TypeVar

from dali_pipes.errors import PipesError

__all__ = ["MAX_JOBS", "Report", "Workers", "default_jobs"]

MAX_JOBS = 16
"""By default. More readers than this rarely find a disk, or a network, that keeps up."""

_STOP_TIMEOUT_S = 10.0
_CHECK_S = 0.5
# Of progress, a worker: a terminal shows no more.
_REPORT_S = 0.1

Task = TypeVar("Task")
Result = TypeVar("Result")
Report = Callable[[int], None]
"""Called by a function with how much more of its task is done."""


def default_jobs() -> int:
    """The cores that this process may use, at most `MAX_JOBS`."""
    return max(1, min(MAX_JOBS, len(os.sched_getaffinity(0))))


class Workers:
    """So many processes, started when first needed or by `start`; a context manager. With one job there are none.

    Args:
        jobs: Processes; 1 does everything in this one.
    """

    def __init__(self, jobs: int) -> None:
        self.jobs = jobs
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        """Start them, if that is not done; they get ready while the caller does other things."""
        if self.jobs == 1 or self._processes:
            return
        root = str(Path(__file__).parents[1])  # where the package ``prep`` is, installed or not
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        for _ in range(self.jobs):
            ours, theirs = Pipe()
            with theirs:
                command = [sys.executable, "-P", "-m", "prep.workers", str(theirs.fileno()), str(os.getpid())]
                self._processes.append(
                    subprocess.Popen(  # noqa: S603 (our own interpreter and module)
                        command,
                        pass_fds=[theirs.fileno()],
                        stdin=subprocess.DEVNULL,
                        env=os.environ | {"PYTHONPATH": path},
                        start_new_session=True,  # Note [ends]
                    )
                )
            self._connections.append(ours)

    def map(
        self,
        function: Callable[[Task, Report], Result],
        tasks: Iterable[Task],
        *,
        inline: Callable[[Task], bool] = lambda _: False,
        on_progress: Report = lambda _: None,
    ) -> list[Result]:
        """What ``function`` returns of each task, in the tasks' order; a task is asked for when a process is free.

        Args:
            function: Of a module.
            tasks: Each is pickled, and so is what comes of it.
            inline: Whether a task is done in this process instead: one that would be too large to send.
            on_progress: Called with what the functions report.

        Raises:
            Exception: What a task raised. The others' processes are ended where they stand.
            PipesError: If a process died.
        """
        results: dict[int, Result] = {}
        remaining = enumerate(tasks)
        if self.jobs == 1:
            return [function(task, on_progress) for _, task in remaining]
        idle: list[Connection] = []
        num_busy = 0
        try:
            while True:
                while num_busy < self.jobs and (taken := next(remaining, None)) is not None:
                    number, task = taken
                    if inline(task):
                        results[number] = function(task, on_progress)
                        continue
                    if not idle and not num_busy:
                        self.start()
                        idle = list(self._connections)
                    self._send(idle.pop(), (number, function, task))
                    num_busy += 1
                if not num_busy:
                    return [results[number] for number in range(len(results))]
                for connection in wait(self._connections):
                    assert isinstance(connection, Connection)
                    number, kind, value = self._receive(connection)
                    if kind == "progress":
                        on_progress(value)
                    elif kind == "result":
                        results[number] = value
                        idle.append(connection)
                        num_busy -= 1
                    else:
                        raise value
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End them, and what they are at. Can be called twice."""
        for process in self._processes:
            process.terminate()
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            try:
                process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes, self._connections = [], []

    def _send(self, connection: Connection, message: object) -> None:
        try:
            connection.send(message)
        except OSError as exc:
            raise self._died(connection) from exc

    def _receive(self, connection: Connection) -> tuple[int, str, Any]:
        try:
            received: tuple[int, str, Any] = connection.recv()
        except (OSError, EOFError) as exc:
            raise self._died(connection) from exc
        return received

    def _died(self, connection: Connection) -> PipesError:
        process = self._processes[self._connections.index(connection)]
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_TIMEOUT_S)
        return PipesError(
            f"a worker process ended in the middle of its work, exit status {process.returncode} (-9: killed, by the "
            "kernel where memory ran out); run it again, with fewer --jobs"
        )


def main(argv: Sequence[str]) -> int:
    """Do tasks until the owner hangs up."""
    descriptor, owner = map(int, argv)
    signal.signal(signal.SIGTERM, _unwind)
    threading.Thread(target=_end_with, args=(owner,), daemon=True).start()
    with Connection(descriptor) as connection, contextlib.suppress(EOFError, ConnectionError):
        while True:
            number, function, task = connection.recv()
            report = _Reports(connection, number)
            try:
                result = function(task, report)
                report.flush()
                connection.send((number, "result", result))
            except ConnectionError:
                raise
            except Exception as exc:  # noqa: BLE001 (the owner raises it)
                connection.send((number, "error", _picklable(exc)))
            # What it held is let go before the next is waited for.
            del function, task, report
    return 0


class _Reports:
    """Progress, gathered."""

    def __init__(self, connection: Connection, number: int) -> None:
        self._connection, self._number = connection, number
        self._num, self._told = 0, time.monotonic()

    def __call__(self, num: int) -> None:
        self._num += num
        if time.monotonic() - self._told >= _REPORT_S:
            self.flush()

    def flush(self) -> None:
        if self._num:
            self._connection.send((self._number, "progress", self._num))
        self._num, self._told = 0, time.monotonic()


def _picklable(exc: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(exc))  # noqa: S301 (our own bytes)
    except Exception:  # noqa: BLE001 (some exceptions cannot be made again from their arguments)
        return PipesError(f"{type(exc).__name__}: {exc}")
    return exc


def _unwind(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + signum)


def _end_with(owner: int) -> None:
    while os.getppid() == owner:
        time.sleep(_CHECK_S)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
