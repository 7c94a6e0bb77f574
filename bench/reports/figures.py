"""Define the figures of all benchmarks: title, unit, and which direction is better; and the titles of settings."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal


@dataclass(frozen=True)
class BenchFigure:
    """The description of a number in a table."""

    title: str
    unit: str
    digits: int
    about: str
    better: Literal["high", "low"] = "low"
    scale: float = 1.0
    """Factor from the value in a record to the value that is shown."""
    least: float = 0.0
    """A change smaller than this is noise, whatever its ratio: other processes on the machine cause it."""
    of_the_machine: bool = False
    """Whether the figure depends on the machine and its load: seconds, and figures computed from seconds."""


_time = partial(BenchFigure, of_the_machine=True)


def _share(title: str, about: str, better: Literal["high", "low"] = "low") -> BenchFigure:
    return _time(title, "%", 1, about, better, scale=100)


_IN_SHM = "Cache files in /dev/shm are not included; they have a figure."

FIGURES: Mapping[str, BenchFigure] = {
    "samples_per_s": _time("samples/s", "samples/s", 0, "Samples of all ranks over the timed seconds.", "high"),
    "mib_per_s": _time("MiB/s", "MiB/s", 1, "Stored bytes over the same time.", "high"),
    "cpu_ms_per_sample": _time(
        "CPU-ms/sample", "CPU-ms a sample", 2, "CPU time, user and system, of all processes that the loader works in."
    ),
    "cpu_us_per_sample": _time("CPU-us/sample", "CPU-us a sample", 1, "CPU time of the process and its children."),
    "kernel_us_per_sample": _time("in the kernel", "CPU-us a sample", 1, "The part of it that the kernel spends."),
    "cpu_s_per_gib": _time("CPU-s/GiB", "CPU-s a GiB", 3, "CPU time of the client."),
    "time_to_first_batch_s": _time(
        "first batch",
        "s",
        2,
        "From before the loader is made to its first batch, for the slowest rank. Libraries are loaded before.",
    ),
    "batch_p50_ms": _time("batch p50", "ms", 1, "From asking for a batch to having it: median over all ranks."),
    "batch_p99_ms": _time(
        "batch p99", "ms", 1, "The same for the 99th percentile. With fewer than 100 batches it is the longest."
    ),
    "batch_max_ms": _time("batch max", "ms", 1, "The same for the longest."),
    "wait_share": _share(
        "waiting", "The share of its time in which the training step waits for a batch, or for the end of the epoch."
    ),
    "accelerator_utilisation": _share(
        "AU",
        "Accelerator utilisation as MLPerf Storage defines it: samples of a rank / batch size x the emulated step's "
        "time, over the running time without the wait for the first batch.",
        "high",
    ),
    "peak_memory_mib": BenchFigure(
        "memory",
        "MiB",
        0,
        "The largest resident memory of all processes, libraries included, shared pages counted once. Measured once a "
        f"second in the first epoch, and at the end. {_IN_SHM}",
    ),
    "loader_memory_mib": BenchFigure(
        "loader memory", "MiB", 0, f"The part of it that was added after the libraries were loaded. {_IN_SHM}"
    ),
    "memory_mib_per_sample": BenchFigure(
        "memory/sample", "MiB a sample", 2, "The same, for each sample of a batch of all ranks."
    ),
    "shared_memory_mib": BenchFigure(
        "/dev/shm",  # noqa: S108 (a title)
        "MiB",
        0,
        "The largest growth of /dev/shm: cache files, and batches on their way from workers. Pages that a process maps "
        "are in its memory, too.",
        least=4,
    ),
    "fetched_ratio": BenchFigure(
        "fetched/needed",
        "bytes a byte",
        2,
        "Bytes of the server's answers in the timed epochs, over the bytes of photos, masks and labels. A gateway "
        "counts them, and all requests go through it.",
    ),
    "first_fetched_ratio": BenchFigure(
        "fetched first", "bytes a byte", 2, "The same in the first epoch, in which a loader may fill a cache."
    ),
    "first_epoch_s": _time("first epoch", "s", 2, "From before the loader is made to the end of its first epoch."),
    # `bench feed`
    "faults_per_sample": BenchFigure("faults", "faults a sample", 1, "Minor page faults of the loader's processes."),
    "read_ratio": BenchFigure(
        "read/delivered", "bytes a byte", 3, "Bytes that system calls read, over the bytes of photos and masks."
    ),
    # `bench run --au`
    "accelerators": _time(
        "accelerators", "accelerators", 0, "Most emulated accelerators whose utilisation reaches the target.", "high"
    ),
    "share": _time(
        "with a fraction", "accelerators", 2, "N x AU / target of the first number N that is too many.", "high"
    ),
    "share_per_core": _time(
        "a core", "accelerators a core", 2, "That, divided by the cores of this host that the run may use.", "high"
    ),
    "utilisation_of_one": _share("AU of one", "Utilisation of a single accelerator.", "high"),
    "cores_per_accelerator": _time(
        "cores an accelerator", "cores", 2, "CPU time that one accelerator takes at full utilisation."
    ),
    "late_share": _share("late", "How much longer the emulated steps took than they should."),
    # `bench fetch` and `bench windows`
    "server_cpu_s_per_gib": _time("server CPU-s/GiB", "CPU-s a GiB", 3, "CPU time of the server."),
    "server_cores": _time("server cores", "cores", 2, "Cores that the server keeps busy."),
    "client_cores": _time("loader cores", "cores", 2, "Cores that the loader keeps busy."),
    "data_wait": _share("data wait", "The share of the timed epochs in which the decode pipeline waits for shards."),
    "cold_samples_per_s": _time("cold: samples/s", "samples/s", 0, "Of the first epoch, with opening.", "high"),
    "cold_data_wait": _share("cold: data wait", "The share of the first epoch."),
    "peak_cache_mib": BenchFigure("peak cache", "MiB", 1, "The largest number of blocks that the cache file had."),
    # `bench resume`
    "first_batch_s": _time("first batch", "ms", 0, "To it.", scale=1000),
    "num_held": BenchFigure(
        "held back", "shards", 0, "Shards that the loader asked for, and that the server held back."
    ),
    # `bench open`
    "open_s": _time("open", "s", 3, "Until the loader is open; of several ranks, the slowest."),
    "open_cpu_s": _time("open CPU-s", "CPU-s", 2, "Of a rank's opening; mean of the ranks."),
    "opened_mib": BenchFigure("opened", "MiB", 0, "A rank's proportional memory, less its imports."),
    "peak_mib": BenchFigure("peak", "MiB", 0, "The peak resident memory of a rank, less its imports."),
    "read_s": _time("read", "s", 2, "For the batches after the opening."),
    "list_s": _time("list", "s", 1, "To list every name of the bucket."),
    "next_window_s": _time("next window", "s", 4, "Median of the nine windows after the first."),
    # `bench gpu`
    "cpu_share": _share("CPU", "CPU time over the time of all cores."),
    "gpu_share": _share("GPU", "The share of its time in which the GPU works.", "high"),
    "jpeg_share": _share("JPEG engines", "The share of their time in which the JPEG engines work.", "high"),
    "step_share": _share("step", "The share of the time that is the emulated training step's.", "high"),
    "checked": BenchFigure("samples", "samples", 0, "Keys, each once, finite.", "high"),
    "equal_share": BenchFigure("equal", "%", 2, "Values that are equal on both sides.", "high", scale=100),
    "mean_difference": BenchFigure("mean", "levels", 3, "Mean difference: grey levels of 255; of graphs, deviations."),
    "p9999_difference": BenchFigure("99.99 %", "levels", 0, "The difference that 99.99 % of the values do not exceed."),
    "max_difference": BenchFigure("max", "levels", 2, "The largest difference."),
}

SETTING_TITLES: Mapping[str, str] = {
    "photo_kb": "photo kB",
    "masks": "masks",
    "recipe": "recipe",
    "threads": "threads",
    "ranks": "ranks",
    "batch_size": "batch",
    "crop": "crop",
    "cache": "cache",
    "compute_ms": "compute ms",
    "latency_ms": "latency ms",
    "shards": "shards",
    "photo_side": "photo side",
    "situation": "situation",
    "server": "server",
    "num_shards": "shards",
    "window_shards": "window",
    "work": "work",
    "scenario": "scenario",
    "change": "setting",
}
"""A setting's fields, as tables and errors call them."""
