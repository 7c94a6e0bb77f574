"""Check all records before anything is written: find the bad ones, and the bytes that each takes in a tar."""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import NamedTuple

from dali_pipes.errors import DataError, StoreError, printable
from dali_pipes.formats.names import LABEL_COMPONENT, split_key
from dali_pipes.formats.orientation import read_orientation, upright_size
from dali_pipes.formats.photo_header import (
    END_BYTES,
    MAX_PHOTO_BYTES,
    PhotoHeader,
    PhotoRules,
    bytes_problem,
    has_end,
    is_photo,
    read_photo_header,
    read_whole_photo_header,
    size_problem,
)
from dali_pipes.progress import bar
from prep.pack.target import MAX_SENT_BYTES
from prep.sources.record import HEAD_BYTES, Source, as_entry
from prep.tar.writer import Entry, Files, Part, Range, tar_bytes
from prep.workers import Report, Workers

# First bytes that are read: enough of most photos to know their size, and all of most masks.
PHOTO_HEAD_BYTES, MASK_BYTES = 1 << 11, 1 << 16
# Enough of most JPEGs to reach the frame header; colour profiles and thumbnails come before it.
LONG_HEAD_BYTES = 64 << 10
_GREY_8 = (8, 0)
"""Bit depth and colour type in a PNG's header."""
# Records of a task: some 10 ms of work, so that the processes end together.
NUM_RECORDS = 500
# Below this, starting processes takes longer than the work.
MIN_SHARED_RECORDS = 2000

_FORMATS = {
    **dict.fromkeys(("jpg", "jpeg", "jpe"), "JPEG"),
    "png": "PNG",
    "webp": "WEBP",
    "bmp": "BMP",
    **dict.fromkeys(("ppm", "pgm", "pbm", "pnm"), "PPM"),
}
"""Extension -> its format, for the formats that loaders decode."""


@dataclass
class Checked:
    """The result of checking records, by their numbers."""

    bad: dict[int, str] = field(default_factory=dict)
    """Bad records: key and reason."""
    unread: dict[int, frozenset[str]] = field(default_factory=dict)
    """Bad records with files that are missing or cannot be read: the components of these files."""
    empty: set[int] = field(default_factory=set)
    """Records without any file that can be read: there is nothing to pack."""
    noted: dict[int, str] = field(default_factory=dict)
    """Records with photos in another format than their names say: key and formats."""
    sizes: "array[int]" = field(default_factory=lambda: array("q"))
    """Bytes that each record takes in a tar."""


class _Task(NamedTuple):
    first: int
    """The number of the first record."""
    entries: list[Entry]
    source: str
    masks: frozenset[str]
    rules: PhotoRules


def check_records(source: Source, *, rules: PhotoRules, workers: Workers, show_progress: bool) -> Checked:
    """Check the name of every component, the first and last bytes of a photo, and all bytes of a PNG.

    A record is bad if a loader with the same ``rules`` would refuse its photo before it is decoded, if a file is empty,
    missing or unreadable, or if a mask is damaged, is not an 8-bit grey PNG, or has another size than its photo. Only
    masks are decoded. (A photo in another format than its extension says is noted.)

    Raises:
        DataError: If a key cannot be a member's name, two keys are equal, or a file's or class's name is not UTF-8.
        StoreError: If a file that holds many records cannot be read.
    """
    checked = Checked()
    for label, text in source.classes.items():
        _check_utf8(text, what=f"{source.name}: the name of class {label}")
    is_small = len(source.records) < MIN_SHARED_RECORDS
    with bar(what="check", total=len(source.records), unit="records", shown=show_progress) as drawn:
        tasks = _tasks(source, rules)
        for part in workers.map(_check_entries, tasks, inline=lambda _: is_small, on_progress=drawn.update):
            checked.bad |= part.bad
            checked.unread |= part.unread
            checked.empty |= part.empty
            checked.noted |= part.noted
            checked.sizes.extend(part.sizes)
    for number, text in source.doubtful.items():
        reasons = checked.bad.get(number, "").partition(": ")[2]
        checked.bad[number] = f"{text}; {reasons}" if reasons else text
    return checked


def _check_utf8(text: str, *, what: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as exc:
        raise DataError(f"{what} is not UTF-8: '{printable(text)}'; rename it") from exc


def _tasks(source: Source, rules: PhotoRules) -> Iterator[_Task]:
    numbers: dict[str, int] = {}
    entries: list[Entry] = []
    total = 0
    for number, record in enumerate(source.records):
        earlier = numbers.setdefault(record.key, number)
        if earlier != number:
            raise DataError(f"{source.name}: key '{record.key}' occurs twice, records {earlier} and {number}")
        entry = as_entry(record, source)
        entries.append(entry)
        total += sum(len(part) for _, part in entry[1] if isinstance(part, bytes))
        if len(entries) == NUM_RECORDS or total > MAX_SENT_BYTES or number + 1 == len(source.records):
            yield _Task(number + 1 - len(entries), entries, source.name, source.masks or frozenset(), rules)
            entries, total = [], 0


def _check_entries(task: _Task, report: Report) -> Checked:
    found = Checked()
    with closing(Files()) as files:
        for key, parts in task.entries:
            _check_names(key, parts, source=task.source)
            _check_record(key, parts, task, files, found)
    report(len(task.entries))
    return found


class _Component:
    """A component, whose first bytes are read when it is made."""

    def __init__(self, part: Part, files: Files, *, num_head: int) -> None:
        self._part, self._files = part, files
        if isinstance(part, Range) and part.head is not None:
            self.num_bytes, self.head = part.size, part.head
        else:
            self.num_bytes = files.open(part)
            self.head = files.read(min(num_head, self.num_bytes))

    def read(self, offset: int, num: int) -> bytes:
        """At most ``num`` bytes from an offset on."""
        stop = min(offset + num, self.num_bytes)
        if stop <= len(self.head):
            return self.head[offset:stop]
        self._files.open(self._part)
        return self._files.read(stop - offset, offset=offset)

    def header(self) -> PhotoHeader:
        """The header of a photo, with what all its bytes say; they are read if its first and last do not suffice."""
        if isinstance(self._part, Range) and self._part.photo is not None:
            return self._part.photo
        header = read_photo_header(self.head)
        if self.num_bytes > MAX_PHOTO_BYTES or header.format == "unknown":
            return header
        if not header.height:
            header = read_photo_header(self.read(0, LONG_HEAD_BYTES))
        # The checksums of a PNG are all over it.
        is_known = bool(header.height) and header.format != "PNG"
        if is_known and has_end(self.read(max(0, self.num_bytes - END_BYTES), END_BYTES), header.format):
            return header
        return read_whole_photo_header(self.read(0, self.num_bytes))

    def problem(self, header: PhotoHeader | None, rules: PhotoRules, *, is_mask: bool) -> str | None:
        """Why it is bad, as a text that follows its name, or ``None``; ``header`` is that of a photo."""
        if not self.num_bytes:
            return "is empty"
        if header is None:
            return None
        problem = bytes_problem(self.num_bytes) or rules.problem(header)
        if problem is not None and header.format == "unknown":
            return f"{problem} (starts with {self.head[:4].hex(' ')})"
        if problem is None and is_mask and (header.format != "PNG" or tuple(self.head[24:26]) != _GREY_8):
            return "is not an 8-bit grey PNG, as masks must be; class ids would be lost"
        return problem


def _check_record(key: str, parts: Sequence[tuple[str, Part]], task: _Task, files: Files, found: Checked) -> None:
    """Append the result of one record to ``found``."""
    total = 0
    reasons: dict[str, str] = {}
    notes: list[str] = []
    unread: set[str] = set()
    good: dict[str, tuple[_Component, PhotoHeader]] = {}
    for name, part in parts:
        is_mask = name in task.masks
        num_head = MASK_BYTES if is_mask else PHOTO_HEAD_BYTES if is_photo(name) else HEAD_BYTES
        try:
            component = _Component(part, files, num_head=num_head)
            header = component.header() if is_photo(name) else None
        except StoreError as exc:
            # A file of one sample concerns this record alone; a file of many ends the pack.
            if not isinstance(part, str):
                raise
            unread.add(name)
            reasons[name] = f"{name}: {exc}"
            continue
        total += tar_bytes(f"{key}.{name}", component.num_bytes)
        if problem := component.problem(header, task.rules, is_mask=is_mask):
            reasons[name] = f"{name} {problem}"
        elif header is not None:
            good[name] = component, header
            if header.format != _FORMATS.get(name.rpartition(".")[2].lower()):
                notes.append(f"{name} is a {header.format}")
    if not task.masks.isdisjoint(good):
        _check_masks(good, reasons, masks=task.masks)
    number = task.first + len(found.sizes)
    found.sizes.append(total)
    if reasons:
        found.bad[number] = f"{key}: {'; '.join(reasons.values())}"
    if notes:
        found.noted[number] = f"{key}: {'; '.join(notes)}"
    if unread:
        found.unread[number] = frozenset(unread)
        if len(unread) == sum(isinstance(part, str) for _, part in parts):
            found.empty.add(number)


def _check_masks(
    photos: Mapping[str, tuple[_Component, PhotoHeader]], reasons: dict[str, str], *, masks: frozenset[str]
) -> None:
    """Add a reason for each 8-bit grey PNG that is damaged, or has another size than its photo if both are upright."""
    name = next((name for name in photos if name not in masks), None)
    if name is not None:
        photo, header = photos[name]
        head = photo.read(0, LONG_HEAD_BYTES)
        # EXIF data come before a JPEG's frame header; those of a PNG or WEBP may be anywhere.
        is_enough = header.format == "JPEG" and read_photo_header(head).height
        data = head if is_enough else photo.read(0, photo.num_bytes)
        stored = header.height, header.width
        expected = upright_size(*stored, read_orientation(data, header.format).value)
    for component in sorted(masks & photos.keys()):
        mask, header = photos[component]
        data = mask.read(0, mask.num_bytes)
        problem = mask_problem(data)
        if problem is None and name is not None:
            found = upright_size(header.height, header.width, read_orientation(data, "PNG").value)
            if found != expected:
                is_as_stored = (header.height, header.width) == stored
                problem = size_problem(name, expected, found, fit_as_stored=is_as_stored)
        if problem is not None:
            reasons[component] = f"{component} {problem}"


def mask_problem(data: bytes) -> str | None:
    """The reason why a mask cannot be decoded, as a text that follows its name; ``None`` if it can be."""
    # Here, because Pillow would cost each worker time and memory.
    from prep.photos.decoders import Undecodable, decode, open_decoder

    try:
        decode(open_decoder("pillow"), data, rules=PhotoRules(), output="gray")
    except Undecodable as exc:
        return str(exc)
    return None


def _check_names(key: str, parts: Sequence[tuple[str, Part]], *, source: str) -> None:
    # The label comes last: an error that names one of the source's own components says more.
    for component, part in sorted(parts, key=lambda part: part[0] == LABEL_COMPONENT):
        name = f"{key}.{component}"
        if split_key(name) != (key, component):
            raise DataError(
                f"{source}: '{name}' would not be read back as key '{key}', component '{component}': WebDataset cuts "
                "the key at the first dot, and it must not be empty"
            )
        if not name.isascii():
            path = part if isinstance(part, str) else name
            _check_utf8(name, what=f"{source}: the name of file '{printable(path)}'")
