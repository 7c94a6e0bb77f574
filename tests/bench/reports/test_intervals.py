"""Intervals hold what they say they hold, of few and skewed repeats, and do not depend on order, unit or direction."""

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.reports.summary import CONFIDENCE, MIN_REPEATS, median_interval, paired_ratio, unpaired_ratio

NUM_DRAWS = 2000
# Three standard errors of a share of 0.95 in so many draws, and what the interpolation is off by (1 % at most).
SLACK = 0.015 + 0.01

positive = st.floats(min_value=1e-3, max_value=1e6, allow_nan=False)
several = st.lists(positive, min_size=MIN_REPEATS, max_size=15)


@pytest.mark.parametrize("num_repeats", [6, 7, 9, 15])
@pytest.mark.parametrize(
    ("distribution", "median"),
    [
        ("normal", 0.0),
        ("exponential", math.log(2)),  # a machine that is at times slower, and never faster than it can be
        ("lognormal", 1.0),
        ("cauchy", 0.0),  # no mean, no variance
    ],
)
def test_interval_of_a_median_holds_it_in_95_of_100(num_repeats: int, distribution: str, median: float) -> None:
    """Whatever the repeats are distributed like; neither less often nor, by being too wide, much more."""
    draw = np.random.default_rng(num_repeats)
    name = "standard_cauchy" if distribution == "cauchy" else distribution
    samples = getattr(draw, name)(size=(NUM_DRAWS, num_repeats))
    held = np.mean([median_interval(row).holds(median) for row in samples.tolist()])
    assert CONFIDENCE - SLACK <= held <= CONFIDENCE + SLACK


def test_interval_of_an_unpaired_ratio_holds_it_in_95_of_100() -> None:
    """Two runs of seven repeats, one of them slower by a third, both skewed; exact, so at least as often as it says."""
    draw = np.random.default_rng(0)
    before, after = (1 + draw.exponential(0.1, size=(NUM_DRAWS, 7)) for _ in range(2))
    found = [unpaired_ratio(a, b) for a, b in zip((1.5 * after).tolist(), before.tolist(), strict=True)]
    held = np.mean([ratio is not None and ratio.holds(1.5) for ratio in found])
    assert CONFIDENCE - 0.015 <= held <= 0.98


@given(several)
def test_interval_lies_within_the_repeats_around_their_median(values: list[float]) -> None:
    """Smallest <= low <= median <= high <= largest."""
    found = median_interval(values)
    assert found.low is not None
    assert found.high is not None
    assert min(values) * (1 - 1e-12) <= found.low <= statistics.median(values) <= found.high
    assert found.high <= max(values) * (1 + 1e-12)


@given(st.lists(st.tuples(positive, positive), min_size=MIN_REPEATS, max_size=12))
def test_paired_ratio_the_other_way_round_is_the_inverse(pairs: list[tuple[float, float]]) -> None:
    """Who is the baseline changes no verdict."""
    first, second = zip(*pairs, strict=True)
    there, back = paired_ratio(first, second), paired_ratio(second, first)
    assert there is not None
    assert back is not None
    assert there.low is not None
    assert back.high is not None
    assert back.high * there.low == pytest.approx(1)
    assert back.median * there.median == pytest.approx(1)


@pytest.mark.parametrize(
    ("num_values", "num_baseline", "k"),
    # Hollander and Wolfe's critical values of the rank sum, two-sided 0.05, as tables of U have them, plus one.
    [(4, 4, 1), (5, 5, 3), (6, 6, 6), (7, 7, 9), (8, 8, 14), (10, 10, 24), (5, 8, 7)],
)
def test_unpaired_ratio_cuts_where_the_tables_do(num_values: int, num_baseline: int, k: int) -> None:
    """The k-th smallest of all ratios is the lower end."""
    values = [2.0**row for row in range(num_values)]
    baseline = [3.0**row for row in range(num_baseline)]
    ratios = sorted(a / b for a in values for b in baseline)
    found = unpaired_ratio(values, baseline)
    assert found is not None
    assert (found.low, found.high) == pytest.approx((ratios[k - 1], ratios[-k]))


def test_too_few_repeats_have_no_interval() -> None:
    """Five of one loader; three against three runs. Nothing is excluded then."""
    assert median_interval([1.0, 2.0, 3.0, 4.0, 5.0]).low is None
    found = unpaired_ratio([1.0, 2.0, 3.0], [1.0, 2.0, 3.0])
    assert found is not None
    assert found.low is None
    assert found.holds(100.0)


def test_ratio_of_nothing_is_none() -> None:
    """A wait of 0 s, and no repeats at all."""
    assert paired_ratio([1.0] * 7, [0.0] + [1.0] * 6) is None
    assert unpaired_ratio([0.0] * 7, [1.0] * 7) is None
    assert unpaired_ratio([], []) is None
