"""Write a report as one HTML page that needs no other file, or as Markdown: tables, plots, definitions, conditions."""

from collections.abc import Sequence
from html import escape

from bench.loaders.registry import is_ours
from bench.reports.figures import FIGURES
from bench.reports.notes import conditions_of, conversions_of, notes_of
from bench.reports.plots import Mark, draw_lines, draw_rows, style_of, svg_of
from bench.reports.ranking import ranking_rows
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
from dali_pipes.pages.page import definition_list, html_document, html_table, text

TITLE = "Loaders, measured"
CONVERSIONS = "Preparation, before anything was timed"
DEFINITIONS = "What the figures are"
_RANKING = (
    "By the median of samples/s, fastest first. Loaders share a place where the repeats do not show that one is "
    "slower: the 95 % interval of their ratio, taken turn by turn, contains 1, or there are too few repeats for one."
)
_NOTE_CHARS = 4000


def html_page(runs: Sequence[tuple[str, Report]], texts: Sequence[tuple[str, str]] = ()) -> str:
    """Return a page of runs, and of other benchmarks' tables as text.

    Args:
        runs: Title and record of each run, in its present form.
        texts: Title and table of each other benchmark.

    Raises:
        PipesError: If matplotlib, which draws the plots, is not installed.
    """
    body = [f"<h1>{TITLE}</h1>", *(part for title, report in runs for part in _run(title, report))]
    for title, table in texts:
        body += [f"<h2>{text(title)}</h2>", f"<pre>{escape(table)}</pre>"]
    if runs:
        body += [f"<h2>{DEFINITIONS}</h2>", definition_list(_definitions(runs))]
    return html_document(TITLE, body)


def markdown_page(runs: Sequence[tuple[str, Report]], texts: Sequence[tuple[str, str]] = ()) -> str:
    """Return the same as Markdown, without the plots."""
    parts = [f"# {TITLE}"]
    for title, report in runs:
        parts += [f"## {title}", format_table(report, markdown=True, intervals=True)]
        parts += [note.replace("*", "\\*") for note in notes_of(report)]
        if made := conversions_of(report):
            parts += [f"{CONVERSIONS}:", format_rows(made, markdown=True)]
        parts.append("\n".join(f"* {name}: {about}" for name, about in conditions_of(report)))
    for title, table in texts:
        parts += [f"## {title}", f"```\n{table}\n```"]
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
    places, are_ours = ranking_rows(report)
    notes = "<br>".join(text(note, max_chars=_NOTE_CHARS) for note in notes_of(report))
    return [
        f"<h2>{text(title)}</h2>",
        "<h3>Ranking</h3>",
        html_table(places, num_names=2, classes=["ours" if is_one else "" for is_one in are_ours]),
        f'<p class="soft">{text(_RANKING, max_chars=_NOTE_CHARS)}</p>',
        "<h3>In short</h3>",
        _figures(report, figures=None),
        f'<p class="soft">{notes}</p>',
        f'<p class="soft">{text(legend, max_chars=_NOTE_CHARS)}</p>',
        f'<div class="plots">{"".join(_plots(report))}</div>',
        "<h3>All figures</h3>",
        _figures(report, figures=tuple(FIGURES)),
        *([f"<h3>{CONVERSIONS}</h3>", html_table(made)] if made else []),
        "<h3>Measured under</h3>",
        definition_list(conditions_of(report)),
    ]


def _figures(report: Report, *, figures: Sequence[str] | None) -> str:
    """A table of figures: ours is marked, and so is where another setting begins."""
    rows, num_names = table_rows(report, figures=figures, intervals=figures is not None)
    classes = []
    for number, record in enumerate(report["records"], start=1):
        is_new = number > 1 and rows[number - 1][: num_names - 1] != rows[number][: num_names - 1]
        classes.append(" ".join(["split"] * is_new + ["ours"] * is_ours(record["loader"])))
    return html_table(rows, num_names=num_names, classes=classes)


def _plots(report: Report) -> list[str]:
    """Draw a plot for each figure, in a sweep also for each combination of the settings that are not on the axis."""
    records = report["records"]
    varied = setting_names(records)
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
                Mark(
                    label=label_of(record),
                    style=style_of(record["loader"], record["decode"]),
                    measured=one,
                    x=_place(record, axis),
                )
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
