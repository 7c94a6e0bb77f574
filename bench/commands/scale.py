"""``bench scale``: what comes before the first sample, by the number of shards."""

from pathlib import Path

import click

from bench.commands.options import json_option, numbers, repeats_option
from bench.commands.running import needs_extras, run_and_tell


@click.command()
@click.option("--num-shards", default="100,10000,1000000", show_default=True, help="Sizes of the simulated data set.")
@click.option("--window-shards", default="10,100", show_default=True, help="Shards of a shuffle window.")
@repeats_option(3, help="Processes for each pair.")
@json_option
@needs_extras
def scale(*, num_shards: str, window_shards: str, repeats: int, json_path: Path | None) -> None:
    """Time what comes before the first sample for data sets of up to a million shards, and what a window costs.

    Reads nothing: manifests of shards that do not exist are made, 1,000 samples in each. Writes nothing but the file
    that --json names.
    """
    from bench.scenarios.scale import ScaleScenario

    scenario = ScaleScenario(
        num_shards=numbers("--num-shards", num_shards, kind=int),
        window_shards=numbers("--window-shards", window_shards, kind=int),
        repeats=repeats,
    )
    run_and_tell(scenario, json_path=json_path)
