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
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

CONFIDENCE = 0.95

MIN_REPEATS = 6
"""With five values, not even the range from smallest to largest is a 95 % interval: it contains the median 15 times in
16."""


@dataclass(frozen=True, kw_only=True)
class Interval:
    """The median of a figure over repeats, and its 95 % interval."""

    median: float
    low: float | None
    """``None``, as ``high``, if there are too few repeats."""
    high: float | None

    def holds(self, value: float) -> bool:
        """Return whether ``value`` is within. Without an interval no value is excluded."""
        return self.low is None or self.high is None or self.low <= value <= self.high

    def mapped(self, function: Callable[[float], float]) -> "Interval":
        """Apply an increasing function to the median and to both ends."""
        low, high = (None if end is None else function(end) for end in (self.low, self.high))
        return Interval(median=function(self.median), low=low, high=high)


def median_interval(values: Sequence[float]) -> Interval:
    """Return the median of repeats and its interval; fewer than `MIN_REPEATS` values have no interval.

    With seven values, each end lies 0.73 of the way from the outermost value to the next one.

    >>> found = median_interval([10.0, 11.0, 12.0, 13.0, 14.0, 15.0, 30.0])
    >>> f"{found.median} [{found.low:.2f}-{found.high:.2f}]"
    '13.0 [10.73-19.00]'
    """
    ordered, n = sorted(values), len(values)
    middle = statistics.median(ordered)
    if n < MIN_REPEATS:
        return Interval(median=middle, low=None, high=None)
    # The k-th values from either end enclose the median unless fewer than k values lie on one side of it.
    coverages = [1 - 2 * sum(math.comb(n, below) for below in range(k)) / 2**n for k in range(1, n // 2 + 1)]
    k = max(row for row, coverage in enumerate(coverages, start=1) if coverage >= CONFIDENCE)
    wider, narrower = coverages[k - 1], coverages[k] if k < len(coverages) else 0.0
    share = (wider - CONFIDENCE) / (wider - narrower)
    weight = (n - k) * share / (k + (n - 2 * k) * share)
    low = (1 - weight) * ordered[k - 1] + weight * ordered[k]
    high = (1 - weight) * ordered[-k] + weight * ordered[-k - 1]
    # With equal values the weighted sum has a rounding error.
    return Interval(median=middle, low=min(low, middle), high=max(high, middle))


def paired_ratio(values: Sequence[float], baseline: Sequence[float]) -> Interval | None:
    """Return the median of ``values / baseline``, turn by turn, and its interval.

    They are computed on logarithms, so the inverse ratio has the inverse interval. ``baseline`` has the values of the
    same turns in the same order. The result is ``None`` if a value is not positive: an epoch was too short for the
    clock, or there was no wait at all.

    Raises:
        ValueError: If the two have different lengths.

    >>> paired_ratio([2.0, 4.0, 6.0], [2.0, 4.0, 6.0])
    Interval(median=1.0, low=None, high=None)
    """
    if len(values) != len(baseline):
        raise ValueError(f"a paired ratio needs as many values as of the baseline, got {len(values)}, {len(baseline)}")
    if not _all_positive(values) or not _all_positive(baseline):
        return None
    return median_interval([math.log(a) - math.log(b) for a, b in zip(values, baseline, strict=True)]).mapped(math.exp)


def unpaired_ratio(values: Sequence[float], baseline: Sequence[float]) -> Interval | None:
    """Return the median of ``values / baseline`` over all pairs of two runs at different times, and its interval.

    The result is ``None`` if a value is not positive. There is no interval if there are too few values, such as three
    and three.

    >>> found = unpaired_ratio([20.0, 21.0, 22.0, 23.0], [10.0, 10.0, 10.0, 10.0])
    >>> f"{found.median:.2f} [{found.low:.2f}-{found.high:.2f}]"
    '2.15 [2.00-2.30]'
    """
    if not _all_positive(values) or not _all_positive(baseline):
        return None
    differences = sorted(math.log(a) - math.log(b) for a in values for b in baseline)
    k = _rank_sum_cut(len(values), len(baseline))
    low, high = (None, None) if k == 0 else (differences[k - 1], differences[-k])
    return Interval(median=statistics.median(differences), low=low, high=high).mapped(math.exp)


def _rank_sum_cut(num_values: int, num_baseline: int) -> int:
    """The *k* for which the *k*-th smallest and largest of all pairs' differences enclose the shift in 95 %, or 0."""
    # counts[n, u]: the orders in which n values have u pairs with a smaller baseline value; all orders are equally
    # likely. Values are added in ascending order, by the number of baseline values below them.
    num_pairs = num_values * num_baseline
    counts = np.zeros((num_values + 1, num_pairs + 1))
    counts[0, 0] = 1
    for below in range(num_baseline + 1):
        for n in range(num_values):
            counts[n + 1, below:] += counts[n, : num_pairs + 1 - below]
    tails = np.cumsum(counts[num_values]) / math.comb(num_values + num_baseline, num_values)
    return int(np.searchsorted(tails, (1 - CONFIDENCE) / 2, side="right"))


def _all_positive(values: Sequence[float]) -> bool:
    return bool(values) and min(values) > 0
