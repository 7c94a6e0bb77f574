"""Define the options that several commands of ``bench`` share, each once, with one help text for one meaning.

``@loading_options()`` says how a loader is opened, ``@shards_option(...)`` what it reads. Only click is imported before
a command runs.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from dali_pipes.commands.options import cluster_options, endpoint_for

if TYPE_CHECKING:
    from dali_pipes.store.shard_set import ShardSet

__all__ = [
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
    "words",
]

Command = TypeVar("Command", bound=Callable[..., Any])
Decorator = Callable[[Command], Command]


def at_least(minimum: int) -> click.IntRange:
    """A whole number of ``minimum`` or more."""
    return click.IntRange(min=minimum)


def shards_option(*, help: str, required: bool = True, name: str = "shards") -> Decorator[Any]:
    """``--shards``: what is read."""
    return click.option("--shards", name, required=required, help=help)


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
                "threads" if by_rank else "num_threads",
                default=None,
                type=at_least(1),
                callback=None if by_rank else _or_cores,
                help=f"DALI's threads, or worker processes{each}.  [default: {cores}]",
            ),
            click.option("--device", default="auto", show_default=True, type=click.Choice(["auto", "cpu", "gpu"])),
            click.option("--crop", default=350, show_default=True, type=at_least(1), help="Side of the centre crop."),
        ]
    )


def _or_cores(context: click.Context, parameter: click.Parameter, number: int | None) -> int:
    """The cores that this process may use, where nothing was said."""
    return number or len(os.sched_getaffinity(0))


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
        "work",
        default=Path("/dev/shm"),  # noqa: S108 (a directory of our own is made there)
        show_default=True,
        type=click.Path(path_type=Path),
        help=help,
    )


def scenario_options(*, reads: str, repeats: int, turns: str, cache: str, required: bool = True) -> Decorator[Any]:
    """What benchmarks of one part of the path have in common: what is read, how often, how it is opened, and where.

    Args:
        reads: Help of ``--shards``, before its three forms.
        repeats: Default of ``--repeats``.
        turns: Help of ``--repeats``.
        cache: Help of ``--cache``.
        required: Whether ``--shards`` must be given; if not, ``reads`` is all of its help.
    """
    forms = ": ais://bucket/prefix, a glob of local tars, or a directory." if required else ""
    return combined(
        [
            shards_option(help=f"{reads}{forms}", required=required),
            repeats_option(repeats, help=turns),
            loading_options(),
            cache_option(help=cache),
            json_option,
            cluster_options,
        ]
    )


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
    """A file that is written at the end. Whether it can be is checked before anything starts."""
    return click.option(*names, default=None, type=click.Path(path_type=Path), callback=_check_target, help=help)


json_option = target_option("--json", "json_path", help="Write the record here.")


def words(text: str) -> list[str]:
    """The words of ``a, b``."""
    return [word.strip() for word in text.split(",")]


def numbers(option: str, text: str, *, kind: type[int] | type[float] = float) -> list[Any]:
    """The numbers of ``1,2``.

    Raises:
        ValueError: If a word is no number; names the option.
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
    from bench.tools.processes import child_pids
    from dali_pipes.store.urls import is_remote, resolve_shards

    if not is_remote(shards):
        _refuse_cluster_options(shards)
    with contextlib.ExitStack() as stack:
        before = child_pids()
        url = stack.enter_context(endpoint_for(shards, endpoint, embedded_dir))
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
