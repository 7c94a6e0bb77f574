"""Records to one HTML page that needs nothing else: tables, plots, what the figures are and where they come from."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from bench.reports.figures import FIGURES
from bench.reports.intervals import median_interval
from bench.reports.plots import Line, Point, Row, line_plot, row_plot
from bench.reports.report import (
    BRIEF,
    SETTING_TITLES,
    conditions_of,
    conversions_of,
    format_interval,
    format_setting,
    is_telling,
    label_of,
    notes_of,
    setting_names,
    table_rows,
    values_of,
)

__all__ = ["html_page", "markdown_page"]

Report = Mapping[str, Any]
Record = Mapping[str, Any]

FULL = tuple(FIGURES)

_STYLE = """
:root { color-scheme: light dark; --ink: #1c1e21; --soft: #5b6470; --paper: #ffffff; --line: #d9dde3; --band: 0.22;
  --c0: #2f6fb5; --c1: #c2571a; --c2: #23865c; --c3: #9a4fb0; --c4: #97790a; --c5: #c03a55; --c6: #22808f;
  --c7: #6b6f76; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8eb; --soft: #a2abb7; --paper: #15181c; --line: #343a42;
  --band: 0.3; --c0: #6fb0f2; --c1: #f29a5c; --c2: #5fcb9a; --c3: #cf93e2; --c4: #d9be55; --c5: #f2879c; --c6: #67c6d6;
  --c7: #b3b8bf; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1440px; padding: 28px 24px 60px; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
h1 { font-size: 24px; margin: 0 0 4px; } h2 { font-size: 19px; margin: 44px 0 10px; }
h3 { font-size: 15px; margin: 28px 0 6px; }
p, li, dd { color: var(--ink); } .soft { color: var(--soft); }
.wide { overflow-x: auto; margin: 12px 0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13.5px; }
th, td { padding: 5px 12px 5px 0; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 600; vertical-align: bottom; } .name { text-align: left; }
tr.split td { border-top: 2px solid var(--soft); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 18px; font-size: 13.5px; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 520px), 1fr)); gap: 26px 30px; }
svg { width: 100%; height: auto; overflow: visible; }
svg text { fill: var(--ink); font: 12.5px system-ui, -apple-system, "Segoe UI", sans-serif; }
svg .t { font-weight: 600; font-size: 14.5px; } svg .n, svg .a { fill: var(--soft); }
svg .grid { stroke: var(--line); fill: none; } svg .axis { stroke: var(--soft); fill: none; }
svg .dot { fill: var(--c); opacity: 0.55; } svg .band { fill: var(--c); opacity: var(--band); }
svg .median { stroke: var(--c); stroke-width: 2.5; fill: none; }
svg .line { stroke: var(--c); stroke-width: 2; fill: none; } svg .mark { fill: var(--c); }
svg .whisker { stroke: var(--c); stroke-width: 1.4; fill: none; }
pre { overflow-x: auto; font-size: 13px; }
""" + "".join(f".c{number} {{ --c: var(--c{number}); }}\n" for number in range(8))


def html_page(runs: Sequence[tuple[str, Report]], texts: Sequence[tuple[str, str]] = ()) -> str:
    """A page of runs, and of other benchmarks' tables as they are.

    Args:
        runs: Title and record of each run, in its present form.
        texts: Title and table of what is no run.
    """
    body = ["<h1>Loaders, measured</h1>"]
    body += [part for title, report in runs for part in _run(title, report)]
    for title, text in texts:
        body += [f"<h2>{escape(title)}</h2>", f"<pre>{escape(text)}</pre>"]
    if runs:
        body += ["<h2>What the figures are</h2>", _definitions([report for _, report in runs])]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Loaders, measured</title><style>{_STYLE}</style></head><body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def markdown_page(runs: Sequence[tuple[str, Report]], texts: Sequence[tuple[str, str]] = ()) -> str:
    """The same as Markdown, without the plots."""
    from bench.reports.report import format_table
    from bench.reports.tables import format_rows

    parts = ["# Loaders, measured"]
    for title, report in runs:
        parts += [f"## {title}", format_table(report, markdown=True, intervals=True)]
        parts += [note.replace("*", "\\*") for note in notes_of(report)]
        if made := conversions_of(report):
            parts += ["Made first, before anything was timed:", format_rows(made, markdown=True)]
        parts.append("\n".join(f"* {name}: {text}" for name, text in conditions_of(report)))
    for title, text in texts:
        parts += [f"## {title}", f"```\n{text}\n```"]
    if runs:
        shown = _measured([report for _, report in runs])
        parts += ["## What the figures are"]
        parts.append("\n".join(f"* **{FIGURES[name].title}**: {FIGURES[name].about}" for name in shown))
    return "\n\n".join(parts) + "\n"


def _run(title: str, report: Report) -> list[str]:
    parts = [f"<h2>{escape(title)}</h2>"]
    parts.append(f'<p class="soft">{"<br>".join(escape(note) for note in notes_of(report))}</p>')
    rows, num_names = table_rows(report, intervals=False)
    parts.append(_table(rows, num_names))
    said = "Plots: a dot a repeat, a band or whisker the 95 % interval, a line or mark the median."
    if unplotted := list(dict.fromkeys(label_of(record) for record in report["records"] if not _is_plotted(record))):
        said += f" Not in them, but in the tables: {', '.join(unplotted)}; what comes from no shard is off any scale."
    parts.append(f'<p class="soft">{escape(said)}</p>')
    parts.append(f'<div class="plots">{"".join(_plots(report))}</div>')
    all_rows, num_names = table_rows(report, figures=FULL)
    parts += ["<h3>All figures</h3>", _table(all_rows, num_names)]
    if made := conversions_of(report):
        parts += ["<h3>Made first, before anything was timed</h3>", _table(made, 1)]
    lines = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in conditions_of(report))
    parts += ["<h3>Measured under</h3>", f"<dl>{lines}</dl>"]
    return parts


def _table(rows: Sequence[Sequence[str]], num_names: int) -> str:
    def cells(row: Sequence[str], tag: str) -> str:
        return "".join(
            f"<{tag}{' class=name' if column < num_names else ''}>{escape(cell)}</{tag}>"
            for column, cell in enumerate(row)
        )

    lines = [f"<tr>{cells(rows[0], 'th')}</tr>"]
    for above, row in zip([rows[0], *rows[1:]], rows[1:], strict=False):
        is_new = above is not rows[0] and above[: num_names - 1] != row[: num_names - 1]
        lines.append(f"<tr{' class=split' if is_new else ''}>{cells(row, 'td')}</tr>")
    return f'<div class="wide"><table>{"".join(lines)}</table></div>'


def _plots(report: Report) -> list[str]:
    records = report["records"]
    varied = setting_names(records)
    names = [name for name in BRIEF if is_telling(report, name)]
    colours = {label: row for row, label in enumerate(dict.fromkeys(label_of(record) for record in records))}
    if not varied:
        return [_rows_plot(records, name, colours) for name in names]
    # The axis with most values is drawn, a plot for each combination of the others.
    axis = max(varied, key=lambda name: len({record["setting"].get(name) for record in records}))
    groups: dict[tuple[object, ...], list[Record]] = {}
    for record in records:
        others = tuple(record["setting"].get(name) for name in varied if name != axis)
        groups.setdefault(others, []).append(record)
    titles = [SETTING_TITLES[name] for name in varied if name != axis]
    return [
        _lines_plot(
            group,
            name,
            colours,
            axis=axis,
            where=", ".join(f"{title} {format_setting(value)}" for title, value in zip(titles, others, strict=True)),
        )
        for name in names
        for others, group in groups.items()
        if any(values_of(record, name) for record in group)
    ]


def _is_plotted(record: Record) -> bool:
    """Of a record of before there were parts, ``gives`` is ``None``: it gives all."""
    return record.get("gives") is None or bool(record["gives"])


def _rows_plot(records: Sequence[Record], name: str, colours: Mapping[str, int]) -> str:
    figure = FIGURES[name]
    rows = []
    for record in records:
        values = [value * figure.scale for value in values_of(record, name)]
        if not values or not _is_plotted(record):
            continue
        interval = median_interval(values)
        shown = format_interval(figure, values_of(record, name))
        label = label_of(record)
        rows.append(
            Row(
                label=label,
                values=values,
                median=interval.median,
                low=interval.low,
                high=interval.high,
                shown=shown,
                colour=colours[label],
            )
        )
    return row_plot(rows, title=figure.title, unit=figure.unit, better=figure.better) if rows else ""


def _lines_plot(records: Sequence[Record], name: str, colours: Mapping[str, int], *, axis: str, where: str) -> str:
    figure = FIGURES[name]
    lines: dict[str, list[Point]] = {}
    for record in records:
        values = [value * figure.scale for value in values_of(record, name)]
        if values and _is_plotted(record):
            interval = median_interval(values)
            at = record["setting"].get(axis)
            x = at if isinstance(at, str) else float(at) if at is not None else "as it is"
            point = Point(x=x, median=interval.median, low=interval.low, high=interval.high)
            lines.setdefault(label_of(record), []).append(point)
    if not lines:
        return ""
    return line_plot(
        [Line(label=label, points=points, colour=colours[label]) for label, points in lines.items()],
        title=f"{figure.title}{f', {where}' if where else ''}",
        x_title=SETTING_TITLES[axis],
        unit=figure.unit,
        better=figure.better,
    )


def _measured(reports: Sequence[Report]) -> list[str]:
    return [name for name in FIGURES if any(is_telling(report, name) for report in reports)]


def _definitions(reports: Sequence[Report]) -> str:
    lines = "".join(
        f"<dt>{escape(FIGURES[name].title)}</dt><dd>{escape(FIGURES[name].about)}</dd>" for name in _measured(reports)
    )
    return f"<dl>{lines}</dl>"
