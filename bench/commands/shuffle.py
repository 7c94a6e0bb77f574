"""``bench shuffle``: how far from uniform an order is."""

from pathlib import Path
from typing import Any

import click

from bench.commands.options import at_least, json_option
from bench.commands.running import needs_extras, run_and_tell


@click.command()
@click.option("--samples", "num_samples", default=20_000, show_default=True, type=at_least(2), help="Samples to order.")
@click.option("--num-shards", default=20, show_default=True, type=at_least(1), help="Shards they lie in.")
@click.option(
    "--classes", "num_classes", default=40, show_default=True, type=at_least(2), help="Classes of the samples."
)
@click.option("--batch-size", default=256, show_default=True, type=at_least(1), help="Samples a batch.")
@click.option("--seeds", "repeats", default=3, show_default=True, type=at_least(1), help="Epochs to average over.")
@json_option
@needs_extras
def shuffle(*, json_path: Path | None, **settings: Any) -> None:
    """Read shards that are sorted by label, shuffled by windows or by buffers; print how far from uniform it is.

    Writes its shards to a temporary directory, and nothing else but the file that --json names.
    """
    from bench.scenarios.shuffle_quality import ShuffleScenario

    run_and_tell(ShuffleScenario(**settings), json_path=json_path)
