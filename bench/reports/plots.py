"""Figures to pictures: SVG with axes, units and intervals, small enough to lie inside a page; no library is needed.

Two kinds: a row a loader, for one setting, with every repeat as a dot; and a line a loader, over what was swept. Both
begin at zero, so that twice as long is twice as much. Colours are the page's (`bench.reports.page`), by number, so that
a page can be read on light and dark; a line's marker differs too, for eyes and printers to which colours are alike.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

__all__ = ["NUM_COLOURS", "Line", "Point", "Row", "line_plot", "row_plot", "ticks"]

NUM_COLOURS = 8
WIDTH = 560
ROW_HEIGHT = 26
LABEL_WIDTH = 165
VALUE_WIDTH = 125
AXIS_HEIGHT = 44
TITLE_HEIGHT = 30
PLOT_HEIGHT = 250
LEFT, RIGHT = 62, 16
LEGEND_ROW = 20
LOG_SPAN = 16
"""Values that lie further apart than this, and are all positive, go on a logarithmic axis."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One loader's figure: repeats, their median and interval."""

    label: str
    values: Sequence[float]
    median: float
    low: float | None
    high: float | None
    shown: str
    """The figure as text, beside the row."""
    colour: int


@dataclass(frozen=True, kw_only=True)
class Point:
    """One loader's figure at one place of the axis."""

    x: float | str
    median: float
    low: float | None
    high: float | None


@dataclass(frozen=True, kw_only=True)
class Line:
    """One loader over what was swept."""

    label: str
    points: Sequence[Point]
    colour: int


def ticks(largest: float, *, about: int = 5) -> list[float]:
    """Round numbers from 0 to ``largest`` or a little more, in steps of 1, 2, 2.5 or 5 times a power of ten.

    >>> ticks(870)
    [0, 200, 400, 600, 800, 1000]
    """
    if not (largest > 0 and math.isfinite(largest)):
        return [0, 1]
    raw = largest / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * (1 - 1e-9))
    count = math.ceil(largest / step - 1e-9)
    # One more place than the step's own for 2.5.
    places = max(0, 1 - math.floor(math.log10(step) + 1e-9))
    found = [round(row * step, places) for row in range(count + 1)]
    return [int(value) if value.is_integer() else value for value in found]


def row_plot(rows: Sequence[Row], *, title: str, unit: str, better: str) -> str:
    """A row a loader: a dot a repeat, a bar for the interval, a line for the median.

    Args:
        rows: From above.
        title: What is shown.
        unit: On the axis.
        better: ``high`` or ``low``, said beside the unit.
    """
    steps = ticks(max(max(row.values) for row in rows))
    left, right = LABEL_WIDTH, WIDTH - VALUE_WIDTH
    top, bottom = TITLE_HEIGHT, TITLE_HEIGHT + ROW_HEIGHT * len(rows)

    def x(value: float) -> float:
        return left + (right - left) * value / steps[-1]

    parts = [_text(0, 18, title, "t")]
    parts += _vertical_axis_lines([(x(step), _number(step)) for step in steps], top, bottom)
    parts.append(_text((left + right) / 2, bottom + 36, _axis_title(unit, better), "a", anchor="middle"))
    for number, row in enumerate(rows):
        middle = top + ROW_HEIGHT * (number + 0.5)
        parts.append(_text(left - 10, middle + 4, row.label, "l", anchor="end"))
        body = [f'<circle cx="{x(value):.1f}" cy="{middle:.1f}" r="3.2" class="dot"/>' for value in row.values]
        if row.low is not None and row.high is not None:
            width = max(x(row.high) - x(row.low), 2)
            body.insert(
                0, f'<rect x="{x(row.low):.1f}" y="{middle - 8:.1f}" width="{width:.1f}" height="16" class="band"/>'
            )
        body.append(f'<path d="M{x(row.median):.1f} {middle - 9:.1f}v18" class="median"/>')
        parts.append(f'<g class="c{row.colour % NUM_COLOURS}"><title>{escape(f"{row.label}: {row.shown}")}</title>')
        parts += [*body, "</g>", _text(right + 12, middle + 4, row.shown, "v")]
    return _svg(parts, height=bottom + AXIS_HEIGHT, label=f"{title}, {unit}")


def line_plot(lines: Sequence[Line], *, title: str, x_title: str, unit: str, better: str) -> str:
    """A line a loader, with its interval at every point, over numbers or words.

    Numbers that are far apart and positive lie on a logarithmic axis, words one beside the other.
    """
    values = [point.x for line in lines for point in line.points]
    place, names = _places(values)
    largest = max(max(point.median, point.high or 0) for line in lines for point in line.points)
    steps = ticks(largest)
    legend = _legend(lines)
    top = TITLE_HEIGHT + LEGEND_ROW * legend.rows + 8
    bottom = top + PLOT_HEIGHT
    left, right = LEFT, WIDTH - RIGHT

    def x(value: float | str) -> float:
        return left + 24 + (right - left - 48) * place(value)

    def y(value: float) -> float:
        return bottom - (bottom - top) * value / steps[-1]

    parts = [_text(0, 18, title, "t"), *legend.parts]
    for step in steps:
        parts.append(f'<path d="M{left} {y(step):.1f}H{right}" class="grid"/>')
        parts.append(_text(left - 8, y(step) + 4, _number(step), "n", anchor="end"))
    parts += [
        f'<path d="M{x(value):.1f} {bottom}v5" class="axis"/>{_text(x(value), bottom + 19, name, "n", anchor="middle")}'
        for value, name in names
    ]
    parts.append(f'<path d="M{left} {bottom}H{right}" class="axis"/>')
    parts.append(_text((left + right) / 2, bottom + 37, x_title, "a", anchor="middle"))
    parts.append(
        f'<text x="14" y="{(top + bottom) / 2:.0f}" class="a" text-anchor="middle" '
        f'transform="rotate(-90 14 {(top + bottom) / 2:.0f})">{escape(_axis_title(unit, better))}</text>'
    )
    for row, line in enumerate(lines):
        # Whiskers of several loaders at one place lie beside each other.
        shift = 5 * (row - (len(lines) - 1) / 2) if len(lines) > 1 else 0
        places = [(x(point.x) + shift, point) for point in line.points]
        path = " ".join(
            f"{'M' if first == 0 else 'L'}{at:.1f} {y(p.median):.1f}" for first, (at, p) in enumerate(places)
        )
        parts.append(f'<g class="c{line.colour % NUM_COLOURS}"><title>{escape(line.label)}</title>')
        parts.append(f'<path d="{path}" class="line"/>')
        for at, point in places:
            if point.low is not None and point.high is not None:
                parts.append(
                    f'<path d="M{at:.1f} {y(point.low):.1f}V{y(point.high):.1f}M{at - 4:.1f} {y(point.low):.1f}h8'
                    f'M{at - 4:.1f} {y(point.high):.1f}h8" class="whisker"/>'
                )
            parts.append(_marker(at, y(point.median), line.colour))
        parts.append("</g>")
    return _svg(parts, height=bottom + AXIS_HEIGHT, label=f"{title} over {x_title}, {unit}")


@dataclass(frozen=True)
class _Legend:
    parts: list[str]
    rows: int


def _legend(lines: Sequence[Line]) -> _Legend:
    """Marker and name of each line, side by side, in as many rows as it takes."""
    parts: list[str] = []
    at, row = float(LEFT), 0
    for line in lines:
        width = 28 + 7 * len(line.label)
        if at > LEFT and at + width > WIDTH - RIGHT:
            at, row = float(LEFT), row + 1
        y = TITLE_HEIGHT + LEGEND_ROW * row + 6
        parts.append(f'<g class="c{line.colour % NUM_COLOURS}">{_marker(at + 6, y, line.colour)}</g>')
        parts.append(_text(at + 17, y + 4, line.label, "n"))
        at += width
    return _Legend(parts, row + 1)


def _places(values: Sequence[float | str]) -> tuple[Callable[[Any], float], list[tuple[Any, str]]]:
    """Where each value lies on an axis from 0 to 1, and the values to be named with their names."""
    known = list(dict.fromkeys(values))
    if any(isinstance(value, str) for value in known):
        span = max(1, len(known) - 1)
        middle = 0.5 if len(known) == 1 else 0.0
        return lambda value: middle + known.index(value) / span, [(value, str(value)) for value in known]
    ordered = sorted(float(value) for value in known)
    low, high = ordered[0], ordered[-1]
    names = [(value, _number(value)) for value in ordered]
    if low == high:
        return lambda value: 0.5, names
    if low > 0 and high / low >= LOG_SPAN:
        return lambda value: math.log(value / low) / math.log(high / low), names
    return lambda value: (value - low) / (high - low), names


def _marker(x: float, y: float, colour: int) -> str:
    """Circle, square, diamond or triangle, by number."""
    match colour % 4:
        case 0:
            return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" class="mark"/>'
        case 1:
            return f'<rect x="{x - 3.6:.1f}" y="{y - 3.6:.1f}" width="7.2" height="7.2" class="mark"/>'
        case 2:
            return f'<path d="M{x:.1f} {y - 5:.1f}l5 5l-5 5l-5 -5z" class="mark"/>'
        case _:
            return f'<path d="M{x:.1f} {y - 4.6:.1f}l4.8 8.6h-9.6z" class="mark"/>'


def _vertical_axis_lines(places: Sequence[tuple[float, str]], top: float, bottom: float) -> list[str]:
    return [
        f'<path d="M{at:.1f} {top}V{bottom}" class="grid"/>{_text(at, bottom + 17, name, "n", anchor="middle")}'
        for at, name in places
    ]


def _axis_title(unit: str, better: str) -> str:
    return f"{unit} ({'more' if better == 'high' else 'less'} is better)"


def _number(value: float) -> str:
    """``12,000``; ``0.25``: a number beside an axis."""
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:g}"


def _text(x: float, y: float, text: str, kind: str, *, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(parts: Sequence[str], *, height: float, label: str) -> str:
    box = f'viewBox="0 0 {WIDTH} {height:.0f}"'
    return f'<svg {box} role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'
