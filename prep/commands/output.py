"""Print the results of ``dali-pipes prep`` commands: one line for people, or one JSON document."""

import dataclasses
import json
import re
from collections.abc import Sequence
from typing import Any

import click

from dali_pipes.commands.output import print_line

# Lines of a list that a terminal shows; --json has all of them.
_SHOWN = 20


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
    """Print the first lines of a list to stderr, each after ``what``."""
    for line in lines[:_SHOWN]:
        print_line(f"{what}: {line}", err=True)
    if len(lines) > _SHOWN:
        print_line(f"{what}: {len(lines) - _SHOWN} more, --json names all", err=True)


def counted(number: int, what: str) -> str:
    """``1 shard``, ``2 shards``."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def there_already(number: int, what: str) -> list[str]:
    """A note on the outputs that an earlier run had written."""
    return [f"{number} of the {what} were there already"] if number else []


def shard_span(url: str, shards: Sequence[str]) -> str:
    """The URL of a set of shards.

    >>> shard_span("ais://pets/samples-", ["samples-000000.tar", "samples-000003.tar"])
    'ais://pets/samples-{000000..000003}.tar'
    """
    numbers = [re.findall(r"[0-9]+", shard)[-1] for shard in (shards[0], shards[-1])]
    return f"{url}{numbers[0]}.tar" if len(shards) == 1 else f"{url}{{{numbers[0]}..{numbers[1]}}}.tar"
