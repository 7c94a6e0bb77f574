"""Plots are well-formed SVG with every figure in its place: axes named, intervals around medians, nothing outside."""

import itertools
import math
import re
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.reports.page import html_page, markdown_page
from bench.reports.plots import WIDTH, Line, Point, Row, line_plot, row_plot, ticks

from .records import record, report

RUN = report(
    record("dali", 900, 2.5, decode="dali"),
    record("webloader", 300, 7.5),
    record("synthetic", 1e6, 0.1, decode="none", gives=[]),
)
SWEEP = report(
    *(
        record(loader, speed, 5, setting={"latency_ms": latency, "cache": cache})
        for cache in ("warm", "cold")
        for latency in (0.0, 20.0, 100.0)
        for loader, speed in (("dali", 600), ("webloader", 300))
    )
)


@given(st.floats(min_value=1e-9, max_value=1e12, allow_nan=False))
def test_ticks_begin_at_zero_and_reach_the_largest(largest: float) -> None:
    """Evenly spaced, four to seven of them, and the last is no more than a step beyond."""
    found = ticks(largest)
    step = found[1] - found[0]
    assert found[0] == 0
    assert 4 <= len(found) <= 7
    assert found[-1] >= largest * (1 - 1e-6)
    assert found[-2] < largest
    assert all(math.isclose(b - a, step, rel_tol=1e-6) for a, b in itertools.pairwise(found))
    assert float(f"{step:.3g}") == pytest.approx(step)


@pytest.mark.parametrize("largest", [0.0, -1.0, math.inf, math.nan])
def test_ticks_of_nothing_are_an_axis(largest: float) -> None:
    """A plot of zeros has an axis, too."""
    assert ticks(largest) == [0, 1]


def test_rows_lie_in_their_places() -> None:
    """The median between the interval's ends, twice as much twice as far, names as they are."""
    rows = [
        Row(label="a & b", values=[1.0, 2.0], median=1.5, low=1.0, high=2.0, shown="1.5", colour=0),
        Row(label="c", values=[4.0], median=4.0, low=None, high=None, shown="4", colour=9),
    ]
    svg = ET.fromstring(row_plot(rows, title="speed", unit="samples/s", better="high"))
    texts = ["".join(node.itertext()) for node in svg.iter("text")]
    assert texts[0] == "speed"
    assert {"a & b", "samples/s (more is better)", "1.5", "0", "4"} <= set(texts)
    (band,) = svg.iter("rect")
    bars = [node.attrib["d"] for node in svg.iter("path") if node.get("class") == "median"]
    medians = [float(bar.removeprefix("M").split(" ")[0]) for bar in bars]
    zero = float(next(node for node in svg.iter("text") if node.text == "0").attrib["x"])
    assert float(band.attrib["x"]) < medians[0] < float(band.attrib["x"]) + float(band.attrib["width"])
    assert (medians[1] - zero) / (medians[0] - zero) == pytest.approx(4 / 1.5, rel=0.01)
    assert all(0 <= float(node.attrib["cx"]) <= WIDTH for node in svg.iter("circle"))


@pytest.mark.parametrize(
    ("xs", "fractions"),
    [
        ([0.0, 20.0, 100.0], [0.0, 0.2, 1.0]),  # evenly
        ([10.0, 100.0, 1000.0], [0.0, 0.5, 1.0]),  # far apart: by logarithm
        (["cold", "warm"], [0.0, 1.0]),  # words, in their order
        ([5.0], [0.5]),
    ],
)
def test_lines_lie_in_their_places(xs: list[float | str], fractions: list[float]) -> None:
    """Each value of the axis where it belongs, named; whiskers at each point."""
    line = Line(label="dali", points=[Point(x=x, median=2.0, low=1.0, high=3.0) for x in xs], colour=0)
    svg = ET.fromstring(line_plot([line], title="speed", x_title="latency ms", unit="ms", better="low"))
    path = next(node for node in svg.iter("path") if node.get("class") == "line")
    places = [float(x) for x in re.findall(r"[ML]([\d.]+) ", path.attrib["d"])]
    span = max(places) - min(places) or 1
    found = [(place - min(places)) / span for place in places] if len(xs) > 1 else [0.5]
    assert found == pytest.approx(fractions, abs=0.01)
    texts = {"".join(node.itertext()) for node in svg.iter("text")}
    names = {f"{x:g}" if isinstance(x, float) else x for x in xs}
    assert {name.replace("1000", "1,000") for name in names} | {"dali", "latency ms", "ms (less is better)"} <= texts
    assert len([node for node in svg.iter("path") if node.get("class") == "whisker"]) == len(xs)


def test_page_needs_nothing_else_and_holds_everything() -> None:
    """No address of another file; tables, a plot of each figure and setting, what figures are, where they come from."""
    page = html_page([("a <run>", RUN), ("a sweep", SWEEP)], [("windows", "cache  <1>")])
    assert not re.search(r"(?:src|href)=|@import|url\(", page)
    for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        ET.fromstring(svg)
    assert "a &lt;run&gt;" in page
    assert "cache  &lt;1&gt;" in page
    assert "prefers-color-scheme: dark" in page
    # 4 figures of a run; of the sweep those in a plot for each of the two caches.
    assert page.count("<svg") == 4 + 4 * 2
    for text in (
        "900 [825-921]",
        "0123456789abcdef, with changes",
        "AMD EPYC",
        "Samples of all ranks",
    ):
        assert text in page
    plots = "".join(re.findall(r"<svg.*?</svg>", page, re.DOTALL))
    assert "synthetic" not in plots, "what comes from no shard is off any scale"
    assert "Not in them, but in the tables: synthetic *; what comes from no shard is off any scale." in page
    assert "Not in them" not in html_page([("a sweep", SWEEP)])


def test_page_plots_shared_memory_and_records_of_before_there_were_parts() -> None:
    """Version 0 does not say what a loader gives: it gives all."""
    old = record("dali", 900, 2.5, gives=None)
    for repeat in old["repeats"]:
        repeat["figures"]["shared_memory_mib"] = 116.0
    page = html_page([("a run", report(old))])
    assert page.count("<svg") == 5
    assert 'aria-label="/dev/shm, MiB"' in page
    assert "Not in them" not in page


def test_markdown_holds_the_same_tables() -> None:
    """Every median and interval, notes and conditions, and what figures are."""
    page = markdown_page([("a run", RUN)], [("windows", "cache")])
    for text in ("| dali ", "900 [825-921]", "* commit: 0123456789abcdef, with changes", "## windows", "**samples/s**"):
        assert text in page
