"""Draw small charts as SVG inside a page, in its colours; every mark has its numbers as a text that a pointer shows."""

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from dali_pipes.pages.page import text

# In pixels of a chart that is as wide as a column of the page; a phone shows it smaller.
WIDTH, HEIGHT = 400, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 8, 8, 24


def figure(title: str, drawing: str, *, about: str = "") -> str:
    """Return a drawing under its title; ``about`` is a line below it. Title and line are plain text."""
    below = f'<div class="soft">{text(about)}</div>' if about else ""
    return f"<figure><figcaption>{text(title)}</figcaption>{drawing}{below}</figure>"


def columns(values: Sequence[float], *, titles: Sequence[str], ticks: Sequence[tuple[float, str]], label: str) -> str:
    """Return a chart of columns that stand side by side, from zero.

    Args:
        values: The height of each column, not negative.
        titles: What a pointer shows for each.
        ticks: Place on the horizontal axis, in columns from the left, and its text.
        label: What the chart shows, for readers who do not see it.
    """
    most = max([*values, 0]) or 1
    width, height = WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM
    step = width / max(1, len(values))
    gap = 1 if step > 4 else 0
    parts = [_vertical_axis(most, height)]
    for number, (value, title) in enumerate(zip(values, titles, strict=True)):
        tall = height * value / most
        # One sample among a million is still seen.
        tall = max(tall, 1.5) if value else 0
        parts.append(
            f'<rect class="bar" x="{_LEFT + number * step:.2f}" y="{_TOP + height - tall:.2f}" '
            f'width="{max(step - gap, 0.5):.2f}" height="{tall:.2f}"><title>{text(title)}</title></rect>'
        )
    parts += [_tick(_LEFT + place * step, name) for place, name in ticks]
    return _svg(parts, label)


def heat(
    counts: npt.NDArray[np.int64],
    *,
    titles: Callable[[int, int, int], str],
    x_ticks: Sequence[tuple[float, str]],
    y_ticks: Sequence[tuple[float, str]],
    label: str,
) -> str:
    """Return counts in two dimensions as a field of squares: the darker, the more; the scale is logarithmic.

    Args:
        counts: int64 [columns, rows], row 0 at the bottom. Squares without a count are not drawn.
        titles: Called with column, row and count; returns what a pointer shows.
        x_ticks: Place on the horizontal axis, in columns, and its text.
        y_ticks: Likewise, in rows from the bottom.
        label: What the chart shows, for readers who do not see it.
    """
    num_columns, num_rows = counts.shape
    width, height = WIDTH - _LEFT - _RIGHT, WIDTH * 0.7
    wide, tall = width / num_columns, height / num_rows
    most = math.log1p(int(counts.max(initial=1)))
    parts = []
    for column, row in np.argwhere(counts > 0).tolist():
        count = int(counts[column, row])
        strength = 0.25 + 0.75 * math.log1p(count) / most
        parts.append(
            f'<rect class="bar heat" x="{_LEFT + column * wide:.2f}" y="{_TOP + height - (row + 1) * tall:.2f}" '
            f'width="{wide:.2f}" height="{tall:.2f}" fill-opacity="{strength:.2f}">'
            f"<title>{text(titles(column, row, count))}</title></rect>"
        )
    bottom = _TOP + height
    parts.append(f'<path class="axis" fill="none" d="M{_LEFT} {_TOP}V{bottom:.2f}H{WIDTH - _RIGHT}"/>')
    parts += [_tick(_LEFT + place * wide, name, bottom=bottom) for place, name in x_ticks]
    for place, name in y_ticks:
        at = bottom - place * tall
        parts.append(f'<text class="soft" x="{_LEFT - 5}" y="{at + 4:.2f}" text-anchor="end">{text(name)}</text>')
    return _svg(parts, label, height=bottom + _BOTTOM)


def short(value: float) -> str:
    """Return a count in few characters: ``950``, ``1.23k``, ``34M``.

    >>> short(950), short(1234), short(34_000_000), short(2)
    ('950', '1.23k', '34M', '2')
    """
    for factor, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.3g}{unit}" if value < 10 * factor else f"{value / factor:.0f}{unit}"
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def round_ticks(most: float, number: int = 4) -> list[float]:
    """Return round values from 0 to at most ``most``, some ``number`` of them.

    >>> round_ticks(950)
    [0.0, 200.0, 400.0, 600.0, 800.0]
    """
    raw = max(most, 1e-12) / number
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.8)
    return [step * count for count in range(int(most / step + 1e-9) + 1)]


def _vertical_axis(most: float, height: float) -> str:
    parts = []
    for value in round_ticks(most):
        at = _TOP + height * (1 - value / most)
        parts.append(f'<path class="axis" d="M{_LEFT} {at:.2f}H{WIDTH - _RIGHT}"/>')
        name = short(value)
        parts.append(f'<text class="soft" x="{_LEFT - 5}" y="{at + 4:.2f}" text-anchor="end">{name}</text>')
    return "".join(parts)


def _tick(at: float, name: str, *, bottom: float = HEIGHT - _BOTTOM) -> str:
    anchor = "end" if at > WIDTH - 24 else "start" if at < _LEFT + 12 else "middle"
    return f'<text class="soft" x="{at:.2f}" y="{bottom + 15:.2f}" text-anchor="{anchor}">{text(name)}</text>'


def _svg(parts: Sequence[str], label: str, *, height: float = HEIGHT) -> str:
    return f'<svg role="img" aria-label="{text(label)}" viewBox="0 0 {WIDTH} {height:.0f}">{"".join(parts)}</svg>'
