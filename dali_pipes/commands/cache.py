"""``dali-pipes cache``: list, fill and empty the cache files that loaders on this node share."""

import contextlib
import dataclasses
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dali_pipes.commands.options import cache_bytes_option, cluster_options, format_bytes, json_option, size
from dali_pipes.commands.output import print_line, print_result

if TYPE_CHECKING:
    from dali_pipes.data_set.find import NamedSets
    from dali_pipes.store.shard_set import ShardSet

_directory = click.Path(file_okay=False, path_type=Path)
cache_option = click.option(
    "--cache",
    "cache_dir",
    type=_directory,
    help="The cache's directory.  [default: those of loaders: /dev/shm and the directory for temporary files]",
)


@click.group()
def cache() -> None:
    """List, fill and empty the cache files that loaders on this node share."""


@cache.command("ls", short_help="List resident shards and the processes that hold them.")
@cache_option
@json_option
def list_cache_files(*, cache_dir: Path | None, as_json: bool) -> None:
    """List the cache files, with the number of their shards, how many of these are resident and held, and the processes
    that use them.

    The command reads only the cache's tables.
    """
    from dali_pipes.cache.cache import NodeCache

    rows: list[dict[str, Any]] = []
    for directory in _caches(cache_dir):
        with contextlib.closing(NodeCache(directory)) as opened:
            for found in map(dataclasses.asdict, opened.status()):
                named = {"cache": str(directory), "image": found.pop("key"), "image_bytes": found.pop("file_bytes")}
                rows.append(named | found)
    if as_json:
        click.echo(json.dumps(rows))
        return
    for row in rows:
        users = f"used by {', '.join(map(str, row['pids']))}" if row["pids"] else "unused"
        print_line(
            f"{row['cache']}: {row['source']}  {row['num_resident']} of {row['num_shards']} shards resident, "
            f"{format_bytes(row['resident_bytes'])} of {format_bytes(row['image_bytes'])}, {row['num_held']} held, "
            f"{users}"
        )
    if not rows:
        click.echo("no cache files")


@cache.command(short_help="Stage shards before a job starts.")
@click.argument("urls", metavar="URL...", nargs=-1, required=True)
@click.option("--cache", "cache_dir", type=_directory, help="The directory of the cache file, which is kept.")
@click.option(
    "--in-cluster",
    is_flag=True,
    help="Have AIStore fetch the shards from the cloud to its own disks, for all nodes, instead of staging them here.",
)
@click.option(
    "--blob-threshold",
    type=size,
    default="1GiB",
    show_default=True,
    help="With --in-cluster: AIStore fetches shards of this size or more in parts.",
)
@cache_bytes_option
@click.option(
    "--connections", default=8, show_default=True, type=click.IntRange(min=1), help="Threads that fetch shards."
)
@click.option("--etl", metavar="NAME", help="Read the shards through this running ETL.  [default: as they are stored]")
@cluster_options
@json_option
def warm(
    urls: tuple[str, ...],
    *,
    cache_dir: Path | None,
    in_cluster: bool,
    blob_threshold: int,
    cache_bytes: int | None,
    connections: int,
    etl: str | None,
    endpoint: str | None,
    embedded_dir: Path | None,
    as_json: bool,
) -> None:
    """Stage the shards at URL, beginning with the first, until all are resident or the cache is full.

    A loader with the same cache directory uses them. With --in-cluster AIStore's prefetch job fetches the shards and
    their indexes, and the command waits for its end; Ctrl-C ends the wait, and the job goes on.
    """
    import numpy as np

    from dali_pipes.cache.placement import extent_alignment
    from dali_pipes.data_set.data_set import DataSet
    from dali_pipes.data_set.find import find_shards
    from dali_pipes.options import Shards
    from dali_pipes.progress import bar

    if (cache_dir is None) != in_cluster:
        raise ValueError("name the place of the shards, either --cache or --in-cluster")
    if in_cluster and (etl or cache_bytes is not None):
        raise ValueError("--in-cluster takes neither --etl nor --cache-bytes: the cluster fetches shards as they are")
    if in_cluster and endpoint is None and "://" in urls[0]:
        raise ValueError("--in-cluster needs a cluster: name it by --endpoint or AIS_ENDPOINT")
    started = time.perf_counter()
    with contextlib.ExitStack() as resources:
        named = Shards(list(urls), etl=etl)
        found = find_shards(named, endpoint=endpoint, embedded_dir=embedded_dir, resources=resources)
        if cache_dir is None:
            _prefetch(found, blob_threshold=blob_threshold, as_json=as_json)
            return
        indexed = DataSet(found, alignment=extent_alignment(cache_dir))
        # No reservation: the shards may only take space that running loaders have not reserved.
        share = indexed.open_share(reserved=0, is_windowed=False, group=0, cache_dir=cache_dir, cache_bytes=cache_bytes)
        resources.callback(share.close)
        stager = resources.enter_context(contextlib.closing(indexed.open_stager(share, num_fetchers=connections)))
        fitting = int(np.searchsorted(np.cumsum(indexed.extent_bytes), share.cache_bytes, side="right"))
        total = int(indexed.extent_bytes[:fitting].sum())
        with bar(what="stage", total=total, unit="B", shown=not as_json) as drawn:
            staged = stager.need_fitting(
                range(fitting), waiting=lambda num_bytes_left: drawn.update(total - num_bytes_left - drawn.n)
            )
        fetched = stager.fetched_bytes
    num_bytes = int(indexed.extent_bytes[staged].sum())
    num_shards, elapsed_s = indexed.manifest.num_shards, time.perf_counter() - started
    result: dict[str, Any] = {
        "num_shards": num_shards,
        "num_staged": len(staged),
        "num_bytes": num_bytes,
        "fetched_bytes": fetched,
    }
    result["elapsed_s"] = elapsed_s
    full = "" if len(staged) == num_shards else f" of {num_shards}, the cache is full"
    amount = f"{format_bytes(num_bytes)} ({format_bytes(fetched)} fetched)"
    line = f"staged {len(staged)} shards{full}, {amount} in {elapsed_s:.1f} s -> {cache_dir}"
    print_result(line, result, as_json=as_json)


def _prefetch(found: "ShardSet | NamedSets", *, blob_threshold: int, as_json: bool) -> None:
    from dali_pipes.data_set.data_set import DataSet
    from dali_pipes.data_set.find import NamedSets
    from dali_pipes.formats.names import index_name
    from dali_pipes.store.cluster.prefetch import prefetch

    assert not isinstance(found, NamedSets), "a command names no mixture"
    bucket = found.store.need_cluster("and only a bucket that AIStore has as a backend is fetched into a cluster")
    if found.manifest is None:
        raise ValueError(f"'{found.url}' has no manifest, which says how large its shards are: {found.index_command}")
    manifest, started = DataSet(found).manifest, time.perf_counter()
    names = [name for shard in manifest.names for name in (shard, index_name(shard))]
    is_large = int(manifest.shard_bytes.max()) >= blob_threshold  # else AIStore would ask the cloud for each size
    done = prefetch(
        bucket,
        names,
        num_bytes=int(manifest.shard_bytes.sum() + manifest.index_bytes.sum()),
        blob_threshold=blob_threshold if is_large else 0,
        show_progress=not as_json,
    )
    result = done._asdict() | {"num_shards": manifest.num_shards, "elapsed_s": time.perf_counter() - started}
    rest = "" if done.num_objects == len(names) else ", which had the others already"
    line = (
        f"fetched {done.num_objects} of {len(names)} objects, {format_bytes(done.num_bytes)} in "
        f"{result['elapsed_s']:.1f} s -> {bucket.endpoint}{rest}"
    )
    print_result(line, result, as_json=as_json)


@cache.command(short_help="Evict shards that no loader holds.")
@cache_option
@json_option
def clear(*, cache_dir: Path | None, as_json: bool) -> None:
    """Evict all shards that no loader holds, and remove cache files that no loader uses."""
    from dali_pipes.cache.cache import NodeCache

    freed = held = 0
    for directory in _caches(cache_dir):
        with contextlib.closing(NodeCache(directory)) as opened:
            gone, kept = opened.clear()
        freed, held = freed + gone, held + kept
    rest = f", running loaders hold {format_bytes(held)}" if held else ""
    print_result(f"freed {format_bytes(freed)}{rest}", {"freed_bytes": freed, "held_bytes": held}, as_json=as_json)


def _caches(cache_dir: Path | None) -> list[Path]:
    from dali_pipes.cache.files import cache_root
    from dali_pipes.cache.placement import default_directories

    if cache_dir is not None and not cache_dir.is_dir():
        raise ValueError(f"cache directory '{cache_dir}' does not exist")
    directories = [cache_dir] if cache_dir is not None else default_directories()
    return [directory for directory in directories if cache_root(directory).is_dir()]
