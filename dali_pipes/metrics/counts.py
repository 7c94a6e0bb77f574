"""Count what one loader does, and time its stages, so cheaply that it always counts: a few additions a batch.

Every number has one writer at a time, and any thread may read it: a reader never sees a number go backwards. The
figures of `Loader.stats`, ``dali-pipes profile`` and the lines on long waits read these numbers.

What takes long is reported as a span of OpenTelemetry, if the program uses it. Nothing here imports OpenTelemetry: a
program that exports spans has imported its API, and no other program pays for it.
"""

import contextlib
import logging
import sys
import threading
import time
import traceback
from collections.abc import Iterator

from dali_pipes import profiling
from dali_pipes.errors import printable

_log = logging.getLogger(__name__)

LONG_WAIT_S = 10.0
"""A wait that takes so long is worth a line in the log: the longest step of a healthy job is far shorter."""
# A wait that takes so long becomes a span.
_SPAN_S = 1.0
_TRACER = "dali_pipes"
_STAGES = ("hand-over", "inputs", "read", "wait for shards", "wait for bytes", "wait for decoding")


class _Clock:
    """Seconds of the thread that iterates, by stage. While a stage runs inside another, the inner one counts alone."""

    def __init__(self) -> None:
        # One value, so that a reader in another thread sees all of it: seconds by stage, the stage that runs now (-1:
        # none), and since when.
        self.state: tuple[tuple[float, ...], int, float] = ((0.0,) * len(_STAGES), -1, 0.0)

    def switch(self, stage: int) -> int:
        """Let another stage run from now on; return the one that ran."""
        seconds, running, since = self.state
        now = time.perf_counter()
        if running >= 0:
            seconds = (*seconds[:running], seconds[running] + now - since, *seconds[running + 1 :])
        self.state = (seconds, stage, now)
        return running


class Stage:
    """One stage of the thread that iterates: a context in which it runs.

    ``advice`` is logged, once, when a wait has taken `LONG_WAIT_S`. After a Ctrl-C between begin and end the stage
    around this one ends it.
    """

    __slots__ = ("_advice", "_clock", "_entered", "_is_wait", "_number", "_told_s", "name")

    def __init__(self, name: str, clock: _Clock, *, advice: str | None = None) -> None:
        self.name, self._clock, self._advice = name, clock, advice
        self._number, self._is_wait = _STAGES.index(name), name.startswith("wait for ")
        # The stage around it, the range that is shown.
        self._entered: list[tuple[int, contextlib.ExitStack | None]] = []
        self._told_s = 0.0

    def seconds(self) -> float:
        """Seconds so far, also while the stage runs."""
        seconds, running, since = self._clock.state
        total = seconds[self._number]
        # A stage that ends between these lines has taken less than they say: then the number stands still for a moment.
        self._told_s = max(self._told_s, total if running != self._number else total + time.perf_counter() - since)
        return self._told_s

    def __enter__(self) -> None:
        shown = profiling.begin_range(self.name)
        self._entered.append((self._clock.switch(self._number), shown))

    def __exit__(self, *_: object) -> None:
        since = self._clock.state[2]
        outer, shown = self._entered.pop()
        self._clock.switch(outer)
        if shown is not None:
            shown.close()
        if self._is_wait and (took := self._clock.state[2] - since) >= _SPAN_S:
            report_span("wait", seconds=took, stage=self.name.removeprefix("wait for "))
            if took >= LONG_WAIT_S and self._advice is not None:
                _log.warning("a batch waited %.0f s: %s", took, self._advice)
                self._advice = None


class ThreadsStage:
    """One stage of several threads: a context in which it runs in a thread; the seconds of the threads are added."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._lock = threading.Lock()
        self._seconds = 0.0
        self._since: dict[int, tuple[float, contextlib.ExitStack | None]] = {}  # by thread

    def seconds(self) -> float:
        """Seconds so far, with those of the threads that are in the stage now."""
        with self._lock:
            now = time.perf_counter()
            return self._seconds + sum(now - since for since, _ in self._since.values())

    def __enter__(self) -> None:
        entered = time.perf_counter(), profiling.begin_range(self.name)
        with self._lock:
            self._since[threading.get_ident()] = entered

    def __exit__(self, *_: object) -> None:
        with self._lock:
            since, shown = self._since.pop(threading.get_ident())
            self._seconds += time.perf_counter() - since
        if shown is not None:
            shown.close()


class Counts:
    """What one loader has done since it was made."""

    def __init__(self) -> None:
        self.name = ""
        """The loader's name in metrics, as the user gave it."""
        self.number = 0
        """The loader's number among the open ones of the process, which stands for an empty name."""
        self.samples = 0
        """Samples in delivered batches that count: see `Loader.num_valid`."""
        self.batches = 0
        self.substituted = 0
        """Positions in delivered batches at which another sample replaced a bad one."""
        self.read_bytes: int = 0
        """Encoded bytes of the batches that were read from the cache file."""
        clock = _Clock()
        self.hand_over: Stage = Stage("hand-over", clock)
        """Everything in the loader that the training step waits for, and that no other stage counts."""
        self.inputs: Stage = Stage("inputs", clock)
        """Arrays and parsed components, and feeding them to DALI."""
        self.read: Stage = Stage("read", clock)
        """The plan, and opening segments."""
        self.shard_wait: Stage = Stage("wait for shards", clock)
        """For shards that were not resident. The stager logs long waits: it knows the shards."""
        self.read_wait: Stage = Stage(
            "wait for bytes",
            clock,
            advice="its encoded bytes were resident, and reading them from the cache file took so long; is the disk of "
            "the cache directory busy? `dali-pipes doctor` names it, and Cache(directory=) another one",
        )
        """For the thread that reads encoded bytes."""
        self.decode_wait: Stage = Stage(
            "wait for decoding",
            clock,
            advice="DALI had its bytes, and decoding took so long; `dali-pipes profile` says which stage is slow, and "
            "whether other processes take the cores",
        )
        """For DALI."""
        self.store_retries: int = 0
        self._lock = threading.Lock()

    def in_loader_s(self) -> float:
        """Seconds that the thread that iterates has spent in the loader: the sum of its stages."""
        stages = (self.hand_over, self.inputs, self.read, self.shard_wait, self.read_wait, self.decode_wait)
        return sum(stage.seconds() for stage in stages)

    def add_retry(self) -> None:
        """Count a request to the store that is sent again. Any thread may call this."""
        with self._lock:
            self.store_retries += 1


def report_span(name: str, *, seconds: float, error: BaseException | None = None, **attributes: str | float) -> None:
    """Report a span ``dali_pipes.NAME`` that ends now and took ``seconds``; without OpenTelemetry do nothing.

    Its parent is the current span of the thread, if there is one. Its texts pass `printable`.
    """
    api = sys.modules.get("opentelemetry.trace")
    if api is None:
        return
    try:
        stop = time.time_ns()
        named = {
            f"{_TRACER}.{key}": printable(value) if isinstance(value, str) else value
            for key, value in attributes.items()
        }
        start = stop - int(seconds * 1e9)
        span = api.get_tracer(_TRACER).start_span(f"{_TRACER}.{name}", start_time=start, attributes=named)
        if error is not None:
            trace = "".join(traceback.format_exception(error)).splitlines()
            texts = {"message": printable(str(error)), "stacktrace": "\n".join(map(printable, trace))}
            span.record_exception(error, {f"exception.{name}": text for name, text in texts.items()})
            span.set_status(api.StatusCode.ERROR)
        span.end(end_time=stop)
    except Exception:  # noqa: BLE001 (an exporter's fault must not end a training)
        _log.debug("a span could not be reported", exc_info=True)


@contextlib.contextmanager
def span(name: str) -> Iterator[None]:
    """Report what runs inside this context, or each call of the function that it decorates, as a span."""
    started = time.perf_counter()
    try:
        yield
    except BaseException as exc:
        report_span(name, seconds=time.perf_counter() - started, error=exc)
        raise
    report_span(name, seconds=time.perf_counter() - started)
