"""Print lines that may contain texts from data or from a server: results, errors and notes."""

import os
from typing import Any

import click

from dali_pipes.commands import verbosity
from dali_pipes.commands.verbosity import LINE_CHARS as LINE_CHARS
from dali_pipes.errors import printable


def print_line(text: str, *, err: bool = False, **style: Any) -> None:
    """Print one line, to stderr if ``err``; characters that a terminal would obey are shown as escapes.

    With ``style``, as `click.style` takes it, the line is in colour if that is a terminal and ``NO_COLOR`` is not set.
    """
    colour = False if os.environ.get("NO_COLOR") else None
    click.secho(printable(text, max_chars=LINE_CHARS), err=err, color=colour, **style)


def print_note(text: str) -> None:
    """Print one line to stderr that is neither an error nor a result; ``--quiet`` leaves it out."""
    if verbosity.current() != "quiet":
        print_line(text, err=True)
