"""``dali-pipes cache``: see, fill and empty the images that loaders on this node share."""

import contextlib
import json
import time
from pathlib import Path
from typing import Any

import click

from dali_pipes.commands.options import cluster_options, format_bytes, json_option, size

__all__ = ["cache"]

_directory = click.Path(file_okay=False, path_type=Path)
cache_option = click.option(
    "--cache",
    "cache_dir",
    type=_directory,
    help="Its directory.  [default: where loaders put it by themselves: /dev/shm, the directory for temporary files]",
)


@click.group()
def cache() -> None:
    """See, fill and empty the images that loaders on this node share."""


@cache.command("ls", short_help="What is resident, and who holds it.")
@cache_option
@json_option
def list_images(*, cache_dir: Path | None, as_json: bool) -> None:
    """List the images: shards, what of them is resident, what is held by whom. Reads the cache's tables only."""
    from dali_pipes.cache.cache import NodeCache

    rows: list[dict[str, Any]] = []
    for directory in _caches(cache_dir):
        with contextlib.closing(NodeCache(directory)) as opened:
            rows += [
                {
                    "cache": str(directory),
                    "image": status.key,
                    "source": status.source,
                    "num_shards": status.num_shards,
                    "num_resident": status.num_resident,
                    "num_held": status.num_held,
                    "resident_bytes": status.resident_bytes,
                    "image_bytes": status.image_bytes,
                    "pids": list(status.pids),
                    "keep": status.keep,
                }
                for status in opened.status()
            ]
    if as_json:
        click.echo(json.dumps(rows))
        return
    for row in rows:
        users = f"used by {', '.join(map(str, row['pids']))}" if row["pids"] else "unused"
        click.echo(
            f"{row['cache']}: {row['source']}  {row['num_resident']} of {row['num_shards']} shards resident, "
            f"{format_bytes(row['resident_bytes'])} of {format_bytes(row['image_bytes'])}, {row['num_held']} held, "
            f"{users}"
        )
    if not rows:
        click.echo("no images")


@cache.command(short_help="Stage shards before a job does.")
@click.argument("urls", metavar="URL...", nargs=-1, required=True)
@click.option("--cache", "cache_dir", required=True, type=_directory, help="Where the image lies, and stays.")
@click.option(
    "--cache-bytes",
    type=size,
    help="What all images there may take.  [default: half of free memory, or nine tenths of a disk's free space]",
)
@click.option("--connections", default=8, show_default=True, type=click.IntRange(min=1), help="Shards in flight.")
@click.option("--etl", metavar="NAME", help="Read them through this running ETL.  [default: as they are stored]")
@cluster_options
@json_option
def warm(
    urls: tuple[str, ...],
    *,
    cache_dir: Path,
    cache_bytes: int | None,
    connections: int,
    etl: str | None,
    endpoint: str | None,
    embedded_dir: Path | None,
    as_json: bool,
) -> None:
    """Stage the shards at URL, from the first on, until all are resident or the cache is full.

    A loader with the same cache directory finds them there.
    """
    import numpy as np

    from dali_pipes.cache.placement import extent_alignment
    from dali_pipes.data_set.data_set import Indexed, find_shards, open_share, open_stager
    from dali_pipes.progress import bar

    started = time.perf_counter()
    with contextlib.ExitStack() as resources:
        found = find_shards(list(urls), endpoint=endpoint, embedded_dir=embedded_dir, resources=resources, etl=etl)
        indexed = Indexed(found, alignment=extent_alignment(cache_dir))
        # No promise is asked for: what loaders at work were promised is theirs, the rest can be had.
        share = open_share(
            indexed,
            reserved=0,
            is_windowed=False,
            group=0,
            cache_dir=cache_dir,
            cache_bytes=cache_bytes,
        )
        resources.callback(share.close)
        stager = resources.enter_context(contextlib.closing(open_stager(indexed, share, num_fetchers=connections)))
        fitting = int(np.searchsorted(np.cumsum(indexed.extent_bytes), share.cache_bytes, side="right"))
        total = int(indexed.extent_bytes[:fitting].sum())
        with bar(what="stage", total=total, unit="B", shown=not as_json) as drawn:
            staged = stager.need_fitting(
                range(fitting), waiting=lambda num_bytes_left: drawn.update(total - num_bytes_left - drawn.n)
            )
        fetched = stager.fetched_bytes
    num_bytes = int(indexed.extent_bytes[staged].sum())
    elapsed_s = time.perf_counter() - started
    result = {
        "num_shards": len(indexed.manifest.names),
        "num_staged": len(staged),
        "num_bytes": num_bytes,
        "fetched_bytes": fetched,
        "elapsed_s": elapsed_s,
    }
    full = "" if len(staged) == indexed.manifest.num_shards else f" of {indexed.manifest.num_shards}, the cache is full"
    amount = f"{format_bytes(num_bytes)} ({format_bytes(fetched)} fetched)"
    line = f"staged {len(staged)} shards{full}, {amount} in {elapsed_s:.1f} s"
    click.echo(json.dumps(result) if as_json else f"{line} -> {cache_dir}")


@cache.command(short_help="Give back what nobody holds.")
@cache_option
@json_option
def clear(*, cache_dir: Path | None, as_json: bool) -> None:
    """Give back all that no loader holds, and remove images that no loader uses."""
    from dali_pipes.cache.cache import NodeCache

    freed = held = 0
    for directory in _caches(cache_dir):
        with contextlib.closing(NodeCache(directory)) as opened:
            gone, kept = opened.clear()
        freed, held = freed + gone, held + kept
    rest = f", {format_bytes(held)} are held by loaders at work" if held else ""
    click.echo(
        json.dumps({"freed_bytes": freed, "held_bytes": held}) if as_json else f"freed {format_bytes(freed)}{rest}"
    )


def _caches(cache_dir: Path | None) -> list[Path]:
    """The directories that have a cache."""
    from dali_pipes.cache.files import cache_root
    from dali_pipes.cache.placement import default_directories

    if cache_dir is not None and not cache_dir.is_dir():
        raise ValueError(f"cache directory '{cache_dir}' is not there")
    directories = [cache_dir] if cache_dir is not None else default_directories()
    return [directory for directory in directories if cache_root(directory).is_dir()]
