"""Source files to records: what `prep.pack.pack` writes, found and named, but not yet read.

A record is the files of one sample before they are in a shard. Its bytes are read when its turn comes, so a source of
any size costs memory for its names only.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dali_pipes.errors import DataError

__all__ = [
    "LABEL_COMPONENT",
    "Record",
    "Source",
]


# As `dali_pipes.formats.manifest` has it, whose numpy and safetensors a worker would import for it alone.
LABEL_COMPONENT = "cls"


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One sample to be packed."""

    key: str
    components: Mapping[str, object]
    """component -> its bytes, the file that holds them, a `Range` of one, or a value that is encoded as
    `webdataset.TarWriter` does: a string, what JSON can hold for ``json``, an array for ``npy``."""
    label: int | None
    """The class id as the source counts it; packed as the component ``cls``. ``None``: there is none, or the components
    hold it already."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Records in the order in which they are packed, and what belongs to all of them."""

    name: str
    """Where they come from, for messages."""
    records: Sequence[Record]
    """How many there are is known before one is read: ``len(source.records)``."""
    classes: Mapping[int, str]
    """class id -> name."""
    skipped: Sequence[str] = ()
    """What was left out, one line each: the record's name and why."""
    masks: frozenset[str] = frozenset()
    """The components that hold class ids a pixel, which must be 8-bit grey PNGs of their photo's size."""
    decodes_masks: bool = False
    """Whether each mask is decoded before it is packed, 0.2 ms of CPU; else headers and checksums speak for it."""
    broken: Sequence[str] = ()
    """Records that were found and cannot be packed, one line each: where, and why."""
    reads: frozenset[str] = frozenset()
    """URLs of shards, and absolute paths, that are read while the records are packed: not to be written over."""
    keeps_order: bool = False
    """Whether components stay in the order in which a record has them; otherwise they are sorted, as ``TarWriter``
    does."""


def require_directory(directory: Path) -> None:
    if not directory.exists():
        raise DataError(f"no such directory: '{directory}'")
    if not directory.is_dir():
        raise DataError(f"'{directory}' is a file, expected a directory")
    if next(directory.iterdir(), None) is None:
        raise DataError(f"'{directory}' is empty")
