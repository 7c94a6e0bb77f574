"""Records to those that are bad, and the bytes that each takes: looked at before anything is written."""

import os
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from prep.errors import DataError, StoreError
from prep.keys import split_key
from prep.photos import is_photo, read_photo_header
from prep.progress import bar
from prep.records import LABEL_COMPONENT, Record, Source
from prep.shard_plan import tar_bytes
from prep.tar_stream import Entry, Part, Range
from prep.values import encode_value
from prep.workers import Report, Workers

__all__ = ["MAX_SENT_BYTES", "Checked", "as_entry", "check_records"]

# Enough of a file to tell its format, and a PNG's colour type.
HEAD_BYTES = 64
# Records a task: some 10 ms of work, so that processes end together.
NUM_RECORDS = 500
# Below this, starting processes takes longer than the work.
MIN_SHARED_RECORDS = 2000
MAX_SENT_BYTES = 8 << 20
"""Of components that are in memory, and so would be copied to a worker: of more the task is done by their owner."""

# A tuple: of a union `isinstance` takes ten times as long.
_PARTS = (bytes, Range)

_FORMATS = {
    "jpg": "JPEG",
    "jpeg": "JPEG",
    "jpe": "JPEG",
    "png": "PNG",
    "webp": "WEBP",
    "tif": "TIFF",
    "tiff": "TIFF",
    "bmp": "BMP",
    "ppm": "PPM",
    "pgm": "PPM",
    "pbm": "PPM",
    "pnm": "PPM",
    "jp2": "JPEG2000",
    "j2k": "JPEG2000",
}
"""Extension -> the format that it announces. All of them DALI decodes, under any name; a GIF it does not."""


@dataclass(kw_only=True)
class Checked:
    """What is known of records, by their numbers, before one is read."""

    bad: dict[int, str]
    """Key and reason."""
    noted: dict[int, str]
    """Key, and the format that its name does not say."""
    sizes: "array[int]"
    """Bytes that each takes in a tar."""
    held_bytes: "array[int]"
    """Of these, those that are in memory and not in a file."""


class _Task(NamedTuple):
    entries: list[Entry]
    source: str
    masks: frozenset[str]
    held_bytes: int


def check_records(source: Source, *, workers: Workers, show_progress: bool) -> Checked:
    """Look at the name and the first bytes of every component.

    Raises:
        DataError: If a key cannot be a member's name, two are equal, a component has no label's or value's form, or a
            file's or class's name is not UTF-8.
        StoreError: If a file cannot be read.
    """
    checked = Checked(bad={}, noted={}, sizes=array("q"), held_bytes=array("q"))
    for label, text in source.classes.items():
        check_utf8(text, what=f"{source.name}: the name of class {label}")
    is_small = len(source.records) < MIN_SHARED_RECORDS
    with bar(what="check", total=len(source.records), unit="records", shown=show_progress) as drawn:
        found = workers.map(
            _check_entries,
            _tasks(source, checked),
            inline=lambda task: is_small or task.held_bytes > MAX_SENT_BYTES,
            on_progress=drawn.update,
        )
    for sizes, bad, noted in found:
        first = len(checked.sizes)
        checked.sizes.extend(sizes)
        checked.bad |= {first + number: text for number, text in bad.items()}
        checked.noted |= {first + number: text for number, text in noted.items()}
    return checked


def as_entry(record: Record, source: Source) -> Entry:
    """A sample as it is written: its components and its class id, as ``cls``, in the order of their names.

    Raises:
        DataError: If a component is neither bytes nor a file, and not a value that its extension takes.
    """
    parts = [(component, _part(record, component, content)) for component, content in record.components.items()]
    if record.label is not None:
        parts = [part for part in parts if part[0] != LABEL_COMPONENT]
        parts.append((LABEL_COMPONENT, b"%d" % record.label))
    return record.key, parts if source.keeps_order else sorted(parts, key=lambda part: part[0])


def check_utf8(text: str, *, what: str) -> None:
    """Refuse a name that no tar or JSON of ours could hold.

    Raises:
        DataError: Starts with ``what``.
    """
    try:
        text.encode()
    except UnicodeEncodeError as exc:
        raise DataError(f"{what} is not UTF-8: '{_printable(text)}'; rename it") from exc


def _part(record: Record, component: str, content: object) -> Part:
    if isinstance(content, Path):
        return str(content)  # which goes to a worker, and is opened, several times faster
    if isinstance(content, _PARTS):
        return content
    return encode_value(content, component=component, where=f"record '{record.key}'")


def _tasks(source: Source, checked: Checked) -> Iterator[_Task]:
    numbers: dict[str, int] = {}
    entries: list[Entry] = []
    total = 0
    for number, record in enumerate(source.records):
        earlier = numbers.setdefault(record.key, number)
        if earlier != number:
            raise DataError(f"{source.name}: key '{record.key}' is there twice, records {earlier} and {number}")
        entry = as_entry(record, source)
        entries.append(entry)
        held = sum(len(part) for _, part in entry[1] if isinstance(part, bytes))
        checked.held_bytes.append(held)
        total += held
        if len(entries) == NUM_RECORDS or total > MAX_SENT_BYTES:
            yield _Task(entries, source.name, source.masks, total)
            entries, total = [], 0
    if entries:
        yield _Task(entries, source.name, source.masks, total)


def _check_entries(task: _Task, report: Report) -> tuple["array[int]", dict[int, str], dict[int, str]]:
    """Bytes of each, the bad and the noted, by their numbers in the task."""
    sizes = array("q")
    bad: dict[int, str] = {}
    noted: dict[int, str] = {}
    for number, (key, parts) in enumerate(task.entries):
        reasons: list[str] = []
        notes: list[str] = []
        size = 0
        _check_names(key, parts, source=task.source)
        for component, part in parts:
            head, num_bytes = _head(part)
            size += tar_bytes(f"{key}.{component}", num_bytes)
            found = _format(head) if is_photo(component) else None
            reason = _reason(component, head, num_bytes, found, is_mask=component in task.masks)
            if reason:
                reasons.append(reason)
            elif found and found != _FORMATS.get(component.rpartition(".")[2].lower()):
                notes.append(f"{component} is a {found}")
        sizes.append(size)
        if reasons:
            bad[number] = f"{key}: {'; '.join(reasons)}"
        if notes:
            noted[number] = f"{key}: {'; '.join(notes)}"
    report(len(task.entries))
    return sizes, bad, noted


def _check_names(key: str, parts: Sequence[tuple[str, Part]], *, source: str) -> None:
    # The label's name is ours: the source's tell more.
    for component, part in sorted(parts, key=lambda part: part[0] == LABEL_COMPONENT):
        name = f"{key}.{component}"
        if split_key(name) != (key, component):
            raise DataError(
                f"{source}: '{name}' would not be read back as key '{key}', component '{component}': WebDataset cuts "
                "the key at the first dot, and it must not be empty"
            )
        if not name.isascii():
            path = part if isinstance(part, str) else name
            check_utf8(name, what=f"{source}: the name of file '{_printable(path)}'")


def _reason(component: str, head: bytes, num_bytes: int, found: str | None, *, is_mask: bool) -> str | None:
    """Why a component is bad, ``None`` where it is not; ``found`` is a photo's format."""
    if not num_bytes:
        return f"{component} is empty"
    if found is None:
        return None
    if found == "GIF":
        return f"{component} is a GIF, which DALI cannot decode"
    if found == "unknown":
        return f"{component} is no photo of a known format (starts with {head[:4].hex(' ')})"
    if is_mask and found != "PNG":
        return f"{component} is a {found}, a mask must be an 8-bit grey PNG"
    # IHDR: bit depth, colour type.
    if is_mask and tuple(head[24:26]) != (8, 0):
        return (
            f"{component} is no 8-bit grey PNG (bit depth {head[24]}, colour type {head[25]}), class ids would be lost"
        )
    return None


def _format(head: bytes) -> str:
    # `read_photo_header` goes on to the photo's size, by Pillow's readers: ten times the time of all else here.
    if head.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    return read_photo_header(head).format


def _printable(text: str) -> str:
    r"""A name from the file system, its bytes that are not UTF-8 as ``\xff``."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def _head(part: Part) -> tuple[bytes, int]:
    if isinstance(part, bytes):
        return part[:HEAD_BYTES], len(part)
    if isinstance(part, Range):
        assert part.head is not None or isinstance(part.file, Path), "who found an object's range saw its first bytes"
        if part.head is not None or not isinstance(part.file, Path):
            return part.head or b"", part.size
        return _look(str(part.file), part.offset, min(part.size, HEAD_BYTES))[0], part.size
    return _look(part, 0, HEAD_BYTES)


def _look(path: str, offset: int, num: int) -> tuple[bytes, int]:
    """So many bytes of a file, and its size."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.pread(file, num, offset), os.fstat(file).st_size
        finally:
            os.close(file)
    except OSError as exc:
        raise StoreError(f"cannot read '{path}': {exc.strerror or exc}") from exc
