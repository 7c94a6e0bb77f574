"""Errors that a caller may want to catch. Each says where, what was expected, what was found and what to do."""

from collections.abc import Sequence

# Names of a long list that an error shows, so that it stays short.
_NUM_SHOWN = 3


class PipesError(Exception):
    """Any failure that this project reports; its text is written for the user."""


class DataError(PipesError):
    """The data are invalid: a broken archive, a missing component, a label that is not a number."""


class StoreError(PipesError):
    """The object store or file system failed: no answer, no such bucket, no free space."""


class CacheError(PipesError):
    """The cache file cannot hold the shards that must be resident: no free space, or an unsuitable file system."""


class DecodeError(PipesError):
    """DALI could not read or decode a batch; the text names the batch's samples."""


class WorkerProcessError(PipesError):
    """A loader was used in a process other than the one that made it."""


def shown(texts: Sequence[str], *, are_names: bool = True) -> str:
    """The first items of a list, for an error's text: names in quotes, other texts unchanged.

    >>> shown(["a", "b", "c", "d"])
    "'a', 'b', 'c' and 1 more"
    >>> shown(["a: no photo", "b: no mask"], are_names=False)
    'a: no photo; b: no mask'
    """
    more = f" and {len(texts) - _NUM_SHOWN} more" if len(texts) > _NUM_SHOWN else ""
    first = texts[:_NUM_SHOWN]
    return (", ".join(f"'{text}'" for text in first) if are_names else "; ".join(first)) + more
