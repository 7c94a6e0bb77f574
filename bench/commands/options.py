"""Define options and contexts that several commands of ``bench`` share. Only click is imported before one runs."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from dali_pipes.store.shard_set import ShardSet


def _check_target(context: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
    """Refuse a file that could not be written before anything is timed."""
    from bench.reports.record import check_target

    if path is not None and str(path) != "-":
        check_target(path, option=parameter.opts[0])
    return path


def target_option(*names: str, help: str) -> Callable[[Any], Any]:
    """Make an option for a file that is written at the end; before anything starts, check that it can be written."""
    return click.option(*names, type=click.Path(path_type=Path), callback=_check_target, help=help)


json_option = target_option("--json", "json_path", help="Write the record here.")


@contextlib.contextmanager
def opened_shards(
    shards: str, *, endpoint: str | None, embedded_dir: Path | None
) -> "Iterator[tuple[ShardSet, set[int]]]":
    """Open shards; yields them and the processes that were started to serve them, such as an embedded node.

    Raises:
        DataError: If samples were removed from the data set, and its shards still hold them; if a version is named.
        ValueError: If the shards are local, and the command line has ``--endpoint`` or ``--embedded-dir``. The
            environment variables of these options are allowed.
    """
    from bench.tools.processes import child_pids
    from dali_pipes.commands.options import endpoint_for
    from dali_pipes.data_set.named import name_shards, without_removals
    from dali_pipes.errors import DataError
    from dali_pipes.store.urls import is_remote

    if not is_remote(shards):
        _refuse_cluster_options(shards)
    with contextlib.ExitStack() as stack:
        before = child_pids()
        url = stack.enter_context(endpoint_for(shards, endpoint, embedded_dir))
        # Other loaders read whole shards.
        named = without_removals(name_shards(shards, endpoint=url))
        if named.version is not None:
            raise DataError(
                f"'{named.url}': benchmarks take the newest version of a data set, because other loaders know of no "
                f"versions; name it without @{named.version}"
            )
        yield named, child_pids() - before


def _refuse_cluster_options(shards: str) -> None:
    if (context := click.get_current_context(silent=True)) is None:
        return
    for name in ("endpoint", "embedded_dir"):
        if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            raise ValueError(
                f"--{name.replace('_', '-')} says where buckets are, and --shards '{shards}' is local; drop it, or "
                "name a bucket: --shards ais://BUCKET/PREFIX"
            )
