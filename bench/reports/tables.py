"""Write tables, as text or Markdown: of any rows of cells, of a run, and of other benchmarks' records."""

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from types import MappingProxyType
from typing import Any

from bench.reports.figures import FIGURES, Figure
from bench.reports.summary import (
    BRIEF,
    SETTING_TITLES,
    Report,
    baseline_of,
    format_setting,
    is_telling,
    label_of,
    measured,
    setting_names,
)

Columns = Mapping[str, str | Callable[[Any], str]]
"""The columns of a table, as `records_table` takes them."""
RATIOS = ("samples_per_s", "cpu_ms_per_sample", "cpu_us_per_sample")
"""The figures that have a column for the ratio to the baseline."""
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


def table_rows(
    report: Report, *, figures: Sequence[str] | None = None, intervals: bool = True
) -> tuple[list[list[str]], int]:
    """Return the cells of a run's table, the header first, and the number of columns that are names.

    Args:
        report: The run.
        figures: Names of `FIGURES`; ``None``: `BRIEF`. Figures that no record has are left out.
        intervals: Show the interval of every figure, not only of those that have a ratio.
    """
    records = report["records"]
    chosen = [name for name in figures or BRIEF if is_telling(report, name)]
    varied = setting_names(records)
    header = [SETTING_TITLES[name] for name in varied] + ["loader"]
    for name in chosen:
        figure = FIGURES[name]
        header.append(f"{figure.title} {figure.unit}" if figure.unit in UNITS else figure.title)
        if name in RATIOS:
            header.append(f"x {label_of(baseline_of(report, records[0]))}")
    rows = [header]
    for record in records:
        row = [format_setting(record["setting"].get(name)) for name in varied] + [label_of(record)]
        for name in chosen:
            found = measured(report, record, name)
            row.append("-" if found is None else found.shown(with_interval=intervals or name in RATIOS))
            if name in RATIOS:
                row.append("-" if found is None else found.ratio_shown())
        rows.append(row)
    return rows, len(varied) + 1


def format_table(
    report: Report, *, markdown: bool = False, figures: Sequence[str] | None = None, intervals: bool = False
) -> str:
    """Return a row for each loader and setting: medians, 95 % intervals over the repeats, ratios to the baseline."""
    rows, num_names = table_rows(report, figures=figures, intervals=intervals)
    return format_rows(rows, markdown=markdown, left=num_names)


def summarised(figures: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Return the median of each figure over the rounds, and under ``spread`` its smallest and largest values.

    >>> summarised({"wall_s": [3.0, 1.0, 2.0]})
    {'wall_s': 2.0, 'spread': {'wall_s': [1.0, 3.0]}}
    """
    return {
        **{name: median(values) for name, values in figures.items()},
        "spread": {name: [min(values), max(values)] for name, values in figures.items()},
    }


def spread_cell(record: Mapping[str, Any], name: str, figures: Mapping[str, Figure]) -> str:
    """Return a figure that `summarised` made as a cell of a table: ``2.0 (1.0-3.0)``."""
    scale, digits = figures[name].scale, figures[name].digits
    low, high = record["spread"][name]
    return f"{scale * record[name]:.{digits}f} ({scale * low:.{digits}f}-{scale * high:.{digits}f})"


def records_table(
    records: Sequence[Mapping[str, Any]], columns: Columns, figures: Mapping[str, Figure] = MappingProxyType({})
) -> str:
    """Return a table with one row for each record.

    Args:
        records: The records of one benchmark.
        columns: Title -> what the cells show: the name of a figure, which is shown by `spread_cell`; the name of
            another entry of the record; or a function from the record to the text.
        figures: The benchmark's figures.

    >>> print(records_table([{"client": "sdk", "mb": 9}], {"client": "client", "MB": lambda one: f"{one['mb']:.1f}"}))
    client   MB
    ------  ---
    sdk     9.0
    """
    rows = [list(columns)]
    for record in records:
        cells = []
        for shown in columns.values():
            if callable(shown):
                cells.append(shown(record))
            else:
                cells.append(spread_cell(record, shown, figures) if shown in figures else str(record[shown]))
        rows.append(cells)
    return format_rows(rows)
