"""Compute 95 % intervals from repeats: of a figure, of a paired ratio within one run, of a ratio between two runs.

Repeats are few, seven or so, and skewed: a machine is sometimes slower than usual, and never faster than it can be. So
nothing here assumes a normal distribution, and nothing resamples: with seven values the bootstrap's interval of a
median contains it less often than it claims. The methods here need only independent repeats:

* For one figure, and for the ratio of two loaders that took turns: the sign test's interval, interpolated between
  neighbouring order statistics (T. P. Hettmansperger and S. J. Sheather, "Confidence intervals based on interpolated
  order statistics", Statistics & Probability Letters 4, 1986, 75-79). Ratios are taken turn by turn first, so a drift
  of the machine, which affects all loaders of a turn alike, cancels out.
* For two runs, whose repeats are unrelated: the interval of Hodges and Lehmann for a shift, here of logarithms
  (M. Hollander and D. A. Wolfe, "Nonparametric Statistical Methods", chapter 4), exact for the Wilcoxon rank sum.

All are pure functions of lists of numbers.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95

MIN_REPEATS = 6
"""Of five values not even smallest to largest is a 95 % interval of the median: it contains it 15 times in 16."""


@dataclass(frozen=True, kw_only=True)
class Interval:
    """The median of a figure over repeats, and its 95 % interval."""

    median: float
    low: float | None
    """``None``, as ``high``, if there are too few repeats."""
    high: float | None

    def holds(self, value: float) -> bool:
        """Whether ``value`` is within. Without an interval no value is excluded."""
        return self.low is None or self.high is None or self.low <= value <= self.high


def median_interval(values: Sequence[float]) -> Interval:
    """The median of repeats and its interval.

    Args:
        values: At least one; in any order.

    Returns:
        No interval of fewer than `MIN_REPEATS` values; of seven, 0.73 of the way from the smallest to the second, and
        likewise above.

    >>> found = median_interval([10.0, 11.0, 12.0, 13.0, 14.0, 15.0, 30.0])
    >>> f"{found.median} [{found.low:.2f}-{found.high:.2f}]"
    '13.0 [10.73-19.00]'
    """
    ordered = sorted(values)
    middle = statistics.median(ordered)
    place = _interpolation(len(ordered))
    if place is None:
        return Interval(median=middle, low=None, high=None)
    k, weight = place
    low = (1 - weight) * ordered[k - 1] + weight * ordered[k]
    high = (1 - weight) * ordered[-k] + weight * ordered[-k - 1]
    # With equal values the weighted sum has a rounding error.
    return Interval(median=middle, low=min(low, middle), high=max(high, middle))


def paired_ratio(values: Sequence[float], baseline: Sequence[float]) -> Interval | None:
    """``values / baseline``, turn by turn, and the interval of its median; taken on logarithms.

    So the ratio the other way round has the inverse interval.

    Args:
        values: One a turn.
        baseline: Of the same turns, in the same order.

    Returns:
        ``None`` if a value is not positive: an epoch too short for the clock, or no wait at all.

    Raises:
        ValueError: If the two have different lengths.

    >>> paired_ratio([2.0, 4.0, 6.0], [2.0, 4.0, 6.0])
    Interval(median=1.0, low=None, high=None)
    """
    if len(values) != len(baseline):
        raise ValueError(f"a paired ratio needs as many values as of the baseline, got {len(values)}, {len(baseline)}")
    if not _all_positive(values) or not _all_positive(baseline):
        return None
    logs = median_interval([math.log(a) - math.log(b) for a, b in zip(values, baseline, strict=True)])
    return _exp(logs)


def unpaired_ratio(values: Sequence[float], baseline: Sequence[float]) -> Interval | None:
    """``values / baseline`` of two runs at different times: the median of all pairs' ratios, and its interval.

    Returns:
        ``None`` if a value is not positive. No interval if there are too few values, such as three and three.

    >>> found = unpaired_ratio([20.0, 21.0, 22.0, 23.0], [10.0, 10.0, 10.0, 10.0])
    >>> f"{found.median:.2f} [{found.low:.2f}-{found.high:.2f}]"
    '2.15 [2.00-2.30]'
    """
    if not _all_positive(values) or not _all_positive(baseline):
        return None
    differences = sorted(math.log(a) - math.log(b) for a in values for b in baseline)
    middle = statistics.median(differences)
    k = _rank_sum_cut(len(values), len(baseline))
    if k is None:
        return _exp(Interval(median=middle, low=None, high=None))
    return _exp(Interval(median=middle, low=differences[k - 1], high=differences[-k]))


def _interpolation(n: int) -> tuple[int, float] | None:
    """Which order statistics of ``n`` enclose the median, the *k*-th from either end, and how far to go inwards."""
    if n < MIN_REPEATS:
        return None
    # The k-th from either end enclose the median unless fewer than k values lie on one side of it.
    coverages = [1 - 2 * sum(math.comb(n, below) for below in range(k)) / 2**n for k in range(1, n // 2 + 1)]
    k = max(row for row, coverage in enumerate(coverages, start=1) if coverage >= CONFIDENCE)
    wider = coverages[k - 1]
    narrower = coverages[k] if k < len(coverages) else 0.0
    share = (wider - CONFIDENCE) / (wider - narrower)
    return k, (n - k) * share / (k + (n - 2 * k) * share)


def _rank_sum_cut(num_values: int, num_baseline: int) -> int | None:
    """The *k* for which the *k*-th smallest and largest of all pairs' differences enclose the shift in 95 %."""
    # counts[u]: the orders of both samples in which u pairs have the value below the baseline; all are equally likely.
    counts = [1]
    for row in range(1, num_values + 1):
        counts = _times(counts, num_baseline + row)
        counts = _divided(counts, row)
    total = math.comb(num_values + num_baseline, num_values)
    tail, cut = 0, 0
    for count in counts:
        tail += count
        if tail / total > (1 - CONFIDENCE) / 2:
            break
        cut += 1
    return cut or None


def _times(counts: list[int], power: int) -> list[int]:
    """The polynomial times ``1 - x^power``."""
    product = counts + [0] * power
    for row, count in enumerate(counts):
        product[row + power] -= count
    return product


def _divided(counts: list[int], power: int) -> list[int]:
    """The polynomial by ``1 - x^power``, which divides it."""
    quotient = counts[: len(counts) - power]
    for row in range(power, len(quotient)):
        quotient[row] += quotient[row - power]
    return quotient


def _all_positive(values: Sequence[float]) -> bool:
    return bool(values) and min(values) > 0


def _exp(logs: Interval) -> Interval:
    return Interval(
        median=math.exp(logs.median),
        low=None if logs.low is None else math.exp(logs.low),
        high=None if logs.high is None else math.exp(logs.high),
    )
