"""Summarise a figure over the rounds, for records and for tables: its median, smallest and largest value."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from bench.reports.figures import Figure


def summarised(figures: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Medians by the figures' names, and under ``spread`` their smallest and largest values.

    >>> summarised({"wall_s": [3.0, 1.0, 2.0]})
    {'wall_s': 2.0, 'spread': {'wall_s': [1.0, 3.0]}}
    """
    return {
        **{name: median(values) for name, values in figures.items()},
        "spread": {name: [min(values), max(values)] for name, values in figures.items()},
    }


def spread_cell(record: Mapping[str, Any], name: str, figures: Mapping[str, Figure]) -> str:
    """A figure of a record, as `summarised` made it, as a cell of a table: ``2.0 (1.0-3.0)``."""
    scale, digits = figures[name].scale, figures[name].digits
    low, high = record["spread"][name]
    return f"{scale * record[name]:.{digits}f} ({scale * low:.{digits}f}-{scale * high:.{digits}f})"
