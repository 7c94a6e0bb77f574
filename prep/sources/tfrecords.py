"""TFRecord files of ``tf.train.Example`` to records: where in the files the photos lie, and their labels.

The framing and the protocol buffer are read here; nothing of TensorFlow is needed. Each file is read once, all its
checksums verified; a photo's bytes are read again, from where they lie, when its record is packed.

::

    length, 8 bytes   masked CRC32C of the length   data   masked CRC32C of the data     (little-endian)
"""

import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import google_crc32c

from dali_pipes.errors import DataError, shown
from dali_pipes.formats.photo_header import read_photo_header
from dali_pipes.progress import bar
from prep.sources.record import Record, Source
from prep.sources.tf_example import Span, find_features, list_of, values_of
from prep.tar.writer import Range
from prep.workers import Report, Workers, default_jobs

__all__ = ["IMAGE_FEATURES", "LABEL_FEATURES", "TEXT_FEATURES", "find_tfrecords", "masked_crc32c", "tfrecords"]

# Names that features are known by, the first that is there.
IMAGE_FEATURES = ("image/encoded", "image", "image_raw", "jpeg", "img")
LABEL_FEATURES = ("image/class/label", "label", "image/label", "class/label")
TEXT_FEATURES = ("image/class/text", "class/text", "label/text")

_LENGTH = struct.Struct("<QI")
_CRC = struct.Struct("<I")
# A record is held whole while it is looked at. Protocol buffers end at 2 GiB.
MAX_RECORD_BYTES = 1 << 31
HEAD_BYTES = 64
# Below this, starting processes takes longer than reading.
MIN_SHARED_BYTES = 64 << 20

_EXTENSIONS = {
    "JPEG": "jpg",
    "PNG": "png",
    "WEBP": "webp",
    "TIFF": "tif",
    "BMP": "bmp",
    "JPEG2000": "jp2",
    "GIF": "gif",
}


@dataclass(frozen=True, kw_only=True)
class _Wanted:
    """What is looked for in a record; feature names."""

    components: Mapping[str, str]
    values: Mapping[str, str]
    label: str | None
    has_labels: bool
    key: str | None


class _Found(NamedTuple):
    """A record of a file."""

    key: str
    components: dict[str, "tuple[int, int, bytes] | Any"]
    """component -> offset in the file, size and first bytes; or a value."""
    ranges: frozenset[str]
    """Those of the first kind."""
    label: int | None
    text: str | None


@dataclass
class _File:
    """What a file holds."""

    found: list[_Found] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)


def tfrecords(
    files: Sequence[Path],
    *,
    components: Mapping[str, str] | None = None,
    values: Mapping[str, str] | None = None,
    label: str | None = None,
    has_labels: bool = True,
    key: str | None = None,
    jobs: int | None = None,
    show_progress: bool = False,
) -> Source:
    """The records of TFRecord files, in their order.

    Args:
        files: Not compressed.
        components: Component -> feature whose bytes it is. By default the first of `IMAGE_FEATURES`, named by the
            format that its bytes are in: ``jpg``, ``png``.
        values: Component -> feature that is written as `webdataset.TarWriter` writes values: ``caption.txt`` a text,
            ``boxes.json`` a list, ``boxes.npy`` an array.
        label: The feature with the class id, an integer, or with the class's name; by default the first of
            `LABEL_FEATURES`. Names, where labels are integers, come from `TEXT_FEATURES`.
        has_labels: ``False`` packs no ``cls``.
        key: The feature with the key, whose extension is left out; by default the file's name and the record's number:
            ``train-00000-of-00008/000017``.
        jobs: Files read at a time, each by a process; by default the cores, at most 16.
        show_progress: Draw a bar.

    Returns:
        A source whose ``broken`` names the records that are damaged or lack what is wanted, by file and byte.

    Raises:
        DataError: If a file cannot be read or is compressed, no record is whole, or one class id has two names.
    """
    wanted = _Wanted(
        components=dict(components or {}), values=dict(values or {}), label=label, has_labels=has_labels, key=key
    )
    total = sum(_size(path) for path in files)
    jobs = default_jobs() if jobs is None else jobs
    with (
        Workers(min(jobs, max(1, len(files)))) as workers,
        bar(what="read", total=total, unit="B", shown=show_progress) as drawn,
    ):
        tasks = ((path, _stem(path, files), wanted) for path in files)
        read = workers.map(_read_file, tasks, inline=lambda _: total < MIN_SHARED_BYTES, on_progress=drawn.update)
    broken = [line for file in read for line in file.broken]
    name = f"tfrecords '{files[0]}'" + (f" and {len(files) - 1} more" if len(files) > 1 else "")
    if not any(file.found for file in read):
        raise DataError(f"{name}: no record can be packed: {shown(broken, are_names=False) or 'the files are empty'}")
    classes, numbers = _classes(read, name) if has_labels else ({}, {})
    records = [
        Record(
            key=found.key,
            components={
                component: Range(path, *content) if component in found.ranges else content
                for component, content in found.components.items()
            },
            label=None if not has_labels else found.label if found.label is not None else numbers[found.text or ""],
        )
        for path, file in zip(files, read, strict=True)
        for found in file.found
    ]
    return Source(name=name, records=records, classes=classes, broken=broken)


def find_tfrecords(paths: Sequence[Path]) -> list[Path]:
    """Files, and those of directories whose name holds ``tfrecord``, sorted within each.

    Raises:
        DataError: If there is no such file or directory, or a directory holds none.
    """
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            # DALI's index of such a file may lie beside it.
            inside = sorted(
                entry
                for entry in path.iterdir()
                if "tfrecord" in entry.name.lower() and entry.suffix != ".idx" and entry.is_file()
            )
            if not inside:
                raise DataError(f"directory '{path}' holds no file with 'tfrecord' in its name; name the files")
            files += inside
        elif path.is_file():
            files.append(path)
        else:
            raise DataError(f"no such file or directory: '{path}'")
    return files


def masked_crc32c(data: bytes) -> int:
    """TFRecord's checksum: CRC32C, rotated and shifted, so that a file of checksums is not its own.

    >>> hex(masked_crc32c(b"123456789"))
    '0xc78ab0e5'
    """
    crc: int = google_crc32c.value(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


# Files


def _read_file(task: tuple[Path, str, _Wanted], report: Report) -> _File:
    path, stem, wanted = task
    file = _File()
    try:
        with path.open("rb") as stream:
            for number, (offset, data, problem) in enumerate(_frames(stream, os.fstat(stream.fileno()).st_size)):
                where = f"'{path}', record {number} at byte {offset}"
                if number == 0 and problem and data[:2] == b"\x1f\x8b":
                    raise DataError(f"'{path}' is compressed, expected a plain TFRecord file; gunzip it")
                if problem:
                    file.broken.append(f"{where}: {problem}")
                    continue
                try:
                    file.found.append(_find(data, offset + _LENGTH.size, wanted=wanted, key=f"{stem}/{number:06d}"))
                except DataError as exc:
                    file.broken.append(f"{where}: {exc}")
                report(len(data) + _LENGTH.size + _CRC.size)
    except OSError as exc:
        raise DataError(f"cannot read '{path}': {exc.strerror or exc}") from exc
    return file


def _frames(stream: BinaryIO, num_bytes: int) -> Iterator[tuple[int, bytes, str | None]]:
    """Offset and data of each record, and what is wrong with it; after a length that is wrong nothing more is found."""
    offset = 0
    while head := stream.read(_LENGTH.size):
        if len(head) < _LENGTH.size:
            yield offset, head, f"the file ends after {len(head)} of its first {_LENGTH.size} bytes"
            return
        length, crc = _LENGTH.unpack(head)
        if masked_crc32c(head[:8]) != crc:
            found = masked_crc32c(head[:8])
            lost = num_bytes - offset
            yield (
                offset,
                head,
                f"its length has the checksum {found:08x}, the file says {crc:08x}; this and the rest of the file, "
                f"{lost} bytes, cannot be read",
            )
            return
        stop = offset + _LENGTH.size + length + _CRC.size
        if length > MAX_RECORD_BYTES or stop > num_bytes:
            yield offset, head, f"it claims bytes {offset} to {stop}, the file has {num_bytes}: it was cut off"
            return
        data = stream.read(length)
        (crc,) = _CRC.unpack(stream.read(_CRC.size))
        found = masked_crc32c(data)
        problem = f"its data have the checksum {found:08x}, the file says {crc:08x}" if found != crc else None
        yield offset, data, problem
        offset = stop


def _stem(path: Path, files: Sequence[Path]) -> str:
    """What keys of a file start with: its name, its folder's too where another file has the same."""
    is_shared = sum(other.name == path.name for other in files) > 1
    name = f"{path.parent.name}-{path.name}" if is_shared else path.name
    # At a dot, WebDataset would cut only in the last part; but a suffix says nothing here.
    return name.removesuffix(".tfrecord").removesuffix(".tfrecords").replace(".", "-")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as exc:
        raise DataError(f"cannot read '{path}': {exc.strerror or exc}") from exc


# Records


def _find(data: bytes, start: int, *, wanted: _Wanted, key: str) -> _Found:
    """What is wanted of an Example whose data begin at byte ``start`` of the file."""
    features = find_features(data)
    components: dict[str, Any] = {}
    for name, feature in (wanted.components or {"": _known(features, IMAGE_FEATURES, what="photo")}).items():
        first, stop = _only_bytes(features, data, feature)
        head = data[first : min(stop, first + HEAD_BYTES)]
        name = name or _EXTENSIONS.get(read_photo_header(head).format, "jpg")
        components[name] = (start + first, stop - first, head)
    ranges = frozenset(components)
    for name, feature in wanted.values.items():
        components[name] = _as_value(values_of(features, data, feature), component=name)
    if wanted.key is not None:
        key = _text(features, data, wanted.key)
        key = key.removesuffix(f".{key.rpartition('.')[2]}") if "." in key.rpartition("/")[2] else key
    label, text = _label(features, data, wanted) if wanted.has_labels else (None, None)
    return _Found(key, components, ranges, label, text)


def _label(features: Mapping[str, Span], data: bytes, wanted: _Wanted) -> tuple[int | None, str | None]:
    text_feature = next((name for name in TEXT_FEATURES if name in features), None)
    feature = wanted.label or next((name for name in LABEL_FEATURES if name in features), None) or text_feature
    if feature is None:
        raise DataError(
            f"no feature {' or '.join(LABEL_FEATURES)} (found: {', '.join(sorted(features))}); name the labels: "
            "--label FEATURE, or --unlabelled"
        )
    values = values_of(features, data, feature)
    if len(values) != 1 or isinstance(values[0], float):
        raise DataError(f"feature '{feature}' holds {_shown(values)}, expected one integer or name")
    if isinstance(values[0], bytes):
        return None, _text(features, data, feature)
    has_text = text_feature is not None and values_of(features, data, text_feature) not in ([], [b""])
    return values[0], _text(features, data, text_feature) if has_text and text_feature else None


def _classes(read: Sequence[_File], name: str) -> tuple[dict[int, str], dict[str, int]]:
    """The class table, and class ids by name where labels are names."""
    rows = [found for file in read for found in file.found]
    if any(found.label is None for found in rows):
        if odd := next((found for found in rows if found.label is not None), None):
            raise DataError(f"{name}: labels are names and integers, {odd.label} at '{odd.key}'; expected one of both")
        names = sorted({found.text or "" for found in rows})
        return dict(enumerate(names)), {text: number for number, text in enumerate(names)}
    classes: dict[int, str] = {}
    for found in rows:
        assert found.label is not None, "looked at above"
        text = found.text or str(found.label)
        if classes.setdefault(found.label, text) != text:
            raise DataError(
                f"{name}: class id {found.label} is '{classes[found.label]}' and, at '{found.key}', '{text}'"
            )
    return dict(sorted(classes.items())), {}


def _known(features: Mapping[str, Span], names: Sequence[str], *, what: str) -> str:
    found = next((name for name in names if name in features), None)
    if found is None:
        raise DataError(
            f"no feature {' or '.join(names)} (found: {', '.join(sorted(features))}); name the {what}: "
            "--component image.jpg=FEATURE"
        )
    return found


def _only_bytes(features: Mapping[str, Span], data: bytes, feature: str) -> Span:
    kind, spans = list_of(features, data, feature)
    if kind != 1 or len(spans) != 1:
        raise DataError(f"feature '{feature}' holds {len(spans)} values, expected one of bytes")
    return spans[0]


def _text(features: Mapping[str, Span], data: bytes, feature: str) -> str:
    first, stop = _only_bytes(features, data, feature)
    try:
        return data[first:stop].decode()
    except UnicodeDecodeError as exc:
        raise DataError(f"feature '{feature}' is no UTF-8 text") from exc


def _as_value(values: list[Any], *, component: str) -> Any:
    """What TarWriter takes for the component's extension."""
    extension = component.rpartition(".")[2]
    if extension == "npy":
        import numpy as np

        return np.array(values, np.float32 if values and isinstance(values[0], float) else None)
    if values and isinstance(values[0], bytes):
        if len(values) == 1 and extension not in ("json", "jsn"):
            return values[0]
        values = [value.decode(errors="replace") for value in values]
    return values if len(values) != 1 or extension in ("json", "jsn") else str(values[0])


def _shown(values: Sequence[object]) -> str:
    text = repr(list(values))
    return text if len(text) <= 60 else f"{text[:57]}..."
