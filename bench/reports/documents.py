"""Show records: as Markdown, on the terminal, and in the tables of documents such as the README."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from bench.catalog import OTHERS, SCENARIOS, scenario_class
from bench.reports.figures import FIGURES
from bench.reports.notes import notes_of
from bench.reports.record import FORMAT, as_run, read_record, write_text
from bench.reports.summary import Report, restricted
from bench.reports.tables import format_table
from dali_pipes.errors import DataError

START = "<!-- bench report RECORD [--baseline LOADER] [--loaders LOADER,...] [FIGURE]... -->"
STOP = "<!-- end of bench report -->"
_START = re.compile(r"^[ \t]*<!-- bench report (?P<words>[^\n]+?) -->[ \t]*$", re.MULTILINE)
_STOP = re.compile(rf"^[ \t]*{re.escape(STOP)}[ \t]*$", re.MULTILINE)

_SIGNS = {
    "client": "fetch",
    "scenario": "resume",
    "window_shards": "scale",
    "reader": "tfrecord",
    "cache_fraction": "windows",
    "loader": "run",
}
"""The oldest records have no format: a field that they have, and the benchmark that wrote them."""

OPTIONS = ("--baseline", "--loaders")
"""The options of a mark; the command has the same ones."""

Run = tuple[str, Report]
Text = tuple[str, str]


class Updated(NamedTuple):
    """The result of updating a document's tables."""

    num_tables: int
    changed: bool


def page_parts(
    paths: Sequence[Path], *, baseline: str | None = None, loaders: Sequence[str] | None = None
) -> tuple[list[Run], list[Text]]:
    """Read records; return the runs, and the tables of the others, each with the file's name as its title.

    ``baseline`` and ``loaders`` are for the runs, as `bench.reports.summary.restricted` takes them.

    Raises:
        DataError: If a file is not a benchmark's record, or has an unknown version.
        ValueError: If a run has no such loader.
    """
    runs: list[Run] = []
    texts: list[Text] = []
    for path in paths:
        shown = _read(path, baseline=baseline, loaders=loaders)
        if isinstance(shown, str):
            texts.append((path.stem, shown))
        else:
            runs.append((path.stem, shown))
    return runs, texts


def terminal_text(runs: Sequence[Run], texts: Sequence[Text]) -> str:
    """Return the tables, each under its title if there are several."""
    parts = [(title, "\n".join([format_table(report), "", *notes_of(report)])) for title, report in runs]
    parts += texts
    return parts[0][1] if len(parts) == 1 else "\n\n".join(f"{title}\n{text}" for title, text in parts)


def update_document(path: Path, *, write: bool = True) -> Updated:
    """Write a document's tables again, from the records that its marks name.

    Args:
        path: Markdown, with pairs of lines like `START` and `STOP`. The lines between them are replaced.
        write: If false, only find out whether anything would change.

    Raises:
        DataError: If the document or a record cannot be read, a mark has no end, or names no figure or loader of a
            run.
        StoreError: If the document cannot be written.
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
    """Return what goes between a pair of marks, whose first line has these words.

    Raises:
        DataError: If the record cannot be read.
        ValueError: If the words name no figure or loader of it.
    """
    name, *rest = words.split()
    figures: list[str] = []
    options: dict[str, str] = {}
    while rest:
        word = rest.pop(0)
        option, mark, value = word.partition("=")
        if option not in OPTIONS:
            figures.append(word)
        elif not mark and not rest:
            raise ValueError(f"{option} expects a loader, got nothing in '{words}'")
        else:
            options[option] = value if mark else rest.pop(0)
    if unknown := [figure for figure in figures if figure not in FIGURES]:
        raise ValueError(f"a figure must be one of {', '.join(FIGURES)}, got '{unknown[0]}'")
    loaders = options["--loaders"].split(",") if "--loaders" in options else None
    shown = _read(folder / name, baseline=options.get("--baseline"), loaders=loaders)
    if isinstance(shown, str):
        return f"```\n{shown}\n```"
    notes = "\n".join(f"* {note.removeprefix('* ')}" for note in notes_of(shown, figures=figures or None))
    return f"{format_table(shown, markdown=True, figures=figures or None)}\n\n{notes}"


def _read(path: Path, *, baseline: str | None, loaders: Sequence[str] | None) -> Report | str:
    """Read a record: a run with this baseline and these loaders, or the table of another benchmark as text."""
    report = read_record(path)
    name = str(report.get("format", ""))
    if name.startswith(f"{FORMAT}-"):
        kind = name.removeprefix(f"{FORMAT}-")
    else:
        records = report.get("records")
        first = records[0] if isinstance(records, list) and records and isinstance(records[0], dict) else {}
        kind = next((kind for sign, kind in _SIGNS.items() if sign in first), "")
    if kind == "run":
        run = as_run(report, path)
        try:
            return restricted(run, baseline=baseline, loaders=loaders)
        except ValueError as exc:
            raise ValueError(f"'{path}': {exc}") from exc
    if kind not in {*SCENARIOS, *OTHERS}:
        found = f"format '{name}'" if name else "a JSON file without a format"
        raise DataError(
            f"'{path}': expected the record of one of bench {', '.join(['run', *SCENARIOS])}, found {found}"
        )
    try:
        table: str = scenario_class(kind).table(report)
    except (LookupError, TypeError, AttributeError) as exc:
        raise DataError(
            f"'{path}': expected a record of `bench {kind}`, and its table cannot be made ({type(exc).__name__}: {exc})"
        ) from exc
    return table
