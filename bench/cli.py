"""``dali-pipes bench``: the names of its commands, each in a file of its own under `bench.commands`."""

import importlib

import click

__all__ = ["bench"]

_COMMANDS = {
    "compare": "Tell whether a run is slower than an earlier one; exit 1 if it is.",
    "fetch": "Our transport, the SDK and curl, on the same objects.",
    "gpu": "What a GPU decodes, how it is set, and what is lost on the way; or its twin on the CPU.",
    "pack": "`prep pack` against tar and curl, on the same files.",
    "report": "Records to tables and plots: HTML, Markdown, a document's tables.",
    "resume": "The first batch after a resume against that of an epoch's start.",
    "run": "Loaders on the same shards, compared first, then timed.",
    "scale": "What comes before the first sample, for up to a million shards.",
    "shuffle": "How far from uniform the orders of windows and buffers are.",
    "smoke": "Every loader and mode that is there, on tiny data; is any output wrong?",
    "sweep": "The same as run, over threads, ranks, latencies, sizes, ...",
    "tfrecord": "The same samples as tars and as TFRecord files.",
    "windows": "Caches that hold all of a data set or a part, near and far from its server.",
}


class _Lazy(click.Group):
    """A group that knows its commands' names and first lines without importing them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = getattr(importlib.import_module(f"bench.commands.{cmd_name}"), cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(sorted(_COMMANDS.items()))


@click.group(cls=_Lazy)
def bench() -> None:
    """Time DALI against its peers, on the same shards, batches and clock."""
