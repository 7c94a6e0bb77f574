"""Measure CPU time and memory of a process and all that it started, and end a process together with another."""

import contextlib
import os
import select
import threading
from collections.abc import Collection
from pathlib import Path

import psutil

PAGE = 4096
BLOCK_BYTES = 256 << 20


def touch_memory(num_bytes: int) -> int:
    """Use this much memory once and give it back, so that the next measurement gets pages that the host has backed.

    # Note [cold memory]: some hosts take free pages back from a guest (free page reporting, two seconds after they were
    # freed). The guest then pays for each page as for its first use: 2.3 s of system time a GiB were seen, where 0.35 s
    # is usual. So touch the memory just before the clock starts, in the process that is timed.

    Returns the number of bytes that were touched.
    """
    import numpy as np

    num_bytes = min(num_bytes, psutil.virtual_memory().available // 2)
    # Allocate all blocks first: a block that is freed would be allocated again.
    blocks = [np.empty(min(BLOCK_BYTES, num_bytes - start), np.uint8) for start in range(0, num_bytes, BLOCK_BYTES)]
    for block in blocks:
        block[::PAGE] = 1
    return num_bytes


SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 (looked at, not written to)


def child_pids() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def cpu_s_of(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


class ProcessTree:
    """A process and its descendants.

    Args:
        root: Its number; ``None``: the calling process. Workers that a fork server starts are the server's children,
            so a rank that measures passes the process that started the server.
        bystanders: Processes that are not measured, such as an embedded AIS node. They must outlive the measurement:
            when a process ends, the kernel adds its whole CPU time to the process that waited for it, this one.
    """

    def __init__(self, *, root: int | None = None, bystanders: Collection[int] = ()) -> None:
        self._root = root
        self._bystanders = frozenset(bystanders)

    def cpu_s(self) -> float:
        """Seconds of CPU, user and system, spent so far; take the difference of two calls. The kernel's ticks are 10
        ms.

        The kernel adds a process that has ended to the one that waited for it, so a worker of one epoch is counted,
        too.
        """
        total = 0.0
        for process in self._processes():
            try:
                times = process.cpu_times()
            except psutil.NoSuchProcess:
                # It ended after it was listed. Its time is in its parent's figure now, or at the next call.
                continue
            total += times.user + times.system + times.children_user + times.children_system
        return total

    def pss_bytes(self) -> int:
        """Resident memory, shared pages divided among those that map them: what would be free without the processes.

        The kernel walks the page tables for it, 50 ms for a process of 800 MB, so do not ask while a clock runs. Files
        in shared memory that no process maps do not count; `shared_memory_bytes` has them.
        """
        total = 0
        for process in self._processes():
            try:
                lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
            except (FileNotFoundError, ProcessLookupError):
                continue  # ended since it was listed
            total += next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)
        return total

    def _processes(self) -> list[psutil.Process]:
        root = psutil.Process(self._root)
        return [child for child in [root, *root.children(recursive=True)] if child.pid not in self._bystanders]


def shared_memory_bytes() -> int:
    """Bytes of all files in ``/dev/shm``: cache files, batches on their way from workers, files of other programs."""
    status = os.statvfs(SHARED_MEMORY)
    return (status.f_blocks - status.f_bfree) * status.f_frsize


def end_with_main(main_pid: int) -> None:
    """Make this process, a rank or a worker, end at once when the main process ends, for any reason.

    The parent of ranks and workers is the fork server. It outlives the main process, so it does not help to watch the
    parent, as torch's own watchdog does.
    """

    def exit_after() -> None:
        with contextlib.suppress(ProcessLookupError):
            waiting = select.poll()
            waiting.register(os.pidfd_open(main_pid), select.POLLIN)
            waiting.poll()
        os._exit(1)

    threading.Thread(target=exit_after, name="end-with-main", daemon=True).start()
