"""A file that a command writes at its end: refused before anything starts, if it cannot be written."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from dali_pipes.errors import StoreError

PAGES = (".html", ".htm")


def check_output(path: Path, *, endings: Sequence[str], expected: str, option: str) -> None:
    """Refuse a name that has another ending, lies in no directory, or is a directory.

    Args:
        path: The file.
        endings: The endings that are allowed, in small letters.
        expected: The same in words.
        option: The option or argument, for the error.
    """
    if path.suffix.lower() not in endings:
        raise click.BadParameter(f"expected {expected}, got '{path}'", param_hint=option)
    if not path.parent.is_dir():
        raise click.BadParameter(f"no directory '{path.parent}'; make it", param_hint=option)
    if path.is_dir():
        raise click.BadParameter(f"'{path}' is a directory; name a file in it", param_hint=option)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an error of the system into one that names the file."""
    try:
        yield
    except OSError as exc:
        raise StoreError(f"cannot write '{path}': {exc.strerror or exc}") from exc
