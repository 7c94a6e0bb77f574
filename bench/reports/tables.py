"""Cells to a table, as text or Markdown: the first column to the left, figures to the right."""

from collections.abc import Sequence

__all__ = ["format_rows"]


def format_rows(rows: Sequence[Sequence[str]], *, markdown: bool = False, left: int = 1) -> str:
    """The rows, the first one a header with a rule below it.

    Args:
        rows: All of one length.
        markdown: For a document.
        left: So many columns are names, and go to the left.

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
