"""Define the figures of `bench run` and `bench feed`: title, unit, and which direction is better."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Figure:
    """The description of a number in a table."""

    title: str
    unit: str
    better: Literal["high", "low"]
    digits: int
    """Digits after the decimal point."""
    about: str
    """An explanation for the reader of a report."""
    scale: float = 1.0
    """Factor from the value in a record to the value that is shown."""
    least: float = 0.0
    """A change smaller than this is noise, whatever its ratio: other processes on the machine cause it."""
    of_the_machine: bool = False
    """Whether the figure depends on the machine and its load: seconds, and figures computed from seconds."""


def _time(title: str, unit: str, digits: int, about: str, better: Literal["high", "low"] = "low") -> Figure:
    return Figure(title=title, unit=unit, better=better, digits=digits, about=about, of_the_machine=True)


def _low(title: str, unit: str, digits: int, about: str, *, scale: float = 1.0, least: float = 0.0) -> Figure:
    return Figure(title=title, unit=unit, better="low", digits=digits, about=about, scale=scale, least=least)


RUN_FIGURES: Mapping[str, Figure] = {
    "samples_per_s": _time(
        "samples/s",
        "samples/s",
        0,
        "Samples of all ranks over the time from the common start to the end of the last rank.",
        better="high",
    ),
    "mib_per_s": _time("MiB/s", "MiB/s", 1, "Stored bytes of the shards over the same time.", better="high"),
    "cpu_ms_per_sample": _time(
        "CPU-ms/sample",
        "CPU-ms a sample",
        2,
        "CPU time, user and system, of all processes that the loader works in. Servers are not included.",
    ),
    "time_to_first_batch_s": _time(
        "first batch",
        "s",
        2,
        "From before the loader is made to its first batch, for the slowest rank. Libraries are loaded before.",
    ),
    "batch_p50_ms": _time(
        "batch p50", "ms", 1, "From asking for a batch to having it: the median over the batches of all ranks."
    ),
    "batch_p99_ms": _time(
        "batch p99",
        "ms",
        1,
        "The same for the 99th percentile. With fewer than 100 batches it is the longest.",
    ),
    "batch_max_ms": _time("batch max", "ms", 1, "The same for the longest."),
    "wait_share": _low(
        "waiting",
        "%",
        1,
        "The share of its time in which the training step waits for a batch, or for the end of the epoch.",
        scale=100,
    ),
    "accelerator_utilisation": Figure(
        title="AU",
        unit="%",
        better="high",
        digits=1,
        scale=100,
        about="Accelerator utilisation as MLPerf Storage defines it: samples of a rank / batch size x the emulated "
        "step's time, over the running time without the wait for the first batch.",
    ),
    "peak_memory_mib": _low(
        "memory",
        "MiB",
        0,
        "The largest resident memory of all processes, libraries included, shared pages counted once. Measured once a "
        "second in the first epoch, and at the end. Cache files in /dev/shm are not included; they have a figure.",
    ),
    "loader_memory_mib": _low(
        "loader memory",
        "MiB",
        0,
        "The part of it that was added after the libraries were loaded. Cache files in /dev/shm are not included; "
        "they have a figure.",
    ),
    "memory_mib_per_sample": _low(
        "memory/sample", "MiB a sample", 2, "The same, for each sample of a batch of all ranks."
    ),
    "shared_memory_mib": _low(
        "/dev/shm",  # noqa: S108 (a title)
        "MiB",
        0,
        "The largest growth of /dev/shm: cache files, and batches on their way from workers. Pages that a process maps "
        "are in its memory, too.",
        least=4,
    ),
    "fetched_ratio": _low(
        "fetched/needed",
        "bytes a byte",
        2,
        "Bytes of the server's answers in the timed epochs, over the bytes of photos, masks and labels. A gateway "
        "counts them, and all requests go through it.",
    ),
    "first_fetched_ratio": _low(
        "fetched first", "bytes a byte", 2, "The same in the first epoch, in which a loader may fill a cache."
    ),
    "first_epoch_s": _time("first epoch", "s", 2, "From before the loader is made to the end of its first epoch."),
}
"""The figures of `bench run`, in the order of a report."""

FEED_FIGURES: Mapping[str, Figure] = {
    "cpu_us_per_sample": _time("CPU-us/sample", "CPU-us a sample", 1, "CPU time of the process and its children."),
    "kernel_us_per_sample": _time("in the kernel", "CPU-us a sample", 1, "The part of it that the kernel spends."),
    "reader_us_per_sample": _time("reader", "CPU-us a sample", 1, "The part of threads that read bytes."),
    "executor_us_per_sample": _time("executor", "CPU-us a sample", 1, "The part of DALI's other threads."),
    "main_us_per_sample": _time("main", "CPU-us a sample", 1, "The part of the thread that takes the batches."),
    "worker_us_per_sample": _time("worker", "CPU-us a sample", 1, "The part of worker processes."),
    "other_us_per_sample": _time("other", "CPU-us a sample", 1, "The part of all other threads."),
    "faults_per_sample": _low("faults", "faults a sample", 1, "Minor page faults of the loader's processes."),
    "read_ratio": _low(
        "read/delivered", "bytes a byte", 3, "Bytes that system calls read, over the bytes of photos and masks."
    ),
    "num_reading": _low("reading threads", "threads", 1, "Threads that read many bytes at the same time."),
}
"""The figures that `bench feed` has in addition to ``samples_per_s``."""

FIGURES: Mapping[str, Figure] = {**RUN_FIGURES, **FEED_FIGURES}
"""All figures, in the order of a report."""
