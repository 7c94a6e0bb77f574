"""A run's record to tables: medians, intervals, paired ratios, and what a reader is told beside them."""

import math
from typing import Any

import numpy as np
import pytest

from bench.reports.summary import CONFIDENCE, differing, median_interval, paired_ratio, restricted, unpaired_ratio
from bench.reports.tables import format_table, report_text

from .records import SEVEN, record, report

RECORDS = [record("dali", 900, 2.5, decode="dali"), record("webloader", 300, 7.5), record("tutorial", 303, 7.5)]


def cells_of(run: Any, **options: Any) -> list[list[str]]:
    """The cells of a table in Markdown, without its rule."""
    lines = format_table(run, markdown=True, **options).splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in (lines[0], *lines[2:])]


def test_rows_hold_medians_intervals_and_paired_ratios() -> None:
    """One row a loader; what meets all loaders of a turn alike widens the figures' intervals and no ratio's."""
    _, dali, webloader, tutorial = cells_of(report(*RECORDS))
    assert dali == [
        "dali",
        "900 [825-921]",
        "3.00 [3.00-3.00]",
        "2.50 [2.44-2.75]",
        "0.33 [0.33-0.33]",
        "0.50 [0.49-0.55]",
        "25.0",
    ]
    assert (webloader[2], webloader[4]) == ("1.00", "1.00")
    assert tutorial[4] == "1.00 [1.00-1.00] equal"
    turns = (0.9, 1.1, 0.95, 1.05, 1.0, 1.12, 0.88)
    uneven = report(record("webloader", 300, 7, turns=(1.0,) * 7), record("a", 300, 7, turns=turns))
    assert cells_of(uneven)[2][2] == "1.00 [0.90-1.12] ?", "too wide to be called equal"


def test_rows_whose_repeats_differ_are_named() -> None:
    """By more than a tenth: the interval of the median, so one slow turn of seven does not matter."""
    steady, slow_once = (1.0, 1.01, 0.99, 1.02, 0.98, 1.0, 1.01), (1.0, 1.01, 0.99, 1.2, 1.0, 1.0, 1.01)
    run = report(record("a", 300, 7, turns=steady), record("b", 300, 7, turns=slow_once), record("c", 900, 2.5))
    assert [text.split(":")[0] for text in differing(run)] == ["c (pil), samples_per_s", "c (pil), cpu_ms_per_sample"]
    few = record("a", 300, 7, turns=(1.0, 1.0, 1.2), setting={"latency_ms": 20.0})
    first, *_ = differing(report(few, record("a", 300, 7, turns=steady)))
    assert first.startswith("a (pil) (latency ms 20), samples_per_s: 250 to 300")


def test_note_says_who_decodes_a_part_of_a_photo() -> None:
    """Peers that use nvImageCodec, and DALI's."""
    decoded = {"dali": "dali", "dali-external": "dali", "spdl": "nvimgcodec", "webloader": "turbo"}
    run = report(*(record(name, 300, 7, decode=decode) for name, decode in decoded.items()))
    assert "dali, dali-external, spdl (nvimgcodec): decode only the part of a photo" in report_text(run)


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


NUM_DRAWS = 2000
# Three standard errors of a share of 0.95 in 2,000 draws, plus the error of the interpolation (at most 1 %).
SLACK = 0.015 + 0.01


@pytest.mark.parametrize("num_repeats", [6, 9, 15])
@pytest.mark.parametrize(
    ("distribution", "median"),
    [
        ("normal", 0.0),
        ("exponential", math.log(2)),  # a machine that is sometimes slower, and never faster than its limit
        ("lognormal", 1.0),
        ("cauchy", 0.0),  # no mean, no variance
    ],
)
def test_interval_of_a_median_holds_it_in_95_of_100(num_repeats: int, distribution: str, median: float) -> None:
    """The interval contains the median in 95 % of the draws, for any distribution of the repeats."""
    draw = np.random.default_rng(num_repeats)
    name = "standard_cauchy" if distribution == "cauchy" else distribution
    samples = getattr(draw, name)(size=(NUM_DRAWS, num_repeats))
    held = np.mean([median_interval(row).holds(median) for row in samples.tolist()])
    assert CONFIDENCE - SLACK <= held <= CONFIDENCE + SLACK


@pytest.mark.parametrize(
    ("num_values", "num_baseline", "k"),
    # ``k`` is the critical value of Mann-Whitney's U (two-sided, 0.05) plus one, from Hollander and Wolfe's tables.
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
    """Five repeats have no interval. Three repeats against three exclude no ratio. A wait of 0 s has no ratio."""
    assert median_interval([1.0, 2.0, 3.0, 4.0, 5.0]).low is None
    few = report(record("webloader", 300, 7, turns=SEVEN[:5]))
    assert cells_of(few)[1][1] == "300 (291-309)"
    assert report_text(report(notes=["Full disk."])) == "nothing was timed\n\nFull disk."
    assert "* memory gives nothing from the shards: what" in report_text(report(record("memory", 300, 7, gives=[])))
    found = unpaired_ratio([1.0, 2.0, 3.0], [1.0, 2.0, 3.0])
    assert found is not None
    assert found.low is None
    assert found.holds(100.0)
    assert paired_ratio([1.0] * 7, [0.0] + [1.0] * 6) is None
    assert unpaired_ratio([0.0] * 7, [1.0] * 7) is None
    assert unpaired_ratio([], []) is None
