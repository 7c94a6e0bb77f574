"""Records to those that are bad, and the bytes that each takes: looked at before anything is written."""

import os
from array import array
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from dali_pipes.errors import DataError, StoreError
from dali_pipes.formats.keys import split_key
from dali_pipes.formats.names import LABEL_COMPONENT
from dali_pipes.formats.photo_header import is_photo, read_photo_header
from dali_pipes.progress import bar
from prep.pack.plan import tar_bytes
from prep.photos.masks import HEADER_BYTES, mask_problem, photo_size
from prep.sources.record import Record, Source
from prep.sources.values import encode_value
from prep.tar.writer import Entry, Part, Range
from prep.workers import Report, Workers

__all__ = ["MAX_SENT_BYTES", "Checked", "as_entry", "check_records"]

# Enough of a file to tell its format, and a PNG's colour type.
HEAD_BYTES = 64
# Of a mask: all, of most.
MASK_BYTES = 1 << 16
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
    unread: dict[int, frozenset[str]]
    """Of the bad, those with files that are not there or cannot be read: which components these are."""
    empty: set[int]
    """Of these, those of whose files none can be read: there is nothing to pack."""
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
    decodes_masks: bool
    held_bytes: int


class _Found(NamedTuple):
    """What is known of a task's records, by their numbers in it."""

    sizes: "array[int]"
    bad: dict[int, str]
    noted: dict[int, str]
    unread: dict[int, frozenset[str]]
    empty: set[int]


def check_records(source: Source, *, workers: Workers, show_progress: bool) -> Checked:
    """Look at the name and the first bytes of every component, and at all of a mask's.

    Raises:
        DataError: If a key cannot be a member's name, two are equal, a component has no label's or value's form, or a
            file's or class's name is not UTF-8.
        StoreError: If a file that holds many records cannot be read.
    """
    checked = Checked(bad={}, unread={}, empty=set(), noted={}, sizes=array("q"), held_bytes=array("q"))
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
    for part in found:
        first = len(checked.sizes)
        checked.sizes.extend(part.sizes)
        checked.bad |= {first + number: text for number, text in part.bad.items()}
        checked.noted |= {first + number: text for number, text in part.noted.items()}
        checked.unread |= {first + number: components for number, components in part.unread.items()}
        checked.empty |= {first + number for number in part.empty}
    return checked


def as_entry(record: Record, source: Source, *, without: Set[str] = frozenset()) -> Entry:
    """A sample as it is written: its components and its class id, as ``cls``, in the order of their names.

    Args:
        record: The sample.
        source: Where it is from.
        without: Components that are left out.

    Raises:
        DataError: If a component is neither bytes nor a file, and not a value that its extension takes.
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
            yield _Task(entries, source.name, source.masks, source.decodes_masks, total)
            entries, total = [], 0
    if entries:
        yield _Task(entries, source.name, source.masks, source.decodes_masks, total)


def _check_entries(task: _Task, report: Report) -> _Found:
    found = _Found(array("q"), {}, {}, {}, set())
    for number, (key, parts) in enumerate(task.entries):
        reasons: dict[str, str] = {}
        notes: list[str] = []
        unread: set[str] = set()
        good: dict[str, _Component] = {}
        size = 0
        _check_names(key, parts, source=task.source)
        for component, part in parts:
            is_mask = component in task.masks
            # Each is opened once: of a mask all is wanted, and of its photo the size.
            num = MASK_BYTES if is_mask else HEADER_BYTES if task.masks else HEAD_BYTES
            try:
                head, num_bytes = _head(part, num)
            except StoreError as exc:
                # Of one file a sample: it is this record's, and no other's.
                if not isinstance(part, str):
                    raise
                unread.add(component)
                reasons[component] = f"{component}: {exc}"
                continue
            size += tar_bytes(f"{key}.{component}", num_bytes)
            format = _format(head) if is_photo(component) else None
            reason = _reason(component, head, num_bytes, format, is_mask=is_mask)
            if reason:
                reasons[component] = reason
                continue
            if format and format != _FORMATS.get(component.rpartition(".")[2].lower()):
                notes.append(f"{component} is a {format}")
            if format and task.masks:
                good[component] = _Component(part, head, num_bytes)
        if not task.masks.isdisjoint(good):
            _check_masks(good, reasons, masks=task.masks, decoded=task.decodes_masks)
        found.sizes.append(size)
        if reasons:
            found.bad[number] = f"{key}: {'; '.join(reasons.values())}"
        if notes:
            found.noted[number] = f"{key}: {'; '.join(notes)}"
        if unread:
            found.unread[number] = frozenset(unread)
            if len(unread) == sum(isinstance(part, str) for _, part in parts):
                found.empty.add(number)
    report(len(task.entries))
    return found


class _Component(NamedTuple):
    """A photo or mask, and what of it was read."""

    part: Part
    head: bytes
    num_bytes: int

    def read(self, offset: int, num: int) -> bytes:
        stop = min(offset + num, self.num_bytes)
        if stop <= len(self.head):
            return self.head[offset:stop]
        return _read_part(self.part, offset, stop - offset)


def _check_masks(
    photos: Mapping[str, _Component], reasons: dict[str, str], *, masks: frozenset[str], decoded: bool
) -> None:
    """Add why masks that are 8-bit grey PNGs are bad all the same: damaged, or not of their photo's size."""
    name = next((name for name in photos if name not in masks), None)
    expected = photo_size(photos[name].read, photos[name].num_bytes) if name is not None else None
    for component, mask in photos.items():
        if component not in masks:
            continue
        data = mask.read(0, mask.num_bytes)
        problem = mask_problem(data, decoded=decoded)
        _, height, width = read_photo_header(data)
        if problem is None and expected is not None and (height, width) != expected:
            problem = f"has {height} x {width} pixels, '{name}' {expected[0]} x {expected[1]}"
        if problem is not None:
            reasons[component] = f"{component} {problem}"


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


def _head(part: Part, num: int) -> tuple[bytes, int]:
    """The first bytes of a component, and its size."""
    if isinstance(part, bytes):
        return part[:num], len(part)
    if isinstance(part, Range):
        assert part.head is not None or isinstance(part.file, Path), "who found an object's range saw its first bytes"
        return (_read_part(part, 0, min(part.size, num)) if part.head is None else part.head), part.size
    return _look(part, 0, num)


def _read_part(part: Part, offset: int, num: int) -> bytes:
    if isinstance(part, bytes):
        return part[offset : offset + num]
    if isinstance(part, str):
        return _look(part, offset, num)[0]
    assert isinstance(part.file, Path), "a source with masks has files: nothing is read of a bucket before it is packed"
    return _look(str(part.file), part.offset + offset, num)[0]


def _look(path: str, offset: int, num: int) -> tuple[bytes, int]:
    """So many bytes of a file from an offset on, and its size."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.pread(file, num, offset), os.fstat(file).st_size
        finally:
            os.close(file)
    except OSError as exc:
        raise StoreError(f"cannot read '{path}': {exc.strerror or exc}") from exc
