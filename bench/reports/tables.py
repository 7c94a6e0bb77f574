"""Write tables and notes of records, as text or Markdown, also into documents such as the README."""

import re
import statistics
from collections.abc import Sequence
from pathlib import Path

import click

from bench.loaders.registry import LOADERS
from bench.reports.figures import FIGURES, SETTING_TITLES
from bench.reports.record import kind_of, read_run, write_text
from bench.reports.summary import (
    EQUAL_WITHIN,
    MIN_REPEATS,
    RATIOS,
    Record,
    Report,
    baseline_of,
    format_interval,
    format_setting,
    is_telling,
    label_of,
    missing_parts,
    named,
    ratio_cell,
    restricted,
    rounds_of,
    setting_names,
    setting_text,
    shown_figures,
    values_of,
)
from dali_pipes.errors import DataError

WITH_INTERVAL = (*RATIOS, "time_to_first_batch_s")
UNITS = ("%", "ms", "s", "MiB")
"""Units that a column's title must add; the other titles are units themselves."""


def format_rows(rows: Sequence[Sequence[str]], *, markdown: bool = False, left: int = 1) -> str:
    """Align rows of cells, with a rule below the first row.

    The first ``left`` columns are names, and are aligned to the left.

    >>> print(format_rows([["client", "MiB/s"], ["ours", "1900"]]))
    client  MiB/s
    ------  -----
    ours     1900
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(f"| {' | '.join(cells)} |" if markdown else "  ".join(cells).rstrip())
    if markdown:
        rule = ["-" * width if column < left else "-" * (width - 1) + ":" for column, width in enumerate(widths)]
        lines.insert(1, f"| {' | '.join(rule)} |")
    else:
        lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def format_table(
    report: Report, *, markdown: bool = False, figures: Sequence[str] | None = None, intervals: bool = False
) -> str:
    """Return a row for each loader and setting: medians, 95 % intervals over the repeats, ratios to the baseline.

    ``figures`` are names of `FIGURES`, by default `shown_figures`; those that no record has are left out. ``intervals``
    shows the interval of every figure of a run, not only of those that have a ratio.
    """
    rows, left = _table_rows(report, figures=figures, intervals=intervals)
    return format_rows(rows, markdown=markdown, left=left) if rows else "nothing was timed"


def _table_rows(
    report: Report, *, figures: Sequence[str] | None = None, intervals: bool = False
) -> tuple[list[list[str]], int]:
    """Return the rows of `format_table`, first the titles, and how many columns are names; without repeats, none."""
    records = [record for record in report["records"] if record["repeats"]]
    if not records:
        return [], 0
    chosen, varied = shown_figures(report, figures), setting_names(records)
    has_ratios = report["baseline"] is not None
    header = [SETTING_TITLES[name] for name in varied] + ["loader"]
    for name in chosen:
        figure = FIGURES[name]
        header.append(f"{figure.title} {figure.unit}" if figure.unit in UNITS else figure.title)
        if name in RATIOS and has_ratios:
            reference = next(iter(named(records, report["baseline"])), baseline_of(report, records[0]))
            header.append(f"x {label_of(reference)}")
    rows = [header]
    for record in records:
        row = [format_setting(record["setting"].get(name)) for name in varied] + [label_of(record)]
        for name in chosen:
            values = values_of(record, name)
            with_interval = intervals or name in WITH_INTERVAL or kind_of(report) not in ("run", "feed")
            row.append(format_interval(FIGURES[name], values, with_interval=with_interval) if values else "-")
            if name in RATIOS and has_ratios:
                row.append(ratio_cell(report, record, name))
        rows.append(row)
    return rows, len(varied) + 1


def report_text(report: Report) -> str:
    """Return a record as the terminal shows it: its table, and the notes below."""
    return "\n".join([format_table(report), "", *notes_of(report)])


def notes_of(report: Report) -> list[str]:
    """Return the notes below a table: how many repeats, how loaders differ, and what the record says."""
    records = [record for record in report["records"] if record["repeats"]]
    notes = [] if (rounds := rounds_of(report)) is None else [f"Stopped after {rounds}, in {report.get('stopped')}."]
    for row in report.get("failed", ()):
        setting = f" ({setting_text(row['setting'])})" if row["setting"] else ""
        notes.append(f"{row['loader']}{setting} failed, and is left out: {row['error']}")
    if not records:
        return [*notes, *report.get("notes", ())]
    if (repeats := min(len(record["repeats"]) for record in records)) < MIN_REPEATS:
        notes.append(
            f"Medians of {repeats} interleaved repeats (smallest to largest); too few for a 95 % interval, which needs "
            f"{MIN_REPEATS}."
        )
    else:
        notes.append(
            f"Medians of {repeats} interleaved repeats, with 95 % intervals in brackets. Ratios are taken turn by "
            f'turn: "equal" if the whole interval is within {EQUAL_WITHIN:.0%} of 1, "?" if it contains 1 and is wider.'
        )
    for record in {record["loader"]: record for record in records if missing_parts(record)}.values():
        parts = f"no {', no '.join(missing_parts(record))}" if record["gives"] else "nothing from the shards"
        notes.append(f"* {record['loader']} gives {parts}: what it does not give is neither compared nor timed.")
    notes += _loader_notes(records)
    made: dict[str, list[str]] = {}
    for record in records:  # once for each data set and number of ranks, which several settings share
        if prepared := record.get("prepared"):
            text = f"{prepared['wall_s']:.1f} s, {prepared['num_bytes'] / (1 << 20):.1f} MiB"
            made.setdefault(record["loader"], []).append(text)
    if made:
        makes = {loader: LOADERS[loader].makes if loader in LOADERS else "a copy" for loader in made}
        each = [f"{loader} ({makes[loader]}): {' or '.join(dict.fromkeys(texts))}" for loader, texts in made.items()]
        notes.append(f"Preparation (not included in the figures): {'; '.join(each)}.")
    return [*notes, *report.get("notes", ())]


def _loader_notes(records: Sequence[Record]) -> list[str]:
    """Say how loaders differ in what they read and decode."""
    entries = {record["loader"]: LOADERS[record["loader"]] for record in records if record["loader"] in LOADERS}
    notes = []
    if converted := sorted(name for name, entry in entries.items() if entry.source == ("converted",)):
        notes.append(
            f"{', '.join(converted)}: read local copies, converted from the shards before, on a disk of this machine; "
            "they make no request that is delayed or counted."
        )
    windowed = {
        label_of(record): _decodes_window(record)
        for record in records
        if record["loader"] in entries and "image" in record.get("gives", ())
    }
    if len(set(windowed.values())) == 2:
        names = ", ".join(name for name, is_windowed in windowed.items() if is_windowed)
        notes.append(f"{names}: decode only the part of a photo that the crop keeps.")
    return notes


def _decodes_window(record: Record) -> bool:
    """Tell whether a loader decodes only a part of each photo."""
    return record["decode"] == "nvimgcodec" or LOADERS[record["loader"]].decodes_window


def origin_of(report: Report) -> str:
    """Return when, on which commit and where a record was made, and how quiet the machine was."""
    environment, quiet = report["environment"], report.get("quiet_ms")
    cpu, commit = environment.get("cpu", {}), environment.get("commit")
    of_commit = "" if not commit else f" at {commit[:8]}{' with changes' if environment.get('is_dirty') else ''}"
    loop = (
        ""
        if not quiet
        else (
            f"; a fixed loop on all cores, between the turns: {statistics.median(quiet):.0f} ms "
            f"({min(quiet):.0f}-{max(quiet):.0f})"
        )
    )
    return (
        f"Measured on {str(environment.get('date'))[:10]}{of_commit}, {cpu.get('cores_available')} cores of "
        f"{cpu.get('model')}{loop}."
    )


def conditions_of(report: Report) -> list[tuple[str, str]]:
    """Return name and text of each condition on which the figures depend."""
    environment, options, records = report["environment"], report["options"], report["records"]
    cpu, commit, epochs = environment.get("cpu", {}), environment.get("commit"), options.get("epochs")
    # The load at the end includes what was timed.
    load, before = f"at the end {cpu.get('load_average_1min')}", environment.get("load_at_start")
    timed = "" if epochs is None else f", {epochs} timed epoch{'' if epochs == 1 else 's'} each"
    found = {
        "command": report["command"],
        "date": environment.get("date"),
        "commit": f"{commit}{', with changes' if environment.get('is_dirty') else ''}" if commit else None,
        "machine": f"{cpu.get('model')}, {cpu.get('cores_available')} cores, {environment.get('memory_gib')} GiB; load "
        + (load if before is None else f"before {before}, {load}"),
        "GPUs": ", ".join(environment.get("gpus", [])) or "none",
        "data": "; ".join(
            f"{data['num_samples']} samples in {data.get('num_shards')} shards"
            + (f", {data['shard_bytes'] / (1 << 20):.0f} MiB" if data.get("shard_bytes") else "")
            for data in report["data"]
        ),
        "recipe": options.get("recipe"),
        "read from": options.get("source"),
        "setting": setting_text(records[0]["setting"], without=setting_names(records)) if records else None,
        "repeats": f"{rounds_of(report) or options.get('repeats')} interleaved{timed}",
        "versions": ", ".join(f"{name} {version}" for name, version in environment.get("versions", {}).items()),
    }
    return [(name, text) for name, text in found.items() if text]


def markdown_page(reports: Sequence[tuple[str, Report]]) -> str:
    """Return a page of records, each with its title: tables, notes, conditions, and what the figures are."""
    parts = ["# Loaders, measured"]
    for title, report in reports:
        parts += [f"## {title}", format_table(report, markdown=True, intervals=True)]
        parts += [note.replace("*", "\\*") for note in notes_of(report)]
        parts.append("\n".join(f"* {name}: {about}" for name, about in conditions_of(report)))
    definitions = [
        f"* **{figure.title}**: {figure.about}"
        for name, figure in FIGURES.items()
        if any(is_telling(report, name) for _, report in reports)
    ]
    parts += ["## What the figures are", "\n".join(definitions)]
    return "\n\n".join(parts) + "\n"


START = "<!-- bench report RECORD[,RECORD] [--baseline LOADER] [--loaders LOADER,...] [FIGURE]... -->"
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


def update_document(path: Path, *, write: bool = True) -> tuple[int, bool]:
    """Write a document's tables again, from the records that its marks name; return their number, and whether one
    changed.

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
    return len(starts), updated != text


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
    reports = [
        restricted(read_run(folder / record), baseline=given["baseline"], loaders=loaders)
        for record in given["record"].split(",")
    ]
    notes = [
        f"* {f'{_recipe_of(report)}: ' if len(reports) > 1 else ''}{note.removeprefix('* ')}"
        for report in reports
        for note in [*notes_of(report), origin_of(report)]
    ]
    return f"{_side_by_side(reports, figures or None)}\n\n{chr(10).join(notes)}"


def _recipe_of(report: Report) -> str:
    return str(report["options"].get("recipe", kind_of(report)))


def _side_by_side(reports: Sequence[Report], figures: Sequence[str] | None) -> str:
    """Return a table of one record; or of several, whose columns say the recipe, with the loaders that all have."""
    if len(reports) == 1:
        return format_table(reports[0], markdown=True, figures=figures)
    if any(setting_names(report["records"]) for report in reports):
        raise ValueError("several records can only be joined if none varies a setting; give a mark for each")
    tables = [_table_rows(report, figures=figures)[0] for report in reports]
    rows = [["loader"]] + [row[:1] for row in tables[0][1:]]
    for report, (titles, *found) in zip(reports, tables, strict=True):
        cells = {row[0]: row[1:] for row in found}
        rows[0] += [f"{_recipe_of(report)}: {title}" for title in titles[1:]]
        rows = [rows[0]] + [row + cells[row[0]] for row in rows[1:] if row[0] in cells]
    return format_rows(rows, markdown=True)
