"""A run's record to tables: medians, intervals, paired ratios, and what a reader is told beside them."""

from typing import Any

import pytest

from bench.reports.figures import FIGURES
from bench.reports.report import (
    Spread,
    baseline_of,
    conditions_of,
    conversions_of,
    format_interval,
    format_table,
    label_of,
    notes_of,
    setting_names,
    summarise,
    table_rows,
)

from .records import SEVEN, record, report

RECORDS = [record("dali", 900, 2.5, decode="dali"), record("webloader", 300, 7.5), record("tutorial", 303, 7.5)]


@pytest.mark.parametrize(
    ("values", "median", "low", "high"),
    [
        ([4.0], 4.0, 4.0, 4.0),  # one repeat: no spread
        ([3.0, 1.0, 2.0], 2.0, 1.0, 3.0),  # the order of repeats does not count
        ([1.0, 2.0, 4.0, 100.0], 3.0, 1.0, 100.0),  # an even number: the mean of the middle two; no outlier moves it
    ],
)
def test_spread_of_repeats(values: list[float], median: float, low: float, high: float) -> None:
    """The figure is the median; smallest and largest stand beside it."""
    assert Spread.of(values) == Spread(median=median, min=low, max=high)


def test_rows_hold_medians_intervals_and_paired_ratios() -> None:
    """One row a loader; what meets all loaders of a turn alike widens the figures' intervals and no ratio's."""
    (header, dali, webloader, tutorial), num_names = table_rows(report(*RECORDS), intervals=False)
    assert num_names == 1
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


def test_equal_is_said_where_one_is_within_the_interval() -> None:
    """A loader that is faster in half of the turns, and slower in the others; and one that is always 1 % faster."""
    turns = (0.9, 1.1, 0.95, 1.05, 1.0, 1.12, 0.88)
    even = report(record("webloader", 300, 7, turns=(1.0,) * 7), record("a", 300, 7, turns=turns), record("b", 303, 7))
    cells = [row[2] for row in table_rows(even)[0]]
    assert cells[2] == "1.00 [0.90-1.12] ?", "too wide to be called equal"
    ahead = report(record("webloader", 300, 7), record("b", 303, 7))
    assert table_rows(ahead)[0][2][2] == "1.01 [1.01-1.01]"


def test_few_repeats_have_their_spread_and_say_so() -> None:
    """Five turns: smallest to largest, in round brackets, and no word about equality."""
    few = report(record("webloader", 300, 7, turns=SEVEN[:5]), record("dali", 300, 7, turns=SEVEN[:5]))
    assert table_rows(few)[0][1][1:3] == ["300 (291-309)", "1.00"]
    assert notes_of(few) == [
        "Medians of 5 interleaved repeats (smallest to largest): too few for a 95 % interval, which takes 6."
    ]


def test_ratios_are_to_the_baseline_of_the_same_setting() -> None:
    """In a sweep each setting has its own baseline; what is swept has a column."""
    records = [
        record(loader, speed, 5, setting={"latency_ms": latency})
        for latency, factor in ((0.0, 1), (20.0, 3))
        for loader, speed in (("dali", 600), ("webloader", 300 / factor))
    ]
    rows, num_names = table_rows(report(*records))
    assert num_names == 2
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
    """By name, or by name and decoder."""
    assert baseline_of(report(*RECORDS, baseline=baseline), RECORDS[0])["loader"] == expected


def test_label_names_the_decoder_where_there_is_a_choice() -> None:
    """Two records of one loader are told apart; a star marks one that does not give all."""
    assert [label_of(row) for row in RECORDS[:2]] == ["dali", "webloader (pil)"]
    partial = record("litdata", 400, 5, decode="turbo", gives=["image", "key", "label", "normalised"])
    assert label_of(partial) == "litdata (turbo) *"
    assert notes_of(report(*RECORDS, partial))[1:] == [
        "* litdata gives no masks: that is neither compared nor part of what is timed."
    ]
    nothing = record("synthetic", 400, 5, decode="none", gives=[])
    assert notes_of(report(nothing))[1:] == [
        "* synthetic gives nothing of the shards: that is neither compared nor part of what is timed."
    ]


def test_summary_is_in_the_record_by_name() -> None:
    """Medians and ends, for whoever reads the JSON; what was not measured is not there."""
    dali = summarise(report(*RECORDS))[0]
    assert set(dali["figures"]) == {"samples_per_s", "cpu_ms_per_sample", "time_to_first_batch_s", "wait_share"}
    assert dali["figures"]["samples_per_s"]["median"] == pytest.approx(900)
    assert dali["ratios"]["samples_per_s"]["low"] == pytest.approx(3)


def test_conversion_is_shown_once_a_loader() -> None:
    """Seconds and bytes of what was made before anything was timed."""
    made = {"wall_s": 1.25, "num_bytes": 3 << 20}
    rows = conversions_of(
        report(*RECORDS, record("litdata", 1, 1, prepared=made), record("litdata", 1, 1, prepared=made))
    )
    assert rows == [["loader", "made in s", "MiB"], ["litdata", "1.2", "3.0"]]
    assert conversions_of(report(*RECORDS)) == []


def test_conditions_say_where_figures_come_from() -> None:
    """Command, commit and its changes, machine, data, setting."""
    found = dict(conditions_of(report(*RECORDS)))
    assert found["command"] == "dali-pipes bench run --shards .../pets"
    assert found["commit"] == "0123456789abcdef, with changes"
    assert found["machine"] == "AMD EPYC, 2 cores, 23.5 GiB; load at the end 1.5"
    assert found["data"] == "22 samples in 3 shards, 1 MiB"
    assert found["setting"] == "threads 2, ranks 1, batch 64, cache warm, compute ms 40"
    assert found["GPUs"] == "none"


@pytest.mark.parametrize("markdown", [False, True])
def test_table_lines_up(markdown: bool) -> None:
    """Every line of text that is not cut at its end has the rule's length; Markdown has a cell a column."""
    lines = format_table(report(*RECORDS), markdown=markdown).splitlines()
    assert len(lines) == 2 + len(RECORDS)
    if markdown:
        assert {line.count("|") for line in lines} == {8}
        assert lines[1].count(":") == 6
    else:
        assert {len(line) for line in lines[:2]} == {len(lines[1])}


def test_figures_can_be_chosen() -> None:
    """In the order that they are named; one that was not measured is left out."""
    chosen: dict[str, Any] = {"figures": ("time_to_first_batch_s", "accelerator_utilisation", "samples_per_s")}
    header = table_rows(report(*RECORDS), **chosen)[0][0]
    assert header == ["loader", "first batch s", "samples/s", "x webloader (pil)"]


def test_waiting_is_shown_only_where_there_is_something_else_to_do() -> None:
    """Without a step all of the time is waited; the record holds it all the same."""
    idle = report(record("dali", 900, 2.5, setting={"compute_ms": 0.0}))
    assert "waiting %" not in table_rows(idle)[0][0]
    assert "wait_share" in summarise(idle)[0]["figures"]


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.0123, "0.01"), (1.236, "1.24"), (12.36, "12.4"), (99.96, "100"), (1234.5, "1234")],
)
def test_numbers_have_as_many_digits_as_tell_something(value: float, shown: str) -> None:
    """Two after the point for small ones, none for large ones."""
    assert format_interval(FIGURES["cpu_ms_per_sample"], [value]) == shown
