"""Show a loader's stages as ranges on a time axis: in NVTX, in ``torch.profiler``, and in a Chrome trace.

`dali_pipes.metrics.counts` begins a range for each stage here, a few times per batch. Without a listener this costs the
reading of one variable. Listeners see the whole process, as profilers do: they do not distinguish loaders.
"""

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

MAX_RANGES = 1_000_000
"""Ranges that a trace keeps, the first ones: some 150 MB, a quarter of an hour of a fast loader."""

ANNOTATE_VARIABLE = "DALI_PIPES_ANNOTATE"
# Profilers that listen to NVTX set one of these in the process that they start; DALI checks the same variables.
_INJECTIONS = ("NVTX_INJECTION64_PATH", "NSYS_INJECTION_PATH", "CUDA_INJECTION64_PATH")
_DOMAIN = "dali-pipes"

# What shows ranges: "nvtx", "torch" and "trace" -> a function that makes a range's context of its name.
_listeners: dict[str, Callable[[str], AbstractContextManager[Any]]] = {}
_follows_profiler = True  # the environment does not decide


def begin_range(name: str) -> contextlib.ExitStack | None:
    """Begin a range of this thread; ``close()`` of the result ends it. ``None``: nobody listens."""
    if not _listeners:
        return None
    ends = contextlib.ExitStack()
    for listener in tuple(_listeners.values()):
        ends.enter_context(listener(name))
    return ends


class Trace:
    """Ranges of all threads, for Perfetto, chrome://tracing and other viewers; made by `recording`."""

    def __init__(self) -> None:
        self._zero = time.perf_counter()
        self._ranges: list[tuple[str, int, float, float]] = []  # name, thread, begin, end
        self._threads: dict[int, str] = {}

    @contextlib.contextmanager
    def range(self, name: str) -> Iterator[None]:
        """Show what this thread does inside the context."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, begin, time.perf_counter())

    def add(self, name: str, begin: float, end: float) -> None:
        """Show a range of this thread, from ``begin`` to ``end``, in seconds of `time.perf_counter`."""
        thread = threading.get_native_id()
        if thread not in self._threads:
            self._threads[thread] = threading.current_thread().name
        if len(self._ranges) < MAX_RANGES:
            self._ranges.append((name, thread, begin, end))

    def write(self, path: Path) -> int:
        """Write the events as JSON in the Trace Event Format, and return the number of bytes.

        Times are microseconds. Ranges are complete events ("X"), and the names of threads metadata ("M"):
        https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
        """
        pid = os.getpid()
        events: list[dict[str, Any]] = [
            {"name": "thread_name", "ph": "M", "pid": pid, "tid": thread, "args": {"name": name}}
            for thread, name in self._threads.items()
        ]
        for name, thread, begin, end in self._ranges:
            ts, dur = 1e6 * (begin - self._zero), 1e6 * (end - begin)
            events.append({"name": name, "ph": "X", "pid": pid, "tid": thread, "ts": ts, "dur": dur})
        text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
        return path.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def recording() -> Iterator[Trace]:
    """Record what all loaders of this process do inside this context; one recording at a time."""
    trace = Trace()
    if _listeners.setdefault("trace", trace.range) != trace.range:
        raise RuntimeError("stages are being recorded already; one recording at a time")
    try:
        yield trace
    finally:
        del _listeners["trace"]


def follow_environment() -> None:
    """Show the stages in profilers as the variable ``DALI_PIPES_ANNOTATE`` says: 1 always, 0 never.

    Without it they are shown in NVTX's domain ``dali-pipes`` if a profiler that listens to NVTX started the process,
    and in ``torch.profiler`` while it runs.

    Raises:
        ValueError: If the variable has another value.
    """
    global _follows_profiler
    value = os.environ.get(ANNOTATE_VARIABLE, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{ANNOTATE_VARIABLE} must be 0 or 1, got {value!r}")
    _follows_profiler = not value
    _show("torch", _torch_range, wanted=value == "1")
    _show("nvtx", _nvtx_range, wanted=value == "1" or (not value and any(map(os.environ.get, _INJECTIONS))))


def look_for_profiler() -> None:
    """Notice whether ``torch.profiler`` was started or stopped since the last batch."""
    if _follows_profiler:
        # A flag of torch's; a profiler runs only where torch is imported.
        autograd = sys.modules.get("torch.autograd")
        is_running = autograd is not None and autograd._profiler_enabled()
        if is_running != ("torch" in _listeners):
            _show("torch", _torch_range, wanted=is_running)


def _show(where: str, listener: Callable[[str], AbstractContextManager[Any]], *, wanted: bool) -> None:
    if wanted:
        _listeners[where] = listener
    else:
        _listeners.pop(where, None)


def _nvtx_range(name: str) -> AbstractContextManager[Any]:
    import nvtx  # type: ignore[import-untyped]  # comes with DALI

    shown: AbstractContextManager[Any] = nvtx.annotate(name, domain=_DOMAIN)
    return shown


def _torch_range(name: str) -> AbstractContextManager[Any]:
    from torch.profiler import record_function

    return record_function(f"{_DOMAIN}: {name}")
