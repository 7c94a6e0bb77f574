"""``bench pack``: `prep pack` against tar and curl."""

from pathlib import Path
from typing import Any

import click

from bench.commands.options import at_least, cache_option, json_option, repeats_option
from bench.commands.running import needs_extras, run_and_tell
from dali_pipes.commands.options import size


@click.command()
@click.option(
    "--pets",
    required=True,
    type=click.Path(path_type=Path),
    help="A directory in the layout of Oxford-IIIT Pet; its records are repeated.",
)
@click.option("--samples", "num_samples", default=10_000, show_default=True, type=at_least(1), help="Samples to pack.")
@click.option("--max-bytes", default="256MiB", show_default=True, type=size, help="Bytes a shard.")
@click.option("--jobs", default=None, type=at_least(1), help="Shards in flight.  [default: the cores, at most 16]")
@repeats_option(5, help="Turns of each packer.")
@cache_option(help="Where the files and tar's shards are written; the own server keeps its objects there too.")
@click.option("--endpoint", default=None, help="AIStore's proxy, to pack to a cluster.  [default: a server of our own]")
@json_option
@needs_extras
def pack(*, json_path: Path | None, **settings: Any) -> None:
    """Pack the same files with `prep pack`, and with tar and curl, in turns; print speed and CPU of each.

    Makes the bucket ais://dali-pipes-bench-pack, on a server of its own or on the cluster that --endpoint names, and
    destroys it at the end. Writes nothing else but the files under --cache, and the one that --json names.
    """
    from bench.scenarios.pack import PackScenario

    run_and_tell(PackScenario(**settings), json_path=json_path)
