"""``bench fetch``: our transport, the SDK and curl take turns."""

from pathlib import Path
from typing import Any

import click

from bench.commands.options import at_least, cache_option, json_option, repeats_option, words
from bench.commands.running import needs_extras, run_and_tell
from dali_pipes.commands.options import size


@click.command()
@click.option("--object-bytes", default="64MiB", show_default=True, type=size, help="Bytes an object.")
@click.option("--num-objects", default=16, show_default=True, type=at_least(1), help="Objects a turn.")
@click.option("--connections", default=8, show_default=True, type=at_least(1), help="Objects in flight.")
@repeats_option(5, help="Turns of each client.")
@click.option("--clients", default=None, help="Comma separated: ours, sdk, curl.  [default: all that are there]")
@cache_option(help="Where fetched bytes are written; the own server keeps its objects there too.")
@click.option(
    "--endpoint", default=None, help="AIStore's proxy, to fetch from a cluster.  [default: a server of our own]"
)
@json_option
@needs_extras
def fetch(*, clients: str | None, json_path: Path | None, **settings: Any) -> None:
    """Fetch the same objects with our transport, the SDK and curl, in turns; print speed and CPU of each.

    Ours verifies checksums and stores into a cache file, the SDK's read_all() keeps bytes in memory, curl writes files.
    Makes the bucket ais://dali-pipes-bench-fetch, on a server of its own or on the cluster that --endpoint names, and
    destroys it at the end. Writes nothing else but the file that --json names.
    """
    from bench.scenarios.fetch import FetchScenario
    from bench.scenarios.fetch_client import find_curl

    if clients is None and find_curl() is None:
        click.echo("no program 'curl' in PATH: left out", err=True)
    scenario = FetchScenario(clients=None if clients is None else words(clients), **settings)
    run_and_tell(scenario, json_path=json_path)
