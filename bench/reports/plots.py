"""Draw the figures of a run with matplotlib, as SVG; the same records give the same SVG.

A row for each loader under one setting, or a line for each loader over a setting that was swept; both begin at zero. A
dot is a repeat, a band or whisker the 95 % interval, a line or mark the median. Text and axes have the text colour of
the page that the SVG stands in.
"""

import io
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple

from bench.loaders.registry import LOADERS, is_ours
from bench.reports.figures import FIGURES, SETTING_TITLES, BenchFigure
from bench.reports.summary import (
    Record,
    Report,
    format_interval,
    format_setting,
    label_of,
    median_interval,
    setting_names,
    shown_figures,
    values_of,
)
from dali_pipes.errors import PipesError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawing

WIDTH, HEIGHT, ROW_HEIGHT = 5.6, 3.4, 0.26
"""Inches."""
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


class Mark(NamedTuple):
    """One figure of one record in a plot."""

    record: Record
    figure: BenchFigure
    values: Sequence[float]
    x: float | str = 0.0

    @property
    def is_ours(self) -> bool:
        return is_ours(self.record["loader"])

    @property
    def colour(self) -> str:
        """The loader's colour, the same in every plot; ours has the first one."""
        number = [*LOADERS, self.record["loader"]].index(self.record["loader"])
        return f"C{0 if self.is_ours else 1 + number % 9}"

    @property
    def ends(self) -> tuple[float, float, float]:
        """Lower end, median and upper end in the figure's unit; without an interval they are equal."""
        interval, scale = median_interval(self.values), self.figure.scale
        low, high = (interval.median if end is None else end for end in (interval.low, interval.high))
        return scale * low, scale * interval.median, scale * high


def plots_of(report: Report) -> dict[str, str]:
    """Draw a plot for each figure, in a sweep also for each combination of the settings that are not on the axis.

    Loaders that read no shard are left out: their figures are off any scale. Returns a name for a file, without its
    ending -> the plot as SVG.
    """
    try:
        import matplotlib as mpl
    except ImportError as exc:
        raise PipesError("plots need matplotlib; install: pip install 'dali-pipes[bench]'") from exc
    records = [record for record in report["records"] if record.get("gives") is None or record["gives"]]
    varied = setting_names(report["records"])
    # The setting with the most values is the axis.
    axis = max(varied, key=lambda name: len({record["setting"].get(name) for record in records}), default=None)
    groups: dict[str, list[Record]] = {}
    for record in records:
        others = [
            f"{SETTING_TITLES[name]} {format_setting(record['setting'].get(name))}" for name in varied if name != axis
        ]
        groups.setdefault(", ".join(others), []).append(record)
    plots = {}
    for name in shown_figures(report):
        for number, (where, group) in enumerate(groups.items(), start=1):
            found = [(record, values_of(record, name), record["setting"].get(axis, 0.0)) for record in group]
            marks = [
                Mark(one, FIGURES[name], values, "as it is" if x is None else x) for one, values, x in found if values
            ]
            if not marks:
                continue
            title, unit = FIGURES[name].title, FIGURES[name].unit
            label = f"{title}{f', {where}' if where else ''}{f' over {SETTING_TITLES[axis]}' if axis else ''}, {unit}"
            # The salt keeps identifiers equal from run to run, and apart within a page.
            with mpl.rc_context({**STYLE, "svg.hashsalt": label}):
                drawing = draw_rows(marks) if axis is None else draw_lines(marks, x_title=SETTING_TITLES[axis])
                if where:
                    drawing.axes[0].set_title(f"{title}, {where}", loc="left")
                plots[f"{name}-{number}" if len(groups) > 1 else name] = svg_of(drawing, label=label)
    return plots


def draw_rows(marks: Sequence[Mark]) -> "Drawing":
    """Draw a row for each loader: a dot for each repeat, a bar for the interval, a line for the median."""
    figure = marks[0].figure
    drawing, axes = _new(figure, height=1.0 + ROW_HEIGHT * len(marks))
    for place, mark in enumerate(marks):
        values = [figure.scale * value for value in mark.values]
        low, median, high = mark.ends
        axes.scatter(values, [place] * len(values), s=14, color=mark.colour, alpha=0.55, linewidths=0)
        axes.barh(place, high - low, left=low, height=0.6, color=mark.colour, alpha=0.25)
        axes.plot([median] * 2, [place - 0.36, place + 0.36], color=mark.colour, linewidth=2.2)
        axes.text(1.02, place, format_interval(figure, mark.values), transform=axes.get_yaxis_transform(), va="center")
    axes.set_yticks(range(len(marks)), [label_of(mark.record) for mark in marks])
    for name, mark in zip(axes.get_yticklabels(), marks, strict=True):
        name.set_fontweight("bold" if mark.is_ours else "normal")
    axes.set_ylim(len(marks) - 0.5, -0.5)
    axes.set_xlim(left=0)
    axes.set_xlabel(_axis_title(figure))
    axes.grid(axis="x")
    return drawing


def draw_lines(marks: Sequence[Mark], *, x_title: str) -> "Drawing":
    """Draw a line for each loader over the setting ``x_title``, with its interval at every point."""
    figure = marks[0].figure
    drawing, axes = _new(figure, height=HEIGHT)
    values = list(dict.fromkeys(mark.x for mark in marks))
    are_words = any(isinstance(value, str) for value in values)
    for label in dict.fromkeys(label_of(mark.record) for mark in marks):
        line = [mark for mark in marks if label_of(mark.record) == label]
        medians = [median for _, median, _ in (mark.ends for mark in line)]
        is_other_decoder = line[0].record["decode"] == "turbo"
        axes.errorbar(
            [float(values.index(mark.x)) if are_words else float(mark.x) for mark in line],
            medians,
            yerr=[
                [mid - low for low, mid, _ in (mark.ends for mark in line)],
                [high - mid for _, mid, high in (mark.ends for mark in line)],
            ],
            label=label,
            color=line[0].colour,
            marker="o",
            linestyle="--" if is_other_decoder else "-",
            linewidth=2.8 if line[0].is_ours else 1.4,
            zorder=3 if line[0].is_ours else 2,
            capsize=3,
        )
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
    metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    drawing.savefig(stream, format="svg", transparent=True, metadata=metadata)
    svg = stream.getvalue()
    svg = svg[svg.index("<svg ") :].replace(INK, "currentColor")
    return svg.replace("<svg ", f'<svg role="img" aria-label="{escape(label)}" ', 1)


def _new(figure: BenchFigure, *, height: float) -> tuple["Drawing", "Axes"]:
    from matplotlib.figure import Figure as Drawing

    drawing = Drawing(figsize=(WIDTH, height), layout="constrained")
    axes = drawing.add_subplot()
    axes.set_title(figure.title, loc="left")
    axes.xaxis.set_major_formatter("{x:,.10g}")
    axes.yaxis.set_major_formatter("{x:,.10g}")
    return drawing, axes


def _axis_title(figure: BenchFigure) -> str:
    return f"{figure.unit} ({'more' if figure.better == 'high' else 'less'} is better)"
