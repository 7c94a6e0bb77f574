"""``dali-pipes prep``: the names of its commands, each in a file of its own under `prep.commands`."""

import click

from dali_pipes.commands.lazy import LazyGroup

_COMMANDS = {
    "embedded": "Run an AIStore-compatible node here.",
    "etl": "Transforms inside the cluster.",
    "export": "Shards into TFRecord files.",
    "index": "Locate every component of every sample.",
    "info": "Classes, sizes, formats, means.",
    "pack": "Photos, masks and labels into shards.",
    "shuffle": "Shuffle, sort or regroup shards, with dSort or on this machine.",
    "transform": "Apply a function to every sample, on this machine.",
    "verify": "Read every byte and decode every photo.",
    "view": "A contact sheet of some samples.",
}


@click.group(cls=LazyGroup, lazy={name: (f"prep.commands.{name}:{name}", line) for name, line in _COMMANDS.items()})
def prep() -> None:
    """Turn photos into shuffled, indexed WebDataset shards, and examine them."""
