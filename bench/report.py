"""Repeats to a figure, figures to a table: medians, spreads, ratios, as text or Markdown."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Spread", "baseline_of", "format_table", "label_of", "rows_of"]

BASELINE = "webloader"
"""The loader that ratios are to, where it was timed; else the first."""

Record = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Spread:
    """A figure over repeats."""

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Median, smallest and largest.

        >>> Spread.of([3.0, 1.0, 2.0])
        Spread(median=2.0, min=1.0, max=3.0)
        """
        return cls(median=statistics.median(values), min=min(values), max=max(values))


def label_of(record: Record) -> str:
    """``dali``, ``webloader (pil)``: a record's row in a table."""
    return record["loader"] if record["decode"] == "dali" else f"{record['loader']} ({record['decode']})"


def baseline_of(records: Sequence[Record]) -> Record:
    """The record that ratios are to."""
    return next((record for record in records if record["loader"] == BASELINE), records[0])


def ratio(figure: float, baseline: float) -> float | None:
    """``figure / baseline``; ``None`` where the baseline was too short to measure.

    >>> ratio(900.0, 300.0)
    3.0
    """
    return figure / baseline if baseline > 0 else None


def rows_of(records: Sequence[Record]) -> list[list[str]]:
    """The table's cells, the header first."""
    baseline = baseline_of(records)
    name = label_of(baseline)
    rows = [["loader", "samples/s", f"x {name}", "CPU-ms/sample", f"x {name}", "first batch s"]]
    for record in records:
        speed, cpu, first = (record[key] for key in ("samples_per_s", "cpu_ms_per_sample", "time_to_first_batch_s"))
        rows.append(
            [
                label_of(record),
                _with_spread(speed, record["spread"]["samples_per_s"], digits=0),
                _ratio_text(ratio(speed, baseline["samples_per_s"])),
                _with_spread(cpu, record["spread"]["cpu_ms_per_sample"], digits=2),
                _ratio_text(ratio(cpu, baseline["cpu_ms_per_sample"])),
                f"{first:.2f}",
            ]
        )
    return rows


def format_table(records: Sequence[Record], *, markdown: bool = False) -> str:
    """One row a loader: median (smallest to largest) over the repeats, and ratios to the baseline's median."""
    rows = rows_of(records)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        # The first column to the left, numbers to the right.
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append(f"| {' | '.join(cells)} |" if markdown else "  ".join(cells).rstrip())
    if markdown:
        rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
        lines.insert(1, f"| {' | '.join(rule)} |")
    else:
        lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def _with_spread(median: float, spread: Sequence[float], *, digits: int) -> str:
    low, high = spread
    return f"{median:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


def _ratio_text(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
