"""Note when a loop asked for each batch and got it, and meanwhile how busy DALI's threads were."""

import contextlib
import threading
import time
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

SAMPLE_S = 0.02
"""Seconds between two looks at DALI's threads; one takes some 20 us for each thread."""
_TASKS = Path("/proc/self/task")


@dataclass(kw_only=True)
class EpochSteps:
    """The times of one epoch's batches, in seconds of `time.perf_counter`."""

    epoch: int
    started: float
    ended: float = 0.0
    asked: "array[float]" = field(default_factory=lambda: array("d"))
    """When the loop asked for each batch; the last entry is the question after the last batch."""
    came: "array[float]" = field(default_factory=lambda: array("d"))
    num_samples: int = 0


class StepClock:
    """A context manager that looks at DALI's threads in a thread of its own, until its end.

    The loop calls `begin_epoch`, then `came` and `ask` for each batch, and `end_epoch`.
    """

    def __init__(self) -> None:
        self.epochs: list[EpochSteps] = []
        self.at = array("d")
        """When DALI's threads were looked at, in seconds of `time.perf_counter`."""
        self.on_core_s = array("d")
        """Seconds that they had been on a core until then, all together."""
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="profile-clock", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._thread.join()

    def begin_epoch(self, epoch: int, started: float) -> None:
        """An epoch began at ``started``, when its first batch was asked for."""
        self.epochs.append(EpochSteps(epoch=epoch, started=started))
        self.epochs[-1].asked.append(started)

    def came(self, num_samples: int) -> None:
        """A batch is there."""
        self.epochs[-1].came.append(time.perf_counter())
        self.epochs[-1].num_samples += num_samples

    def ask(self) -> None:
        """The step is over."""
        self.epochs[-1].asked.append(time.perf_counter())

    def end_epoch(self) -> None:
        """There was no further batch."""
        self.epochs[-1].ended = time.perf_counter()

    def _look(self) -> None:
        seconds: dict[int, float] = {}  # a thread that ended keeps its seconds: a sum never falls
        is_dali: dict[int, bool] = {}
        while not self._is_over.wait(SAMPLE_S):
            now = time.perf_counter()
            is_dali = {number: is_dali[number] if number in is_dali else _is_dali(number) for number in _threads()}
            times = _times_of(number for number, is_theirs in is_dali.items() if is_theirs)
            seconds.update({number: on_core_s for number, (on_core_s, _) in times.items()})
            self.at.append(now)
            self.on_core_s.append(sum(seconds.values()))


def dali_thread_times() -> dict[int, tuple[float, float]]:
    """Read the times of DALI's threads: number -> seconds on a core, seconds ready without a free core."""
    return _times_of(filter(_is_dali, _threads()))


def _threads() -> list[int]:
    return [int(task.name) for task in _TASKS.iterdir()]


def _is_dali(number: int) -> bool:
    # A thread may end meanwhile, as the threads of a segment do.
    with contextlib.suppress(OSError):
        return (_TASKS / str(number) / "comm").read_text().startswith("[DALI]")
    return False


def _times_of(threads: Iterable[int]) -> dict[int, tuple[float, float]]:
    found = {}
    for thread in threads:
        with contextlib.suppress(OSError, ValueError):
            on_core, queued, *_ = (int(text) for text in (_TASKS / str(thread) / "schedstat").read_text().split())
            found[thread] = on_core / 1e9, queued / 1e9
    return found
