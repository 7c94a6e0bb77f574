"""CPU time and memory of a process and of all that it started: what a loader costs, wherever it does its work."""

import os
from collections.abc import Collection
from pathlib import Path

import psutil

__all__ = ["ProcessTree", "child_pids", "shared_memory_bytes"]

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 (looked at, not written to)


def child_pids() -> set[int]:
    """The processes below this one, now."""
    return {child.pid for child in psutil.Process().children(recursive=True)}


class ProcessTree:
    """A process and its descendants.

    Args:
        root: Its number; the calling process where ``None``. Workers that a fork server starts are the server's
            children, so who measures for a rank takes the process that started the server.
        bystanders: Processes that are no part of what is measured, such as an embedded AIS node. They must outlive the
            measurement: the kernel adds the whole CPU time of one that ends to the process that waited for it, this
            one, so a node that spent 30 s in its life and is stopped between two calls of `cpu_s` shows up as 30 s.
    """

    def __init__(self, *, root: int | None = None, bystanders: Collection[int] = ()) -> None:
        self._root = root
        self._bystanders = frozenset(bystanders)

    def cpu_s(self) -> float:
        """Seconds of CPU, user and system, spent so far; the difference of two calls is what was spent between them.

        A process that has ended counts through the one that waited for it, as the kernel adds it there; so a worker
        that lives for one epoch only is counted. The kernel's ticks are 10 ms.
        """
        total = 0.0
        for process in self._processes():
            try:
                times = process.cpu_times()
            except psutil.NoSuchProcess:
                # Ended since it was listed: already, or with the next call, in its parent's figure.
                continue
            total += times.user + times.system + times.children_user + times.children_system
        return total

    def rss_bytes(self) -> int:
        """Resident memory, what is shared counted once for each process that maps it."""
        total = 0
        for process in self._processes():
            try:
                total += process.memory_info().rss
            except psutil.NoSuchProcess:
                continue
        return total

    def pss_bytes(self) -> int:
        """Resident memory, what is shared divided among those that map it: what would be free without them.

        The kernel walks the page tables for it, 50 ms for a process of 800 MB: nothing to ask for while a clock runs.
        Files in shared memory that nobody maps, as this project's image, are not in it; `shared_memory_bytes` is.
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
    """What all files in ``/dev/shm`` take: batches on their way from workers, images, whatever others have there."""
    status = os.statvfs(SHARED_MEMORY)
    return (status.f_blocks - status.f_bfree) * status.f_frsize
