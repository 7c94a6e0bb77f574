"""Find the records of TFRecord files of ``tf.train.Example``: where the photos lie in the files, and their labels.

Each file is read once; a photo's bytes are read again, from their place in the file, when its record is packed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from dali_pipes.errors import DataError, shown
from dali_pipes.formats.photo_header import is_photo, read_photo_header, read_whole_photo_header
from dali_pipes.progress import bar
from prep.sources.record import (
    HEAD_BYTES,
    PHOTO_EXTENSION,
    Record,
    Source,
    file_stem,
    find_known,
    number_classes,
    preview,
)
from prep.sources.tfrecord_files import (
    FRAME_BYTES,
    LENGTH_BYTES,
    FieldRange,
    file_bytes,
    find_features,
    list_of,
    read_frames,
    values_of,
)
from prep.tar.writer import Range
from prep.workers import Report, Workers

# Usual names of features, in upper or lower case. The first one that a record has is taken.
IMAGE_FEATURES = ("image/encoded", "image", "image_raw", "jpeg", "img")
LABEL_FEATURES = ("image/class/label", "label", "image/label", "class/label")
TEXT_FEATURES = ("image/class/text", "class/text", "label/text")

# Below this, starting processes takes longer than reading.
MIN_SHARED_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class _Wanted:
    """The names of the features to find: see `tfrecords`."""

    components: Mapping[str, str]
    values: Mapping[str, str]
    label: str | None
    has_labels: bool
    key: str | None


class _Found(NamedTuple):
    key: str
    components: dict[str, object]
    label: int | None
    text: str | None
    """The name of the class."""


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
        files: The files, which are not compressed.
        components: Component -> feature that holds its bytes. By default the first of `IMAGE_FEATURES`, named after the
            format of its bytes: ``jpg``, ``png``.
        values: Component -> feature that is written as `webdataset.TarWriter` writes values: ``caption.txt`` a text,
            ``boxes.json`` a list, ``boxes.npy`` an array.
        label: The feature with the class id, an integer, or with the class's name; by default the first of
            `LABEL_FEATURES`. If labels are integers, the names of classes come from `TEXT_FEATURES`.
        has_labels: ``False`` packs no ``cls``.
        key: The feature with the key, whose extension is left out; by default the file's name and the record's number:
            ``train-00000-of-00008/000017``.
        jobs: The number of processes, each of which reads a file; by default the cores, at most 16.
        show_progress: Draw a bar.

    Returns:
        A source whose ``broken`` names, by file and byte, the records that are damaged or lack a wanted feature.

    Raises:
        DataError: If a file cannot be read or is compressed, no record can be packed, or one class id has two names.
    """
    wanted = _Wanted(
        components=dict(components or {}), values=dict(values or {}), label=label, has_labels=has_labels, key=key
    )
    total = sum(map(file_bytes, files))
    with (
        Workers(jobs, at_most=len(files)) as workers,
        bar(what="read", total=total, unit="B", shown=show_progress) as drawn,
    ):
        tasks = ((path, file_stem(path, files, endings=(".tfrecord", ".tfrecords")), wanted) for path in files)
        read = list(workers.map(_read_file, tasks, inline=lambda _: total < MIN_SHARED_BYTES, on_progress=drawn.update))
    rows = [found for found_here, _ in read for found in found_here]
    broken = [line for _, broken_here in read for line in broken_here]
    name = f"tfrecords '{files[0]}'" + (f" and {len(files) - 1} more" if len(files) > 1 else "")
    if not rows:
        raise DataError(f"{name}: no record can be packed: {shown(broken, are_names=False) or 'the files are empty'}")
    classes: dict[int, str] = {}
    are_names = any(found.label is None for found in rows)
    if has_labels:
        rows, classes = _with_labels(rows, name)
    records = [Record(key=found.key, components=found.components, label=found.label) for found in rows]
    return Source(name=name, records=records, classes=classes, numbers_classes=has_labels and are_names, broken=broken)


# Files


def _read_file(task: tuple[Path, str, _Wanted], report: Report) -> tuple[list[_Found], list[str]]:
    """The records of a file, and one line for each record that cannot be packed."""
    path, stem, wanted = task
    records: list[_Found] = []
    broken: list[str] = []
    try:
        with path.open("rb") as stream:
            for number, (offset, data, problem) in enumerate(read_frames(stream, file_bytes(path))):
                where = f"'{path}', record {number} at byte {offset}"
                if number == 0 and problem and data[:2] == b"\x1f\x8b":
                    raise DataError(f"'{path}' is compressed, expected a plain TFRecord file; gunzip it")
                if problem:
                    broken.append(f"{where}: {problem}")
                    continue
                try:
                    records.append(_find(path, offset + LENGTH_BYTES, data, wanted=wanted, key=f"{stem}/{number:06d}"))
                except DataError as exc:
                    broken.append(f"{where}: {exc}")
                report(len(data) + FRAME_BYTES)
    except OSError as exc:
        raise DataError(f"cannot read '{path}': {exc.strerror or exc}") from exc
    return records, broken


# Records


def _find(path: Path, start: int, data: bytes, *, wanted: _Wanted, key: str) -> _Found:
    """The wanted features of the Example ``data``, which begins at byte ``start`` of the file."""
    features = find_features(data)
    photo = find_known(features, IMAGE_FEATURES)
    if photo is None and not wanted.components:
        raise _unknown(features, IMAGE_FEATURES, "name the photo: --component image.jpg=FEATURE")
    components: dict[str, Any] = {}
    for name, feature in (wanted.components or {"": photo or ""}).items():
        first, stop = _only_bytes(features, data, feature)
        head = data[first : min(stop, first + HEAD_BYTES)]
        name = name or PHOTO_EXTENSION.get(read_photo_header(head).format, "jpg")
        header = read_whole_photo_header(memoryview(data)[first:stop]) if is_photo(name) else None
        components[name] = Range(path, start + first, stop - first, head, header)
    for name, feature in wanted.values.items():
        components[name] = _as_value(values_of(features, data, feature), component=name)
    if wanted.key is not None:
        key = _text(features, data, wanted.key)
        key = key.removesuffix(f".{key.rpartition('.')[2]}") if "." in key.rpartition("/")[2] else key
    label, text = _label(features, data, wanted) if wanted.has_labels else (None, None)
    return _Found(key, components, label, text)


def _label(features: Mapping[str, FieldRange], data: bytes, wanted: _Wanted) -> tuple[int | None, str | None]:
    text_feature = find_known(features, TEXT_FEATURES)
    feature = wanted.label or find_known(features, LABEL_FEATURES) or text_feature
    if feature is None:
        raise _unknown(features, LABEL_FEATURES, "name the labels: --label FEATURE, or --unlabelled")
    values = values_of(features, data, feature)
    if len(values) != 1 or isinstance(values[0], float):
        raise DataError(f"feature '{feature}' holds {preview(list(values))}, expected one integer or name")
    if isinstance(values[0], bytes):
        return None, _text(features, data, feature)
    has_text = text_feature is not None and values_of(features, data, text_feature) not in ([], [b""])
    return values[0], _text(features, data, text_feature) if has_text and text_feature else None


def _with_labels(rows: list[_Found], name: str) -> tuple[list[_Found], dict[int, str]]:
    """The records with class ids, also where their labels are names, and the class table."""
    if any(found.label is None for found in rows):
        if odd := next((found for found in rows if found.label is not None), None):
            raise DataError(f"{name}: labels are names and integers, {odd.label} at '{odd.key}'; expected one of both")
        numbers = number_classes(found.text or "" for found in rows)
        rows = [found._replace(label=numbers[found.text or ""]) for found in rows]
        return rows, {number: text for text, number in numbers.items()}
    classes: dict[int, str] = {}
    for found in rows:
        assert found.label is not None, "checked above"
        text = found.text or str(found.label)
        if classes.setdefault(found.label, text) != text:
            raise DataError(
                f"{name}: class id {found.label} is '{classes[found.label]}' and, at '{found.key}', '{text}'"
            )
    return rows, dict(sorted(classes.items()))


def _unknown(features: Mapping[str, FieldRange], names: Sequence[str], advice: str) -> DataError:
    return DataError(f"no feature {' or '.join(names)} (found: {', '.join(sorted(features))}); {advice}")


def _only_bytes(features: Mapping[str, FieldRange], data: bytes, feature: str) -> FieldRange:
    kind, spans = list_of(features, data, feature)
    if kind != 1 or len(spans) != 1:
        raise DataError(f"feature '{feature}' holds {len(spans)} values, expected one of bytes")
    return spans[0]


def _text(features: Mapping[str, FieldRange], data: bytes, feature: str) -> str:
    first, stop = _only_bytes(features, data, feature)
    try:
        return data[first:stop].decode()
    except UnicodeDecodeError as exc:
        raise DataError(f"feature '{feature}' is not UTF-8 text") from exc


def _as_value(values: list[Any], *, component: str) -> Any:
    """The value in the form that TarWriter takes for the component's extension."""
    extension = component.rpartition(".")[2]
    if extension == "npy":
        import numpy as np

        return np.array(values, np.float32 if values and isinstance(values[0], float) else None)
    if values and isinstance(values[0], bytes):
        if len(values) == 1 and extension not in ("json", "jsn"):
            return values[0]
        values = [value.decode(errors="replace") for value in values]
    return values if len(values) != 1 or extension in ("json", "jsn") else str(values[0])
