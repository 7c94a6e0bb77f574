"""Options that several commands of ``bench`` take, each written once; what is shared in meaning has one help text.

A command names its own beside itself, and these by what they are: ``@loading_options()`` for how a loader is opened,
``@shards_option(...)`` for what it reads. Only click is imported before a command runs.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

import click

from dali_pipes.commands.options import cluster_options

if TYPE_CHECKING:
    from bench.loaders import Device
    from dali_pipes.store.urls import ShardSet

__all__ = [
    "ScenarioArguments",
    "at_least",
    "cache_option",
    "cluster_options",
    "combined",
    "json_option",
    "loading_options",
    "numbers",
    "opened_shards",
    "photo_options",
    "repeats_option",
    "scenario_options",
    "shards_option",
    "target_option",
    "tell",
    "words",
]

Command = TypeVar("Command", bound=Callable[..., Any])
Decorator = Callable[[Command], Command]


def at_least(minimum: int) -> click.IntRange:
    """A whole number of ``minimum`` or more."""
    return click.IntRange(min=minimum)


def shards_option(*, help: str, required: bool = True) -> Decorator[Any]:
    """``--shards``: what is read."""
    return click.option("--shards", required=required, help=help)


def repeats_option(default: int, *, help: str) -> Decorator[Any]:
    """``--repeats``: how often, in turns."""
    return click.option("--repeats", default=default, show_default=True, type=at_least(1), help=help)


def loading_options(*, by_rank: bool = False) -> Decorator[Any]:
    """How a loader is opened: ``--batch-size``, ``--num-threads``, ``--device`` and ``--crop``.

    Args:
        by_rank: The command may open several, and the first two are of each.
    """
    each, cores = (" of each rank", "the cores, shared by the ranks") if by_rank else ("", "cores")
    return combined(
        [
            click.option(
                "--batch-size", default=64, show_default=True, type=at_least(1), help=f"Samples a batch{each}."
            ),
            click.option(
                "--num-threads",
                default=None,
                type=at_least(1),
                help=f"DALI's threads, or worker processes{each}.  [default: {cores}]",
            ),
            click.option("--device", default="auto", show_default=True, type=click.Choice(["auto", "cpu", "gpu"])),
            click.option("--crop", default=350, show_default=True, type=at_least(1), help="Side of the centre crop."),
        ]
    )


def photo_options() -> Decorator[Any]:
    """What a sample is made of, and in which order samples come: ``--photo``, ``--mask``, ``--seed``."""
    return combined(
        [
            click.option("--photo", default="image.jpg", show_default=True, help="Component that holds the photo."),
            click.option("--mask", default="trimap.png", show_default=True, help="Component that holds the mask."),
            click.option(
                "--seed",
                default=7,
                show_default=True,
                type=at_least(0),
                help="Order of the shards and samples, for loaders that have one.",
            ),
        ]
    )


def cache_option(*, help: str) -> Decorator[Any]:
    """``--cache``: where a benchmark keeps what it makes."""
    return click.option(
        "--cache",
        default=Path("/dev/shm"),  # noqa: S108 (a directory of our own is made there)
        show_default=True,
        type=click.Path(path_type=Path),
        help=help,
    )


def scenario_options(*, reads: str, repeats: int, turns: str, cache: str) -> Decorator[Any]:
    """What benchmarks of one part of the path have in common: what is read, how often, how it is opened, and where.

    Args:
        reads: Help of ``--shards``, before its three forms.
        repeats: Default of ``--repeats``.
        turns: Help of ``--repeats``.
        cache: Help of ``--cache``.
    """
    return combined(
        [
            shards_option(help=f"{reads}: ais://bucket/prefix, a glob of local tars, or a directory."),
            repeats_option(repeats, help=turns),
            loading_options(),
            cache_option(help=cache),
            json_option,
            cluster_options,
        ]
    )


class ScenarioArguments(TypedDict):
    """The values of `scenario_options`."""

    shards: str
    repeats: int
    batch_size: int
    num_threads: int | None
    device: "Device"
    crop: int
    cache: Path
    json_path: Path | None
    endpoint: str | None
    embedded_dir: Path | None


def combined(options: list[Decorator[Any]]) -> Decorator[Any]:
    """Several options as one decorator, in the order of ``--help``."""

    def add(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def _check_target(context: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
    """Refuse a file that could not be written before anything is timed."""
    from bench.reports.record import check_target

    if path is not None and str(path) != "-":
        check_target(path, option=parameter.opts[0])
    return path


def target_option(*names: str, help: str) -> Decorator[Any]:
    """A file that is written in the end, and is known to be writable before anything starts."""
    return click.option(*names, default=None, type=click.Path(path_type=Path), callback=_check_target, help=help)


json_option = target_option("--json", "json_path", help="Write the record here.")


def tell(kind: str, report: Mapping[str, Any], text: str, json_path: Path | None) -> None:
    """Print what was measured, and write the record where one was asked for.

    The table first: it is on the terminal whatever becomes of the file.

    Args:
        kind: The command; names the record's format where the report does not.
        report: For JSON.
        text: For people.
        json_path: Where to; ``None``: nowhere.
    """
    from bench.reports.record import stamped, write_record

    click.echo(text)
    if json_path is not None:
        write_record(stamped(report, kind=kind), json_path)


def words(text: str) -> list[str]:
    """``a, b`` to its words."""
    return [word.strip() for word in text.split(",")]


def numbers(option: str, text: str, *, kind: type[int] | type[float] = float) -> list[Any]:
    """``1,2`` to numbers.

    Raises:
        ValueError: If a word is none; names the option.
    """
    try:
        return [kind(word) for word in words(text)]
    except ValueError:
        whole = "whole numbers" if kind is int else "numbers"
        raise ValueError(f"{option} must be {whole} with commas between them, got '{text}'") from None


@contextlib.contextmanager
def opened_shards(
    shards: str, *, endpoint: str | None, embedded_dir: Path | None
) -> "Iterator[tuple[ShardSet, set[int]]]":
    """The shards, and the processes that were started to serve them: the embedded node's, for as long as needed.

    Raises:
        ValueError: If the shards are local, and the command line says where a bucket is; the environment may.
    """
    from bench.timing.processes import child_pids
    from dali_pipes.store.endpoint import cluster
    from dali_pipes.store.urls import is_remote, resolve_shards

    if not is_remote(shards):
        _refuse_cluster_options(shards)
    with contextlib.ExitStack() as stack:
        before = child_pids()
        url = stack.enter_context(cluster(endpoint, embedded_dir=embedded_dir)) if is_remote(shards) else None
        yield resolve_shards(shards, endpoint=url), child_pids() - before


def _refuse_cluster_options(shards: str) -> None:
    if (context := click.get_current_context(silent=True)) is None:
        return
    for name in ("endpoint", "embedded_dir"):
        if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            raise ValueError(
                f"--{name.replace('_', '-')} says where buckets are, and --shards '{shards}' is local; drop it, or "
                "name a bucket: --shards ais://BUCKET/PREFIX"
            )
