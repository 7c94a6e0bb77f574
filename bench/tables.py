"""Cells to a table as text: the first column to the left, figures to the right."""

from collections.abc import Sequence

__all__ = ["format_rows"]


def format_rows(rows: Sequence[Sequence[str]]) -> str:
    """The rows, the first one a header with a rule below it.

    >>> print(format_rows([["client", "MiB/s"], ["ours", "1900"]]))
    client  MiB/s
    ------  -----
    ours     1900
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])
