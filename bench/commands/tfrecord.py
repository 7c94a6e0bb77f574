"""``bench tfrecord``: the same samples as tars and as TFRecord files."""

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
    photo_options,
    repeats_option,
    shards_option,
    tell,
)

if TYPE_CHECKING:
    from bench.loaders import Device

__all__ = ["tfrecord"]


@click.command()
@shards_option(help="What to write and read: ais://bucket/prefix, a glob of local tars, or a directory.")
@repeats_option(6, help="Turns of each writer and reader.")
@click.option("--epochs", default=2, show_default=True, type=at_least(1), help="Epochs that are decoded in each turn.")
@loading_options()
@photo_options()
@cache_option(help="Where tars and TFRecord files are written, and read from.")
@json_option
@cluster_options
def tfrecord(
    *,
    shards: str,
    repeats: int,
    epochs: int,
    batch_size: int,
    num_threads: int | None,
    device: "Device",
    crop: int,
    photo: str,
    mask: str,
    seed: int,
    cache: Path,
    json_path: Path | None,
    endpoint: str | None,
    embedded_dir: Path | None,
) -> None:
    """Write the same samples as tars and as TFRecord files, then read and decode them: ours, and DALI's own readers.

    Reads --shards, which must be indexed. Each reader's outputs are held against Pillow and torchvision before
    anything is timed. Writes into a directory under --cache, which is deleted at the end, and the file that --json
    names.
    """
    from bench.environment import check_extras

    check_extras()
    from bench.loaders import LoaderOptions, available_cores
    from bench.scenarios.tfrecord import TfrecordOptions, format_tfrecord, run_tfrecord

    options = TfrecordOptions(
        loaders=LoaderOptions(
            batch_size=batch_size,
            num_threads=num_threads or available_cores(),
            crop=crop,
            photo=photo,
            mask=mask,
            seed=seed,
            device=device,
        ),
        repeats=repeats,
        epochs=epochs,
        cache=cache,
    )
    with opened_shards(shards, endpoint=endpoint, embedded_dir=embedded_dir) as (found, _):
        report = run_tfrecord(options, found)
    tell("tfrecord", report, format_tfrecord(report), json_path)
