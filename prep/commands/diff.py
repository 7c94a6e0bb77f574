"""``dali-pipes prep diff``."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dali_pipes.commands.options import cluster_options, endpoint_for, json_option
from dali_pipes.commands.output import counted, fields_of, print_line, print_result

if TYPE_CHECKING:
    from prep.versions.diff import SetDiff

# Lines of each list that a terminal shows; --json has all of them.
_SHOWN = 20


@click.command()
@click.argument("first", metavar="A")
@click.argument("second", metavar="B")
@cluster_options
@json_option
def diff(first: str, second: str, *, endpoint: str | None, embedded_dir: Path | None, as_json: bool) -> None:
    """Say what B has and A has not, and the other way round: keys of samples, shards and classes.

    A and B are versions of a data set, such as ais://pets/shuffled-@2 and ais://pets/shuffled-, or two data sets. Only
    manifests and column files are read. The exit code is 0, whatever is found.
    """
    from dali_pipes.data_set.named import name_shards
    from prep.versions.diff import compare_sets

    with endpoint_for([first, second], endpoint, embedded_dir) as answering:
        found = compare_sets(name_shards(first, endpoint=answering), name_shards(second, endpoint=answering))
    if not as_json:
        _print_lists(found)
    summary = (
        f"{counted(len(found.added_keys), 'sample')} added, {len(found.removed_keys)} removed, {found.num_moved} in "
        f"another shard; {counted(len(found.added_shards), 'shard')} added, {len(found.removed_shards)} removed; "
        f"{counted(len(found.added_classes), 'class', 'classes')} added, {len(found.removed_classes)} removed"
    )
    print_result(
        f"'{found.urls[0]}' and '{found.urls[1]}' are equal" if found.is_equal else summary,
        fields_of(found)
        | {
            "is_equal": found.is_equal,
            "added_classes": {str(label): name for label, name in found.added_classes.items()},
            "removed_classes": {str(label): name for label, name in found.removed_classes.items()},
            "renamed_classes": {str(label): list(names) for label, names in found.renamed_classes.items()},
        },
        as_json=as_json,
    )


def _print_lists(found: "SetDiff") -> None:
    for mark, what, names in (
        ("+", "class", [f"{label} {name}" for label, name in found.added_classes.items()]),
        ("-", "class", [f"{label} {name}" for label, name in found.removed_classes.items()]),
        ("~", "class", [f"{label} {old} -> {new}" for label, (old, new) in found.renamed_classes.items()]),
        ("+", "shard", found.added_shards),
        ("-", "shard", found.removed_shards),
        ("+", "key", found.added_keys),
        ("-", "key", found.removed_keys),
    ):
        _print_list(mark, what, names)


def _print_list(mark: str, what: str, names: Sequence[str]) -> None:
    for name in names[:_SHOWN]:
        print_line(f"{mark} {what} {name}")
    if len(names) > _SHOWN:
        print_line(f"{mark} {what}: {len(names) - _SHOWN} more, --json names all")
