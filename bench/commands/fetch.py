"""``bench fetch``: our transport, the SDK and curl take turns."""

from pathlib import Path

import click

from bench.commands.options import at_least, cache_option, json_option, repeats_option, tell, words
from dali_pipes.commands.options import size

__all__ = ["fetch"]


@click.command()
@click.option("--object-bytes", default="64MiB", show_default=True, type=size, help="Bytes an object.")
@click.option("--num-objects", default=16, show_default=True, type=at_least(1), help="Objects a turn.")
@click.option("--connections", default=8, show_default=True, type=at_least(1), help="Objects in flight.")
@repeats_option(5, help="Turns of each client.")
@click.option("--clients", default=None, help="Comma separated: ours, sdk, curl.  [default: all that are there]")
@cache_option(help="Where images and curl's files are written; the own server keeps its objects there too.")
@click.option(
    "--endpoint", default=None, help="AIStore's proxy, to fetch from a cluster.  [default: a server of our own]"
)
@json_option
def fetch(
    *,
    object_bytes: int,
    num_objects: int,
    connections: int,
    repeats: int,
    clients: str | None,
    cache: Path,
    endpoint: str | None,
    json_path: Path | None,
) -> None:
    """Fetch the same objects with our transport, the SDK and curl, in turns; print speed and CPU of each.

    Ours verifies checksums and stores into an image, the SDK's read_all() keeps bytes in memory, curl writes files.
    Makes the bucket ais://dali-pipes-bench-fetch, on a server of its own or on the cluster that --endpoint names, and
    destroys it at the end. Writes nothing else but the file that --json names.
    """
    from bench.environment import check_extras

    check_extras()
    from bench.scenarios.fetch import CLIENT_NAMES, FetchOptions, format_fetch, run_fetch
    from bench.scenarios.fetch_client import find_curl

    chosen = words(clients) if clients is not None else list(CLIENT_NAMES)
    if clients is None and find_curl() is None:
        chosen.remove("curl")
        click.echo("no program 'curl' in PATH: left out", err=True)
    options = FetchOptions(
        object_bytes=object_bytes,
        num_objects=num_objects,
        connections=connections,
        repeats=repeats,
        clients=chosen,
        cache=cache,
        endpoint=endpoint,
    )
    report = run_fetch(options)
    tell("fetch", report, format_fetch(report), json_path)
