"""Wait for a store that is away: how long, with which pauses, and what the user is told meanwhile.

A cluster restarts, rebalances or limits its rate. A request that fails because of this is sent again until it
succeeds, or until `Patience.patience_s` have passed without progress. A `Waiting` counts the time of one request.

The patience is a value of the context (`use_patience`), not an argument of each function: a command or a loader sets it
once, and every store that it opens keeps the value that it found, also in other threads and processes.
"""

import contextlib
import contextvars
import logging
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

from dali_pipes.arguments import as_number
from dali_pipes.errors import printable

_log = logging.getLogger(__name__)

PATIENCE_S = 600.0
"""A cluster's restart takes a minute, the replacement of a node some minutes."""
_FIRST_PAUSE_S = 0.1
# Shorter waits are not worth a line.
_QUIET_S = 3.0
_TOLD_EACH_S = 60.0

_Arguments = ParamSpec("_Arguments")
_Item = TypeVar("_Item")
_Returned = TypeVar("_Returned")


class InterruptedWaitError(Exception):
    """The thread was told to end while it waited for a store."""


class PatienceOverError(Exception):
    """A store was away for longer than the patience lasts; the text says for how long, why, and what to do."""


def as_seconds(name: str, value: object) -> float:
    """``value``, a number of seconds, 0 or more, as a float: see `dali_pipes.arguments.as_number`."""
    seconds = as_number(name, value)
    if not 0 <= seconds < float("inf"):
        raise ValueError(f"{name} must be 0 or more seconds, and finite, got {value}")
    return seconds


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long to wait for a store that is away."""

    patience_s: float = PATIENCE_S
    """Seconds without progress after which a request fails; 0: the first failure is final."""
    start_s: float = 0.0
    """The same for a cluster that has not answered yet. A wrong address must be told within seconds."""
    longest_pause_s: float = 5.0
    """The pause after n failures is a random time up to ``0.1 * 2 ** n`` seconds, at most this: clients that failed at
    the same time do not come back at the same time."""
    advice: str = "run the command again: what it has written is kept"
    on_retry: Callable[[], None] | None = field(default=None, compare=False)
    """Called for each request that failed, by the thread that is about to send it again."""

    def __post_init__(self) -> None:
        for name in ("patience_s", "start_s", "longest_pause_s"):
            object.__setattr__(self, name, as_seconds(name, getattr(self, name)))


IMPATIENT = Patience(patience_s=0.0)

# What the log has said of waits: one line a minute for each endpoint, however many requests wait.
_told_at: dict[str, float] = {}
_away: set[str] = set()

_current: contextvars.ContextVar[Patience | None] = contextvars.ContextVar("patience", default=None)
# Any of these ends the waits of a thread: that of its own group, the last one, or of a thread that waits for the group.
_endings: contextvars.ContextVar[tuple[threading.Event, ...]] = contextvars.ContextVar("endings", default=())
_POLL_S = 0.1


def current_patience() -> Patience:
    """The patience that stores take when they are opened."""
    return _current.get() or Patience()


@contextlib.contextmanager
def use_patience(patience: Patience) -> Iterator[None]:
    """Give the stores that are opened in this block a patience."""
    token = _current.set(patience)
    try:
        yield
    finally:
        _current.reset(token)


def pause(seconds: float) -> None:
    """Sleep, but wake up when this thread is told to end.

    Raises:
        InterruptedWaitError: If this thread, or the one that waits for it, is told to end.
    """
    endings, end = _endings.get(), time.monotonic() + seconds
    if not endings:
        time.sleep(seconds)  # in the main thread; Ctrl-C ends it
        return
    while not is_told_to_end():
        if (left := end - time.monotonic()) <= 0:
            return
        endings[-1].wait(left if len(endings) == 1 else min(left, _POLL_S))
    raise InterruptedWaitError


def is_told_to_end() -> bool:
    """Whether this thread, or one that waits for it, is told to end: then requests end, too."""
    return any(ending.is_set() for ending in _endings.get())


@contextlib.contextmanager
def waits_ended_by(ending: threading.Event) -> Iterator[None]:
    """End the waits and requests of this block, and of threads that it starts, when ``ending`` is set."""
    token = _endings.set((*_endings.get(), ending))
    try:
        yield
    finally:
        _endings.reset(token)


def in_threads(function: Callable[[_Item], _Returned], items: Iterable[_Item], *, num_threads: int) -> list[_Returned]:
    """Call ``function`` for each item, several at a time; returns the results in the items' order.

    The first error is raised, and ends the others' waits. The threads are daemons: a program that ends does not wait
    for them, and they also work for a thread that goes on when the main thread has ended, which executors do not.
    """
    given, ending = list(items), threading.Event()
    if len(given) <= 1 or num_threads == 1:
        return [function(item) for item in given]
    results: dict[int, _Returned] = {}
    errors: list[BaseException] = []
    numbers = iter(range(len(given)))  # one thread at a time gets a number: the iterator is C code

    def work() -> None:
        with waits_ended_by(ending):
            for number in numbers:
                if ending.is_set():
                    return
                try:
                    results[number] = function(given[number])
                except BaseException as exc:  # noqa: BLE001 (raised in the caller)
                    errors.append(exc)
                    ending.set()

    threads = [
        threading.Thread(target=contextvars.copy_context().run, args=(work,), name="dali-pipes-ask", daemon=True)
        for _ in range(min(num_threads, len(given)))
    ]
    try:
        for number, thread in enumerate(threads):
            try:
                thread.start()
            except RuntimeError:  # the process may not start more threads: those that it has do the work
                del threads[number:]
                break
        if not threads:
            work()
        for thread in threads:
            thread.join()
    finally:  # Ctrl-C
        ending.set()
    if errors:
        raise errors[0]
    return [results[number] for number in range(len(given))]


class PatientThreads(ThreadPoolExecutor):
    """A pool of threads with the caller's patience. An exception in its ``with`` block ends their waits at once."""

    def __init__(self, num_threads: int) -> None:
        super().__init__(num_threads)
        self._is_ending = threading.Event()

    def submit(
        self, function: Callable[_Arguments, _Returned], /, *args: _Arguments.args, **kwargs: _Arguments.kwargs
    ) -> "Future[_Returned]":
        context = contextvars.copy_context()
        context.run(_endings.set, (*_endings.get(), self._is_ending))
        call: Any = context.run
        future: Future[_Returned] = super().submit(call, function, *args, **kwargs)
        return future

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._is_ending.set()
        self.shutdown(cancel_futures=kind is not None)


class Waiting:
    """Counts the time for which one request waits for ``whom``, an endpoint of a ``service``.

    The time starts with the first failure after the last progress.
    """

    def __init__(self, patience: Patience, whom: str, *, service: str = "AIStore") -> None:
        self._patience, self._whom = patience, f"{service} at {whom}"
        self._kind = "cluster" if service == "AIStore" else "server"
        self.num_failures = 0
        """Failures since the last progress after which there was a pause."""
        self._since: float | None = None

    @property
    def waited_s(self) -> float:
        """Seconds since the first failure after the last progress."""
        return 0.0 if self._since is None else time.monotonic() - self._since

    def next_pause_s(self, cause: str, *, retry_after_s: float = 0.0, has_answered: bool = True) -> float | None:
        """Count a failure; return the seconds to pause before the next attempt, or ``None`` if the patience is over.

        The server asked for a pause of ``retry_after_s``. While the pauses go on, the log has a line once a minute.
        """
        now = time.monotonic()
        if self._since is None:
            self._since = now
        limit_s = self._patience.patience_s if has_answered else self._patience.start_s
        left_s = self._since + limit_s - now
        if left_s <= 0:
            _away.discard(self._whom)
            return None
        pause_s = max(self.brief_pause_s(), retry_after_s)
        waited_s = now - self._since
        if waited_s >= _QUIET_S and now - _told_at.get(self._whom, float("-inf")) >= _TOLD_EACH_S:
            _told_at[self._whom] = now
            _away.add(self._whom)
            _log.warning(
                "waiting for %s for %.0f s so far, up to %.0f s without progress: %s",
                self._whom, waited_s, limit_s, printable(cause),
            )  # fmt: skip
        return min(pause_s, left_s)

    def brief_pause_s(self) -> float:
        """Count a failure that another rule limits: the seconds to pause before the next attempt."""
        self.num_failures += 1
        if self._patience.on_retry is not None:
            self._patience.on_retry()
        longest_s = min(self._patience.longest_pause_s, _FIRST_PAUSE_S * 2.0 ** min(self.num_failures, 10))
        return random.SystemRandom().uniform(0, longest_s)  # no seed of a job makes its ranks wait alike

    def over(self, cause: str) -> PatienceOverError:
        """The error for a patience at its end."""
        return PatienceOverError(
            f"given up after {self.num_failures + 1} attempts in {self.waited_s:.1f} s without progress "
            f"(patience: {self._patience.patience_s:g} s), the last one: {cause}; is the {self._kind} well? "
            f"{self._patience.advice}"
        )

    def progress(self) -> None:
        """Begin anew: the request succeeded, or brought bytes."""
        if self._since is not None and self._whom in _away:
            _away.discard(self._whom)
            _log.warning("%s answers again: going on after %.0f s", self._whom, self.waited_s)
        self._since, self.num_failures = None, 0


def is_outage_told() -> bool:
    """Whether a cluster is away now, and the log has said so."""
    # A request that its caller gave up in the middle of an outage never tells its end.
    now = time.monotonic()
    return any(now - _told_at[whom] < 2 * _TOLD_EACH_S for whom in list(_away))
