"""A loader's stages as they run, to seconds busy and waiting, and to ranges on a profiler's time line.

The modules along the data path say at their borders what begins and ends, a few times a batch and never once a sample.
Where nobody asked, that is a look at one variable. It is process-wide, as profilers are: stages run in threads that
know nothing of each other, and two loaders are told apart by running one.
"""

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Literal

__all__ = [
    "ANNOTATE_VARIABLE",
    "Kind",
    "Recorder",
    "Seconds",
    "Stage",
    "annotate",
    "busy",
    "follow_environment",
    "look_for_profiler",
    "recording",
    "waiting",
]

_log = logging.getLogger(__name__)

Stage = Literal["fetch", "stage", "read", "seam", "hand-over"]
"""Those that say when they are at work, in the order of the data path.

``fetch``: bytes from the store to the image, in the stager's threads. ``stage``: the rest of what these threads do for
a shard: room, checks, the table. ``read``: the plan, segments, encoded bytes. ``seam``: arrays and parsed components,
and handing them to DALI. ``hand-over``: all else in the loader that the training step waits for. Decoding has threads
of DALI's own, which are looked at from outside; the step is what is between two batches.
"""
Kind = Literal["busy", "waiting"]
Seconds = Mapping[tuple[Stage, Kind], float]

ANNOTATE_VARIABLE = "DALI_PIPES_ANNOTATE"
# By these a process finds out that it was started by a profiler which listens to NVTX; DALI looks at the same ones.
_INJECTIONS = ("NVTX_INJECTION64_PATH", "NSYS_INJECTION_PATH", "CUDA_INJECTION64_PATH")
_DOMAIN = "dali-pipes"

# What listens: nothing, or all that `_Span` tells. Read without a lock: a span keeps what it began with.
_recorder: "Recorder | None" = None
_nvtx: Any = None  # a domain of the package nvtx
_torch: Any = None  # torch.profiler.record_function, while somebody profiles or where it was asked for
_asked: bool | None = None  # None: by whether a profiler is there
_is_on = False
_changing = threading.Lock()


class Recorder:
    """Seconds that each stage was busy and waiting, summed over threads; made by `recording`.

    What runs inside another stage counts for the inner one alone: the sum over a thread's stages is the time that it
    spent in them. What has not ended yet counts as far as it has come.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds: dict[tuple[Stage, Kind], float] = {}
        self._stacks: dict[int, list[tuple[Stage, Kind]]] = {}
        self._since: dict[int, float] = {}
        self._in_loader_s = 0.0

    def seconds(self) -> dict[tuple[Stage, Kind], float]:
        """So far, by stage and kind; those that never ran are not in it."""
        with self._lock:
            found = dict(self._seconds)
            now = time.perf_counter()
            for thread, stack in self._stacks.items():
                if stack:
                    found[stack[-1]] = found.get(stack[-1], 0.0) + now - self._since[thread]
        return found

    def in_loader_s(self) -> float:
        """Seconds, so far, that whoever iterates spent in the loader, whatever the loader did meanwhile."""
        with self._lock:
            now = time.perf_counter()
            begun = (thread for thread, stack in self._stacks.items() if stack and stack[0][0] == "hand-over")
            return self._in_loader_s + sum(now - self._since[thread] for thread in begun)

    def enter(self, stage: Stage, kind: Kind) -> int:
        """Begin; returns what `leave` is to be given."""
        thread = threading.get_ident()
        with self._lock:
            stack = self._stacks.setdefault(thread, [])
            self._charge(thread, stack)
            stack.append((stage, kind))
            return len(stack) - 1

    def leave(self, depth: int) -> None:
        """End what began at this depth, and all within it that a Ctrl-C kept from ending."""
        thread = threading.get_ident()
        with self._lock:
            stack = self._stacks.get(thread, [])
            self._charge(thread, stack)
            del stack[depth:]
            if not stack:  # fetching threads come and go
                self._stacks.pop(thread, None)
                self._since.pop(thread, None)

    def _charge(self, thread: int, stack: list[tuple[Stage, Kind]]) -> None:
        now = time.perf_counter()
        if stack:
            elapsed = now - self._since[thread]
            self._seconds[stack[-1]] = self._seconds.get(stack[-1], 0.0) + elapsed
            if stack[0][0] == "hand-over":
                self._in_loader_s += elapsed
        self._since[thread] = now


class _Span:
    """One run of a stage, told to whoever listened when it began."""

    def __init__(self, stage: Stage, kind: Kind) -> None:
        self._stage, self._kind = stage, kind
        self._ends: list[Any] = []

    def __enter__(self) -> None:
        name = self._stage if self._kind == "busy" else f"{self._stage} waits"
        if (recorder := _recorder) is not None:
            depth = recorder.enter(self._stage, self._kind)
            self._ends.append(lambda: recorder.leave(depth))
        if (domain := _nvtx) is not None:
            domain.push_range(domain.get_event_attributes(message=name))
            self._ends.append(domain.pop_range)
        if (record_function := _torch) is not None:
            shown = record_function(f"{_DOMAIN}: {name}")
            shown.__enter__()
            self._ends.append(lambda: shown.__exit__(None, None, None))

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        while self._ends:
            self._ends.pop()()


_NOTHING = contextlib.nullcontext()


def busy(stage: Stage) -> AbstractContextManager[None]:
    """What is done inside is work of this stage."""
    return _Span(stage, "busy") if _is_on else _NOTHING


def waiting(stage: Stage) -> AbstractContextManager[None]:
    """Inside, this stage waits for the one before it."""
    return _Span(stage, "waiting") if _is_on else _NOTHING


@contextlib.contextmanager
def recording() -> Iterator[Recorder]:
    """Measure all loaders of this process meanwhile.

    Raises:
        RuntimeError: If somebody does already.
    """
    global _recorder
    with _changing:
        if _recorder is not None:
            raise RuntimeError("stages are being recorded already; one recording at a time")
        recorder = _recorder = Recorder()
    _update()
    try:
        yield recorder
    finally:
        with _changing:
            _recorder = None
        _update()


def annotate(wanted: bool | None = None) -> None:
    """Whether stages show as ranges in profilers: NVTX's domain ``dali-pipes``, and ``torch.profiler``.

    Args:
        wanted: ``None``, as it is at first: NVTX if the process was started by a profiler that takes it, and
            ``torch.profiler`` while it is at work.
    """
    global _asked, _nvtx, _torch
    with _changing:
        _asked = wanted
        wants_nvtx = wanted if wanted is not None else any(os.environ.get(name) for name in _INJECTIONS)
        _nvtx = _nvtx_domain() if wants_nvtx else None
        _torch = _record_function() if wanted else None
    _update()


def follow_environment() -> None:
    """As `annotate`, by ``DALI_PIPES_ANNOTATE``, 1 or 0, unless `annotate` has said something else.

    Raises:
        ValueError: If the variable says something else.
    """
    if _asked is not None:
        return
    value = os.environ.get(ANNOTATE_VARIABLE, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{ANNOTATE_VARIABLE} must be 0 or 1, got {value!r}")
    annotate(value == "1" if value else None)


def look_for_profiler() -> None:
    """Follow ``torch.profiler``, which may have been started or stopped since the last batch."""
    global _torch
    if _asked is not None:
        return
    # One flag of torch's, where torch is imported: else it could not be at work.
    autograd = sys.modules.get("torch.autograd")
    is_there = autograd is not None and autograd._profiler_enabled()
    if is_there != (_torch is not None):
        with _changing:
            _torch = _record_function() if is_there else None
        _update()


def _update() -> None:
    global _is_on
    with _changing:
        _is_on = _recorder is not None or _nvtx is not None or _torch is not None


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
