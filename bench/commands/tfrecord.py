"""``bench tfrecord``: the same samples as tars and as TFRecord files."""

from typing import Any

import click

from bench.commands.options import at_least, photo_options, scenario_options
from bench.commands.running import needs_extras, run_on_shards


@click.command()
@scenario_options(
    reads="What to write and read",
    repeats=6,
    turns="Turns of each writer and reader.",
    cache="Where tars and TFRecord files are written, and read from.",
)
@click.option("--epochs", default=2, show_default=True, type=at_least(1), help="Epochs that are decoded in each turn.")
@photo_options()
@needs_extras
def tfrecord(**given: Any) -> None:
    """Write the same samples as tars and as TFRecord files, then read and decode them: ours, and DALI's own readers.

    Reads --shards, which must be indexed. Each reader's outputs are compared with Pillow's and torchvision's before
    anything is timed. Writes into a directory under --cache, which is deleted at the end, and the file that --json
    names.
    """
    from bench.scenarios.tfrecord import TfrecordScenario

    run_on_shards(TfrecordScenario, given)
