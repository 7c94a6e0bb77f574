"""Write one HTML page that needs no network and no other file: the document, its texts and tables.

Texts of data, servers and files reach a page in two ways only: through `text`, which makes them printable and escapes
them, and through `data_script`, which writes JSON that no HTML parser can leave; the scripts of this project show such
data as text, never as HTML. Beside that a page says by its Content-Security-Policy that only its own scripts run, each
named by its SHA-256, and that nothing is loaded, so that a mistake here would show a tag but run nothing.
"""

import base64
import hashlib
import json
from collections.abc import Sequence
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any

from dali_pipes.errors import printable

TEXT_CHARS = 300
"""Characters of one text of the data that a page shows, unless the caller says another number."""


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


def html_table(rows: Sequence[Sequence[str]], *, num_names: int = 1, shares: Sequence[float] = ()) -> str:
    """Return a table in a box of its own that scrolls if it is wider than the page; a click on a title sorts it.

    Args:
        rows: Cells as plain text, the header first.
        num_names: Columns from the left that are names, and are aligned to the left.
        shares: For each row but the header, the length of its bar in [0, 1]; empty: no bars.
    """

    def cells(row: Sequence[str], tag: str) -> str:
        marks = [' class="name"' if column < num_names else "" for column in range(len(row))]
        return "".join(f"<{tag}{mark}>{text(cell)}</{tag}>" for mark, cell in zip(marks, row, strict=True))

    bars = [f"<td>{meter(share)}</td>" for share in shares] or [""] * (len(rows) - 1)
    lines = [f"<tr>{cells(row, 'td')}{bar}</tr>" for row, bar in zip(rows[1:], bars, strict=True)]
    head = f"{cells(rows[0], 'th')}{'<th></th>' if shares else ''}"
    return (
        f'<div class="wide" tabindex="0"><table class="sortable"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def meter(share: float) -> str:
    """Return a bar whose length is a share in [0, 1] of its cell's width."""
    return (
        '<svg class="meter" viewBox="0 0 100 10" preserveAspectRatio="none">'
        f'<rect class="bar" width="{100 * share:.1f}" height="10"/></svg>'
    )


def _digest(source: str) -> str:
    return base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
