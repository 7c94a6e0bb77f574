"""Plots are well-formed SVG with every figure in its place: axes named, intervals around medians, nothing outside."""

import re
import sys
import xml.etree.ElementTree as ET
from typing import Any

import numpy as np
import pytest
from matplotlib.patches import Rectangle

from bench.loaders.registry import LOADERS
from bench.reports.plots import COLOURS, FEED, Mark, draw_lines, draw_rows, plots_of, style_of, svg_of
from bench.reports.summary import label_of, measured, median_interval
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


def marks_of(name: str, run: dict[str, Any], axis: str | None = None) -> list[Mark]:
    """A mark for each record that has the figure."""
    return [
        Mark(
            label=label,
            style=style_of(row["loader"], row["decode"]),
            measured=one,
            x=0.0 if axis is None else row["setting"][axis],
        )
        for row in run["records"]
        if (one := measured(run, row, name)) is not None
        for label in [label_of(row)]
    ]


def texts_of(svg: str) -> set[str]:
    """What can be read in a picture: text is text, and no path of letters."""
    return {"".join(node.itertext()).strip() for node in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")}


def test_rows_lie_in_their_places() -> None:
    """All repeats are there, the median is between the interval's ends, and both axes begin at zero, from above."""
    run = report(record("a & b", 1.5, 1), record("c", 4, 1, turns=(1.0,)))
    marks = marks_of("samples_per_s", run)
    drawing = draw_rows(marks)
    (axes,) = drawing.axes
    assert axes.get_xlim()[0] == 0
    assert axes.get_ylim() == (1.5, -0.5)
    for place, (mark, dots) in enumerate(zip(marks, axes.collections, strict=True)):
        found = np.asarray(dots.get_offsets())
        assert found[:, 0].tolist() == pytest.approx(mark.measured.values)
        assert set(found[:, 1]) == {place}
    (band,) = axes.patches  # of one repeat there is no interval
    assert isinstance(band, Rectangle)
    medians = [float(np.asarray(line.get_xdata())[0]) for line in axes.lines]
    assert band.get_x() < medians[0] < band.get_x() + band.get_width()
    assert medians == pytest.approx([1.5, 4])
    svg = svg_of(drawing, label="speed")
    assert {"samples/s", "a & b (pil)", "c (pil)", "samples/s (more is better)", "0", "4"} <= texts_of(svg)


@pytest.mark.parametrize(
    ("values", "scale"),
    [
        ([0.0, 20.0, 100.0], "linear"),
        ([10.0, 100.0, 1000.0], "log"),  # far apart
        ([10.0, 20.0, 40.0], "linear"),
        (["cold", "warm"], "words"),  # in their order
        ([5.0], "linear"),
    ],
)
def test_lines_lie_in_their_places(values: list[float | str], scale: str) -> None:
    """Each value of the axis is at its place and named, with a whisker; the axis of the figure begins at zero."""
    run = report(*(record("dali", 500, 1, setting={"latency_ms": value}) for value in values))
    drawing = draw_lines(marks_of("samples_per_s", run, "latency_ms"), x_title="latency ms", where="cache warm")
    (axes,) = drawing.axes
    (bars,) = axes.containers
    expected = list(range(len(values))) if scale == "words" else values
    line, _, (whiskers,) = bars
    assert np.asarray(line.get_xdata()).tolist() == expected
    assert np.asarray(line.get_ydata()).tolist() == pytest.approx([500] * len(values))
    interval = median_interval(marks_of("samples_per_s", run)[0].measured.values)
    expected_ends = pytest.approx([interval.low, interval.high])
    assert [segment[:, 1].tolist() for segment in whiskers.get_segments()] == [expected_ends] * len(values)
    assert axes.get_xscale() == ("log" if scale == "log" else "linear")
    assert axes.get_ylim()[0] == 0
    left, right = axes.get_xlim()
    assert all(left <= value <= right for value in map(float, expected))
    assert axes.get_ylim()[1] >= (interval.high or 0)
    names = {f"{value:,.0f}" if isinstance(value, float) else value for value in values}
    found = texts_of(svg_of(drawing, label="speed"))
    assert names | {"samples/s, cache warm", "dali (pil)", "latency ms", "samples/s (more is better)"} <= found


def test_svg_is_the_same_each_time_and_has_the_colour_of_the_page() -> None:
    """A report of the same records is the same file; on dark paper axes and text are light."""
    first, second = (svg_of(draw_rows(marks_of("samples_per_s", RUN)), label="speed <1>") for _ in range(2))
    assert first == second
    assert first.startswith('<svg role="img" aria-label="speed &lt;1&gt;"')
    assert "currentColor" in first
    assert "#010203" not in first
    assert svg_of(draw_rows(marks_of("samples_per_s", RUN)), label="other").count("<g") == first.count("<g")


def test_a_loader_has_one_style_everywhere() -> None:
    """Each of the registry has a pair of colour and marker of its own, ours a colour; another decoder is dashed."""
    styles = {name: style_of(name) for name in LOADERS}
    assert len({(style.colour, style.marker) for style in styles.values()}) == len(styles)
    assert len({style.colour for style in styles.values()}) == len(COLOURS)
    assert [name for name, style in styles.items() if style.colour == COLOURS[0]] == ["dali"]
    assert styles["dali"].colour == style_of("dali-pipes", "none").colour == COLOURS[0]
    assert [name for name, style in styles.items() if style.is_ours] == ["dali"]
    assert len({style_of(name).colour for name in ("dali-pipes", *FEED)}) == 1 + len(FEED)
    pil, turbo = style_of("webloader", "pil"), style_of("webloader", "turbo")
    assert pil.colour == turbo.colour
    assert (pil.is_dashed, turbo.is_dashed) == (False, True)
    assert style_of("a loader of later").colour in COLOURS[1:]


# What people see who lack the cones for red, green or blue, in linear RGB: G. M. Machado, M. M. Oliveira and
# L. A. F. Fernandes, "A physiologically-based model for simulation of color vision deficiency", IEEE Transactions on
# Visualization and Computer Graphics 15, 2009, table 1, severity 1.
SEEN = {
    "all": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
# Linear RGB to OKLab: B. Ottosson, "A perceptual color space for image processing", 2020. A step of 0.02 is just seen.
TO_LMS = [
    [0.4122214708, 0.5363325363, 0.0514459929],
    [0.2119034982, 0.6806995451, 0.1073969566],
    [0.0883024619, 0.2817188376, 0.6299787005],
]
TO_LAB = [
    [0.2104542553, 0.7936177850, -0.0040720468],
    [1.9779984951, -2.4285922050, 0.4505937099],
    [0.0259040371, 0.7827717662, -0.8086757660],
]


def linear(colour: str) -> Any:
    """Linear RGB of ``#rrggbb``, 0 to 1."""
    values = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


@pytest.mark.parametrize("eyes", SEEN)
def test_colours_differ_for_all_eyes(eyes: str) -> None:
    """Each pair by four just visible steps or more."""
    seen = np.clip(np.array([np.array(SEEN[eyes]) @ linear(colour) for colour in COLOURS]), 0, 1)
    lab = np.cbrt(seen @ np.array(TO_LMS).T) @ np.array(TO_LAB).T
    distances = np.linalg.norm(lab[:, None] - lab[None], axis=2) + np.eye(len(COLOURS))
    assert distances.min() > 0.08


@pytest.mark.parametrize("paper", ["#ffffff", "#15181c"])
def test_colours_contrast_with_the_paper(paper: str) -> None:
    """WCAG's ratio of 2 or more, on light and on dark pages."""
    weights = np.array([0.2126, 0.7152, 0.0722])
    for colour in COLOURS:
        darker, lighter = sorted((linear(colour) @ weights, linear(paper) @ weights))
        assert (lighter + 0.05) / (darker + 0.05) > 1.95, colour


def test_ours_stands_out() -> None:
    """In rows by a band and a bold name, in lines by a thicker one in front."""
    drawing = draw_rows(marks_of("samples_per_s", RUN))
    (axes,) = drawing.axes
    assert [name.get_fontweight() for name in axes.get_yticklabels()] == ["bold", "normal", "normal"]
    assert len(axes.patches) == 3 + 1, "an interval each, and the band"
    (axes,) = draw_lines(marks_of("samples_per_s", SWEEP, "latency_ms"), x_title="latency ms").axes
    ours, other = (bars[0] for bars in axes.containers)
    assert ours.get_linewidth() > other.get_linewidth()
    assert ours.get_zorder() > other.get_zorder()


def test_plots_without_matplotlib_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables need it not."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(PipesError, match=r"plots need matplotlib; install: pip install 'dali-pipes\[bench\]'"):
        plots_of(RUN)
    assert "900 [825-921]" in markdown_page([("a run", RUN)])


def test_a_run_has_a_plot_of_each_figure_and_setting() -> None:
    """Each stands by itself; what comes from no shard is off any scale, and left out."""
    plots = plots_of(RUN)
    assert [*plots] == ["samples_per_s", "cpu_ms_per_sample", "time_to_first_batch_s", "wait_share"]
    for svg in plots.values():
        ET.fromstring(svg)
        assert not re.search(r"(?:src|href)=\"(?!#)|@import|url\((?!#)", svg)
        assert "synthetic" not in svg
    sweep = plots_of(SWEEP)
    assert len(sweep) == 4 * 2
    assert [*sweep][:2] == ["samples_per_s-1", "samples_per_s-2"]
    assert "samples/s, cache warm over latency ms" in sweep["samples_per_s-1"]
    identifiers = re.findall(r' id="([mp][0-9a-f]{10})"', "".join([*plots.values(), *sweep.values()]))
    assert len(set(identifiers)) == len(identifiers), "several may stand in one page"


def test_markdown_holds_the_tables() -> None:
    """Every median and interval, notes and conditions, and what figures are."""
    page = markdown_page([("a run", RUN)])
    for text in ("| dali ", "900 [825-921]", "* commit: 0123456789abcdef, with changes", "**samples/s**"):
        assert text in page
