"""CPU time and memory of this process and of all that it started: what a loader costs, wherever it does its work."""

from collections.abc import Collection

import psutil

__all__ = ["ProcessTree", "child_pids"]


def child_pids() -> set[int]:
    """The processes below this one, now."""
    return {child.pid for child in psutil.Process().children(recursive=True)}


class ProcessTree:
    """The calling process and its descendants.

    Args:
        bystanders: Processes that are no part of what is measured, such as an embedded AIS node. They must outlive the
            measurement: the kernel adds the whole CPU time of one that ends to the process that waited for it, this
            one, so a node that spent 30 s in its life and is stopped between two calls of `cpu_s` shows up as 30 s.
    """

    def __init__(self, *, bystanders: Collection[int] = ()) -> None:
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

    def _processes(self) -> list[psutil.Process]:
        this = psutil.Process()
        return [this, *(child for child in this.children(recursive=True) if child.pid not in self._bystanders)]
