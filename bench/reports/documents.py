"""Records to what shows them: the parts of a page, the terminal, the tables of a document such as the README."""

import importlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.reports.figures import FIGURES
from bench.reports.record import FORMAT, RUN_FORMAT, read_record, read_run, write_text
from bench.reports.report import format_table, notes_of, restricted
from dali_pipes.errors import DataError

__all__ = ["START", "STOP", "Updated", "page_parts", "terminal_text", "update_document"]

START = "<!-- bench report RECORD [--baseline LOADER] [--loaders LOADER,...] [FIGURE]... -->"
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

OPTIONS = ("--baseline", "--loaders")
"""Of a mark, as of the command."""

Run = tuple[str, Mapping[str, Any]]
Text = tuple[str, str]


@dataclass(frozen=True, kw_only=True)
class Updated:
    """What became of a document's tables."""

    num_tables: int
    changed: bool


def page_parts(
    paths: Sequence[Path], *, baseline: str | None = None, loaders: Sequence[str] | None = None
) -> tuple[list[Run], list[Text]]:
    """The runs among the records, and the tables of the others, each with the file's name as its title.

    Args:
        paths: Of the records.
        baseline: Of the runs, as `bench.reports.report.restricted` takes it.
        loaders: Likewise.

    Raises:
        DataError: If a file is no benchmark's record, or of a version that is not known here.
        ValueError: If a run has no such loader.
    """
    runs: list[Run] = []
    texts: list[Text] = []
    for path in paths:
        kind, report = _read(path)
        if kind == "run":
            runs.append((path.stem, _restricted(report, where=path, baseline=baseline, loaders=loaders)))
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
        DataError: If the document or a record cannot be read, a mark lacks its end, or names no figure or loader of a
            run's.
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
        try:
            table = _table(start["words"], beside=path)
        except ValueError as exc:
            line = text.count("\n", 0, start.start()) + 1
            raise DataError(f"'{path}', line {line}: {exc}") from exc
        parts += [text[at : start.end()], "\n\n", table, "\n\n"]
        at = stop.start()
    updated = "".join([*parts, text[at:]])
    if write and updated != text:
        write_text(updated, path)
    return Updated(num_tables=len(starts), changed=updated != text)


def _table(words: str, *, beside: Path) -> str:
    """What goes between a pair of marks, the first of which says ``words``.

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
    path = beside.parent / name
    kind, report = _read(path)
    if kind != "run":
        return f"```\n{_text(kind, report, path)}\n```"
    loaders = options["--loaders"].split(",") if "--loaders" in options else None
    shown = _restricted(report, where=path, baseline=options.get("--baseline"), loaders=loaders)
    notes = "\n".join(f"* {note.removeprefix('* ')}" for note in notes_of(shown, figures=figures or None))
    return f"{format_table(shown, markdown=True, figures=figures or None)}\n\n{notes}"


def _restricted(
    report: Mapping[str, Any], *, where: Path, baseline: str | None, loaders: Sequence[str] | None
) -> Mapping[str, Any]:
    try:
        return restricted(report, baseline=baseline, loaders=loaders)
    except ValueError as exc:
        raise ValueError(f"'{where}': {exc}") from exc


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
