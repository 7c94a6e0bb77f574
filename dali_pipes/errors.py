"""Errors that a caller may want to catch: where, what was expected, what was found, what to do."""

from collections.abc import Sequence

__all__ = ["CacheError", "DataError", "DecodeError", "PipesError", "StoreError", "WorkerProcessError", "shown"]

# Names shown of a long list, so that an error stays a line that can be read.
_NUM_SHOWN = 3


class PipesError(Exception):
    """Anything this project refuses or cannot finish; its text is written for the person who reads it."""


class DataError(PipesError):
    """The data are not what they must be: a broken archive, a missing component, a label that is no number."""


class StoreError(PipesError):
    """The object store or file system did not do what was asked: no answer, no such bucket, no room."""


class CacheError(PipesError):
    """The image cannot hold what must be resident: no room, or a file system that cannot do it."""


class DecodeError(PipesError):
    """DALI could not read or decode a batch; the text names the samples that were in it."""


class WorkerProcessError(PipesError):
    """A loader was used in another process than the one that made it."""


def shown(texts: Sequence[str], *, are_names: bool = True) -> str:
    """The first of a list, for an error's text; names in quotes, other lines as they are.

    >>> shown(["a", "b", "c", "d"])
    "'a', 'b', 'c' and 1 more"
    >>> shown(["a: no photo", "b: no mask"], are_names=False)
    'a: no photo; b: no mask'
    """
    more = f" and {len(texts) - _NUM_SHOWN} more" if len(texts) > _NUM_SHOWN else ""
    first = texts[:_NUM_SHOWN]
    return (", ".join(f"'{text}'" for text in first) if are_names else "; ".join(first)) + more
