"""Describe the records that `prep.pack.pack` writes: found and named, but not yet read.

A record is the files of one sample before they are in a shard. Their bytes are read when the record is packed, so a
source of any size needs memory only for names. The other modules of this folder make sources. `as_entry` makes the
entry of a tar from a record.
"""

import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from dali_pipes.errors import DataError
from dali_pipes.formats.names import LABEL_COMPONENT
from prep.tar.writer import Entry, Part, Range

if TYPE_CHECKING:
    from dali_pipes.formats.manifest import RecodedStep

HEAD_BYTES = 64
"""Enough of a file to know its format, and a PNG's colour type."""

PHOTO_EXTENSION = {
    "JPEG": "jpg",
    "PNG": "png",
    "WEBP": "webp",
    "TIFF": "tif",
    "BMP": "bmp",
    "PPM": "ppm",
    "JPEG2000": "jp2",
    "GIF": "gif",
    "APNG": "png",
}
"""A photo's format -> the extension for photos that have no name."""

# Other usual extensions of JPEG files.
_JPEG_EXTENSIONS = ("jpeg", "jpe")

_NUMBERS = frozenset({"cls", "cls2", "class", "count", "index", "inx", "id"})
"""Extensions of components that hold a number as text."""

# A tuple: `isinstance` takes ten times as long with a union.
_PARTS = (bytes, Range)

OTHER_PICTURES = frozenset(
    {
        *("jxl", "jxr", "jfif", "svg", "psd", "tga", "ico", "exr", "hdr", "eps", "pcx"),
        *("dng", "cr2", "cr3", "nef", "arw", "orf", "rw2", "raf", "pef", "srw"),  # cameras' raw files
    }
)
"""Extensions of pictures that are no photo component, because no decoder here reads them."""


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
    numbers_classes: bool = False
    """Whether the ids only number the names of the classes, so that another data set may number them in its own way."""
    skipped: Sequence[str] = ()
    """Records and pictures that were left out, one line each: name and reason. They count as bad."""
    others: Sequence[str] = ()
    """Files that are no pictures, such as ``Thumbs.db``: one line each, name and reason. They do not count as bad."""
    masks: frozenset[str] = frozenset()
    """Components that hold a class id for each pixel: they must be 8-bit grey PNGs of their photo's size."""
    finds_masks: bool = True
    """Whether, if ``masks`` is empty, a photo is taken for a mask when its name and those of its record's other photos
    show that; it matters only where photos are recoded."""
    steps: "Sequence[RecodedStep]" = ()
    """What was done to the photos when they were packed before."""
    step: "Callable[[Sequence[int]], RecodedStep] | None" = None
    """What was done now to the photos of the records with these numbers; ``None``: nothing."""
    broken: Sequence[str] = ()
    """Records that cannot be packed, one line each: place and reason."""
    doubtful: Mapping[int, str] = field(default_factory=dict)
    """The number of a record that can be packed but is bad, such as one with two photos -> its key and the reason."""
    noted: Sequence[str] = ()
    """Remarks on records that are packed, one line each: key and remark."""
    unused: Sequence[str] = ()
    """Columns of a table that nothing takes."""
    reads: frozenset[str] = frozenset()
    """URLs and absolute paths of shards that are read while the records are packed: they must not be written."""
    keeps_order: bool = False
    """Whether components keep the record's order; otherwise they are sorted, as ``TarWriter`` does."""


def as_entry(record: Record, source: Source, *, without: Set[str] = frozenset()) -> Entry:
    """A sample as it is written: its components except those in ``without``, and its class id, as ``cls``.

    The components are sorted by name, unless the source keeps their order.

    Raises:
        DataError: If a component is neither bytes, nor a file, nor a value that its extension takes.
    """
    parts = [
        (component, _part(record, component, content))
        for component, content in record.components.items()
        if component not in without
    ]
    if record.label is not None:
        parts = [part for part in parts if part[0] != LABEL_COMPONENT]
        parts.append((LABEL_COMPONENT, b"%d" % record.label))
    return record.key, parts if source.keeps_order else sorted(parts, key=lambda part: part[0])


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


def component_names(record: Record, *, without: Set[str] = frozenset()) -> Set[str]:
    """The names of a sample's components as `as_entry` gives them, also that of its class id."""
    label = {LABEL_COMPONENT} if record.label is not None else set()
    return (record.components.keys() - without) | label


def require_directory(directory: Path) -> None:
    """Raise `DataError` if a directory is missing."""
    if not directory.is_dir():
        raise DataError(f"no such directory: '{directory}'")


def find_known(names: Iterable[str], known: Sequence[str]) -> str | None:
    """The column that has the first of the ``known`` names, in upper or lower case; ``None`` if none has.

    >>> find_known(["Label", "Path"], ["path", "file"])
    'Path'
    """
    by_lower = {name.lower(): name for name in reversed(list(names))}
    return next((by_lower[name] for name in known if name in by_lower), None)


def photo_component(extension: str) -> str:
    """The component of a photo's file that has only an extension: one name for all extensions of JPEG.

    >>> photo_component("JPEG"), photo_component("png")
    ('jpg', 'png')
    """
    extension = extension.lower()
    return "jpg" if extension in _JPEG_EXTENSIONS else extension


def number_classes(names: Iterable[str]) -> dict[str, int]:
    """Class ids for classes that have only names: the positions of the sorted names, from 0."""
    return {name: number for number, name in enumerate(sorted(set(names)))}


def preview(value: object) -> str:
    """A value for an error's text, at most 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _part(record: Record, component: str, content: object) -> Part:
    if isinstance(content, Path):
        return str(content)  # it is sent to a worker and opened several times faster than a Path
    if isinstance(content, _PARTS):
        return content
    return encode_value(content, component=component, where=f"record '{record.key}'")


def encode_value(value: object, *, component: str, where: str) -> bytes:
    """The bytes that ``webdataset.TarWriter`` would write for a value, and that WebDataset's ``decode()`` reads back.

    Args:
        value: A string for any extension; an integer or similar for ``cls``, ``count``, ``index`` and ``id``; JSON
            values for ``json``; an array for ``npy``.
        component: Its last part is the extension.
        where: The record, for errors.

    Raises:
        DataError: If there is no rule for the extension, or the value does not fit it.

    >>> encode_value([1, 2], component="boxes.json", where="record 'a'")
    b'[1, 2]'
    """
    if isinstance(value, str):
        return value.encode()
    extension = component.rpartition(".")[2].lower()
    try:
        if extension in _NUMBERS:
            return str(value).encode("ascii")
        if extension in ("json", "jsn"):
            return json.dumps(value).encode()
        if extension == "npy":
            return _npy(value)
        raise TypeError(f"only texts can be '.{extension}'")
    except (TypeError, ValueError, RecursionError) as exc:
        raise DataError(
            f"{where}: cannot write a {type(value).__name__} as '{component}' ({type(exc).__name__}: {exc}); "
            "expected bytes, a path, a text, a value for .json, an array for .npy, or a number for .cls"
        ) from exc


def _npy(value: object) -> bytes:
    import numpy as np

    if not isinstance(value, np.ndarray):
        raise TypeError("expected a numpy array")
    stream = io.BytesIO()
    np.lib.format.write_array(stream, value, allow_pickle=False)
    return stream.getvalue()
