"""Write one HTML page that needs no network and no other file: the document, its texts and tables, and small charts.

Texts of data, servers and files reach a page in two ways only: through `text`, which makes them printable and escapes
them, and through `data_script`, which writes JSON that no HTML parser can leave; the scripts of this project show such
data as text, never as HTML. Beside that a page says by its Content-Security-Policy that only its own scripts run, each
named by its SHA-256, and that nothing is loaded, so that a mistake here would show a tag but run nothing.

Charts are SVG in the page's colours; every mark has its numbers as a text that a pointer shows.
"""

import base64
import hashlib
import json
import math
from collections.abc import Callable, Sequence
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any

import numpy as np
import numpy.typing as npt

from dali_pipes.errors import printable

TEXT_CHARS = 300
"""Characters of one text of the data that a page shows, unless the caller says another number."""
# In pixels of a chart that is as wide as a column of the page; a phone shows it smaller.
WIDTH, HEIGHT = 400, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 8, 8, 24


def html_document(title: str, body: Sequence[str], *, styles: Sequence[str] = (), scripts: Sequence[str] = ()) -> str:
    """Return a whole page.

    Args:
        title: Of the page, as plain text.
        body: Parts of HTML, in their order.
        styles: CSS beside the style that all pages share.
        scripts: JavaScript that runs after the body; the script that sorts tables is always there.
    """
    sources = [own_file("page.js"), *scripts]
    hashes = " ".join(f"'sha256-{_digest(source)}'" for source in sources)
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src {hashes}; base-uri 'none'"
    head = (
        '<meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{text(title)}</title>"
    ) + "".join(f"<style>{style}</style>" for style in (own_file("page.css"), *styles))
    ends = "".join(f"<script>{source}</script>" for source in sources)
    joined = "\n".join(body)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n{joined}\n{ends}</body></html>\n'


@cache
def own_file(name: str) -> str:
    """Return the text of a style or script, a file beside this module."""
    return files("prep.inspect").joinpath(name).read_text("utf-8")


def text(value: object, *, max_chars: int = TEXT_CHARS) -> str:
    """Return a text as HTML shows it: printable, of bounded length, escaped, also for attributes in double quotes.

    >>> text('<b title="x">' + chr(27))
    '&lt;b title=&quot;x&quot;&gt;\\\\x1b'
    """
    return escape(printable(str(value), max_chars=max_chars))


def data_script(identifier: str, data: Any) -> str:
    """Return a script element that holds ``data`` as JSON, for `JSON.parse` of its text; it is never run.

    >>> data_script("d", ["</script>"])
    '<script type="application/json" id="d">["\\\\u003c/script\\\\u003e"]</script>'
    """
    found = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        found = found.replace(character, f"\\u{ord(character):04x}")
    return f'<script type="application/json" id="{identifier}">{found}</script>'


def html_table(rows: Sequence[Sequence[str]], *, num_names: int = 1) -> str:
    """Return a table in a box of its own that scrolls if it is wider than the page; a click on a title sorts it.

    Args:
        rows: Cells as plain text, the header first.
        num_names: Columns from the left that are names, and are aligned to the left.
    """

    def cells(row: Sequence[str], tag: str) -> str:
        marks = [' class="name"' if column < num_names else "" for column in range(len(row))]
        return "".join(f"<{tag}{mark}>{text(cell)}</{tag}>" for mark, cell in zip(marks, row, strict=True))

    lines = [f"<tr>{cells(row, 'td')}</tr>" for row in rows[1:]]
    return (
        f'<div class="wide" tabindex="0"><table class="sortable"><thead><tr>{cells(rows[0], "th")}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def _digest(source: str) -> str:
    return base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()


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
