"""``dali-pipes prep``: the names of its commands, which stand in the files of `prep.commands`."""

import click

from dali_pipes.commands.options import LazyGroup

_COMMANDS = {
    "add": "Add samples to a data set, as a new version.",
    "compact": "Write shards without their removed samples; delete old versions.",
    "diff": "Compare two versions, or two data sets.",
    "embedded": "Run an AIStore-compatible node here.",
    "etl": "Transforms inside the cluster.",
    "index": "Locate every component of every sample.",
    "info": "Classes, sizes, formats, means.",
    "log": "The versions of a data set.",
    "make": "Pack, shuffle, split, index and verify in one go.",
    "pack": "Photos, masks and labels into shards.",
    "recode": "Resize, optimize or convert the photos of shards.",
    "relabel": "Give samples other classes, or classes other names, as a new version.",
    "remove": "Remove samples or shards from a data set, as a new version.",
    "shuffle": "Shuffle, sort or regroup shards, with dSort or on this machine.",
    "transform": "Apply a function to every sample, on this machine.",
    "verify": "Read every byte and decode every photo.",
    "view": "A contact sheet of some samples.",
}

# Commands whose file has another name.
_FILES = {
    **dict.fromkeys(("add", "compact", "diff", "log", "relabel", "remove"), "versions"),
    "recode": "pack",
    "transform": "etl",
}


@click.group(
    cls=LazyGroup,
    lazy={name: (f"prep.commands.{_FILES.get(name, name)}:{name}", line) for name, line in _COMMANDS.items()},
)
def prep() -> None:
    """Turn photos into shuffled, indexed WebDataset shards, and examine them."""
