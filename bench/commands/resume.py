"""``bench resume``: the first batch after a resume against that of an epoch's start."""

from typing import Any

import click

from bench.commands.options import at_least, scenario_options
from bench.commands.running import needs_extras, run_on_shards


@click.command()
@scenario_options(
    reads="What to load",
    repeats=9,
    turns="Turns of each scenario.",
    cache="Where cache files lie; the server of the cold turns keeps the samples there too.",
)
@click.option(
    "--cold-shards",
    default=40,
    show_default=True,
    type=at_least(1),
    help="Shards that the samples are packed into for the cold turns.",
)
@click.option("--cold-windows", default=5, show_default=True, type=at_least(1), help="Shuffle windows that these make.")
@needs_extras
def resume(**given: Any) -> None:
    """Time the first batch after a resume in mid-epoch against that of an epoch's start, warm and cold.

    Reads --shards. The cold turns load a copy of them, from a server that answers, in one of the scenarios, for no
    shard but those that the first batch names. Writes nothing but the file that --json names.
    """
    from bench.scenarios.resume import ResumeScenario

    run_on_shards(ResumeScenario, given)
