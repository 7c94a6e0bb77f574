"""Compute the accelerator utilisation as MLPerf Storage defines it, and search for the most accelerators it allows.

AU = total compute time / total running time (mlcommons/storage v2.0, ``Submission_guidelines.md``, "Performance
Metrics"). The rules leave out the input of the first step, because a pipeline is being filled then. DLIO, which they
run, does so in each epoch (argonne-lcf/dlio_benchmark 2.0.0, ``dlio_benchmark/utils/statscounter.py``,
``compute_metrics_train``): it leaves the first step out of both sums, takes the mean over the epochs of a rank, and
then over the ranks. The end of an epoch, where a loader says that there are no more batches, counts.

There is one difference. DLIO adds up how long its sleeps took, so on a busy host a sleep that ends late counts as
compute time. Here a step has its nominal time, as in the rules' text, and being late lowers the utilisation.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple


class EpochTimes(NamedTuple):
    """One epoch of one rank."""

    num_samples: int
    elapsed_s: float
    """From asking for the first batch to learning that the epoch is over."""
    first_samples: int
    """Samples of the first step."""
    first_step_s: float
    """From asking for the first batch to the end of the first step."""
    computed_s: float
    """How long the emulated steps really took, the first one included."""


def utilisation(epochs: Sequence[EpochTimes], *, batch_size: int, compute_s: float) -> float | None:
    """Return the utilisation of one rank; ``None`` if no epoch has a second step.

    A short batch takes its share of a step.

    >>> utilisation([EpochTimes(30, 5.0, 10, 3.0, 3.0)], batch_size=10, compute_s=0.9)
    0.9
    """
    found = [
        (one.num_samples - one.first_samples) / batch_size * compute_s / (one.elapsed_s - one.first_step_s)
        for one in epochs
        if one.num_samples > one.first_samples
    ]
    return statistics.fmean(found) if found else None


def late_share(epochs: Sequence[EpochTimes], *, batch_size: int, compute_s: float) -> float:
    """Return how much longer the steps took than they should, as a share: 0.01 if a sleep of 100 ms took 101."""
    nominal_s = sum(one.num_samples for one in epochs) / batch_size * compute_s
    return sum(one.computed_s for one in epochs) / nominal_s - 1


def search(measure: Callable[[int], float], *, target: float, limit: int) -> dict[int, float]:
    """Look for the largest number of accelerators with a utilisation of ``target`` or more.

    Tries 1, 2, 4, ... until one is too many, then halves the gap. So it is taken for granted that more accelerators are
    not used better.

    Args:
        measure: Emulates this number of accelerators, and returns their utilisation.
        target: The least utilisation.
        limit: The largest number that can be tried.

    Returns:
        Number -> utilisation of all that were tried, in the order of the trials.

    >>> list(search(lambda number: 3.5 / number, target=1.0, limit=64))
    [1, 2, 4, 3]
    """
    found: dict[int, float] = {}
    fed, starved, number = 0, limit + 1, 1
    while fed + 1 < starved:
        found[number] = measure(number)
        if found[number] >= target:
            fed = number
        else:
            starved = number
        number = min(2 * fed, limit) if starved > limit else (fed + starved) // 2
    return found


def num_fed(found: Mapping[int, float], *, target: float) -> int:
    """Return the largest number below the first one that is starved; 0 if a single one is."""
    starved = min((number for number, value in found.items() if value < target), default=None)
    return max((number for number in found if starved is None or number < starved), default=0)


def share_fed(found: Mapping[int, float], *, target: float) -> float:
    """Return how many accelerators are fed, with a fraction: 0.6 if a single one reaches 0.6 of ``target``.

    The smallest number that is starved takes all that the host can deliver; ``target`` of fewer accelerators' needs is
    that much. If none is starved, it is the largest number that was tried, and at least that many are fed.

    >>> share_fed({1: 0.45}, target=0.9)
    0.5
    >>> round(share_fed({1: 0.99, 2: 0.98, 3: 0.75}, target=0.9), 3)
    2.5
    """
    whole = num_fed(found, target=target)
    starved = [number for number, value in found.items() if value < target]
    return max(float(whole), min(starved) * found[min(starved)] / target) if starved else float(whole)
