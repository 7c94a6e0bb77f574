"""Options that several commands of ``dali-pipes prep`` take. Only click is imported before a command runs."""

from collections.abc import Callable, Sequence
from typing import Any

import click

from dali_pipes.commands.options import Command

urls_argument = click.argument("urls", metavar="URL...", nargs=-1, required=True)


def jobs_option(what: str) -> Callable[[Command], Command]:
    """``--jobs``: the number of worker processes."""
    return click.option(
        "--jobs", type=click.IntRange(min=1), help=f"{what}.  [default: the number of cores, at most 16]"
    )


def overwrite_option(what: str) -> Callable[[Command], Command]:
    """``--overwrite``: replace existing files or objects."""
    return click.option("--overwrite", is_flag=True, help=f"Replace {what}.")


def pairs_option(name: str, *names: str, **arguments: Any) -> Callable[[Command], Command]:
    """An option ``NAME=WHAT`` that may be repeated; the command gets a dict."""
    return click.option(name, *names, multiple=True, callback=_parse_pairs, **arguments)


def _parse_pairs(context: click.Context, option: click.Parameter, texts: Sequence[str]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for text in texts:
        name, mark, what = text.partition("=")
        if name in pairs:
            raise click.BadParameter(f"'{name}' is given twice")
        if not (name and mark and what):
            raise click.BadParameter(f"expected {option.metavar}, got '{text}'")
        pairs[name] = what
    return pairs
