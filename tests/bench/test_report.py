"""Medians, spreads, ratios and the table made of them."""

import pytest

from bench.report import Spread, baseline_of, format_table, label_of, ratio, rows_of


def record(loader: str, samples_per_s: float, cpu_ms: float, *, decode: str = "pil") -> dict[str, object]:
    return {
        "loader": loader,
        "decode": decode,
        "samples_per_s": samples_per_s,
        "cpu_ms_per_sample": cpu_ms,
        "time_to_first_batch_s": 0.5,
        "spread": {
            "samples_per_s": [samples_per_s - 10, samples_per_s + 10],
            "cpu_ms_per_sample": [cpu_ms - 0.25, cpu_ms + 0.25],
        },
    }


RECORDS = [record("dali", 900, 2.5, decode="dali"), record("webloader", 300, 7.5), record("tutorial", 150, 15)]


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


@pytest.mark.parametrize(
    ("figure", "baseline", "expected"),
    [
        (900.0, 300.0, 3.0),
        (2.5, 7.5, 1 / 3),  # CPU time: below 1 is better
        (5.0, 5.0, 1.0),
        (5.0, 0.0, None),  # too short an epoch for the kernel's ticks
    ],
)
def test_ratio_to_the_baseline(figure: float, baseline: float, expected: float | None) -> None:
    """A figure over the baseline's."""
    assert ratio(figure, baseline) == (None if expected is None else pytest.approx(expected))


def test_baseline_is_webloader_else_the_first() -> None:
    """Ratios are to the tuned WebLoader where it was timed."""
    assert baseline_of(RECORDS)["loader"] == "webloader"
    assert baseline_of([RECORDS[2], RECORDS[0]])["loader"] == "tutorial"


def test_label_names_the_decoder_where_there_is_a_choice() -> None:
    """Two records of one loader are told apart."""
    assert [label_of(row) for row in RECORDS[:2]] == ["dali", "webloader (pil)"]


def test_rows_hold_medians_spreads_and_ratios() -> None:
    """One row a loader, in the order that they were named."""
    header, dali, webloader, tutorial = rows_of(RECORDS)
    assert header[2] == header[4] == "x webloader (pil)"
    assert dali == ["dali", "900 (890-910)", "3.00", "2.50 (2.25-2.75)", "0.33", "0.50"]
    assert (webloader[2], webloader[4]) == ("1.00", "1.00")
    assert (tutorial[2], tutorial[4]) == ("0.50", "2.00")


def test_table_as_text_is_aligned() -> None:
    """Columns line up: every line that is not cut at its end has the rule's length."""
    lines = format_table(RECORDS).splitlines()
    assert len(lines) == 2 + len(RECORDS)
    assert {len(line) for line in lines} == {len(lines[1])}


def test_table_as_markdown_has_a_cell_a_column() -> None:
    """Six columns, numbers to the right."""
    lines = format_table(RECORDS, markdown=True).splitlines()
    assert [line.count("|") for line in lines] == [7] * 5
    assert lines[1].count(":") == 5
