"""Write records to WebDataset shards in a bucket or a directory; files keep their bytes.

Bad records, the number and sizes of shards, and the existing shards are known before a byte is written. Then
shards are streamed to their target, several at a time, each by a process of its own; the local disk gets no copy unless
one is asked for. The same records give the same shards, byte for byte, so an interrupted pack is finished by running it
again.

# Note [memory]: this process holds the names and sizes of all records. A worker holds 1 MiB of its shard, whatever the
sizes of shards and files (`prep.tar.writer.CHUNK_BYTES`), and its task: paths, and components that are not in files.
"""

import posixpath
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from dali_pipes.data_set.indexing import class_table_file
from dali_pipes.data_set.written import WrittenShards, write_record
from dali_pipes.errors import DataError, StoreError, shown
from dali_pipes.formats.manifest import RecodedStep, write_steps
from dali_pipes.formats.names import classes_name, columns_name, index_name, manifest_name, recoded_name, record_names
from dali_pipes.formats.photo_header import MAX_PIXELS
from dali_pipes.formats.photo_rules import PhotoRules
from dali_pipes.store.base import Store
from dali_pipes.store.local import LocalStore
from dali_pipes.store.urls import open_prefix
from prep.left_out import MaxBad, count_reasons
from prep.pack.check import Checked, check_records
from prep.pack.target import FileWorkers, Target, check_limits, plan_shards
from prep.pack.tasks import CopiedTarget, ShardTask, Stored, StreamTarget, write_file
from prep.part import ALL, JobPart
from prep.recode.photos import Recoding
from prep.recode.stage import recode_source
from prep.sources.record import Source, as_entry, component_names, without_empty_classes
from prep.spool import open_spool
from prep.tar.writer import Range
from prep.workers import Workers, WorkersKind, open_workers

OnBad = Literal["fail", "skip", "keep"]
DEFAULT_PREFIX = "samples-"

# AIStore and WebDataset recommend shards of some 100 MB to 1 GB; the count is a second limit, for small samples.
DEFAULT_MAX_COUNT = 10_000
DEFAULT_MAX_BYTES = 256 << 20

# Below this, starting processes takes longer than writing.
MIN_SHARED_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class PackReport:
    """The result of a pack, or with ``dry_run`` the result that it would have."""

    url: str
    """The beginning of all names: ``ais://pets/samples-``."""
    shards: tuple[str, ...]
    """All shards of the set, or of the part of it that was to be written, in order."""
    num_written: int
    """Shards that were not there already, byte for byte."""
    copy: str | None
    """The directory of the second copy; ``None`` without one."""
    num_copied: int
    """Shards that the second copy did not have."""
    num_samples: int
    num_bytes: int
    """Bytes of all shards."""
    skipped: tuple[str, ...]
    """Records and pictures that were left out, one line each: key and reason."""
    reasons: Mapping[str, int]
    """Reason, without what belongs to one file alone -> the number of them in ``skipped``; the most frequent first."""
    others: tuple[str, ...]
    """Files beside the photos that are no pictures, in the same form."""
    kept: tuple[str, ...]
    """Bad records that were packed nevertheless, in the same form."""
    classes: Mapping[int, str]
    """class id -> name, of the classes that have samples if the source only numbers their names."""
    noted: tuple[str, ...]
    """Records with a photo in another format than its name says, which DALI decodes, and classes without samples."""
    recoded: tuple[RecodedStep, ...]
    """What was done to the photos, in this pack and in those before it."""
    elapsed_s: float
    dry_run: bool


class NoRecordLeftError(DataError):
    """All records are bad."""

    def __init__(self, text: str, num_left_out: int = 0) -> None:  # the default lets it be pickled
        super().__init__(text)
        self.num_left_out = num_left_out


def pack(
    source: Source,
    *,
    store: Store,
    prefix: str = DEFAULT_PREFIX,
    max_count: int = DEFAULT_MAX_COUNT,
    max_bytes: int = DEFAULT_MAX_BYTES,
    on_bad: OnBad = "fail",
    max_bad: MaxBad | None = None,
    max_pixels: int | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    copy: Path | None = None,
    recode: Recoding | None = None,
    spool_dir: Path | None = None,
    jobs: int | None = None,
    on: WorkersKind = "processes",
    part: JobPart = ALL,
    show_progress: bool = False,
    check_components: Callable[[Iterable[Set[str]]], None] | None = None,
) -> PackReport:
    """Write ``PREFIX000000.tar``, ``PREFIX000001.tar``, ... and, last, the class table ``PREFIXclasses.json``.

    If photos are recoded, or were when they were packed before, ``PREFIXrecoded.json`` tells how.

    Args:
        source: The records, packed in their order, and their class table.
        store: The output; a missing bucket is made.
        prefix: The beginning of all names.
        max_count: The most samples of a shard.
        max_bytes: The most bytes of a shard; a larger sample gets a shard of its own.
        on_bad: What to do about a bad record: one with a photo that loaders refuse by its header, with a file that
            is empty, missing or unreadable, or with a mask that is damaged, is not an 8-bit grey PNG, or has another
            size than its photo. (A photo in another format than its extension says is packed, and noted.) ``"fail"``:
            raise before anything is written. ``"skip"``: leave the record out.
            ``"keep"``: pack it as it is, without the files that cannot be read; a record without other files is left
            out. Only ``"skip"`` accepts records that the source could not read.
        max_bad: The most records and pictures that may be left out; ``None``: any number, as long as a record is left.
        max_pixels: Photos with more pixels are bad; ``None``: `dali_pipes.formats.photo_header.MAX_PIXELS`.
        overwrite: Replace shards of other content under these names, and delete those beyond the last one.
        dry_run: Check and plan only.
        copy: A directory that gets a second copy of shards and class table, under the same names. It is written while
            the shards are sent, so the source files are read once. Equal files there are kept; ``overwrite`` replaces
            others.
        recode: How photos and masks are resized, optimized or converted first; ``None``: files keep their bytes. A
            record with a photo or mask for which this fails is bad. (With ``dry_run`` they are recoded too, because
            their sizes are not known before.)
        spool_dir: A directory for the recoded photos, until they are packed; by default a folder in the store's own
            directory, or the temporary directory.
        jobs: Shards in flight, each written by a process; with 1, this process does all. By default the number of
            cores, at most 16. This process packs small sets alone.
        on: Who checks and writes: see `prep.workers.open_workers`. Directories must be the same on all nodes of a Ray.
        part: The part of the shards that is written. All records are read and checked for the plan, whatever the part.
        show_progress: Draw bars.
        check_components: Called before anything is written, with the components of each sample that will be: after bad
            records are left out, and photos recoded. May raise.

    Raises:
        DataError: If records are bad and ``on_bad`` is ``"fail"``, if more are left out than ``max_bad``, if no record
            is left, a key cannot be a member's
            name, two keys are equal, a name of a file or class is not UTF-8, or source files change meanwhile.
        PipesError: If a worker process died, or a node of a Ray does not reach a directory.
        StoreError: If there are other shards under the prefix and ``overwrite`` is false, there is no space for the
            copy, or writing fails. Complete shards stay, partial ones do not; running again finishes the pack.
        ValueError: If an argument is not valid, the source's own shards lie under the prefix, the copy would be the
            pack itself, or photos would be recoded for each of several parts.
    """
    started = time.perf_counter()
    check_limits(prefix=prefix, max_count=max_count, max_bytes=max_bytes)
    if on_bad not in get_args(OnBad):
        raise ValueError(f"on_bad must be one of {', '.join(get_args(OnBad))}, got '{on_bad}'")
    if recode is not None and recode.is_on and not part.is_all:
        raise ValueError(
            f"part {part} would recode all photos, to learn their sizes, and so would each other part; recode without "
            "--part, or pack them as they are"
        )
    converts = recode is not None and recode.convert
    rules = PhotoRules(max_pixels=max_pixels or MAX_PIXELS, is_converted=converts)
    store.check_name(prefix)
    if copy is not None:
        _check_copy(store, copy)
    if source.broken and on_bad != "skip":
        raise DataError(
            f"{len(source.broken)} records of {source.name} cannot be read: {shown(source.broken, are_names=False)}; "
            "leave them out with --on-bad skip"
        )
    with open_workers(on, jobs) as workers, ExitStack() as stack:
        _check_reach(workers, source, store, copy)
        if recode is not None and recode.is_on:
            spool_dir = spool_dir or (Path(tempfile.gettempdir()) if dry_run else None)
            spool = stack.enter_context(open_spool(store, prefix, spool_dir))
            workers.check_reach([spool])
            source = recode_source(
                source, recode, rules=rules, spool=spool, workers=workers, show_progress=show_progress
            )
        checked = check_records(source, rules=rules, workers=workers, show_progress=show_progress)
        numbers, skipped, kept = _choose(source, checked, on_bad=on_bad)
        named = source.classes
        source = without_empty_classes(source, numbers)
        empty = sorted({*named.values()} - {*source.classes.values()})
        reasons = count_reasons(skipped)
        _check_number(source, skipped, reasons, num_packed=len(numbers), max_bad=max_bad)
        if check_components is not None:
            nothing: frozenset[str] = frozenset()
            check_components(
                component_names(source.records[number], without=checked.unread.get(number, nothing))
                for number in numbers
            )
        steps = (*source.steps, *([source.step(numbers)] if source.step is not None else []))
        shards = _plan(numbers, checked, prefix=prefix, max_count=max_count, max_bytes=max_bytes)
        places = [store, *([LocalStore(copy)] if copy is not None else [])]
        targets = [Target(place, prefix, overwrite=overwrite) for place in places]
        for target in targets:
            _check_apart(target.store, source, (*(shard.name for shard in shards), *target.existing))
        stale = [target.stale(shards) for target in targets]
        missing: list[list[_Shard]] = [[] for _ in targets]
        own = part.of(shards)
        if not dry_run:
            file_workers = FileWorkers(workers=workers, min_shared_bytes=MIN_SHARED_BYTES, show_progress=show_progress)
            task = partial(_task, source, checked.unread)
            missing = [
                target.missing(own, lambda shard, stored: task(shard, stored=stored), file_workers)
                for target in targets
            ]
            if copy is not None:
                _check_space(copy, sum(shard.num_bytes for shard in missing[1]))
            written = WrittenShards(
                names=[posixpath.basename(shard.name) for shard in shards],
                num_samples=sum(shard.num_samples for shard in shards),
                num_bytes=sum(shard.num_bytes for shard in shards),
            )
            for target in targets:
                target.create()
                if not target.holds(record_names(prefix)[0], written.to_bytes()):
                    target.delete(record_names(prefix))
                    write_record(target.store, prefix, written)
            _write(own, targets, missing, task, file_workers)
            for target, gone in zip(targets, stale, strict=True):
                _finish(target, gone, source.classes, steps)
    return PackReport(
        url=store.locate(prefix),
        shards=tuple(shard.name for shard in own),
        num_written=len(missing[0]),
        copy=None if copy is None else str(copy),
        num_copied=len(missing[-1]) if copy is not None else 0,
        num_samples=sum(shard.num_samples for shard in own),
        num_bytes=sum(shard.num_bytes for shard in own),
        skipped=skipped,
        reasons=reasons,
        others=tuple(source.others),
        kept=kept,
        classes=source.classes,
        noted=(
            *source.noted,
            *(f"{name}: no record of this class is left, so it has no class id" for name in empty),
            *(checked.noted[number] for number in numbers if number in checked.noted),
        ),
        recoded=steps,
        elapsed_s=time.perf_counter() - started,
        dry_run=dry_run,
    )


def open_target(url: str | Path, *, endpoint: str | None) -> tuple[Store, str]:
    """The store and the prefix that a pack's URL names: `open_prefix`, and `DEFAULT_PREFIX` in a folder."""
    store, prefix = open_prefix(url, endpoint=endpoint)
    return store, prefix if prefix.endswith(("-", "_")) else f"{prefix}{DEFAULT_PREFIX}"


# Before anything is written


def _check_copy(store: Store, copy: Path) -> None:
    if copy.exists() and not copy.is_dir():
        raise ValueError(f"copy must be a directory, '{copy}' is a file")
    if store.directory is not None and store.directory.resolve() == copy.resolve():
        raise ValueError(f"copy must be another directory than that of the pack, got '{copy}' twice")


def _check_reach(workers: Workers, source: Source, store: Store, copy: Path | None) -> None:
    """Refuse directories that the workers do not reach: those of the source's files, of the store and of the copy."""
    folders = (
        file.parent
        for record in source.records
        for content in record.components.values()
        if isinstance(file := content.file if isinstance(content, Range) else content, Path)
    )
    written = (place for place in (store.directory, copy) if place is not None)
    workers.check_reach(chain(written, folders))


def _choose(
    source: Source, checked: Checked, *, on_bad: OnBad
) -> tuple[Sequence[int], tuple[str, ...], tuple[str, ...]]:
    """The numbers of the records to pack, and one line for each record that is left out, or is bad and packed."""
    bad = checked.bad
    if bad and on_bad == "fail":
        raise DataError(
            f"{len(bad)} of {len(source.records)} records of {source.name} are bad: "
            f"{shown(list(bad.values()), are_names=False)}; "
            "leave them out with --on-bad skip, or pack them as they are with --on-bad keep"
        )
    dropped = bad if on_bad == "skip" else {number: bad[number] for number in sorted(checked.empty)}
    numbers: Sequence[int] = range(len(source.records))
    if dropped:
        numbers = [number for number in numbers if number not in dropped]
    left_out = (*source.skipped, *source.broken, *dropped.values())
    if not numbers:
        raise NoRecordLeftError(
            f"{source.name}: no record is left to pack; {shown(left_out, are_names=False)}", len(left_out)
        )
    return numbers, left_out, tuple(text for number, text in bad.items() if number not in dropped)


def _check_number(
    source: Source, skipped: Sequence[str], reasons: Mapping[str, int], *, num_packed: int, max_bad: MaxBad | None
) -> None:
    total = num_packed + len(skipped)
    if max_bad is None or max_bad.allows(len(skipped), of=total):
        return
    shown_reasons = [f"{number} x {reason}" for reason, number in reasons.items()]
    raise DataError(
        f"{source.name}: {len(skipped)} of {total} records would be left out, more than --max-bad {max_bad.text}: "
        f"{shown(shown_reasons, are_names=False)}; mend them, or allow so many: --max-bad {len(skipped)}"
    )


class _Shard(NamedTuple):
    """A planned shard."""

    name: str
    num_bytes: int
    numbers: Sequence[int]
    """The numbers of its records."""

    @property
    def num_samples(self) -> int:
        return len(self.numbers)


def _plan(numbers: Sequence[int], checked: Checked, *, prefix: str, max_count: int, max_bytes: int) -> list[_Shard]:
    plan = plan_shards([checked.sizes[number] for number in numbers], max_count=max_count, max_bytes=max_bytes)
    return [
        _Shard(
            name=f"{prefix}{row:06d}.tar",
            num_bytes=shard.num_bytes,
            numbers=numbers[shard.start : shard.stop],
        )
        for row, shard in enumerate(plan)
    ]


def _check_apart(store: Store, source: Source, names: Iterable[str]) -> None:
    """Raise `ValueError` if the pack would write a shard that the source reads."""
    for name in names if source.reads else ():
        if store.identity(name) in source.reads:
            raise ValueError(
                f"'{store.locate(name)}' is a shard of the input, and would be replaced or mixed with the output; "
                "pack under another prefix"
            )


def _check_space(copy: Path, num_bytes: int) -> None:
    there = next(folder for folder in (copy.resolve(), *copy.resolve().parents) if folder.is_dir())
    free = shutil.disk_usage(there).free
    if num_bytes > free:
        raise StoreError(f"'{copy}' has {free} bytes free, the copy takes {num_bytes} more; name another disk")


# Writing


def _task(
    source: Source,
    unread: Mapping[int, frozenset[str]],
    shard: _Shard,
    *,
    target: StreamTarget | None = None,
    stored: Stored | None = None,
) -> ShardTask:
    """The task that writes or compares a shard. ``unread``: a record's number -> components to leave out."""
    none: frozenset[str] = frozenset()
    return ShardTask(
        name=shard.name,
        num_bytes=shard.num_bytes,
        target=target,
        stored=stored,
        entries=[
            as_entry(source.records[number], source, without=unread.get(number, none)) for number in shard.numbers
        ],
    )


def _write(
    shards: Sequence[_Shard],
    targets: Sequence[Target],
    missing: Sequence[Sequence[_Shard]],
    task: Callable[..., ShardTask],
    file_workers: FileWorkers,
) -> None:
    """Write each shard that the store or the copy lacks, to those that lack it, in one stream."""
    for target, lacking in zip(targets, missing, strict=True):
        if lacking:
            target.delete(_descriptions(target.prefix, (shard.name for shard in lacking)))
    lacks = [{shard.name for shard in lacking} for lacking in missing]
    wanted = [shard for shard in shards if any(shard.name in names for names in lacks)]

    def target_of(name: str) -> StreamTarget:
        main = targets[0].access if name in lacks[0] else None
        if len(targets) == 1 or name not in lacks[1]:
            assert main is not None, "the store or the copy lacks it"
            return main
        copy = targets[1].store.directory
        assert copy is not None, "a copy is in a directory"
        return CopiedTarget(target=main, directory=copy)

    to_write = (task(shard, target=target_of(shard.name)) for shard in wanted)
    file_workers.run(write_file, to_write, wanted, what="pack")


def _finish(target: Target, stale: Sequence[str], classes: Mapping[int, str], steps: Sequence[RecodedStep]) -> None:
    """Delete the shards beyond the last one; write the class table and what was done to photos, if they differ."""
    if stale:
        target.delete([*_descriptions(target.prefix, stale), *stale])
    tables = {classes_name(target.prefix): class_table_file(classes)}
    if steps:
        tables[recoded_name(target.prefix)] = write_steps(steps)
    if not all(target.holds(name, data) for name, data in tables.items()):
        target.delete(_descriptions(target.prefix, ()))
        for name, data in tables.items():
            target.store.write(name, data)
    if not steps:
        target.delete([recoded_name(target.prefix)])


def _descriptions(prefix: str, shards: Iterable[str]) -> list[str]:
    """The objects that describe a set with these shards."""
    return [manifest_name(prefix), columns_name(prefix), *map(index_name, shards)]
