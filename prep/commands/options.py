"""Options that several commands of ``dali-pipes prep`` take. Only click is imported before a command runs."""

from collections.abc import Callable, Sequence
from typing import Any

import click

from dali_pipes.commands.options import Command, join_options

urls_argument = click.argument("urls", metavar="URL...", nargs=-1, required=True)


def jobs_option(what: str) -> Callable[[Command], Command]:
    """``--jobs``: the number of worker processes."""
    return click.option(
        "--jobs", type=click.IntRange(min=1), help=f"{what}.  [default: the number of cores, at most 16]"
    )


def overwrite_option(what: str) -> Callable[[Command], Command]:
    """``--overwrite``: replace existing files or objects."""
    return click.option("--overwrite", is_flag=True, help=f"Replace {what}.")


def seed_option(what: str) -> Callable[[Command], Command]:
    """``--seed`` of a random choice."""
    return click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help=f"Seed of {what}.")


allow_missing_option = click.option(
    "--allow-missing",
    is_flag=True,
    help="Leave out shards that the manifest lists and the store lacks, and log their names.  [default: an error]",
)

dry_run_option = click.option("--dry-run", is_flag=True, help="Check, print what would be written, and write nothing.")

format_option = click.option(
    "--format",
    "formats",
    type=click.Choice(["jpeg2000", "tiff", "gif", "apng"]),
    multiple=True,
    help="A format that is allowed beside JPEG, PNG, WEBP, BMP and PNM; may be repeated. Loaders take such photos only "
    "with the same names in Decode(formats=...). apng is an animated PNG.  [default: none]",
)

mask_options = join_options(
    click.option(
        "--mask",
        "masks",
        metavar="COMPONENT",
        multiple=True,
        help="A component that holds a class id for each pixel: an 8-bit grey PNG that can be decoded and has its "
        "photo's size; may be repeated.  [default: found by their names]",
    ),
    click.option("--no-masks", is_flag=True, help="Nothing is a mask; a PNG may have any depth, colour and size."),
)


def chosen_masks(masks: tuple[str, ...], *, no_masks: bool) -> tuple[str, ...] | None:
    """The components that `mask_options` name; ``None`` to find them by their names."""
    if no_masks and masks:
        raise click.UsageError("--no-masks and --mask exclude each other")
    return () if no_masks else masks or None


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
