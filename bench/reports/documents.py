"""Write the tables of documents such as the README again, from the records that their marks name."""

import re
from pathlib import Path
from typing import NamedTuple

import click

from bench.reports.figures import FIGURES
from bench.reports.record import read_run, write_text
from bench.reports.summary import restricted
from bench.reports.tables import format_table, notes_of
from dali_pipes.errors import DataError

START = "<!-- bench report RECORD [--baseline LOADER] [--loaders LOADER,...] [FIGURE]... -->"
STOP = "<!-- end of bench report -->"
_START = re.compile(r"^[ \t]*<!-- bench report (?P<words>[^\n]+?) -->[ \t]*$", re.MULTILINE)
_STOP = re.compile(rf"^[ \t]*{re.escape(STOP)}[ \t]*$", re.MULTILINE)
_MARK = click.Command(
    "mark",
    params=[
        click.Argument(["record"]),
        click.Argument(["figures"], nargs=-1),
        click.Option(["--baseline"]),
        click.Option(["--loaders"]),
    ],
    add_help_option=False,
)
"""The words of a mark."""


class Updated(NamedTuple):
    """The result of updating a document's tables."""

    num_tables: int
    changed: bool


def update_document(path: Path, *, write: bool = True) -> Updated:
    """Write a document's tables again, from the records that its marks name.

    The lines between pairs of lines like `START` and `STOP` are replaced, unless ``write`` is false.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as exc:
        raise DataError(f"'{path}': expected a Markdown document: {exc}") from exc
    parts: list[str] = []
    at = 0
    starts = list(_START.finditer(text))
    if not starts:
        raise DataError(f"'{path}': no line like '{START}' says where a table goes, and of what")
    for start, following in zip(starts, [*starts[1:], None], strict=True):
        where = f"'{path}', line {text.count(chr(10), 0, start.start()) + 1}"
        stop = _STOP.search(text, start.end(), following.start() if following else len(text))
        if stop is None:
            raise DataError(f"{where}: the table that begins here has no end; add a line '{STOP}'")
        try:
            table = _table(start["words"], path.parent)
        except ValueError as exc:
            raise DataError(f"{where}: {exc}") from exc
        parts += [text[at : start.end()], "\n\n", table, "\n\n"]
        at = stop.start()
    updated = "".join([*parts, text[at:]])
    if write and updated != text:
        write_text(updated, path)
    return Updated(num_tables=len(starts), changed=updated != text)


def _table(words: str, folder: Path) -> str:
    """Return what goes between a pair of marks, whose first line has these words."""
    try:
        given = _MARK.make_context("mark", words.split()).params
    except click.UsageError as exc:
        raise ValueError(f"{exc.format_message()} In '{words}'") from exc
    figures = given["figures"]
    if unknown := [figure for figure in figures if figure not in FIGURES]:
        raise ValueError(f"a figure must be one of {', '.join(FIGURES)}, got '{unknown[0]}'")
    loaders = None if given["loaders"] is None else given["loaders"].split(",")
    shown = restricted(read_run(folder / given["record"]), baseline=given["baseline"], loaders=loaders)
    notes = "\n".join(f"* {note.removeprefix('* ')}" for note in notes_of(shown))
    return f"{format_table(shown, markdown=True, figures=figures or None)}\n\n{notes}"
