"""``bench sweep``: the same loaders under many settings, interleaved as in one run."""

from typing import Any

import click

from bench.commands.run import time_loaders, timing_options
from bench.commands.running import needs_extras


@click.command()
@click.option(
    "--over",
    required=True,
    multiple=True,
    metavar="NAME=VALUE,...",
    help="What to vary: threads, ranks, batch-size, crop, photo-side, shards, latency-ms, compute-ms or cache. Given "
    "several times: every combination.",
)
@timing_options
@needs_extras
def sweep(over: tuple[str, ...], **given: Any) -> None:
    """Time loaders as `bench run` does, under every setting that --over names, in turns.

    \b
    dali-pipes bench sweep --shards ais://pets/shuffled- --over latency-ms=0,20,100
    dali-pipes bench sweep --shards pets/ --over ranks=1,2,4 --over cache=cold,warm
    dali-pipes bench sweep --shards pets/ --samples 20000 --over shards=10,100,1000,10000

    Reads the shards. Writes the file that --json names, and, until the end, packed, served and converted shards
    under --work. If Ctrl-C or a failing loader ends the run early, the complete rounds before that are printed and
    written, too.
    """
    time_loaders(given, over=over)
