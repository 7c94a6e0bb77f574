"""``dali-pipes bench``: the names of its commands, each in a file of its own under `bench.commands`."""

import click

from dali_pipes.commands.lazy import LazyGroup

_COMMANDS = {
    "compare": "Tell whether a run is slower than an earlier one; exit 1 if it is.",
    "fetch": "Our transport, the SDK and curl, on the same objects.",
    "gpu": "What a GPU decodes, how it is set, and what is lost on the way; or the same on the CPU.",
    "pack": "`prep pack` against tar and curl, on the same files.",
    "report": "Records to tables and plots: HTML, Markdown, a document's tables.",
    "resume": "The first batch after a resume against that of an epoch's start.",
    "run": "Loaders on the same shards, compared first, then timed.",
    "scale": "What comes before the first sample, for up to a million shards.",
    "shuffle": "How far from uniform the orders of windows and buffers are.",
    "smoke": "Every installed loader in every mode, on tiny data; is any output wrong?",
    "sweep": "The same as run, over threads, ranks, latencies, sizes, ...",
    "tfrecord": "The same samples as tars and as TFRecord files.",
    "windows": "Caches that hold all of a data set or a part, near and far from its server.",
}


@click.group(cls=LazyGroup, lazy={name: (f"bench.commands.{name}:{name}", line) for name, line in _COMMANDS.items()})
def bench() -> None:
    """Time DALI against its peers, on the same shards, batches and clock."""
