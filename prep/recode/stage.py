"""Resize, optimize or convert the photos of a source before they are checked and packed.

Worker processes recode some records at a time and append the new bytes to a file in a folder; the new source has these
parts in place of the old ones. All that comes after sees an ordinary source whose sizes are known. The bytes depend on
nothing but the photo and the settings, so a pack that was interrupted is finished by running it again; it recodes all
photos again.

# Note [memory of recoding]: a worker holds one record's encoded photos and one decoded photo, of at most
`PhotoRules.max_pixels`: a quarter of a GiB for 89 million pixels, and a third more while a HEIC or AVIF is decoded. The
parent holds 0.5 KiB for each record that is changed.
"""

import os
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import BinaryIO, NamedTuple, overload

from dali_pipes.errors import DataError, StoreError, shown
from dali_pipes.formats.manifest import RecodedStep
from dali_pipes.formats.photo_header import MAX_PHOTO_BYTES, is_photo
from dali_pipes.formats.photo_names import is_mask_name
from dali_pipes.formats.photo_rules import PhotoRules
from dali_pipes.progress import bar
from prep.pack.tasks import MAX_SENT_BYTES
from prep.recode.jpegs import check_jpegtran
from prep.recode.photos import Recoding, check_converters
from prep.recode.sample import recode_record
from prep.sources.record import HEAD_BYTES, Record, Source, as_entry
from prep.tar.gzipped import UnpackedFile
from prep.tar.writer import Files, Part, Range
from prep.workers import Report, Workers

# Records of a task: some 0.1 s of work, so that the processes end together.
NUM_RECORDS = 32
# Below this, starting processes takes longer than the work.
MIN_SHARED_RECORDS = 64
# Components that may hold places in a photo, in pixels.
_MAY_HOLD_PLACES = frozenset({"json", "jsn", "npy", "npz"})


class _Record(NamedTuple):
    """The photos of a record, and which of them are masks."""

    key: str
    photos: Sequence[tuple[str, Part]]
    masks: frozenset[str]


class _Done(NamedTuple):
    """The result of recoding one record."""

    changed: Mapping[str, tuple[str, Range]]
    """component -> its new name, and where its bytes are."""
    actions: tuple[str, ...]
    bytes_before: int
    bytes_after: int
    flaw: str
    note: str


class _Task(NamedTuple):
    records: list[_Record]
    recoding: Recoding
    rules: PhotoRules
    spool: Path


def recode_source(
    source: Source, recoding: Recoding, *, rules: PhotoRules, spool: Path, workers: Workers, show_progress: bool
) -> Source:
    """Recode the photos and masks of a source.

    Photos that ``rules`` refuses are left as they are, because the check that follows names them. A record with a photo
    or mask that cannot be recoded is doubtful: `Source.doubtful`. `Source.step` tells what was done.

    Args:
        source: The records. Masks are those that it names, or that their names show, as it says.
        recoding: What to do.
        rules: Photos that are allowed.
        spool: An empty folder for the new photos, for as long as the source is used.
        workers: Several records are recoded at a time.
        show_progress: Draw a bar.

    Raises:
        DataError: If photos are to be resized, and there are masks and no rule for them.
        PipesError: If a library or program that is needed is not installed.
        StoreError: If a file that holds many records cannot be read, or the new photos cannot be written.
    """
    _check_needs(recoding)
    if recoding.resizes and recoding.masks is None and source.masks:
        raise _no_rule_for_masks(source, min(source.masks))
    changed: dict[int, Mapping[str, tuple[str, Range]]] = {}
    num_bytes = (array("q"), array("q"))
    actions: list[tuple[str, ...]] = []
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
        for number, done in enumerate(chain.from_iterable(found)):
            if done.changed:
                changed[number] = done.changed
            actions.append(done.actions)
            num_bytes[0].append(done.bytes_before)
            num_bytes[1].append(done.bytes_after)
            if done.flaw:
                doubtful[number] = f"{doubtful[number]}; {done.flaw}" if number in doubtful else done.flaw
            noted += [done.note] if done.note else []
    if recoding.resizes and places:
        noted.append(f"{shown(sorted(places))}: not changed; places in pixels are those of the photos before")

    def step(numbers: Sequence[int]) -> RecodedStep:
        counts = Counter(action for number in numbers for action in actions[number])
        before, after = (sum(column[number] for number in numbers) for column in num_bytes)
        return RecodedStep(
            settings=recoding.as_settings(), counts=dict(sorted(counts.items())), bytes_before=before, bytes_after=after
        )

    records = _Records(source.records, changed)
    return replace(source, records=records, doubtful=doubtful, noted=noted, step=step)


def _check_needs(recoding: Recoding) -> None:
    if recoding.optimize:
        check_jpegtran()
    if recoding.convert:
        check_converters()


def _no_rule_for_masks(source: Source, mask: str) -> DataError:
    return DataError(
        f"{source.name}: '{mask}' is a mask, and the photos are to be resized: say how masks follow them, "
        "--masks nearest"
    )


class _Records(Sequence[Record]):
    """Records with other photos, each made when it is used."""

    def __init__(self, records: Sequence[Record], changed: Mapping[int, Mapping[str, tuple[str, Range]]]) -> None:
        self._records, self._changed = records, changed

    def __len__(self) -> int:
        return len(self._records)

    @overload
    def __getitem__(self, number: int) -> Record: ...

    @overload
    def __getitem__(self, number: slice) -> "list[Record]": ...

    def __getitem__(self, number: int | slice) -> "Record | list[Record]":
        if isinstance(number, slice):
            return [self[row] for row in range(*number.indices(len(self)))]
        record = self._records[number]
        changed = self._changed.get(number)
        if changed is None:
            return record
        components: dict[str, object] = {}
        for component, content in record.components.items():
            name, part = changed.get(component, (component, content))
            components[name] = part
        return replace(record, components=components)


def _tasks(source: Source, recoding: Recoding, rules: PhotoRules, spool: Path, places: set[str]) -> Iterator[_Task]:
    """Cut the records into tasks; adds the components that are not photos and may hold places to ``places``."""
    records: list[_Record] = []
    total = 0
    place: UnpackedFile | None = None
    by_name = source.finds_masks and not source.masks
    for record in source.records:
        key, parts = as_entry(record, source)
        photos = [(component, part) for component, part in parts if is_photo(component)]
        names = {component for component, _ in photos}
        places |= {name for name, _ in parts if name.rpartition(".")[2].lower() in _MAY_HOLD_PLACES}
        masks = frozenset(name for name in names if is_mask_name(name, names)) if by_name else source.masks
        if recoding.resizes and recoding.masks is None and masks:
            raise _no_rule_for_masks(source, min(masks))
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
    files = Files()
    path = task.spool / f"{os.getpid()}.photos"
    try:
        with path.open("ab") as spool:
            for record in task.records:
                found.append(_recode_record(record, _read(record, files), task, path, spool))
                report(1)
    except OSError as exc:
        raise StoreError(
            f"cannot write '{path}': {exc.strerror or exc}; recoded photos are kept there until they are packed: name "
            "a disk with more free space with --spool-dir"
        ) from exc
    finally:
        files.close()
    return found


def _recode_record(record: _Record, photos: Mapping[str, bytes], task: _Task, path: Path, spool: BinaryIO) -> _Done:
    new = recode_record(photos, masks=record.masks, recoding=task.recoding, rules=task.rules)
    changed = {}
    before = after = sum(map(len, photos.values()))
    for component, (name, data) in new.changed.items():
        changed[component] = (name, Range(path, spool.tell(), len(data), data[:HEAD_BYTES]))
        spool.write(data)
        after += len(data) - len(photos[component])
    flaw, note = (f"{record.key}: {text}" if text else "" for text in (new.flaw, new.note))
    return _Done(changed, tuple(new.actions), before, after, flaw, note)


def _read(record: _Record, files: Files) -> dict[str, bytes]:
    """The photos of a record; not those that cannot be read, or are too large to be photos: the check names them."""
    found = {}
    for component, part in record.photos:
        try:
            if isinstance(part, bytes):
                found[component] = part
            elif (size := files.open(part)) <= MAX_PHOTO_BYTES:
                found[component] = files.read(size)
        except StoreError:
            if not isinstance(part, str):
                raise
    return found
