"""Errors of the loading side; the data's and the store's own come from `prep.errors`."""

from prep.errors import DataError, PipesError, StoreError

__all__ = ["CacheError", "DataError", "DecodeError", "PipesError", "StoreError", "WorkerProcessError"]


class CacheError(PipesError):
    """The image cannot hold what must be resident: no room, or a file system that cannot do it."""


class DecodeError(PipesError):
    """DALI could not read or decode a batch; the text names the samples that were in it."""


class WorkerProcessError(PipesError):
    """A loader was used in another process than the one that made it."""
