"""A turn to figures: what each is, in which unit, which way is better, and how it comes from what was measured."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from bench.timing.data import DataFacts
    from bench.timing.ranks import Turn
    from bench.timing.settings import Setting
    from bench.timing.turn import Drawn, Spent

__all__ = ["FIGURES", "Figure", "figures_of", "percentile"]

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Figure:
    """What a number in a table is."""

    title: str
    unit: str
    better: Literal["high", "low"]
    digits: int
    """After the decimal point."""
    about: str
    """A sentence for whoever reads the report."""
    scale: float = 1.0
    """From what a record holds to what is shown."""
    least: float = 0.0
    """A change smaller than this is none, whatever its ratio: others on the machine make it."""
    of_the_machine: bool = False
    """Another machine, or a busier one, gives another figure: seconds and what is made of them."""


FIGURES: Mapping[str, Figure] = {
    "samples_per_s": Figure(
        title="samples/s",
        unit="samples/s",
        better="high",
        digits=0,
        of_the_machine=True,
        about="Samples of all ranks over the time from the common start to the end of the last rank.",
    ),
    "mib_per_s": Figure(
        title="MiB/s",
        unit="MiB/s",
        better="high",
        digits=1,
        of_the_machine=True,
        about="Bytes of the shards, as they lie, over the same time.",
    ),
    "cpu_ms_per_sample": Figure(
        title="CPU-ms/sample",
        unit="CPU-ms a sample",
        better="low",
        digits=2,
        of_the_machine=True,
        about="CPU time, user and system, of all processes that the loader works in; servers are not among them.",
    ),
    "time_to_first_batch_s": Figure(
        title="first batch",
        unit="s",
        better="low",
        digits=2,
        of_the_machine=True,
        about="From before the loader is made to its first batch, of the slowest rank; libraries are loaded by then.",
    ),
    "batch_p50_ms": Figure(
        title="batch p50",
        unit="ms",
        better="low",
        digits=1,
        of_the_machine=True,
        about="From asking for a batch to having it: the median over the batches of all ranks.",
    ),
    "batch_p99_ms": Figure(
        title="batch p99",
        unit="ms",
        better="low",
        digits=1,
        of_the_machine=True,
        about="The same, 99 of 100 batches take no longer; of fewer than 100 batches it is the longest.",
    ),
    "batch_max_ms": Figure(
        title="batch max", unit="ms", better="low", digits=1, of_the_machine=True, about="The same, of the longest."
    ),
    "wait_share": Figure(
        title="waiting",
        unit="%",
        better="low",
        digits=1,
        scale=100,
        about="The share of its time in which the training step waits for a batch, or for the end of the epoch.",
    ),
    "accelerator_utilisation": Figure(
        title="AU",
        unit="%",
        better="high",
        digits=1,
        scale=100,
        about="Accelerator utilisation as MLPerf Storage defines it: samples a rank / batch size x the emulated step's "
        "time, over the running time without the wait for the first batch.",
    ),
    "peak_memory_mib": Figure(
        title="memory",
        unit="MiB",
        better="low",
        digits=0,
        about="The most resident memory of all processes, seen once a second in the first epoch and when all are "
        "over, shared pages counted once; libraries are in it. Images in /dev/shm are not: see there.",
    ),
    "loader_memory_mib": Figure(
        title="loader memory",
        unit="MiB",
        better="low",
        digits=0,
        about="How much of it came after the libraries were loaded. Images in /dev/shm are not in it: see there.",
    ),
    "memory_mib_per_sample": Figure(
        title="memory/sample",
        unit="MiB a sample",
        better="low",
        digits=2,
        about="The same, for each sample of a batch of all ranks.",
    ),
    "shared_memory_mib": Figure(
        title="/dev/shm",  # noqa: S108 (a title)
        unit="MiB",
        better="low",
        digits=0,
        least=4,
        about="How much fuller /dev/shm was at most: images of shards, batches on their way from workers. Of these, "
        "what a process maps is in its memory, too.",
    ),
    "fetched_ratio": Figure(
        title="fetched/needed",
        unit="bytes a byte",
        better="low",
        digits=2,
        about="Bytes of the server's answers in the timed epochs, over those of the photos, masks and labels; counted "
        "in a gateway that all requests go through.",
    ),
    "first_fetched_ratio": Figure(
        title="fetched first",
        unit="bytes a byte",
        better="low",
        digits=2,
        about="The same in the first epoch, in which a loader may fill a cache.",
    ),
    "first_epoch_s": Figure(
        title="first epoch",
        unit="s",
        better="low",
        digits=2,
        of_the_machine=True,
        about="From before the loader is made to the end of its first epoch.",
    ),
}
"""In the order of a report."""


def figures_of(turn: "Turn", *, setting: "Setting", facts: "DataFacts") -> dict[str, float | None]:
    """The figures of one turn, by the names of `FIGURES`; ``None`` for what was not measured."""
    firsts = [rank.first for rank in turn.ranks]
    timed = [rank.steady if rank.steady is not None else rank.first for rank in turn.ranks]
    measured = turn.ranks[0]
    spent = measured.steady_spent if measured.steady is not None else measured.first_spent
    assert spent is not None, "the first rank measures"
    assert measured.first_spent is not None, "the first rank measures"
    epochs = timed[0].num_epochs
    num_samples = sum(drawn.num_samples for drawn in timed)
    elapsed_s = max(drawn.elapsed_s for drawn in timed)
    waits_s = [wait for drawn in timed for wait in drawn.waits_s]
    growth = turn.peak_mib - turn.start_mib
    return {
        "samples_per_s": num_samples / elapsed_s,
        "mib_per_s": epochs * facts.shard_bytes / MIB / elapsed_s,
        "cpu_ms_per_sample": 1000 * spent.cpu_s / num_samples,
        "time_to_first_batch_s": max(drawn.waits_s[0] for drawn in firsts),
        "batch_p50_ms": 1000 * percentile(waits_s, 50),
        "batch_p99_ms": 1000 * percentile(waits_s, 99),
        "batch_max_ms": 1000 * max(waits_s),
        "wait_share": sum(sum(drawn.waits_s) + drawn.ends_s for drawn in timed)
        / sum(drawn.elapsed_s for drawn in timed),
        "accelerator_utilisation": _utilisation(timed, setting),
        "peak_memory_mib": turn.peak_mib,
        "loader_memory_mib": growth,
        "memory_mib_per_sample": growth / (setting.batch_size * setting.ranks),
        "shared_memory_mib": turn.shared_memory_mib,
        "fetched_ratio": _fetched(spent, facts, epochs=epochs),
        "first_fetched_ratio": _fetched(measured.first_spent, facts, epochs=1),
        "first_epoch_s": max(drawn.elapsed_s for drawn in firsts),
    }


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest of the values that so many of them do not exceed.

    >>> percentile([3.0, 1.0, 2.0], 99)
    3.0
    """
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def _utilisation(timed: "Sequence[Drawn]", setting: "Setting") -> float | None:
    """Of the ranks on average.

    The rules (mlcommons/storage, Submission_guidelines.md, "Performance Metrics", v2.0): the total compute time, which
    is the sleep's, so many samples an accelerator over the batch size times its length, over the total running time;
    what the first step's input takes is left out of the latter. The sleep counts as long as it was to be, and not as
    long as it was.
    """
    if setting.compute_ms <= 0:
        return None
    return statistics.fmean(
        drawn.num_samples / setting.batch_size * setting.compute_ms / 1000 / (drawn.elapsed_s - drawn.waits_s[0])
        for drawn in timed
    )


def _fetched(spent: "Spent", facts: "DataFacts", *, epochs: int) -> float | None:
    return None if spent.traffic is None else spent.traffic.num_bytes / epochs / facts.needed_bytes
