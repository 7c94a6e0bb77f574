"""``bench tfrecord``: the same samples as tars and as TFRecord files."""

from typing import TYPE_CHECKING

import click

from bench.commands.options import ScenarioArguments, at_least, opened_shards, photo_options, scenario_options, tell

if TYPE_CHECKING:
    from typing import Unpack

__all__ = ["tfrecord"]


@click.command()
@scenario_options(
    reads="What to write and read",
    repeats=6,
    turns="Turns of each writer and reader.",
    cache="Where tars and TFRecord files are written, and read from.",
)
@click.option("--epochs", default=2, show_default=True, type=at_least(1), help="Epochs that are decoded in each turn.")
@photo_options()
def tfrecord(*, epochs: int, photo: str, mask: str, seed: int, **given: "Unpack[ScenarioArguments]") -> None:
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
            batch_size=given["batch_size"],
            num_threads=given["num_threads"] or available_cores(),
            crop=given["crop"],
            photo=photo,
            mask=mask,
            seed=seed,
            device=given["device"],
        ),
        repeats=given["repeats"],
        epochs=epochs,
        cache=given["cache"],
    )
    with opened_shards(given["shards"], endpoint=given["endpoint"], embedded_dir=given["embedded_dir"]) as (found, _):
        report = run_tfrecord(options, found)
    tell("tfrecord", report, format_tfrecord(report), given["json_path"])
