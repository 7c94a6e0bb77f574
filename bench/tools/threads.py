"""Measure what this process and its children spend: CPU time by group of threads, page faults, bytes read.

The kernel keeps a thread's counters only while the thread lives. Some readers live for a second, so the threads are
looked at again and again. What a thread spends after the last look counts in the process's total, and here as "other".
"""

import os
import resource
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import psutil

from bench.tools.processes import child_pids

LOOK_S = 0.05
"""Seconds between two looks: one takes some 0.3 ms."""
GROUPS = ("reader", "executor", "main", "worker", "other")
READER_NAMES = ("PrefetchWorker", "dali-pipes-read")
"""How the names of reading threads begin: those of DALI's readers, and our loader's."""
# Other threads read, too, if they have read this share of all bytes since the last look, and so many: some read /proc.
READER_SHARE = 0.05
READER_BYTES = 1 << 20


class _Thread(NamedTuple):
    cpu_s: float
    bytes_read: int


_UNSEEN = _Thread(0.0, 0)


class _Totals(NamedTuple):
    cpu_s: float
    kernel_s: float
    faults: int
    bytes_read: int


class Spent(NamedTuple):
    """What was spent between the start of `ThreadMeter` and its last look."""

    wall_s: float
    cpu_s: float
    kernel_s: float
    """The part of ``cpu_s`` that the kernel spent."""
    faults: int
    """Minor page faults."""
    bytes_read: int | None
    """Bytes that system calls read, without pages of mapped files. ``None``: the process has a context for asynchronous
    I/O, whose bytes the kernel does not count."""
    group_cpu_s: Mapping[str, float]
    """CPU time by group: reader, the threads with `READER_NAMES` and those that read many bytes, except the main
    thread; executor, DALI's other threads; main, the main thread; worker, child processes; other, the rest, such as
    threads that have ended."""
    num_reading: float
    """Threads that read at the same time, on average; the main thread counts, if it reads many bytes."""


class ThreadMeter:
    """Measure from now on; the children are those that the process has now, and must live until `stop`."""

    def __init__(self) -> None:
        self._children = child_pids()
        self._names: dict[tuple[int, int], str] = {}
        self._readers: set[tuple[int, int]] = set()
        self._reading: list[int] = []
        self._own_cpu_s = 0.0
        self._looked = self._started = time.perf_counter()
        self._last = self._first = self._threads()
        self._totals = self._now()

    def tick(self) -> None:
        """Look at the threads if the last look was some time ago. Call it often, in the main thread."""
        if time.perf_counter() - self._looked >= LOOK_S:
            self._look()

    def stop(self) -> Spent:
        """Look a last time and return what was spent since the start."""
        wall_s, now, own_cpu_s, before = time.perf_counter() - self._started, self._now(), self._own_cpu_s, self._totals
        self._look()
        cpu_s = now.cpu_s - before.cpu_s - own_cpu_s
        groups = dict.fromkeys(GROUPS, 0.0)
        for thread, found in self._last.items():
            groups[self._group_of(thread)] += found.cpu_s - self._first.get(thread, _UNSEEN).cpu_s
        groups["main"] -= own_cpu_s
        groups["other"] += max(0.0, cpu_s - sum(groups.values()))
        num_reading = sum(self._reading) / len(self._reading) if self._reading else 0.0
        return Spent(
            wall_s,
            cpu_s,
            now.kernel_s - before.kernel_s,
            now.faults - before.faults,
            None if _has_asynchronous_io() else now.bytes_read - before.bytes_read,
            groups,
            num_reading,
        )

    def _look(self) -> None:
        cpu_start = time.thread_time()
        found = self._threads()
        before = {thread: self._last.get(thread, _UNSEEN) for thread in found}
        read = {thread: one.bytes_read - before[thread].bytes_read for thread, one in found.items()}
        least = max(READER_BYTES, READER_SHARE * sum(read.values()))
        self._readers.update(thread for thread, num_bytes in read.items() if num_bytes >= least)
        worked = (thread for thread, one in found.items() if one.cpu_s > before[thread].cpu_s)
        self._reading.append(sum(read[thread] >= least or self._is_named_reader(thread) for thread in worked))
        self._last = {**self._last, **found}
        self._looked = time.perf_counter()
        self._own_cpu_s += time.thread_time() - cpu_start

    def _group_of(self, thread: tuple[int, int]) -> str:
        pid, number = thread
        if pid != os.getpid():
            return "worker"
        if number == pid:
            return "main"
        if self._is_named_reader(thread) or thread in self._readers:
            return "reader"
        return "executor" if self._names[thread].startswith("[DALI]") else "other"

    def _is_named_reader(self, thread: tuple[int, int]) -> bool:
        return self._names[thread].startswith(READER_NAMES)

    def _threads(self) -> dict[tuple[int, int], _Thread]:
        found = {}
        for pid in (os.getpid(), *self._children):
            for place in Path(f"/proc/{pid}/task").iterdir():
                thread = (pid, int(place.name))
                try:
                    if thread not in self._names:
                        self._names[thread] = _python_name(thread) or (place / "comm").read_text().strip()
                    cpu_ns = int((place / "schedstat").read_text().split()[0])
                    found[thread] = _Thread(cpu_ns / 1e9, _bytes_read(place))
                except (FileNotFoundError, ProcessLookupError):
                    continue  # it has ended since it was listed
        return found

    def _now(self) -> _Totals:
        own = resource.getrusage(resource.RUSAGE_SELF)
        user_s, kernel_s, faults = own.ru_utime, own.ru_stime, own.ru_minflt
        bytes_read = _bytes_read(Path("/proc/self"))
        for pid in self._children:
            times = psutil.Process(pid).cpu_times()
            user_s, kernel_s = user_s + times.user, kernel_s + times.system
            # After the name, which may hold blanks: the eighth field is the number of minor faults.
            faults += int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[7])
            bytes_read += _bytes_read(Path(f"/proc/{pid}"))
        return _Totals(user_s + kernel_s, kernel_s, faults, bytes_read)


def _python_name(thread: tuple[int, int]) -> str | None:
    """The name of a thread that Python started in this process; the kernel does not know it before Python 3.14."""
    pid, number = thread
    if pid != os.getpid() or number == pid:
        return None
    return next((one.name for one in threading.enumerate() if one.native_id == number), None)


def _has_asynchronous_io() -> bool:
    return any(line.rstrip().endswith("/[aio] (deleted)") for line in Path("/proc/self/maps").open())


def _bytes_read(place: Path) -> int:
    first = (place / "io").read_text().partition("\n")[0]
    return int(first.removeprefix("rchar: "))
