"""Write a report as Markdown: tables, notes, definitions, conditions."""

from collections.abc import Sequence

from bench.reports.figures import FIGURES
from bench.reports.notes import conditions_of, conversions_of, notes_of
from bench.reports.summary import Report, is_telling
from bench.reports.tables import format_rows, format_table

TITLE = "Loaders, measured"
CONVERSIONS = "Preparation, before anything was timed"
DEFINITIONS = "What the figures are"


def markdown_page(runs: Sequence[tuple[str, Report]], texts: Sequence[tuple[str, str]] = ()) -> str:
    """Return a page of runs, and of other benchmarks' tables as text.

    Args:
        runs: Title and record of each run, in its present form.
        texts: Title and table of each other benchmark.
    """
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
