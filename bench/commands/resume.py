"""``bench resume``: the first batch after a resume against that of an epoch's start."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from bench.commands.options import (
    at_least,
    cache_option,
    cluster_options,
    json_option,
    loading_options,
    opened_shards,
    repeats_option,
    shards_option,
    tell,
)

if TYPE_CHECKING:
    from bench.loaders import Device

__all__ = ["resume"]


@click.command()
@shards_option(help="What to load: ais://bucket/prefix, a glob of local tars, or a directory.")
@repeats_option(9, help="Turns of each scenario.")
@loading_options()
@click.option(
    "--cold-shards",
    default=40,
    show_default=True,
    type=at_least(1),
    help="Shards that the samples are packed into for the cold turns.",
)
@click.option("--cold-windows", default=5, show_default=True, type=at_least(1), help="Shuffle windows that these make.")
@cache_option(help="Where the images lie; the server of the cold turns keeps the samples there too.")
@json_option
@cluster_options
def resume(
    *,
    shards: str,
    repeats: int,
    batch_size: int,
    num_threads: int | None,
    device: "Device",
    crop: int,
    cold_shards: int,
    cold_windows: int,
    cache: Path,
    json_path: Path | None,
    endpoint: str | None,
    embedded_dir: Path | None,
) -> None:
    """Time the first batch after a resume in mid-epoch against that of an epoch's start, warm and cold.

    Reads --shards. The cold turns load a copy of them, from a server that answers, in half of the turns, for no shard
    but those that the first batch names. Writes nothing but the file that --json names.
    """
    from bench.environment import check_extras

    check_extras()
    from bench.loaders import available_cores
    from bench.scenarios.resume import ResumeOptions, format_resume, run_resume

    options = ResumeOptions(
        repeats=repeats,
        batch_size=batch_size,
        num_threads=num_threads or available_cores(),
        device=device,
        crop=crop,
        cold_shards=cold_shards,
        cold_windows=cold_windows,
        cache=cache,
    )
    with opened_shards(shards, endpoint=endpoint, embedded_dir=embedded_dir) as (found, _):
        report = run_resume(options, found)
    tell("resume", report, format_resume(report), json_path)
