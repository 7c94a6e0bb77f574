"""Print the results of ``dali-pipes prep`` commands: one line for people, or one JSON document."""

import dataclasses
import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from dali_pipes.commands.options import format_bytes
from dali_pipes.commands.output import print_line, print_note
from dali_pipes.errors import printable

if TYPE_CHECKING:
    from dali_pipes.formats.manifest import RecodedStep
    from prep.part import JobPart

# Options that say where and how a command runs, and change nothing of what it writes.
_LOCAL = frozenset({"endpoint", "embedded_dir", "as_json", "jobs", "dry_run", "spool_dir"})
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
    """Print the first lines of a list to stderr, as notes, each after ``what``."""
    for line in lines[:_SHOWN]:
        print_note(f"{what}: {line}")
    if len(lines) > _SHOWN:
        print_note(f"{what}: {len(lines) - _SHOWN} more, --json names all")


def print_reasons(what: str, reasons: Mapping[str, int]) -> None:
    """Print how often each reason occurs to stderr, as notes."""
    for reason, number in reasons.items():
        print_note(f"{number:8}  {what}: {reason}")


def command_line(context: click.Context) -> str:
    """The command as it was typed, for the history of a data set; without the options that say how it runs here.

    The home directory is written ``~``, so that no name of a user is kept.
    """
    words = context.command_path.split()
    for option in context.command.params:
        given = option.name is not None and context.get_parameter_source(option.name) is ParameterSource.COMMANDLINE
        if option.name is None or not given or option.name not in context.params or option.name in _LOCAL:
            continue
        value = context.params[option.name]
        flag = [] if isinstance(option, click.Argument) else [option.opts[0]]
        if value is True:
            words += flag
            continue
        if isinstance(value, dict):
            value = [f"{name}={what}" for name, what in value.items()]
        for one in value if isinstance(value, list | tuple) else [value]:
            words += [*flag, str(one)]
    line, home = shlex.join(words), str(Path.home())
    # Some containers have the home directory "/".
    return line if home == "/" else re.sub(rf"{re.escape(home)}(?=[/\s']|$)", "~", line)


def there_already(number: int, what: str) -> list[str]:
    """A note on the outputs that an earlier run had written."""
    return [f"{number} of the {what} were there already"] if number else []


def recoded_text(step: "RecodedStep") -> str:
    """What was done to photos, in one line.

    >>> from dali_pipes.formats.manifest import RecodedStep
    >>> settings = {"short_side": 256, "quality": 90}
    >>> counts = {"resized": 9, "kept": 1}
    >>> recoded_text(RecodedStep(settings=settings, counts=counts, bytes_before=4 << 20, bytes_after=1 << 20))
    'quality=90, short_side=256: 9 resized, 1 kept; 4.0 MiB became 1.0 MiB'
    """
    settings = ", ".join(name if value is True else f"{name}={value}" for name, value in sorted(step.settings.items()))
    counts = ", ".join(f"{number} {action}" for action, number in sorted(step.counts.items(), key=_by_number))
    sizes = f"{format_bytes(step.bytes_before)} became {format_bytes(step.bytes_after)}"
    return printable(f"{settings}: {counts}; {sizes}", max_chars=500)


def _by_number(count: tuple[str, int]) -> tuple[int, str]:
    return -count[1], count[0]


def shard_span(url: str, shards: Sequence[str]) -> str:
    """The URL of a set of shards.

    >>> shard_span("ais://pets/samples-", ["samples-000000.tar", "samples-000003.tar"])
    'ais://pets/samples-{000000..000003}.tar'
    """
    numbers = [re.findall(r"[0-9]+", shard)[-1] for shard in (shards[0], shards[-1])]
    return f"{url}{numbers[0]}.tar" if len(shards) == 1 else f"{url}{{{numbers[0]}..{numbers[1]}}}.tar"


def print_empty_part(part: "JobPart", url: str, *, as_json: bool) -> None:
    """Say that a part of a job has no shard: there are fewer shards than parts."""
    print_result(of_part(str, part, url, ()), {"part": str(part), "shards": []}, as_json=as_json)


def of_part(summary: Callable[[], str], part: "JobPart", url: str, shards: Sequence[str]) -> str:
    """The line that reports a job, ``summary()`` and its part, if it is one of several."""
    if not shards:
        return f"nothing to do: part {part} of '{url}' has no shard"
    return summary() if part.is_all else f"{summary()} (part {part} of these)"
