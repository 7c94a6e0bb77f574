"""Draw the figures of a run with matplotlib, as SVG.

There are two kinds of plots: a row for each loader under one setting, with every repeat as a dot; and a line for each
loader over a setting that was swept. Both begin at zero, so that twice as long is twice as much. A dot is a repeat, a
band or whisker the 95 % interval, a line or mark the median. Text and axes have the text colour of the page that the
SVG stands in, which suits light and dark pages. The same records give the same SVG.
"""

import contextlib
import io
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple

from bench.loaders.registry import LOADERS, is_ours
from bench.reports.figures import FIGURES, SETTING_TITLES, BenchFigure
from bench.reports.summary import (
    Interval,
    Measured,
    Record,
    Report,
    format_setting,
    label_of,
    measured,
    setting_names,
    shown_figures,
)
from dali_pipes.errors import PipesError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawing


COLOURS = (
    "#0078b4", "#ff2d00", "#d2a5f0", "#a50000", "#00d278", "#7800f0",
    "#c369f0", "#a55a78", "#78a587", "#ff9600", "#005a3c", "#782d87",
)  # fmt: skip
"""The first is ours. Each pair differs, also for people who do not see red, green or blue; each contrasts with white
and with dark paper: a test computes both. Markers differ too, for printers."""
MARKERS = "osD^vP"
FEED = ("external-source", "preadv", "webdataset", "webdataset-mapped")
"""The other loaders of `bench feed`, which occur in no record of `bench run`."""
WIDTH, HEIGHT = 5.6, 3.4
"""Inches."""
ROW_HEIGHT = 0.26
INK = "#010203"
"""Stands for the page's colour of text."""
STYLE: Any = {
    "font.size": 9,
    "svg.fonttype": "none",  # text stays text
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.alpha": 0.25,
    **dict.fromkeys(
        ("axes.edgecolor", "axes.labelcolor", "grid.color", "text.color", "xtick.color", "ytick.color"), INK
    ),
}
LOG_SPAN = 16
"""Positive values whose largest is this many times the smallest go on a logarithmic axis."""
WHISKER_SHIFT = 3
"""Points between the whiskers of two loaders at one place."""


class Style(NamedTuple):
    """How a loader is drawn, in every plot."""

    colour: str
    marker: str
    is_dashed: bool
    """Another decoder of the same loader has the same colour."""
    is_ours: bool


def style_of(loader: str, decode: str = "pil") -> Style:
    """Return the style of a record's loader: that of its place in `LOADERS`, so that it is the same in every record."""
    if is_ours(loader):
        number = 0
    elif loader in LOADERS:
        number = [*LOADERS].index(loader)
    elif loader in FEED:
        number = 1 + FEED.index(loader)
    else:  # of another version
        number = 1 + zlib.crc32(loader.encode()) % (len(COLOURS) - 1)
    others = len(COLOURS) - 1
    # There are more loaders than colours that differ: a colour comes again with another marker, ours does not.
    turn, place = divmod(number - 1, others) if number else (0, -1)
    marker = MARKERS[(number + turn * (len(MARKERS) // 2 - others)) % len(MARKERS)]
    return Style(COLOURS[1 + place], marker, decode == "turbo", is_ours(loader))


@dataclass(frozen=True, kw_only=True)
class Mark:
    """One figure of one loader in a plot."""

    label: str
    """The loader's label."""
    style: Style
    measured: Measured
    x: float | str = 0.0
    """The value of the setting that was swept."""

    @property
    def interval(self) -> Interval:
        """The interval in the figure's unit."""
        return self.measured.interval.mapped(lambda value: self.measured.figure.scale * value)


@contextlib.contextmanager
def _styled(more: Any = None) -> Iterator[None]:
    """Give matplotlib the style of the plots.

    Raises:
        PipesError: If matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
    except ImportError as exc:
        raise PipesError("plots need matplotlib; install: pip install 'dali-pipes[bench]'") from exc
    with mpl.rc_context({**STYLE, **(more or {})}):
        yield


def plots_of(report: Report) -> dict[str, str]:
    """Draw a plot for each figure, in a sweep also for each combination of the settings that are not on the axis.

    Loaders that read no shard are left out: their figures are off any scale.

    Returns:
        A name for a file, without its ending -> the plot as SVG.

    Raises:
        PipesError: If matplotlib is not installed.
    """
    records = [record for record in report["records"] if _is_plotted(record)]
    varied = setting_names(report["records"])
    # The setting with the most values is the axis.
    axis = max(varied, key=lambda name: len({record["setting"].get(name) for record in records}), default=None)
    groups: dict[str, list[Record]] = {}
    for record in records:
        # With a dash for None: a plot's title names each setting that varies.
        others = [
            f"{SETTING_TITLES[name]} {format_setting(record['setting'].get(name))}" for name in varied if name != axis
        ]
        groups.setdefault(", ".join(others), []).append(record)
    plots = {}
    for name in shown_figures(report):
        for number, (where, group) in enumerate(groups.items(), start=1):
            marks = [
                Mark(
                    label=label_of(record),
                    style=style_of(record["loader"], record["decode"]),
                    measured=one,
                    x=_place(record, axis),
                )
                for record in group
                if (one := measured(report, record, name)) is not None
            ]
            if not marks:
                continue
            title, unit = FIGURES[name].title, FIGURES[name].unit
            if axis is None:
                plots[name] = svg_of(draw_rows(marks), label=f"{title}, {unit}")
                continue
            x_title = SETTING_TITLES[axis]
            label = f"{title}{f', {where}' if where else ''} over {x_title}, {unit}"
            drawing = draw_lines(marks, x_title=x_title, where=where)
            plots[f"{name}-{number}" if len(groups) > 1 else name] = svg_of(drawing, label=label)
    return plots


def _is_plotted(record: Record) -> bool:
    """Return whether a loader reads shards; the loaders of the oldest records, with ``None``, all do."""
    return record.get("gives") is None or bool(record["gives"])


def _place(record: Record, axis: str | None) -> float | str:
    value = 0.0 if axis is None else record["setting"].get(axis)
    return value if isinstance(value, str) else "as it is" if value is None else float(value)


@_styled()
def draw_rows(marks: Sequence[Mark]) -> "Drawing":
    """Draw a row for each loader: a dot for each repeat, a bar for the interval, a line for the median."""
    figure = marks[0].measured.figure
    drawing, axes = _new(figure.title, height=1.0 + ROW_HEIGHT * len(marks))
    for place, mark in enumerate(marks):
        colour, interval = mark.style.colour, mark.interval
        if mark.style.is_ours:
            axes.axhspan(place - 0.48, place + 0.48, color=colour, alpha=0.1, linewidth=0)
        values = [figure.scale * value for value in mark.measured.values]
        axes.scatter(values, [place] * len(values), s=14, color=colour, alpha=0.55, linewidths=0)
        if interval.low is not None and interval.high is not None:
            axes.barh(place, interval.high - interval.low, left=interval.low, height=0.6, color=colour, alpha=0.25)
        axes.plot([interval.median] * 2, [place - 0.36, place + 0.36], color=colour, linewidth=2.2)
        axes.text(1.02, place, mark.measured.shown(), transform=axes.get_yaxis_transform(), va="center")
    axes.set_yticks(range(len(marks)), [mark.label for mark in marks])
    for name, mark in zip(axes.get_yticklabels(), marks, strict=True):
        name.set_fontweight("bold" if mark.style.is_ours else "normal")
    axes.set_ylim(len(marks) - 0.5, -0.5)
    axes.set_xlim(left=0)
    axes.set_xlabel(_axis_title(figure))
    axes.grid(axis="x")
    return drawing


@_styled()
def draw_lines(marks: Sequence[Mark], *, x_title: str, where: str = "") -> "Drawing":
    """Draw a line for each loader over the setting ``x_title``, with its interval at every point.

    ``where`` names the other settings, for the title.
    """
    from matplotlib.transforms import offset_copy

    figure = marks[0].measured.figure
    drawing, axes = _new(f"{figure.title}, {where}" if where else figure.title, height=HEIGHT)
    values = list(dict.fromkeys(mark.x for mark in marks))
    are_words = any(isinstance(value, str) for value in values)
    loaders = dict.fromkeys(mark.label for mark in marks)
    for row, label in enumerate(loaders):
        line = [mark for mark in marks if mark.label == label]
        style, intervals = line[0].style, [mark.interval for mark in line]
        shift = WHISKER_SHIFT * (row - (len(loaders) - 1) / 2)
        places = [float(values.index(mark.x)) if are_words else float(mark.x) for mark in line]
        # An artist with a transform of its own is not counted in the limits of the axes.
        axes.update_datalim([(place, one.high or one.median) for place, one in zip(places, intervals, strict=True)])
        axes.errorbar(
            places,
            [one.median for one in intervals],
            yerr=[
                [0.0 if one.low is None else one.median - one.low for one in intervals],
                [0.0 if one.high is None else one.high - one.median for one in intervals],
            ],
            label=label,
            color=style.colour,
            marker=style.marker,
            linestyle="--" if style.is_dashed else "-",
            linewidth=2.8 if style.is_ours else 1.4,
            zorder=3 if style.is_ours else 2,
            markerfacecolor="none" if style.is_dashed else style.colour,
            capsize=3,
            transform=offset_copy(axes.transData, drawing, x=shift, units="points"),
        )
    axes.autoscale_view()
    if are_words:
        axes.set_xticks(range(len(values)), [str(value) for value in values])
    else:
        numbers = [float(value) for value in values]
        if min(numbers) > 0 and max(numbers) / min(numbers) >= LOG_SPAN:
            axes.set_xscale("log")
        axes.set_xticks(numbers, [f"{value:,.10g}" for value in numbers])
        axes.set_xticks([], minor=True)
    axes.set_ylim(bottom=0)
    axes.set_xlabel(x_title)
    axes.set_ylabel(_axis_title(figure))
    axes.grid(axis="y")
    drawing.legend(*axes.get_legend_handles_labels(), loc="outside upper left", ncols=3, frameon=False)
    return drawing


def svg_of(drawing: "Drawing", *, label: str) -> str:
    """Return the drawing as an SVG element, with ``label`` for readers who do not see it."""
    stream = io.StringIO()
    # The salt keeps identifiers equal from run to run, and apart within a page.
    with _styled({"svg.hashsalt": label}):
        metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        drawing.savefig(stream, format="svg", transparent=True, metadata=metadata)
    svg = stream.getvalue()
    svg = svg[svg.index("<svg ") :].replace(INK, "currentColor")
    return svg.replace("<svg ", f'<svg role="img" aria-label="{escape(label)}" ', 1)


def _new(title: str, *, height: float) -> tuple["Drawing", "Axes"]:
    from matplotlib.figure import Figure as Drawing

    drawing = Drawing(figsize=(WIDTH, height), layout="constrained")
    axes = drawing.add_subplot()
    axes.set_title(title, loc="left")
    axes.xaxis.set_major_formatter("{x:,.10g}")
    axes.yaxis.set_major_formatter("{x:,.10g}")
    return drawing, axes


def _axis_title(figure: BenchFigure) -> str:
    return f"{figure.unit} ({'more' if figure.better == 'high' else 'less'} is better)"
