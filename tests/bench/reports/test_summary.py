"""A run's record to tables: medians, intervals, paired ratios, and what a reader is told beside them."""

import math
import statistics
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.reports.figures import FIGURES
from bench.reports.summary import (
    CONFIDENCE,
    MIN_REPEATS,
    baseline_of,
    format_interval,
    label_of,
    median_interval,
    paired_ratio,
    restricted,
    setting_names,
    unpaired_ratio,
)
from bench.reports.tables import conditions_of, format_table, notes_of

from .records import SEVEN, record, report

WINDOW = "dali: decode only the part of a photo that the crop keeps."
RECORDS = [record("dali", 900, 2.5, decode="dali"), record("webloader", 300, 7.5), record("tutorial", 303, 7.5)]


def cells_of(run: Any, **options: Any) -> list[list[str]]:
    """The cells of a table in Markdown, without its rule."""
    lines = format_table(run, markdown=True, **options).splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in (lines[0], *lines[2:])]


def test_rows_hold_medians_intervals_and_paired_ratios() -> None:
    """One row a loader; what meets all loaders of a turn alike widens the figures' intervals and no ratio's."""
    header, dali, webloader, tutorial = cells_of(report(*RECORDS))
    assert header == [
        "loader",
        "samples/s",
        "x webloader (pil)",
        "CPU-ms/sample",
        "x webloader (pil)",
        "first batch s",
        "waiting %",
    ]
    assert dali == ["dali", "900 [825-921]", "3.00 [3.00-3.00]", "2.50 [2.44-2.75]", "0.33 [0.33-0.33]", "0.50", "25.0"]
    assert (webloader[2], webloader[4]) == ("1.00", "1.00")
    assert tutorial[4] == "1.00 [1.00-1.00] equal"
    idle = report(record("dali", 900, 2.5, setting={"compute_ms": 0.0}))
    assert "waiting %" not in cells_of(idle)[0], "without a step all of the time is waited"


def test_equal_is_said_where_one_is_within_the_interval() -> None:
    """A loader that is faster in half of the turns, and slower in the others; and one that is always 1 % faster."""
    turns = (0.9, 1.1, 0.95, 1.05, 1.0, 1.12, 0.88)
    even = report(record("webloader", 300, 7, turns=(1.0,) * 7), record("a", 300, 7, turns=turns), record("b", 303, 7))
    cells = [row[2] for row in cells_of(even)]
    assert cells[2] == "1.00 [0.90-1.12] ?", "too wide to be called equal"
    ahead = report(record("webloader", 300, 7), record("b", 303, 7))
    assert cells_of(ahead)[2][2] == "1.01 [1.01-1.01]"


def test_few_repeats_have_their_spread_and_say_so() -> None:
    """Five turns: smallest to largest, in round brackets, and no word about equality."""
    few = report(record("webloader", 300, 7, turns=SEVEN[:5]), record("dali", 300, 7, turns=SEVEN[:5]))
    assert cells_of(few)[1][1:3] == ["300 (291-309)", "1.00"]
    assert notes_of(few) == [
        "Medians of 5 interleaved repeats (smallest to largest); too few for a 95 % interval, which needs 6.",
        WINDOW,
    ]


def test_ratios_are_to_the_baseline_of_the_same_setting() -> None:
    """In a sweep each setting has its own baseline; what is swept has a column."""
    records = [
        record(loader, speed, 5, setting={"latency_ms": latency})
        for latency, factor in ((0.0, 1), (20.0, 3))
        for loader, speed in (("dali", 600), ("webloader", 300 / factor))
    ]
    rows = cells_of(report(*records))
    assert setting_names(records) == ["latency_ms"]
    assert [row[:2] for row in rows] == [
        ["latency ms", "loader"],
        ["0", "dali (pil)"],
        ["0", "webloader (pil)"],
        ["20", "dali (pil)"],
        ["20", "webloader (pil)"],
    ]
    assert [row[3] for row in rows[1:]] == ["2.00 [2.00-2.00]", "1.00", "6.00 [6.00-6.00]", "1.00"]


@pytest.mark.parametrize(
    ("baseline", "expected"),
    [
        ("webloader", "webloader"),
        ("tutorial:pil", "tutorial"),  # with its decoder
        ("none", "dali"),  # not among them: the first
        (None, "dali"),
    ],
)
def test_baseline_is_the_one_that_was_named_else_the_first(baseline: str | None, expected: str) -> None:
    assert baseline_of(report(*RECORDS, baseline=baseline), RECORDS[0])["loader"] == expected


def test_label_names_the_decoder_where_there_is_a_choice() -> None:
    """Two records of one loader are told apart; a star marks one that does not give all."""
    assert [label_of(row) for row in RECORDS[:2]] == ["dali", "webloader (pil)"]
    partial = record("litdata", 400, 5, decode="turbo", gives=["image", "key", "label", "normalised"])
    assert label_of(partial) == "litdata (turbo) *"
    assert notes_of(report(*RECORDS, partial))[1:] == [
        "* litdata gives no mask: what it does not give is neither compared nor timed.",
        "litdata: read local copies, converted from the shards before, on a disk of this machine; they make no request "
        "that is delayed or counted.",
        WINDOW,
    ]
    nothing = record("synthetic", 400, 5, decode="none", gives=[])
    assert notes_of(report(nothing))[1:] == [
        "* synthetic gives nothing from the shards: what it does not give is neither compared nor timed."
    ]


def test_what_was_made_first_is_said_with_its_scope() -> None:
    """Ours, an index, as others' copies; who starts processes for it says so."""
    made, more = ({"wall_s": wall_s, "num_bytes": 1 << 19} for wall_s in (0.84, 12.3))
    rows = [record("dali", 9, 1, prepared=prepared) for prepared in (made, made, more)]
    notes = notes_of(report(*rows, record("litdata", 9, 1, prepared=made)))
    assert notes[-1] == (
        "Preparation (not included in the figures): dali (an index, by one process): 0.8 s, 0.5 MiB or 12.3 s, 0.5 "
        "MiB; litdata (chunks, by a process on each core; the time includes starting them): 0.8 s, 0.5 MiB."
    )


def test_stopped_run_says_after_how_many_rounds() -> None:
    stopped = report(
        record("dali", 900, 2.5, turns=SEVEN[:2]),
        complete=False,
        num_rounds=2,
        stopped="round 3 of 7, loader 'dali' (threads 2)",
    )
    assert notes_of(stopped)[0] == "Stopped after 2 of 7 rounds, in round 3 of 7, loader 'dali' (threads 2)."
    assert dict(conditions_of(stopped))["repeats"] == "2 of 7 rounds interleaved, 1 timed epoch each"
    assert not notes_of(report(*RECORDS, complete=True, num_rounds=7))[0].startswith("Stopped")


def test_one_record_shows_ratios_to_any_of_its_loaders() -> None:
    """Two tables of one run: the peers' against webloader, and that against dali; one of some loaders only."""
    run = report(*RECORDS, record("webloader", 350, 6, decode="turbo"))
    rows = cells_of(restricted(run, baseline="dali"), figures=["samples_per_s"])
    assert rows[0][2] == "x dali"
    assert [row[2].split(" ")[0] for row in rows[1:]] == ["1.00", "0.33", "0.34", "0.39"]
    some = restricted(run, baseline="webloader:turbo", loaders=["dali", "webloader"])
    rows = cells_of(some, figures=["samples_per_s"])
    assert [row[0] for row in rows[1:]] == ["dali", "webloader (pil)", "webloader (turbo)"]
    assert rows[0][2] == "x webloader (turbo)"
    assert [row[0] for row in cells_of(restricted(run, loaders=["webloader:turbo"]))[1:]] == ["webloader (turbo)"]
    with pytest.raises(ValueError, match=r"--baseline must be of dali, webloader:pil, got 'tutorial'"):
        restricted(run, baseline="tutorial", loaders=["dali", "webloader:pil"])
    with pytest.raises(ValueError, match=r"--loaders must be of dali, webloader:pil, tutorial:pil, .*, got 'spdl'"):
        restricted(run, loaders=["dali", "spdl"])


def test_conditions_say_where_figures_come_from() -> None:
    found = dict(conditions_of(report(*RECORDS)))
    assert found["command"] == "dali-pipes bench run --shards .../pets"
    assert found["commit"] == "0123456789abcdef, with changes"
    assert found["machine"] == "AMD EPYC, 2 cores, 23.5 GiB; load at the end 1.5"
    assert found["data"] == "22 samples in 3 shards, 1 MiB"
    assert found["setting"] == "threads 2, ranks 1, batch 64, cache warm, compute ms 40"
    assert found["GPUs"] == "none"


@pytest.mark.parametrize(
    ("value", "shown"), [(0.0123, "0.01"), (1.236, "1.24"), (12.36, "12.4"), (99.96, "100"), (1234.5, "1234")]
)
def test_numbers_have_as_many_digits_as_tell_something(value: float, shown: str) -> None:
    assert format_interval(FIGURES["cpu_ms_per_sample"], [value]) == shown


NUM_DRAWS = 2000
# Three standard errors of a share of 0.95 in so many draws, and what the interpolation is off by (1 % at most).
SLACK = 0.015 + 0.01

positive = st.floats(min_value=1e-3, max_value=1e6, allow_nan=False)
several = st.lists(positive, min_size=MIN_REPEATS, max_size=15)


@pytest.mark.parametrize("num_repeats", [6, 9, 15])
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
    found = median_interval(values)
    assert found.low is not None
    assert found.high is not None
    assert min(values) * (1 - 1e-12) <= found.low <= statistics.median(values) <= found.high
    assert found.high <= max(values) * (1 + 1e-12)


@given(st.lists(st.tuples(positive, positive), min_size=MIN_REPEATS, max_size=12))
def test_paired_ratio_the_other_way_round_is_the_inverse(pairs: list[tuple[float, float]]) -> None:
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
    values = [2.0**row for row in range(num_values)]
    baseline = [3.0**row for row in range(num_baseline)]
    ratios = sorted(a / b for a in values for b in baseline)
    found = unpaired_ratio(values, baseline)
    assert found is not None
    assert (found.low, found.high) == pytest.approx((ratios[k - 1], ratios[-k]))


def test_too_few_repeats_have_no_interval_and_nothing_no_ratio() -> None:
    """Five of one loader; three against three runs: nothing is excluded then. A wait of 0 s has no ratio."""
    assert median_interval([1.0, 2.0, 3.0, 4.0, 5.0]).low is None
    found = unpaired_ratio([1.0, 2.0, 3.0], [1.0, 2.0, 3.0])
    assert found is not None
    assert found.low is None
    assert found.holds(100.0)
    assert paired_ratio([1.0] * 7, [0.0] + [1.0] * 6) is None
    assert unpaired_ratio([0.0] * 7, [1.0] * 7) is None
    assert unpaired_ratio([], []) is None
