"""A run's record to tables: medians, intervals, paired ratios, and what a reader is told beside them."""

from typing import Any

import pytest

from bench.reports.figures import FIGURES
from bench.reports.summary import baseline_of, format_interval, label_of, restricted, setting_names
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
    """By name, or by name and decoder."""
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
    """And in which turn; the conditions have it too."""
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
    """Command, commit and its changes, machine, data, setting."""
    found = dict(conditions_of(report(*RECORDS)))
    assert found["command"] == "dali-pipes bench run --shards .../pets"
    assert found["commit"] == "0123456789abcdef, with changes"
    assert found["machine"] == "AMD EPYC, 2 cores, 23.5 GiB; load at the end 1.5"
    assert found["data"] == "22 samples in 3 shards, 1 MiB"
    assert found["setting"] == "threads 2, ranks 1, batch 64, cache warm, compute ms 40"
    assert found["GPUs"] == "none"


def test_waiting_is_shown_only_where_there_is_something_else_to_do() -> None:
    """Without a step all of the time is waited; the record holds it all the same."""
    idle = report(record("dali", 900, 2.5, setting={"compute_ms": 0.0}))
    assert "waiting %" not in cells_of(idle)[0]


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.0123, "0.01"), (1.236, "1.24"), (12.36, "12.4"), (99.96, "100"), (1234.5, "1234")],
)
def test_numbers_have_as_many_digits_as_tell_something(value: float, shown: str) -> None:
    """Two after the point for small ones, none for large ones."""
    assert format_interval(FIGURES["cpu_ms_per_sample"], [value]) == shown
