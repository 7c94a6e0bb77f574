"""Write a report as one HTML page that needs no other file, or as Markdown: tables, plots, definitions, conditions."""

from collections.abc import Sequence
from html import escape

from bench.reports.figures import FIGURES
from bench.reports.notes import conditions_of, conversions_of, notes_of
from bench.reports.plots import Mark, draw_lines, draw_rows, svg_of
from bench.reports.summary import (
    BRIEF,
    SETTING_TITLES,
    Record,
    Report,
    format_setting,
    is_telling,
    label_of,
    measured,
    setting_names,
)
from bench.reports.tables import format_rows, format_table, table_rows

TITLE = "Loaders, measured"
CONVERSIONS = "Preparation, before anything was timed"
DEFINITIONS = "What the figures are"

_STYLE = """
:root { color-scheme: light dark; --ink: #1c1e21; --soft: #5b6470; --paper: #ffffff; --line: #d9dde3; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8eb; --soft: #a2abb7; --paper: #15181c; --line: #343a42; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1440px; padding: 28px 24px 60px; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
h1 { font-size: 24px; margin: 0 0 4px; } h2 { font-size: 19px; margin: 44px 0 10px; }
h3 { font-size: 15px; margin: 28px 0 6px; }
.soft { color: var(--soft); }
.wide { overflow-x: auto; margin: 12px 0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13.5px; }
th, td { padding: 5px 12px 5px 0; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 600; vertical-align: bottom; } .name { text-align: left; }
tr.split td { border-top: 2px solid var(--soft); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 18px; font-size: 13.5px; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 520px), 1fr)); gap: 26px 30px; }
svg { width: 100%; height: auto; }
pre { overflow-x: auto; font-size: 13px; }
"""


def html_page(runs: Sequence[tuple[str, Report]], texts: Sequence[tuple[str, str]] = ()) -> str:
    """Return a page of runs, and of other benchmarks' tables as text.

    Args:
        runs: Title and record of each run, in its present form.
        texts: Title and table of each other benchmark.

    Raises:
        PipesError: If matplotlib, which draws the plots, is not installed.
    """
    body = [f"<h1>{TITLE}</h1>", *(part for title, report in runs for part in _run(title, report))]
    for title, text in texts:
        body += [f"<h2>{escape(title)}</h2>", f"<pre>{escape(text)}</pre>"]
    if runs:
        body += [f"<h2>{DEFINITIONS}</h2>", _definition_list(_definitions(runs))]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{TITLE}</title><style>{_STYLE}</style></head><body>\n" + "\n".join(body) + "\n</body></html>\n"
    )


def markdown_page(runs: Sequence[tuple[str, Report]], texts: Sequence[tuple[str, str]] = ()) -> str:
    """Return the same as Markdown, without the plots."""
    parts = [f"# {TITLE}"]
    for title, report in runs:
        parts += [f"## {title}", format_table(report, markdown=True, intervals=True)]
        parts += [note.replace("*", "\\*") for note in notes_of(report)]
        if made := conversions_of(report):
            parts += [f"{CONVERSIONS}:", format_rows(made, markdown=True)]
        parts.append("\n".join(f"* {name}: {text}" for name, text in conditions_of(report)))
    for title, text in texts:
        parts += [f"## {title}", f"```\n{text}\n```"]
    if runs:
        parts.append(f"## {DEFINITIONS}")
        parts.append("\n".join(f"* **{name}**: {about}" for name, about in _definitions(runs)))
    return "\n\n".join(parts) + "\n"


def _definitions(runs: Sequence[tuple[str, Report]]) -> list[tuple[str, str]]:
    return [
        (figure.title, figure.about)
        for name, figure in FIGURES.items()
        if any(is_telling(report, name) for _, report in runs)
    ]


def _run(title: str, report: Report) -> list[str]:
    legend = "In plots a dot is a repeat, a band or whisker the 95 % interval, a line or mark the median."
    if unplotted := list(dict.fromkeys(label_of(record) for record in report["records"] if not _is_plotted(record))):
        legend += f" Not plotted, but in the tables: {', '.join(unplotted)}, which reads no shard and is off any scale."
    made = conversions_of(report)
    return [
        f"<h2>{escape(title)}</h2>",
        f'<p class="soft">{"<br>".join(escape(note) for note in notes_of(report))}</p>',
        _table(*table_rows(report, intervals=False)),
        f'<p class="soft">{escape(legend)}</p>',
        f'<div class="plots">{"".join(_plots(report))}</div>',
        "<h3>All figures</h3>",
        _table(*table_rows(report, figures=tuple(FIGURES))),
        *([f"<h3>{CONVERSIONS}</h3>", _table(made, 1)] if made else []),
        "<h3>Measured under</h3>",
        _definition_list(conditions_of(report)),
    ]


def _definition_list(items: Sequence[tuple[str, str]]) -> str:
    return f"<dl>{''.join(f'<dt>{escape(name)}</dt><dd>{escape(text)}</dd>' for name, text in items)}</dl>"


def _table(rows: Sequence[Sequence[str]], num_names: int) -> str:
    def cells(row: Sequence[str], tag: str) -> str:
        classes = [" class=name" if column < num_names else "" for column in range(len(row))]
        return "".join(f"<{tag}{name}>{escape(cell)}</{tag}>" for name, cell in zip(classes, row, strict=True))

    lines = [f"<tr>{cells(rows[0], 'th')}</tr>"]
    for number, row in enumerate(rows[1:]):
        is_new = number > 0 and rows[number][: num_names - 1] != row[: num_names - 1]
        lines.append(f"<tr{' class=split' if is_new else ''}>{cells(row, 'td')}</tr>")
    return f'<div class="wide"><table>{"".join(lines)}</table></div>'


def _plots(report: Report) -> list[str]:
    """Draw a plot for each figure, in a sweep also for each combination of the settings that are not on the axis."""
    records = report["records"]
    varied = setting_names(records)
    colours = {label: row for row, label in enumerate(dict.fromkeys(label_of(record) for record in records))}
    # The setting with the most values is the axis.
    axis = max(varied, key=lambda name: len({record["setting"].get(name) for record in records}), default=None)
    groups: dict[str, list[Record]] = {}
    for record in filter(_is_plotted, records):
        # With a dash for None: a plot's title names each setting that varies.
        others = [
            f"{SETTING_TITLES[name]} {format_setting(record['setting'].get(name))}" for name in varied if name != axis
        ]
        groups.setdefault(", ".join(others), []).append(record)
    plots = []
    for name in (name for name in BRIEF if is_telling(report, name)):
        for where, group in groups.items():
            marks = [
                Mark(label=(label := label_of(record)), colour=colours[label], measured=one, x=_place(record, axis))
                for record in group
                if (one := measured(report, record, name)) is not None
            ]
            if not marks:
                continue
            title, unit = FIGURES[name].title, FIGURES[name].unit
            if axis is None:
                plots.append(svg_of(draw_rows(marks), label=f"{title}, {unit}"))
                continue
            x_title = SETTING_TITLES[axis]
            label = f"{title}{f', {where}' if where else ''} over {x_title}, {unit}"
            plots.append(svg_of(draw_lines(marks, x_title=x_title, where=where), label=label))
    return plots


def _is_plotted(record: Record) -> bool:
    """Return whether a loader reads shards; the loaders of the oldest records, with ``None``, all do."""
    return record.get("gives") is None or bool(record["gives"])


def _place(record: Record, axis: str | None) -> float | str:
    value = 0.0 if axis is None else record["setting"].get(axis)
    return value if isinstance(value, str) else "as it is" if value is None else float(value)
