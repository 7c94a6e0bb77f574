"""Describe the records that `prep.pack.pack` writes: found and named, but not yet read.

A record is the files of one sample before they are in a shard. Their bytes are read when the record is packed, so a
source of any size needs memory only for names. The other modules of this folder make sources.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dali_pipes.errors import DataError


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One sample to be packed."""

    key: str
    components: Mapping[str, object]
    """component -> its bytes, its file, a `prep.tar.writer.Range` of a file, or a value that is encoded as
    `webdataset.TarWriter` does: a string, JSON values for ``json``, an array for ``npy``."""
    label: int | None
    """The source's class id, packed as the component ``cls``; ``None`` without a class, or if a component holds it."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Records in the order in which they are packed, and the data that all of them share."""

    name: str
    """The origin of the records, for messages."""
    records: Sequence[Record]
    """``len(source.records)`` is known before a record is read."""
    classes: Mapping[int, str]
    """class id -> name."""
    skipped: Sequence[str] = ()
    """Records that were left out, one line each: name and reason."""
    masks: frozenset[str] = frozenset()
    """Components that hold a class id for each pixel: they must be 8-bit grey PNGs of their photo's size."""
    decodes_masks: bool = False
    """Whether masks are decoded before they are packed (0.2 ms of CPU each); else headers and checksums are checked."""
    broken: Sequence[str] = ()
    """Records that cannot be packed, one line each: place and reason."""
    reads: frozenset[str] = frozenset()
    """URLs and absolute paths of shards that are read while the records are packed: they must not be written."""
    keeps_order: bool = False
    """Whether components keep the record's order; otherwise they are sorted, as ``TarWriter`` does."""


def require_directory(directory: Path) -> None:
    """Refuse a directory that is missing or empty."""
    if not directory.exists():
        raise DataError(f"no such directory: '{directory}'")
    if not directory.is_dir():
        raise DataError(f"'{directory}' is a file, expected a directory")
    if next(directory.iterdir(), None) is None:
        raise DataError(f"'{directory}' is empty")


def find_known(names: Iterable[str], known: Sequence[str]) -> str | None:
    """The column or feature with the first of the ``known`` names, in upper or lower case; ``None`` without one.

    >>> find_known(["Label", "Path"], ["path", "file"])
    'Path'
    """
    by_lower = {name.lower(): name for name in reversed(list(names))}
    return next((by_lower[name] for name in known if name in by_lower), None)


def number_classes(names: Iterable[str]) -> dict[str, int]:
    """Class ids for classes that have only names: the positions of the sorted names, from 0."""
    return {name: number for number, name in enumerate(sorted(set(names)))}


def preview(value: object) -> str:
    """A value for an error's text, at most 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
