"""An event loop for one thread: it drives tasks that wait for sockets.

A *task* is a generator that yields a `Wait` whenever it has to wait. So one thread reads several ranges of several
objects at the same time, and can be stopped at each wait.
"""

import select
import time
from collections.abc import Callable, Generator
from typing import Final, NamedTuple, TypeAlias, TypeVar

STOP_CHECK_S = 0.1

Result = TypeVar("Result")


class Wait(NamedTuple):
    """The event that a task waits for."""

    file: int | None
    """A descriptor; ``None``: wait for the time only."""
    events: int
    """`select.POLLIN` and the like."""
    until: float
    """`time.monotonic()` at which the task gets a `TimeoutError`, or, without a descriptor, continues."""


NOW: Final = Wait(None, 0, 0.0)
"""Continue at once, after the other tasks had a turn."""

Task: TypeAlias = Generator[Wait, None, Result]


class EventLoop:
    """Continues each task as soon as the event that it waits for occurs."""

    def __init__(self) -> None:
        self._waits: dict[Task[None], Wait] = {}

    def start(self, task: Task[None]) -> None:
        """Add a task; tasks may call this too."""
        self._waits[task] = NOW

    def run(self, stopped: Callable[[], bool]) -> bool:
        """Run until all tasks have ended, then return ``True``; return ``False`` as soon as ``stopped()`` is true.

        ``stopped`` is called at least every 100 ms. After a stop, or an exception of a task, all tasks are closed.
        """
        try:
            while self._waits:
                if stopped():
                    return False
                for task, is_late in self._due():
                    self._advance(task, is_late)
            return True
        finally:
            while self._waits:
                self._waits.popitem()[0].close()

    def _due(self) -> list[tuple[Task[None], bool]]:
        poller = select.poll()
        first = time.monotonic() + STOP_CHECK_S
        for wait in self._waits.values():
            if wait.file is not None:
                poller.register(wait.file, wait.events)
            first = min(first, wait.until)
        ready = {file for file, _ in poller.poll(max(0.0, first - time.monotonic()) * 1000)}
        now = time.monotonic()
        # A ready task is not late: after a pause of the whole machine, both conditions hold.
        return [
            (task, wait.file is not None and wait.file not in ready)
            for task, wait in self._waits.items()
            if wait.file in ready or wait.until <= now
        ]

    def _advance(self, task: Task[None], is_late: bool) -> None:
        try:
            self._waits[task] = task.throw(TimeoutError()) if is_late else next(task)
        except StopIteration:
            del self._waits[task]
        except BaseException:
            del self._waits[task]
            raise
