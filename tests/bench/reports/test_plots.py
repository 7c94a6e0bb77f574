"""Plots are well-formed SVG with every figure in its place: axes named, intervals around medians, nothing outside."""

import re
import sys
import xml.etree.ElementTree as ET
from typing import Any

import numpy as np
import pytest
from matplotlib.patches import Rectangle

from bench.reports.figures import FIGURES
from bench.reports.plots import Mark, draw_lines, draw_rows, plots_of
from bench.reports.summary import median_interval, values_of
from bench.reports.tables import markdown_page
from dali_pipes.errors import PipesError

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


def marks_of(run: dict[str, Any], axis: str | None = None) -> list[Mark]:
    """A mark for the samples/s of each record."""
    name = "samples_per_s"
    return [
        Mark(row, FIGURES[name], values_of(row, name), 0.0 if axis is None else row["setting"][axis])
        for row in run["records"]
    ]


def texts_of(svg: str) -> set[str]:
    """What can be read in a picture: text is text, and no path of letters."""
    return {"".join(node.itertext()).strip() for node in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")}


def test_rows_lie_in_their_places() -> None:
    """All repeats are there, the median is between the interval's ends, and both axes begin at zero, from above."""
    marks = marks_of(report(record("a & b", 1.5, 1), record("dali", 4, 1, decode="dali")))
    (axes,) = draw_rows(marks).axes
    assert axes.get_xlim()[0] == 0
    assert axes.get_ylim() == (1.5, -0.5)
    for place, (mark, dots) in enumerate(zip(marks, axes.collections, strict=True)):
        found = np.asarray(dots.get_offsets())
        assert found[:, 0].tolist() == pytest.approx(mark.values)
        assert set(found[:, 1]) == {place}
    medians = [float(np.asarray(line.get_xdata())[0]) for line in axes.lines]
    assert medians == pytest.approx([1.5, 4])
    for band, median in zip(axes.patches, medians, strict=True):
        assert isinstance(band, Rectangle)
        assert band.get_x() < median < band.get_x() + band.get_width()
    assert [name.get_fontweight() for name in axes.get_yticklabels()] == ["normal", "bold"], "ours stands out"


@pytest.mark.parametrize(
    ("values", "scale"),
    [
        ([0.0, 20.0, 100.0], "linear"),
        ([10.0, 100.0, 1000.0], "log"),  # far apart
        (["cold", "warm"], "words"),  # in their order
        ([5.0], "linear"),
    ],
)
def test_lines_lie_in_their_places(values: list[float | str], scale: str) -> None:
    """Each value of the axis is at its place and named, with a whisker; the axis of the figure begins at zero."""
    run = report(*(record("dali", 500, 1, setting={"latency_ms": value}) for value in values))
    marks = marks_of(run, "latency_ms")
    (axes,) = draw_lines(marks, x_title="latency ms").axes
    (bars,) = axes.containers
    expected = list(range(len(values))) if scale == "words" else values
    line, _, (whiskers,) = bars
    assert np.asarray(line.get_xdata()).tolist() == expected
    assert np.asarray(line.get_ydata()).tolist() == pytest.approx([500] * len(values))
    interval = median_interval(marks[0].values)
    expected_ends = pytest.approx([interval.low, interval.high])
    assert [segment[:, 1].tolist() for segment in whiskers.get_segments()] == [expected_ends] * len(values)
    assert axes.get_xscale() == ("log" if scale == "log" else "linear")
    assert axes.get_ylim()[0] == 0
    assert axes.get_ylim()[1] >= (interval.high or 0)
    names = [f"{value:,.0f}" if isinstance(value, float) else value for value in values]
    assert [label.get_text() for label in axes.get_xticklabels()] == names


def test_a_run_has_a_plot_of_each_figure_and_setting() -> None:
    """Each stands by itself, and is the same each time; what comes from no shard is off any scale, and left out."""
    plots = plots_of(RUN)
    assert [*plots] == ["samples_per_s", "cpu_ms_per_sample", "time_to_first_batch_s", "wait_share"]
    for svg in plots.values():
        assert not re.search(r"(?:src|href)=\"(?!#)|@import|url\((?!#)", svg)
        assert "synthetic" not in svg
        assert "currentColor" in svg
    first = plots["samples_per_s"]
    assert first.startswith('<svg role="img" aria-label="samples/s, samples/s"')
    assert {"samples/s", "dali", "webloader (pil)", "samples/s (more is better)"} <= texts_of(first)
    assert plots_of(RUN) == plots
    sweep = plots_of(SWEEP)
    assert len(sweep) == 4 * 2
    assert [*sweep][:2] == ["samples_per_s-1", "samples_per_s-2"]
    assert "samples/s, cache warm over latency ms" in sweep["samples_per_s-1"]
    assert "samples/s, cache warm" in texts_of(sweep["samples_per_s-1"])
    identifiers = re.findall(r' id="([mp][0-9a-f]{10})"', "".join([*plots.values(), *sweep.values()]))
    assert len(set(identifiers)) == len(identifiers), "several may stand in one page"


def test_plots_without_matplotlib_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables need it not."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(PipesError, match=r"plots need matplotlib; install: pip install 'dali-pipes\[bench\]'"):
        plots_of(RUN)
    page = markdown_page([("a run", RUN)])
    for text in ("| dali ", "900 [825-921]", "* commit: 0123456789abcdef, with changes", "**samples/s**"):
        assert text in page
