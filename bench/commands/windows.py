"""``bench windows``: a data set through caches that hold all of it or a part."""

from typing import Any

import click

from bench.commands.options import at_least, numbers, scenario_options
from bench.commands.running import needs_extras, run_on_shards


@click.command()
@scenario_options(
    reads="Samples to repeat.  [default: the demo photos]",
    repeats=3,
    turns="Turns of each combination.",
    cache="Where cache files lie; the server keeps the data set there too.",
    required=False,
)
@click.option("--samples", default=10_000, show_default=True, type=at_least(1), help="Samples to load.")
@click.option("--num-shards", default=40, show_default=True, type=at_least(1), help="Shards that they are packed into.")
@click.option(
    "--epochs",
    default=1,
    show_default=True,
    type=at_least(1),
    help="Epochs timed in each turn, after the cold one, which has its own figures.",
)
@click.option("--fractions", default="1.0,0.2", show_default=True, help="Sizes of the cache, as shares of the data.")
@click.option(
    "--latencies-ms",
    default="0,20",
    show_default=True,
    help="Milliseconds added to each request, redirects included.",
)
@click.option("--ramp-up", is_flag=True, help="Start each epoch with windows of 1, 2, 4, ... shards.")
@needs_extras
def windows(*, fractions: str, latencies_ms: str, **given: Any) -> None:
    """Load a data set through caches that hold all of it or a part, near and far from its server; print the waits.

    Reads --shards, once, from where --endpoint says. What is loaded is a copy of them on a server of its own, which is
    slowed by --latencies-ms. Writes nothing but the file that --json names.
    """
    from bench.scenarios.windows import WindowsScenario

    given["fractions"] = numbers("--fractions", fractions)
    given["latencies_ms"] = numbers("--latencies-ms", latencies_ms)
    run_on_shards(WindowsScenario, given)
