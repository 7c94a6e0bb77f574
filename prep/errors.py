"""Errors that a caller may want to catch: where, what was expected, what was found, what to do."""

__all__ = ["DataError", "PipesError", "StoreError"]


class PipesError(Exception):
    """Anything this project refuses or cannot finish; its text is written for the person who reads it."""


class DataError(PipesError):
    """The data are not what they must be: a broken archive, a missing component, a label that is no number."""


class StoreError(PipesError):
    """The object store or file system did not do what was asked: no answer, no such bucket, no room."""
