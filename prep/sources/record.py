"""Describe the records that `prep.pack.pack` writes: found and named, but not yet read.

A record is the files of one sample before they are in a shard. Their bytes are read when the record is packed, so a
source of any size needs memory only for names. The other modules of this folder make sources. `as_entry` makes the
entry of a tar from a record.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from dali_pipes.errors import DataError
from dali_pipes.formats.names import LABEL_COMPONENT
from dali_pipes.formats.orientation import read_orientation, upright_size
from dali_pipes.formats.photo_header import is_photo, read_photo_header
from prep.tar.writer import Entry, Range

if TYPE_CHECKING:
    from dali_pipes.formats.manifest import RecodedStep

HEAD_BYTES = 64
"""Enough of a file to know its format, and a PNG's colour type."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One sample to be packed."""

    key: str
    components: Mapping[str, bytes | Path | Range]
    label: int | None
    """The source's class id, packed as the component ``cls``; ``None`` without a class, or if a component holds it."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Records in the order in which they are packed, and the data that all of them share.

    Texts on records and files have one line each: name and reason, or name and remark.
    """

    name: str
    """The origin of the records, for messages."""
    records: Sequence[Record]
    """``len(source.records)`` is known before a record is read."""
    classes: Mapping[int, str]
    """class id -> name."""
    numbers_classes: bool = False
    """Whether the ids only number the names of the classes, so that another data set may number them in its own way."""
    skipped: list[str] = field(default_factory=list)
    """Records and pictures that were left out. They count as bad."""
    others: list[str] = field(default_factory=list)
    """Files that are no pictures, such as ``Thumbs.db``. They do not count as bad."""
    masks: frozenset[str] | None = None
    """Components that hold a class id for each pixel: they must be 8-bit grey PNGs of their photo's size. ``None``:
    nothing is checked as a mask; where photos are recoded, masks are found by the names of a record's photos."""
    steps: "Sequence[RecodedStep]" = ()
    """What was done to the photos when they were packed before."""
    step: "Callable[[Sequence[int]], RecodedStep] | None" = None
    """What was done now to the photos of the records with these numbers; ``None``: nothing."""
    broken: list[str] = field(default_factory=list)
    """Records that cannot be packed."""
    doubtful: Mapping[int, str] = field(default_factory=dict)
    """The number of a record that can be packed but is bad, such as one with two photos -> its key and the reason."""
    noted: list[str] = field(default_factory=list)
    """Remarks on records that are packed."""
    unused: list[str] = field(default_factory=list)
    """Columns of a table that nothing takes."""
    reads: frozenset[str] = frozenset()
    """URLs and absolute paths of shards that are read while the records are packed: they must not be written."""
    keeps_order: bool = False
    """Whether components keep the record's order; otherwise they are sorted, as ``webdataset.TarWriter`` does."""


def as_entry(record: Record, source: Source, *, without: Set[str] = frozenset()) -> Entry:
    """A sample as it is written: its components except those in ``without``, and its class id, as ``cls``.

    The components are sorted by name, unless the source keeps their order.
    """
    # A text is sent to a worker and opened several times faster than a Path.
    parts = {
        name: str(content) if isinstance(content, Path) else content
        for name, content in record.components.items()
        if name not in without
    }
    if record.label is not None:
        parts.pop(LABEL_COMPONENT, None)
        parts[LABEL_COMPONENT] = b"%d" % record.label
    return record.key, list(parts.items()) if source.keeps_order else sorted(parts.items(), key=lambda part: part[0])


def without_empty_classes(source: Source, numbers: Iterable[int]) -> Source:
    """The source with the classes of the records ``numbers`` alone, counted from 0; unchanged if its ids must stay."""
    if not source.numbers_classes:
        return source
    labels = {source.records[number].label for number in numbers}
    ids = {label: number for number, label in enumerate(sorted(source.classes.keys() & labels))}
    if len(ids) == len(source.classes):
        return source
    records = [
        record if record.label is None else replace(record, label=ids.get(record.label)) for record in source.records
    ]
    return replace(source, records=records, classes={number: source.classes[label] for label, number in ids.items()})


def unpacked_photos(directory: Path, records: Iterable[Record], *, why: str) -> list[str]:
    """Name the photos below a directory that no record has, a line each, with the reason ``why``."""
    packed = {part for record in records for part in record.components.values() if isinstance(part, Path)}
    found = (path for path in sorted(directory.rglob("*")) if is_photo(path.name) and path not in packed)
    return [f"{path.relative_to(directory)}: {why}" for path in found]


def require_directory(directory: Path) -> None:
    """Raise `DataError` if a directory is missing."""
    if not directory.is_dir():
        raise DataError(f"no such directory: '{directory}'")


def size_of_upright(photo: Path) -> tuple[int, int]:
    """Height and width of a photo, turned upright. 0 x 0 if its header cannot be read: then it is bad in any case."""
    data = photo.read_bytes()
    header = read_photo_header(data)
    return upright_size(header.height, header.width, read_orientation(data, header.format).value)


def photo_component(extension: str) -> str:
    """The component of a photo's file that has only an extension: one name for all extensions of JPEG.

    >>> photo_component("JPEG"), photo_component("png")
    ('jpg', 'png')
    """
    extension = extension.lower()
    return "jpg" if extension in ("jpeg", "jpe") else extension
