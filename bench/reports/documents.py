"""Records to what shows them: the parts of a page, the terminal, the tables of a document such as the README."""

import importlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.reports.figures import FIGURES
from bench.reports.record import FORMAT, RUN_FORMAT, read_record, read_run, write_text
from bench.reports.report import format_table, notes_of
from prep.errors import DataError

__all__ = ["START", "STOP", "Updated", "page_parts", "terminal_text", "update_document"]

START = "<!-- bench report RECORD [FIGURE]... -->"
STOP = "<!-- end of bench report -->"
_START = re.compile(r"^[ \t]*<!-- bench report (?P<words>[^\n]+?) -->[ \t]*$", re.MULTILINE)
_STOP = re.compile(rf"^[ \t]*{re.escape(STOP)}[ \t]*$", re.MULTILINE)

_FORMATTERS = {
    "fetch": ("bench.scenarios.fetch", "format_fetch"),
    "pack": ("bench.scenarios.pack", "format_pack"),
    "resume": ("bench.scenarios.resume", "format_resume"),
    "scale": ("bench.scenarios.scale", "format_scale"),
    "shuffle": ("bench.scenarios.shuffle_quality", "format_shuffle"),
    "tfrecord": ("bench.scenarios.tfrecord", "format_tfrecord"),
    "windows": ("bench.scenarios.windows", "format_windows"),
}
"""Benchmarks that are no runs of loaders: which function makes a record's table."""

_SIGNS = {
    "order": "shuffle",
    "client": "fetch",
    "packer": "pack",
    "scenario": "resume",
    "window_shards": "scale",
    "reader": "tfrecord",
    "cache_fraction": "windows",
}
"""What gives a benchmark's records away that were written before they said it."""

Run = tuple[str, Mapping[str, Any]]
Text = tuple[str, str]


@dataclass(frozen=True, kw_only=True)
class Updated:
    """What became of a document's tables."""

    num_tables: int
    changed: bool


def page_parts(paths: Sequence[Path]) -> tuple[list[Run], list[Text]]:
    """The runs among the records, and the tables of the others, each with the file's name as its title.

    Raises:
        DataError: If a file is no benchmark's record, or of a version that is not known here.
    """
    runs: list[Run] = []
    texts: list[Text] = []
    for path in paths:
        kind, report = _read(path)
        if kind == "run":
            runs.append((path.stem, report))
        else:
            texts.append((path.stem, _text(kind, report, path)))
    return runs, texts


def terminal_text(runs: Sequence[Run], texts: Sequence[Text]) -> str:
    """The tables, each under its title where there are several."""
    parts = [(title, "\n".join([format_table(report), "", *notes_of(report)])) for title, report in runs]
    parts += texts
    if len(parts) == 1:
        return parts[0][1]
    return "\n\n".join(f"{title}\n{text}" for title, text in parts)


def update_document(path: Path, *, write: bool = True) -> Updated:
    """Make a document's tables anew, from the records that its marks name.

    Args:
        path: Markdown, with pairs of lines like `START` and `STOP`. What is between them is replaced, the rest stays.
        write: Else only see whether anything would change.

    Raises:
        DataError: If the document or a record cannot be read, a mark lacks its end, or names no figure of a run's.
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
    for start in starts:
        stop = _STOP.search(text, start.end())
        following = _START.search(text, start.end())
        if stop is None or (following is not None and following.start() < stop.start()):
            line = text.count("\n", 0, start.start()) + 1
            raise DataError(f"'{path}', line {line}: the table that begins here has no end; add a line '{STOP}'")
        name, *figures = start["words"].split()
        parts += [text[at : start.end()], "\n\n", _table(path.parent / name, figures, where=path), "\n\n"]
        at = stop.start()
    updated = "".join([*parts, text[at:]])
    if write and updated != text:
        write_text(updated, path)
    return Updated(num_tables=len(starts), changed=updated != text)


def _table(record: Path, figures: Sequence[str], *, where: Path) -> str:
    if unknown := [figure for figure in figures if figure not in FIGURES]:
        raise DataError(f"'{where}': a figure must be one of {', '.join(FIGURES)}, got '{unknown[0]}'")
    kind, report = _read(record)
    if kind == "run":
        notes = "\n".join(f"* {note.removeprefix('* ')}" for note in notes_of(report))
        return f"{format_table(report, markdown=True, figures=figures or None)}\n\n{notes}"
    return f"```\n{_text(kind, report, record)}\n```"


def _read(path: Path) -> tuple[str, dict[str, Any]]:
    """Which benchmark's record it is, and the record; a run's in its present form."""
    report = read_record(path)
    name = str(report.get("format", ""))
    kind = name.removeprefix(f"{FORMAT}-") if name.startswith(f"{FORMAT}-") else _kind_by_sign(report)
    if kind == "run" or name == RUN_FORMAT:
        return "run", read_run(path)
    if kind not in _FORMATTERS:
        found = f"format '{name}'" if name else "a JSON file without a format"
        raise DataError(
            f"'{path}': expected the record of one of bench {', '.join(['run', *_FORMATTERS])}, found {found}"
        )
    return kind, report


def _kind_by_sign(report: Mapping[str, Any]) -> str:
    records = report.get("records")
    first = records[0] if isinstance(records, list) and records and isinstance(records[0], dict) else {}
    return next((kind for sign, kind in _SIGNS.items() if sign in first), "run" if "loader" in first else "")


def _text(kind: str, report: dict[str, Any], path: Path) -> str:
    module, function = _FORMATTERS[kind]
    try:
        text: str = getattr(importlib.import_module(module), function)(report)
    except (LookupError, TypeError, AttributeError) as exc:
        raise DataError(
            f"'{path}': expected a record of `bench {kind}`, and its table cannot be made ({type(exc).__name__}: {exc})"
        ) from exc
    return text
