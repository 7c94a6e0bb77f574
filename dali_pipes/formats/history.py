"""The entries of a manifest that say how a data set grew: its version, its column files, its history."""

import re
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, get_type_hints

import numpy as np
import numpy.typing as npt

from dali_pipes.formats.column_file import ColumnFile, is_count

_PART_NAME = re.compile("(?:(?:add|remove|compact)-[0-9a-f]{10}-)?")
_HALVES = re.compile("[\ud800-\udfff]")
Int64s = npt.NDArray[np.int64]


class Part(NamedTuple):
    """Some shards of a manifest, one after the other, whose samples are in one column file."""

    name: str
    """The text between the manifest's prefix and the column file's name: ``""``, ``"add-3f9a6c01d2-"``."""
    num_shards: int


class Change(NamedTuple):
    """One version of a data set, and how it came to be."""

    version: int
    date: str
    """In UTC, as in ISO 8601: ``2026-03-01T12:00:00Z``; empty if it is not known."""
    what: str
    """``index``, ``add``, ``remove`` or ``compact``."""
    token: str
    """Identifies the change, so that a command that is run again finds what it did; hexadecimal."""
    command: str
    """The command line that made it."""
    num_samples: int
    """Of the whole data set, without the removed ones."""
    num_shards: int
    digest: str
    """The digest of the manifest before this change; empty for the first version."""


def history_entries(version: int, parts: Sequence[Part], history: Sequence[Change]) -> dict[str, Any]:
    """The entries of a manifest's header for a version above 1."""
    return {
        "data_version": version,
        "parts": [list(part) for part in parts],
        "history": [change._asdict() for change in history],
    }


def read_removed(file: ColumnFile, samples: Int64s) -> Int64s:
    """Take the column of removed samples; ``samples`` is the number of samples in each shard."""
    removed: Int64s = file.column("removed", np.int64)
    num_samples = int(samples.sum())
    if (np.diff(removed) <= 0).any() or (len(removed) and not 0 <= removed[0] <= removed[-1] < num_samples):
        raise file.refused(f"column 'removed' of sorted ordinals below {num_samples}", "others")
    return removed


def read_history(file: ColumnFile, num_shards: int) -> tuple[int, tuple[Part, ...], tuple[Change, ...]]:
    """The version of the data set, its parts and its history; version 1 has neither parts nor history."""
    if "data_version" not in file.header:
        return 1, (), ()
    version = file.entry("data_version", "a whole number above 1", lambda value: is_count(value) and value > 1)
    parts = tuple(Part(*part) for part in file.entry("parts", "names and numbers of shards", _are_parts))
    if (num_listed := sum(part.num_shards for part in parts)) != num_shards:
        raise file.refused(f"'parts' of {num_shards} shards, as many as it lists", str(num_listed))
    entries = file.entry("history", f"the changes up to version {version}", partial(_is_history, version=version))
    return version, parts, tuple(Change(**entry) for entry in entries)


def _are_parts(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(part, list)
        and len(part) == 2
        and isinstance(part[0], str)
        and _PART_NAME.fullmatch(part[0])
        and is_count(part[1])
        for part in value
    )


def _is_text(value: object) -> bool:
    return isinstance(value, str) and not _HALVES.search(value)


def _is_history(value: object, *, version: int) -> bool:
    fields = {name: str if hint is str else int for name, hint in get_type_hints(Change).items()}
    return (
        isinstance(value, list)
        and len(value) == version
        and all(
            isinstance(entry, dict)
            and entry.keys() == fields.keys()
            and all(_is_text(entry[name]) if kind is str else is_count(entry[name]) for name, kind in fields.items())
            for entry in value
        )
        and [entry["version"] for entry in value] == list(range(1, version + 1))
    )
