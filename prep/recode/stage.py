"""Resize, optimize or convert the photos of a source before they are checked and packed.

Worker processes recode some records at a time and append the new bytes to a file in a folder; the new source has these
parts in place of the old ones. All that comes after sees an ordinary source whose sizes are known. The bytes depend on
nothing but the photo and the settings, so a pack that was interrupted is finished by running it again; it recodes all
photos again.

# Note [memory of recoding]: a worker holds one record's encoded photos and one decoded photo, of at most
`PhotoRules.max_pixels`: a quarter of a GiB for 89 million pixels, and twice that for a photo that is converted: another
process decodes it. The parent holds 0.5 KiB for each record that is changed, and 0.3 KiB for each other one.
"""

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from dali_pipes.errors import DataError, StoreError, shown
from dali_pipes.formats.manifest import RecodedStep
from dali_pipes.formats.photo_header import (
    CONVERTIBLE_FORMATS,
    MAX_PHOTO_BYTES,
    PhotoHeader,
    PhotoRules,
    is_photo,
    read_whole_photo_header,
    size_problem,
)
from dali_pipes.formats.photo_names import is_mask_name
from dali_pipes.progress import bar
from prep.pack.target import MAX_SENT_BYTES
from prep.photos.decoders import Undecodable
from prep.recode.photos import (
    NotJpegError,
    Recoding,
    check_jpegtran,
    converted,
    optimized,
    optimized_mask,
    resized,
    resized_mask,
)
from prep.sources.record import HEAD_BYTES, Record, Source, as_entry
from prep.tar.inside import UnpackedFile
from prep.tar.writer import Files, Part, Range
from prep.workers import Report, Workers

# Records of a task: some 0.1 s of work, so that the processes end together.
NUM_RECORDS = 32
# Below this, starting processes takes longer than the work.
MIN_SHARED_RECORDS = 64
# Components that may hold places in a photo, in pixels.
_MAY_HOLD_PLACES = frozenset({"json", "jsn", "npy", "npz"})
_JPEG_EXTENSIONS = frozenset({"jpg", "jpeg", "jpe"})

# What was done to a photo or mask, as the manifest counts it.
RESIZED, CONVERTED, OPTIMIZED, KEPT = "resized", "converted", "optimized", "kept"
MADE_JPEG = "resized and made JPEGs"
MASK_RESIZED, MASK_OPTIMIZED = "masks resized", "masks optimized"


class _Record(NamedTuple):
    key: str
    photos: Sequence[tuple[str, Part]]
    masks: frozenset[str]


class _Task(NamedTuple):
    records: list[_Record]
    recoding: Recoding
    rules: PhotoRules
    spool: Path


class _New(NamedTuple):
    """A photo or mask after it was recoded."""

    data: bytes
    action: str
    size: tuple[int, int] = (0, 0)
    """Upright height and width of a photo before it was resized; 0 if its header cannot be read."""
    note: str = ""


class _Done(NamedTuple):
    """The result of recoding one record."""

    changed: Mapping[str, tuple[str, Range]]
    """component -> its new name, and where its bytes are."""
    actions: tuple[str, ...]
    """The change of each photo and mask."""
    bytes_before: int
    bytes_after: int
    flaw: str
    """Why the record could not be recoded; then nothing of it is changed."""
    notes: tuple[str, ...]
    """Remarks on a record that is packed."""


def recode_source(
    source: Source, recoding: Recoding, *, rules: PhotoRules, spool: Path, workers: Workers, show_progress: bool
) -> Source:
    """Recode the photos and masks of a source, into the empty folder ``spool``, which stays while the source is used.

    Photos that ``rules`` refuses are left as they are, because the check that follows names them. A record with a photo
    or mask that cannot be recoded is doubtful: `Source.doubtful`. `Source.step` tells what was done.

    Raises:
        DataError: If photos are to be resized, and there are masks and no rule for them.
        PipesError: If a library or program that is needed is not installed.
        StoreError: If a file that holds many records cannot be read, or the new photos cannot be written.
    """
    if recoding.optimize:
        check_jpegtran()
    doubtful, noted, places = dict(source.doubtful), list(source.noted), set[str]()
    is_small = len(source.records) < MIN_SHARED_RECORDS
    with bar(what="recode", total=len(source.records), unit="records", shown=show_progress) as drawn:
        found = workers.map(
            _recode_records,
            _tasks(source, recoding, rules, spool, places),
            inline=lambda _: is_small,
            on_progress=drawn.update,
            name=lambda task: f"the photos of '{task.records[0].key}' to '{task.records[-1].key}'",
        )
        results = list(chain.from_iterable(found))
    for number, done in enumerate(results):
        if done.flaw:
            doubtful[number] = f"{doubtful[number]}; {done.flaw}" if number in doubtful else done.flaw
        noted += done.notes
    if recoding.resizes and places:
        noted.append(f"{shown(sorted(places))}: not changed; places in pixels are those of the photos before")

    def step(numbers: Sequence[int]) -> RecodedStep:
        packed = [results[number] for number in numbers]
        return RecodedStep(
            settings=recoding.as_settings(),
            counts=dict(sorted(Counter(action for done in packed for action in done.actions).items())),
            bytes_before=sum(done.bytes_before for done in packed),
            bytes_after=sum(done.bytes_after for done in packed),
        )

    def recoded(record: Record, new: Mapping[str, tuple[str, Range]]) -> Record:
        if not new:
            return record
        return replace(record, components=dict(new.get(name, (name, part)) for name, part in record.components.items()))

    records = [recoded(record, done.changed) for record, done in zip(source.records, results, strict=True)]
    return replace(source, records=records, doubtful=doubtful, noted=noted, step=step)


def _tasks(source: Source, recoding: Recoding, rules: PhotoRules, spool: Path, places: set[str]) -> Iterator[_Task]:
    """Cut the records into tasks; adds the components that are not photos and may hold places to ``places``."""
    records: list[_Record] = []
    total = 0
    place: UnpackedFile | None = None
    for record in source.records:
        key, parts = as_entry(record, source)
        photos = [(component, part) for component, part in parts if is_photo(component)]
        names = {component for component, _ in photos}
        places |= {name for name, _ in parts if name.rpartition(".")[2].lower() in _MAY_HOLD_PLACES}
        masks = source.masks
        if masks is None:
            masks = frozenset(name for name in names if is_mask_name(name, names))
        if recoding.resizes and recoding.masks is None and masks:
            raise DataError(
                f"{source.name}: '{min(masks)}' is a mask, and the photos are to be resized: say how masks follow "
                "them, --masks nearest"
            )
        # A compressed tar is unpacked from its first byte on, so one worker reads all of it.
        first = next((part.file for _, part in photos if isinstance(part, Range)), None)
        unpacked = first if isinstance(first, UnpackedFile) else None
        if records and (unpacked != place or total > MAX_SENT_BYTES or (not place and len(records) >= NUM_RECORDS)):
            yield _Task(records, recoding, rules, spool)
            records, total = [], 0
        place = unpacked
        records.append(_Record(key, photos, masks))
        total += sum(len(part) for _, part in photos if isinstance(part, bytes))
    if records:
        yield _Task(records, recoding, rules, spool)


def _recode_records(task: _Task, report: Report) -> list[_Done]:
    found = []
    path = task.spool / f"{os.getpid()}.photos"
    try:
        with closing(Files()) as files, path.open("ab") as spool:
            for record in task.records:
                photos = _read(record, files)
                flaw = ""
                try:
                    new = _recode(photos, record.masks, task)
                except Undecodable as exc:
                    new, flaw = {name: _New(data, KEPT) for name, data in photos.items()}, f"{record.key}: {exc}"
                changed = {}
                for component, photo in new.items():
                    if photo.action != KEPT:
                        place = Range(path, spool.tell(), len(photo.data), photo.data[:HEAD_BYTES])
                        changed[component] = (_new_name(component, photo.action), place)
                        spool.write(photo.data)
                found.append(
                    _Done(
                        changed,
                        actions=tuple(photo.action for photo in new.values()),
                        bytes_before=sum(map(len, photos.values())),
                        bytes_after=sum(len(photo.data) for photo in new.values()),
                        flaw=flaw,
                        notes=tuple(f"{record.key}: {name} {photo.note}" for name, photo in new.items() if photo.note),
                    )
                )
                report(1)
    except OSError as exc:
        raise StoreError(
            f"cannot write '{path}': {exc.strerror or exc}; recoded photos are kept there until they are packed: name "
            "a disk with more free space with --spool-dir"
        ) from exc
    return found


def _read(record: _Record, files: Files) -> dict[str, bytes]:
    """The photos of a record; not those that cannot be read, or are too large to be photos: the check names them."""
    found = {}
    for component, part in record.photos:
        try:
            if (size := files.open(part)) <= MAX_PHOTO_BYTES:
                found[component] = files.read(size)
        except StoreError:
            if not isinstance(part, str):
                raise
    return found


def _recode(photos: Mapping[str, bytes], masks: frozenset[str], task: _Task) -> dict[str, _New]:
    """Recode the photos and masks of one record, component -> bytes.

    A mask belongs to the first photo that is not a mask, as for the check.

    Raises:
        Undecodable: With the name of the component, if the record cannot be recoded.
    """
    found: dict[str, _New] = {}
    first = next((name for name in photos if name not in masks), None)
    for component in sorted(photos, key=lambda name: name in masks):
        data = photos[component]
        header = read_whole_photo_header(data)
        try:
            if component not in masks:
                new = _recode_photo(data, header, task)
            else:
                size = found[first].size if first is not None else (0, 0)
                new = _recode_mask(data, header, first, size, task)
        except Undecodable as exc:
            raise Undecodable(f"{component} {exc}") from exc
        is_changed = new.data != data or _new_name(component, new.action) != component
        found[component] = new if is_changed else new._replace(action=KEPT)
    names = Counter(_new_name(component, new.action) for component, new in found.items())
    if twice := next((name for name, number in names.items() if number > 1), None):
        raise Undecodable(f"two photos would be component '{twice}' as JPEGs; name them apart")
    return found


def _recode_photo(data: bytes, header: PhotoHeader, task: _Task) -> _New:
    recoding, size = task.recoding, (header.height, header.width)
    if header.format in CONVERTIBLE_FORMATS and recoding.convert:
        new, size = converted(data, header, recoding, rules=task.rules)
        return _New(new, CONVERTED, size)
    if task.rules.problem(header) is None:
        if recoding.new_size(*size) is not None:
            return _New(resized(data, header, recoding), RESIZED if header.format == "JPEG" else MADE_JPEG, size)
        if recoding.optimize and header.format == "JPEG":
            try:
                return _New(optimized(data), OPTIMIZED, size)
            except NotJpegError as exc:
                return _New(data, KEPT, size, f"is not optimized: {exc}")
    return _New(data, KEPT, size)


def _recode_mask(data: bytes, header: PhotoHeader, photo: str | None, photo_size: tuple[int, int], task: _Task) -> _New:
    if task.rules.problem(header) is None:
        new_size = task.recoding.new_size(*photo_size) if all(photo_size) else None
        if photo is not None and new_size is not None:
            if photo_size != (header.height, header.width):
                raise Undecodable(size_problem(photo, photo_size, (header.height, header.width)))
            return _New(resized_mask(data, *new_size), MASK_RESIZED)
        if task.recoding.optimize:
            return _New(optimized_mask(data), MASK_OPTIMIZED)
    return _New(data, KEPT)


def _new_name(component: str, action: str) -> str:
    """The name of a component after an action: that of a JPEG, if it was made one."""
    stem, dot, extension = component.rpartition(".")
    is_jpeg = action in (RESIZED, MADE_JPEG, CONVERTED) and extension.lower() not in _JPEG_EXTENSIONS
    return f"{stem}{dot}jpg" if is_jpeg else component
