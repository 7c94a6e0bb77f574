"""The text of commands: results and notes, which may contain texts of data or of a server.

A result is one line for people or, with ``--json``, one JSON document.
"""

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from dali_pipes.errors import StoreError, printable
from dali_pipes.progress import LINE_CHARS, current_verbosity

PAGES = (".html", ".htm")
# Lines of a list that a terminal shows; --json has all of them.
_SHOWN = 20


def print_line(text: str, *, err: bool = False, **style: Any) -> None:
    """Print one line, to stderr if ``err``; characters that a terminal would obey are shown as escapes.

    With ``style``, as `click.style` takes it, the line is in colour if that is a terminal and ``NO_COLOR`` is not set.
    """
    colour = False if os.environ.get("NO_COLOR") else None
    click.secho(printable(text, max_chars=LINE_CHARS), err=err, color=colour, **style)


def print_note(text: str) -> None:
    """Print one line to stderr that is neither an error nor a result; ``--quiet`` leaves it out."""
    if current_verbosity() != "quiet":
        print_line(text, err=True)


def check_output(path: Path, *, endings: Sequence[str], expected: str, option: str) -> None:
    """Refuse a file's name for ``option`` that has none of these endings, in small letters, or that cannot be written.

    ``expected`` are the endings in words.
    """
    if path.suffix.lower() not in endings:
        raise click.BadParameter(f"expected {expected}, got '{path}'", param_hint=option)
    if not path.parent.is_dir():
        raise click.BadParameter(f"no directory '{path.parent}'; make it", param_hint=option)
    if path.is_dir():
        raise click.BadParameter(f"'{path}' is a directory; name a file in it", param_hint=option)


def print_result(line: str, document: dict[str, Any], *, as_json: bool) -> None:
    """Print the result of a command to stdout."""
    if as_json:
        click.echo(json.dumps(document))
    else:
        print_line(line)


def fields_of(report: Any) -> dict[str, Any]:
    """The fields of a report, a dataclass, as part of a JSON document."""
    return {field.name: getattr(report, field.name) for field in dataclasses.fields(report)}


def print_some(what: str, lines: Sequence[str]) -> None:
    """Print the first lines of a list to stderr, as notes, each after ``what``."""
    for line in lines[:_SHOWN]:
        print_note(f"{what}: {line}")
    if len(lines) > _SHOWN:
        print_note(f"{what}: {len(lines) - _SHOWN} more, --json names all")


def print_reasons(what: str, reasons: Mapping[str, int]) -> None:
    """Print how often each reason occurs to stderr, as notes."""
    for reason, number in reasons.items():
        print_note(f"{number:8}  {what}: {reason}")


def counted(number: int, what: str, several: str = "") -> str:
    """``1 shard``, ``2 shards``; ``several`` is the word for more than one, if it is not made with an "s"."""
    return f"{number} {what if number == 1 else several or f'{what}s'}"


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an error of the system into one that names the file."""
    try:
        yield
    except OSError as exc:
        raise StoreError(f"cannot write '{path}': {exc.strerror or exc}") from exc
