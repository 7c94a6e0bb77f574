"""Report a loader's stages while they run: as seconds busy and waiting, and as ranges in a profiler's timeline.

The modules along the data path mark the begin and end of a stage a few times per batch, never once per sample. Without
a listener a mark costs the reading of three variables. Listeners see the whole process, as profilers do: they cannot
distinguish the threads of different loaders, so measure one loader at a time.
"""

import contextlib
import logging
import os
import sys
import threading
import time
from array import array
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

_log = logging.getLogger(__name__)

Stage = Literal["fetch", "stage", "read", "inputs", "hand-over"]
"""The stages that report, in the order of the data path.

``fetch``: bringing bytes from the store to the cache file, in the stager's threads. ``stage``: the other work of these
threads for a shard: free space, checks, the table. ``read``: the plan, segments, and waiting for the thread that
reads encoded bytes, but not its own work, which goes on beside the step. ``inputs``: arrays and parsed components, and
feeding them to DALI. ``hand-over``: everything else in the loader that the training step waits
for. Decoding runs in DALI's own threads, which are measured from outside; the step is the time between two batches.
"""
Kind = Literal["busy", "waiting"]
Seconds = Mapping[tuple[Stage, Kind], float]
Float64s = npt.NDArray[np.float64]

MAX_RANGES = 4_000_000
"""Ranges that are kept for a timeline: 68 MB, more than an hour of a fast loader."""

ANNOTATE_VARIABLE = "DALI_PIPES_ANNOTATE"
# Profilers that listen to NVTX set one of these in the process that they start; DALI checks the same variables.
_INJECTIONS = ("NVTX_INJECTION64_PATH", "NSYS_INJECTION_PATH", "CUDA_INJECTION64_PATH")
_DOMAIN = "dali-pipes"

_CODES: Mapping[tuple[Stage, Kind], int] = {
    (stage, kind): number
    for number, (stage, kind) in enumerate((s, k) for s in get_args(Stage) for k in get_args(Kind))
}

# The listeners. They are read without a lock: a range keeps those that were there at its begin.
_recorder: "Recorder | None" = None
_nvtx: Any = None  # a domain of the package nvtx
_torch: Any = None  # torch.profiler.record_function, while a profiler runs or if `annotate` turned it on
_asked: bool | None = None  # the argument of `annotate`; None: on if a profiler is found
_changing = threading.Lock()


class Ranges:
    """When stages ran, each range with its stage alone, not those inside it; in columns, of 17 bytes a range.

    A thread's ranges do not overlap. After `MAX_RANGES` no more are kept.
    """

    def __init__(self) -> None:
        self.begins = array("d")
        """Seconds of `time.perf_counter`."""
        self.ends = array("d")
        self._codes = array("B")

    def add(self, what: tuple[Stage, Kind], begin: float, end: float, *, is_loop: bool) -> None:
        """Keep a range; ``is_loop`` if it ran for the thread that iterates."""
        if len(self.begins) < MAX_RANGES:
            self.begins.append(begin)
            self.ends.append(end)
            self._codes.append(_CODES[what] + len(_CODES) * is_loop)

    @property
    def is_full(self) -> bool:
        """Whether there may have been more."""
        return len(self.begins) == MAX_RANGES

    def of(self, stage: Stage, kind: Kind, *, in_loop: bool | None = None) -> tuple[Float64s, Float64s]:
        """Begins and ends of a stage's ranges, float64 [ranges] each; of all threads, or the loop's, or the others'."""
        codes = np.array(self._codes, np.uint8)
        wanted = _CODES[stage, kind] + len(_CODES) * np.array([False, True] if in_loop is None else [in_loop])
        chosen = np.isin(codes, wanted)
        return np.array(self.begins, np.float64)[chosen], np.array(self.ends, np.float64)[chosen]


class Recorder:
    """Seconds that each stage was busy and waiting, summed over threads; made by `recording`.

    While one stage runs inside another, the time counts for the inner stage only. So a thread's stages add up to the
    time that the thread spent in them. A stage that has not ended yet counts up to now.
    """

    def __init__(self, *, with_ranges: bool = False) -> None:
        self.ranges = Ranges() if with_ranges else None
        """When each stage ran; ``None`` unless `recording` was asked for it."""
        self._lock = threading.Lock()
        self._seconds: dict[tuple[Stage, Kind], float] = {}
        self._stacks: dict[int, list[tuple[Stage, Kind]]] = {}
        self._since: dict[int, float] = {}
        self._in_loader_s = 0.0

    def seconds(self) -> dict[tuple[Stage, Kind], float]:
        """Seconds so far, by stage and kind; stages that never ran are left out."""
        with self._lock:
            found = dict(self._seconds)
            now = time.perf_counter()
            for thread, stack in self._stacks.items():
                if stack:
                    found[stack[-1]] = found.get(stack[-1], 0.0) + now - self._since[thread]
        return found

    def in_loader_s(self) -> float:
        """Seconds so far that the iterating thread spent in the loader, in all stages."""
        with self._lock:
            now = time.perf_counter()
            begun = (thread for thread, stack in self._stacks.items() if stack and stack[0][0] == "hand-over")
            return self._in_loader_s + sum(now - self._since[thread] for thread in begun)

    def enter(self, stage: Stage, kind: Kind) -> int:
        """Begin a stage in this thread; returns the depth to pass to `leave`."""
        thread = threading.get_ident()
        with self._lock:
            stack = self._stacks.setdefault(thread, [])
            self._charge(thread, stack)
            stack.append((stage, kind))
            return len(stack) - 1

    def leave(self, depth: int) -> None:
        """End the stage that began at this depth, and inner stages that did not end because of a Ctrl-C."""
        thread = threading.get_ident()
        with self._lock:
            stack = self._stacks.get(thread, [])
            self._charge(thread, stack)
            del stack[depth:]
            if not stack:  # the thread may end, as fetching threads do
                self._stacks.pop(thread, None)
                self._since.pop(thread, None)

    def _charge(self, thread: int, stack: list[tuple[Stage, Kind]]) -> None:
        now = time.perf_counter()
        if stack:
            elapsed = now - self._since[thread]
            self._seconds[stack[-1]] = self._seconds.get(stack[-1], 0.0) + elapsed
            is_loop = stack[0][0] == "hand-over"
            if is_loop:
                self._in_loader_s += elapsed
            if self.ranges is not None:
                self.ranges.add(stack[-1], self._since[thread], now, is_loop=is_loop)
        self._since[thread] = now


@contextlib.contextmanager
def _reported(stage: Stage, kind: Kind) -> Iterator[None]:
    """Report one run of a stage to the listeners that are there at its begin."""
    name = stage if kind == "busy" else f"{stage} waits"
    with contextlib.ExitStack() as ends:
        if (recorder := _recorder) is not None:
            ends.callback(recorder.leave, recorder.enter(stage, kind))
        if (domain := _nvtx) is not None:
            domain.push_range(domain.get_event_attributes(message=name))
            ends.callback(domain.pop_range)
        if (record_function := _torch) is not None:
            ends.enter_context(record_function(f"{_DOMAIN}: {name}"))
        yield


def _span(stage: Stage, kind: Kind) -> AbstractContextManager[None]:
    has_listener = _recorder is not None or _nvtx is not None or _torch is not None
    return _reported(stage, kind) if has_listener else _NOTHING


_NOTHING = contextlib.nullcontext()


def busy(stage: Stage) -> AbstractContextManager[None]:
    """Return a context in which this stage works."""
    return _span(stage, "busy")


def waiting(stage: Stage) -> AbstractContextManager[None]:
    """Return a context in which this stage waits for the one before it."""
    return _span(stage, "waiting")


@contextlib.contextmanager
def recording(*, with_ranges: bool = False) -> Iterator[Recorder]:
    """Measure all loaders of this process inside this context.

    Args:
        with_ranges: Keep also when each stage ran, in `Recorder.ranges`.

    Raises:
        RuntimeError: If another recording is running.
    """
    global _recorder
    with _changing:
        if _recorder is not None:
            raise RuntimeError("stages are being recorded already; one recording at a time")
        recorder = _recorder = Recorder(with_ranges=with_ranges)
    try:
        yield recorder
    finally:
        _recorder = None


def annotate(wanted: bool | None = None) -> None:
    """Turn on or off the display of stages in profilers: NVTX's domain ``dali-pipes``, and ``torch.profiler``.

    Args:
        wanted: With ``None``, the default, NVTX is on if a profiler that listens to it started the process, and
            ``torch.profiler`` while it runs.
    """
    global _asked, _nvtx, _torch
    with _changing:
        _asked = wanted
        wants_nvtx = wanted if wanted is not None else any(os.environ.get(name) for name in _INJECTIONS)
        _nvtx = _nvtx_domain() if wants_nvtx else None
        _torch = _record_function() if wanted else None


def follow_environment() -> None:
    """Follow the variable ``DALI_PIPES_ANNOTATE``, 1 or 0, unless `annotate` was called with a bool.

    Raises:
        ValueError: If the variable has another value.
    """
    if _asked is not None:
        return
    value = os.environ.get(ANNOTATE_VARIABLE, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{ANNOTATE_VARIABLE} must be 0 or 1, got {value!r}")
    annotate(value == "1" if value else None)


def look_for_profiler() -> None:
    """Notice whether ``torch.profiler`` was started or stopped since the last batch."""
    global _torch
    if _asked is not None:
        return
    # A flag of torch's; a profiler runs only where torch is imported.
    autograd = sys.modules.get("torch.autograd")
    is_there = autograd is not None and autograd._profiler_enabled()
    if is_there != (_torch is not None):
        _torch = _record_function() if is_there else None


def _nvtx_domain() -> Any:
    try:
        import nvtx  # type: ignore[import-untyped]  # comes with DALI
    except ImportError:
        _log.warning("no NVTX ranges: the package nvtx is not installed; install: pip install nvtx")
        return None
    return nvtx.get_domain(_DOMAIN)


def _record_function() -> Any:
    from torch.profiler import record_function

    return record_function
