"""Run tasks in worker processes, for work that one Python interpreter cannot share among threads.

The processes are plain interpreters that run this module. `multiprocessing` would either import the caller's script
again, which fails in a script without ``if __name__ == "__main__"``, or fork, which is unsafe in a process with threads
or a GPU. Functions, tasks and results are pickled, so a function must be one of a module.

# Note [ends]: workers have a process group of their own and do not receive Ctrl-C; their owner handles it. The owner
ends them by SIGTERM, which raises SystemExit in the running task, so that no half-written file is left. Between tasks
it kills: an exception in the ``__del__`` of what a task leaves would be printed and lost. If the owner is killed, they
notice within half a second that their parent has changed.
"""

import contextlib
import os
import pickle
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from types import FrameType
from typing import Any, Self, TypeVar

from dali_pipes.errors import PipesError
from dali_pipes.processes.programs import own_program
from dali_pipes.progress import follow_parent

MAX_JOBS = 16
"""The largest default number of processes. Disks and networks are rarely fast enough for more readers."""

_STOP_TIMEOUT_S = 10.0
_CHECK_S = 0.5
_REPORT_S = 0.1  # between two progress messages of one worker: a terminal shows no more

Task = TypeVar("Task")
Result = TypeVar("Result")
Report = Callable[[int], None]
"""A function calls it with the amount of work that it has done since the last call."""


def default_jobs() -> int:
    """The number of cores that this process may use, at most `MAX_JOBS`."""
    return max(1, min(MAX_JOBS, len(os.sched_getaffinity(0))))


class WorkerDiedError(PipesError):
    """A worker process ended while it worked."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status
        """The exit status, or the number of the signal below zero."""


class Workers:
    """Processes that run tasks; they start when first needed, or by `start`. A context manager.

    Args:
        jobs: The number of processes; by default `default_jobs`. With one job, this process does the tasks.
        at_most: An upper limit of the number of processes, such as the number of tasks.
        setup: Each process calls it once, before its first task. Its exception counts as that task's.
        isolated: Use a worker process also for one job: for functions that crash, or write to stderr.
        advice: The end of the error when a process dies: what to do.
        environment: The processes' variables; by default those of this one.
    """

    def __init__(
        self,
        jobs: int | None = None,
        *,
        at_most: int | None = None,
        setup: Callable[[], object] | None = None,
        isolated: bool = False,
        advice: str = "run it again with fewer --jobs",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        if jobs is not None and jobs < 1:
            raise ValueError(f"jobs must be positive, got {jobs}")
        wanted = default_jobs() if jobs is None else jobs
        self.jobs = wanted if at_most is None else max(1, min(wanted, at_most))
        self._setup, self._advice, self._environment = setup, advice, environment
        self._is_local = self.jobs == 1 and not isolated
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        self._names: dict[Connection, str] = {}  # of the tasks in flight

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Start the processes, if they do not run, so that they get ready while the caller does other things."""
        if self._is_local or self._processes:
            return
        for _ in range(self.jobs):
            ours, theirs = Pipe()
            with theirs:
                self._processes.append(
                    subprocess.Popen(  # noqa: S603 (our own interpreter and module)
                        own_program("prep.workers", str(theirs.fileno()), str(os.getpid())),
                        pass_fds=[theirs.fileno()],
                        stdin=subprocess.DEVNULL,
                        env=self._environment,
                        start_new_session=True,  # Note [ends]
                    )
                )
            self._connections.append(ours)
            self._send(ours, self._setup, name="its setup")

    def check_reach(self, directories: Iterable[Path]) -> None:
        """Refuse directories that the workers do not reach; processes of this machine reach all."""

    def map(
        self,
        function: Callable[[Task, Report], Result],
        tasks: Iterable[Task],
        *,
        inline: Callable[[Task], bool] = lambda _: False,
        on_progress: Report = lambda _: None,
        name: Callable[[Task], str] = lambda _: "its task",
        max_ahead: int | None = None,
    ) -> Iterator[Result]:
        """Yield the result of each task, in the tasks' order; a task is taken when a process is free.

        Args:
            function: Called with a task and a `Report`.
            tasks: Each is pickled, and so is its result.
            inline: Whether to do a task in this process instead, for example because it is too large to send.
            on_progress: Called with the amounts that the functions report.
            name: A task's name in the error if its process died, such as ``shard 'a-000000.tar'``.
            max_ahead: The number of tasks that may be started before the first of their results is taken. It limits the
                results that wait in memory; by default there is no limit.

        An error of a task is raised here, and the other processes are ended; so it is with `WorkerDiedError`.
        """
        if self._is_local:
            if self._setup is not None:
                self._setup()
                self._setup = None
            for task in tasks:
                yield function(task, on_progress)
            return
        results: dict[int, Result] = {}
        remaining = enumerate(tasks)
        started = yielded = num_flying = 0
        try:
            while True:
                while num_flying < self._num_at_a_time() and (max_ahead is None or started - yielded < max_ahead):
                    if (taken := next(remaining, None)) is None:
                        break
                    number, task = taken
                    started += 1
                    if inline(task):
                        results[number] = function(task, on_progress)
                    else:
                        self._submit(number, function, task, name(task))
                        num_flying += 1
                if yielded in results:
                    yield results.pop(yielded)
                    yielded += 1
                    continue
                if not num_flying:
                    return
                for number, result in self._wait(on_progress):
                    results[number] = result
                    num_flying -= 1
        except BaseException:
            self._stop_tasks()
            raise

    def _num_at_a_time(self) -> int:
        return self.jobs

    def _submit(self, number: int, function: Callable[[Any, Report], Any], task: object, name: str) -> None:
        self.start()
        connection = next(each for each in self._connections if each not in self._names)
        self._names[connection] = name
        self._send(connection, (number, function, task), name=name)

    def _wait(self, on_progress: Report) -> Iterator[tuple[int, Any]]:
        """Wait for workers; yields number and result of the tasks that are done."""
        for ready in wait(self._connections):
            assert isinstance(ready, Connection)
            try:
                number, kind, value = ready.recv()
            except (OSError, EOFError) as exc:
                raise self._died(ready, self._names.get(ready, "nothing")) from exc
            if kind == "progress":
                on_progress(value)
            elif kind == "result":
                del self._names[ready]
                yield number, value
            else:
                raise value

    def _stop_tasks(self) -> None:
        self.close()

    def close(self) -> None:
        """End the processes and their tasks. Can be called twice."""
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
        self._processes, self._connections, self._names = [], [], {}

    def _send(self, connection: Connection, message: object, *, name: str) -> None:
        try:
            connection.send(message)
        except OSError as exc:
            raise self._died(connection, name) from exc

    def _died(self, connection: Connection, name: str) -> PipesError:
        process = self._processes[self._connections.index(connection)]
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_TIMEOUT_S)
        return WorkerDiedError(
            process.returncode,
            f"a worker process ended while it worked on {name}, exit status {process.returncode} (-9: it was killed, "
            f"for example by the kernel when memory ran out); {self._advice}",
        )


def main(argv: Sequence[str]) -> int:
    """Do tasks until the owner closes the connection."""
    descriptor, owner = map(int, argv)
    follow_parent()
    threading.Thread(target=_end_with, args=(owner,), daemon=True).start()
    with Connection(descriptor) as connection, contextlib.suppress(EOFError, ConnectionError):
        setup = connection.recv()
        while True:
            number, function, task = connection.recv()
            report = _Reports(connection, number)
            try:
                signal.signal(signal.SIGTERM, _unwind)  # Note [ends]
                if setup is not None:
                    setup()
                    setup = None
                result = function(task, report)
                report.flush()
                connection.send((number, "result", result))
            except ConnectionError:
                raise
            except Exception as exc:  # noqa: BLE001 (the owner raises it)
                connection.send((number, "error", _picklable(exc)))
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            del function, task, report  # free the memory before the next task arrives
    return 0


class _Reports:
    """Adds up progress and sends the sum at most every `_REPORT_S`."""

    def __init__(self, connection: Connection, number: int) -> None:
        self._connection, self._number, self._num, self._sent_at = connection, number, 0, time.monotonic()

    def __call__(self, num: int) -> None:
        self._num += num
        if time.monotonic() - self._sent_at >= _REPORT_S:
            self.flush()

    def flush(self) -> None:
        if self._num:
            self._connection.send((self._number, "progress", self._num))
        self._num, self._sent_at = 0, time.monotonic()


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
