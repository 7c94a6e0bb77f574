"""Places of loaders: a difference that the repeats do not show is none."""

from typing import Any

import pytest

from bench.reports.page import html_page
from bench.reports.ranking import rank, ranking_rows

from .records import SEVEN, record, report

BACK = tuple(reversed(SEVEN))


def places(run: dict[str, Any]) -> list[tuple[str, int | None]]:
    ((_, ranked),) = rank(run)
    return [(one.record["loader"], one.place) for one in ranked]


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        (
            [record("webloader", 300, 1), record("dali", 900, 1), record("spdl", 600, 1)],
            [("dali", 1), ("spdl", 2), ("webloader", 3)],
        ),
        # The same speed in other turns: the ratio's interval contains 1. The third counts those before it.
        (
            [record("dali", 900, 1), record("spdl", 899, 1, turns=BACK), record("webloader", 300, 1)],
            [("dali", 1), ("spdl", 1), ("webloader", 3)],
        ),
        # Of two turns nothing is known.
        ([record("dali", 900, 1, turns=(1, 1)), record("spdl", 300, 1, turns=(1, 1))], [("dali", 1), ("spdl", 1)]),
        # The ceiling and what reads no shard have no place, wherever they are.
        (
            [record("memory", 950, 1), record("synthetic", 1e6, 1, gives=[]), record("dali", 900, 1)],
            [("synthetic", None), ("memory", None), ("dali", 1)],
        ),
    ],
)
def test_places(records: list[dict[str, Any]], expected: list[tuple[str, int | None]]) -> None:
    assert places(report(*records)) == expected


def test_rows_of_one_setting_say_how_much_of_the_fastest_a_loader_is() -> None:
    rows, are_ours = ranking_rows(
        report(record("webloader", 450, 1), record("dali", 900, 1), record("memory", 1800, 1))
    )
    assert rows[0] == ["place", "loader", "samples/s", "of the fastest"]
    assert [row[:2] for row in rows[1:]] == [
        ["fed from memory: the ceiling", "memory (pil)"],
        ["1", "dali (pil)"],
        ["2", "webloader (pil)"],
    ]
    assert [row[3] for row in rows[1:]] == ["-", "-", "0.50 [0.50-0.50]"]
    assert are_ours == [False, True, False]


def test_rows_of_several_settings_have_a_place_in_each() -> None:
    """Ordered by the mean place; a loader that lacks a setting has a dash there."""
    run = report(
        *(record("spdl", speed, 1, setting={"threads": threads}) for threads, speed in ((1, 900), (2, 1000), (4, 400))),
        *(
            record("dali", speed, 1, setting={"threads": threads})
            for threads, speed in ((1, 500), (2, 2000), (4, 4000))
        ),
        record("webloader", 100, 1, setting={"threads": 2}),
    )
    rows, are_ours = ranking_rows(run)
    assert rows == [
        ["loader", "mean place", "threads 1", "threads 2", "threads 4"],
        ["dali (pil)", "1.3", "2. (500)", "1. (2000)", "1. (4000)"],
        ["spdl (pil)", "1.7", "1. (900)", "2. (1000)", "2. (400)"],
        ["webloader (pil)", "3.0", "-", "3. (100)", "-"],
    ]
    assert are_ours == [True, False, False]


def test_page_begins_with_the_ranking_and_marks_ours() -> None:
    page = html_page([("a run", report(record("webloader", 450, 1), record("dali", 900, 1, decode="dali")))])
    assert page.index("Ranking") < page.index("In short") < page.index("All figures")
    assert page.count('<tr class="ours"><td class="name">1</td><td class="name">dali</td>') == 1
    assert page.count('<tr class="ours"><td class="name">dali</td>') == 2
