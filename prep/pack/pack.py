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
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Literal

from dali_pipes.data_set.indexing import class_table_file
from dali_pipes.data_set.written import WrittenShards, write_record
from dali_pipes.errors import DataError, StoreError, shown
from dali_pipes.formats.manifest import RecodedStep, write_steps
from dali_pipes.formats.names import classes_name, columns_name, index_name, manifest_name, recoded_name, record_names
from dali_pipes.formats.photo_header import MAX_PIXELS, PhotoRules
from dali_pipes.store.base import Store
from dali_pipes.store.local import LocalStore
from dali_pipes.store.urls import open_prefix
from prep.left_out import MaxBad, count_reasons
from prep.pack.check import Checked, check_records
from prep.pack.target import (
    CopiedTarget,
    PackedShard,
    ShardTask,
    Stored,
    StreamTarget,
    Target,
    plan_shards,
    run_tasks,
    write_file,
)
from prep.part import ALL, JobPart
from prep.recode.photos import Recoding
from prep.recode.stage import recode_source
from prep.sources.record import Source, as_entry, without_empty_classes
from prep.spool import open_spool
from prep.tar.writer import Entry, Range
from prep.workers import WorkersKind, open_workers

OnBad = Literal["fail", "skip", "keep"]
DEFAULT_PREFIX = "samples-"


@dataclass(frozen=True, kw_only=True)
class PackJob:
    """The output of a pack, its limits, and who works.

    Raises:
        ValueError: If the prefix is not valid, the copy would be the pack itself, or photos would be recoded for each
            of several parts.
    """

    store: Store
    """The output; a missing bucket is made."""
    prefix: str = DEFAULT_PREFIX
    """The beginning of all names."""
    # AIStore and WebDataset recommend shards of some 100 MB to 1 GB; the count is a second limit, for small samples.
    max_count: int = 10_000
    """The most samples of a shard."""
    max_bytes: int = 256 << 20
    """The most bytes of a shard; a larger sample gets a shard of its own."""
    on_bad: OnBad = "fail"
    """What to do about a bad record: see `check_records`. ``"fail"``: raise before anything is written. ``"skip"``:
    leave it out. ``"keep"``: pack it as it is, without the files that cannot be read; a record without other files is
    left out. Only ``"skip"`` accepts records that the source could not read."""
    max_bad: MaxBad | None = None
    """The most records and pictures that may be left out; ``None`` sets no limit, as long as a record remains."""
    max_pixels: int | None = None
    """Photos with more pixels are bad; the default is `dali_pipes.formats.photo_header.MAX_PIXELS`."""
    overwrite: bool = False
    """Replace shards of other content under these names, and delete those beyond the last one."""
    dry_run: bool = False
    """Check and plan only. (Photos are recoded too, because their sizes are not known before.)"""
    copy: Path | None = None
    """A directory that gets a second copy of shards and class table, under the same names. It is written while the
    shards are sent, so the source files are read once. Equal files there are kept; ``overwrite`` replaces others."""
    recode: Recoding = field(default_factory=Recoding)
    """How photos and masks are resized, optimized or converted first; by default files keep their bytes. A record with
    a photo or mask for which this fails is bad."""
    spool_dir: Path | None = None
    """A directory for the recoded photos, until they are packed; by default a folder in the store's own directory, or
    the temporary directory."""
    jobs: int | None = None
    """Shards in flight, each written by a process; with 1, this process does all. By default the number of cores, at
    most 16. This process packs small sets alone."""
    on: WorkersKind = "processes"
    """Who checks and writes: see `prep.workers.open_workers`. Directories must be the same on all nodes of a Ray."""
    part: JobPart = ALL
    """The part of the shards that is written. All records are read and checked for the plan, whatever the part."""
    show_progress: bool = False
    """Draw bars."""
    check_components: Callable[[Iterable[Set[str]]], None] | None = None
    """Called before anything is written, with the components of each sample that will be: after bad records are left
    out, and photos recoded. May raise."""

    def __post_init__(self) -> None:
        if not self.prefix or self.prefix.endswith("/") or self.prefix[-1].isdigit():
            raise ValueError(
                f"prefix must end in a name's start that is not a digit, such as 'train/samples-', got '{self.prefix}'"
            )
        self.store.check_name(self.prefix)
        if self.recode.is_on and not self.part.is_all:
            raise ValueError(
                f"part {self.part} would recode all photos, to learn their sizes, and so would each other part; recode "
                "without --part, or pack them as they are"
            )
        folder = self.store.directory
        if self.copy is not None and folder is not None and folder.resolve() == self.copy.resolve():
            raise ValueError(f"copy must be another directory than that of the pack, got '{self.copy}' twice")

    @property
    def rules(self) -> PhotoRules:
        """The photos that are allowed."""
        return PhotoRules(max_pixels=self.max_pixels or MAX_PIXELS, is_converted=self.recode.convert)


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
    """Reason, without what belongs to one file alone -> how many of ``skipped`` have it; the most frequent first."""
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


_LIST_ALL = "list them all with --dry-run --on-bad skip --max-bad 100%"


class NoRecordLeftError(DataError):
    """All records are bad."""

    def __init__(self, text: str, num_left_out: int = 0) -> None:  # the default lets it be pickled
        super().__init__(text)
        self.num_left_out = num_left_out


def pack(source: Source, job: PackJob) -> PackReport:
    """Write ``PREFIX000000.tar``, ``PREFIX000001.tar``, ... and, last, the class table ``PREFIXclasses.json``.

    The records are packed in their order. If photos are recoded, or were when they were packed before,
    ``PREFIXrecoded.json`` tells how.

    Raises:
        DataError: If records are bad and ``on_bad`` is ``"fail"``, if more are left out than ``max_bad``, if no record
            is left, a key cannot be a member's name, two keys are equal, a name of a file or class is not UTF-8, or
            source files change meanwhile.
        PipesError: If a worker process died, or a node of a Ray does not reach a directory.
        StoreError: If there are other shards under the prefix and ``overwrite`` is false, there is no space for the
            copy, or writing fails. Complete shards stay, partial ones do not; running again finishes the pack.
        ValueError: If the source's own shards lie under the prefix.
    """
    started = time.perf_counter()
    if source.broken and job.on_bad != "skip":
        raise DataError(
            f"{len(source.broken)} records of {source.name} cannot be read: {shown(source.broken, are_names=False)}; "
            "leave them out with --on-bad skip"
        )
    with open_workers(job.on, job.jobs) as workers, ExitStack() as stack:
        # The directories of the store, of the copy and of the source's files.
        parts = (part for record in source.records for part in record.components.values())
        files = (part.file if isinstance(part, Range) else part for part in parts)
        folders = (file.parent for file in files if isinstance(file, Path))
        workers.check_reach(chain(filter(None, (job.store.directory, job.copy)), folders))
        if job.recode.is_on:
            spool_dir = job.spool_dir or (Path(tempfile.gettempdir()) if job.dry_run else None)
            spool = stack.enter_context(open_spool(job.store, job.prefix, spool_dir))
            workers.check_reach([spool])
            source = recode_source(
                source, job.recode, rules=job.rules, spool=spool, workers=workers, show_progress=job.show_progress
            )
        checked = check_records(source, rules=job.rules, workers=workers, show_progress=job.show_progress)
        numbers, skipped, kept = _choose(source, checked, job)
        named = source.classes
        source = without_empty_classes(source, numbers)
        empty_classes = sorted({*named.values()} - {*source.classes.values()})
        plan = _Plan(job, source, checked, numbers)
        if job.check_components is not None:
            job.check_components({component for component, _ in plan.entry(number)[1]} for number in numbers)
        targets = plan.open_targets()
        run = partial(run_tasks, workers, show_progress=job.show_progress)
        missing = [[] for _ in targets] if job.dry_run else plan.write(targets, run)
    return PackReport(
        url=job.store.locate(job.prefix),
        shards=tuple(shard.name for shard in plan.shards),
        num_written=len(missing[0]),
        copy=None if job.copy is None else str(job.copy),
        num_copied=len(missing[-1]) if job.copy is not None else 0,
        num_samples=sum(shard.num_samples for shard in plan.shards),
        num_bytes=sum(shard.num_bytes for shard in plan.shards),
        skipped=skipped,
        reasons=count_reasons(skipped),
        others=tuple(source.others),
        kept=kept,
        classes=source.classes,
        noted=(
            *source.noted,
            *(f"{name}: no record of this class is left, so it has no class id" for name in empty_classes),
            *(checked.noted[number] for number in numbers if number in checked.noted),
        ),
        recoded=plan.steps,
        elapsed_s=time.perf_counter() - started,
        dry_run=job.dry_run,
    )


def open_target(url: str | Path, *, endpoint: str | None) -> tuple[Store, str]:
    """The store and the prefix that a pack's URL names: `open_prefix`, and `DEFAULT_PREFIX` in a folder."""
    store, prefix = open_prefix(url, endpoint=endpoint)
    return store, prefix if prefix.endswith(("-", "_")) else f"{prefix}{DEFAULT_PREFIX}"


def _choose(source: Source, checked: Checked, job: PackJob) -> tuple[Sequence[int], tuple[str, ...], tuple[str, ...]]:
    """The numbers of the records to pack, the lines on those left out, and those on bad ones that are packed.

    Raises:
        DataError: If bad records, or too many of them, end the pack.
    """
    bad = checked.bad
    if bad and job.on_bad == "fail":
        raise DataError(
            f"{len(bad)} of {len(source.records)} records of {source.name} are bad: "
            f"{shown(list(bad.values()), are_names=False)}{_for_large(bad.values())}; {_LIST_ALL}; "
            "leave them out with --on-bad skip, or pack them as they are with --on-bad keep"
        )
    dropped = bad if job.on_bad == "skip" else {number: bad[number] for number in sorted(checked.empty)}
    numbers: Sequence[int] = range(len(source.records))
    if dropped:
        numbers = [number for number in numbers if number not in dropped]
    skipped = (*source.skipped, *source.broken, *dropped.values())
    if not numbers:
        raise NoRecordLeftError(
            f"{source.name}: no record is left to pack; {shown(skipped, are_names=False)}{_for_large(skipped)}",
            len(skipped),
        )
    total = len(numbers) + len(skipped)
    if job.max_bad is not None and not job.max_bad.allows(len(skipped), of=total):
        reasons = [f"{number} x {reason}" for reason, number in count_reasons(skipped).items()]
        raise DataError(
            f"{source.name}: {len(skipped)} of {total} records would be left out, more than --max-bad "
            f"{job.max_bad.text}: {shown(reasons, are_names=False)}{_for_large(skipped)}; {_LIST_ALL}; "
            f"mend them, or allow so many: --max-bad {len(skipped)}"
        )
    return numbers, skipped, tuple(text for number, text in bad.items() if number not in dropped)


def _for_large(lines: Iterable[str]) -> str:
    """What helps if photos are too large."""
    are_too_large = any("max_pixels" in line for line in lines)
    return "; allow larger photos with --max-pixels, and shrink them with --max-side" * are_too_large


class _Plan:
    """The shards of a pack, of the records with some ``numbers``, and how they are written."""

    def __init__(self, job: PackJob, source: Source, checked: Checked, numbers: Sequence[int]) -> None:
        self._job, self._source, self._unread = job, source, checked.unread
        self.steps = (*source.steps, *([source.step(numbers)] if source.step is not None else []))
        """The changes of the photos, in this pack and before it."""
        plan = plan_shards(
            [checked.sizes[number] for number in numbers], max_count=job.max_count, max_bytes=job.max_bytes
        )
        self._all_shards = [
            PackedShard(f"{job.prefix}{row:06d}.tar", shard.num_bytes, numbers[shard.start : shard.stop])
            for row, shard in enumerate(plan)
        ]
        self.shards = job.part.of(self._all_shards)
        """The shards of this part."""

    def entry(self, number: int) -> Entry:
        """A sample as it is written."""
        return as_entry(self._source.records[number], self._source, without=self._unread.get(number, frozenset()))

    def open_targets(self) -> list[Target]:
        """The store and the directory of the copy, as far as the shards may be written there.

        Raises:
            StoreError: If there are shards of another pack, and they must stay.
            ValueError: If a shard that the source reads would be replaced.
        """
        job = self._job
        stores = [job.store, *([LocalStore(job.copy)] if job.copy is not None else [])]
        targets = [Target(store, job.prefix, overwrite=job.overwrite) for store in stores]
        for target in targets:
            names = (*(shard.name for shard in self._all_shards), *target.existing)
            for name in names if self._source.reads else ():
                if target.store.identity(name) in self._source.reads:
                    raise ValueError(
                        f"'{target.store.locate(name)}' is a shard of the input, and would be replaced or mixed with "
                        "the output; pack under another prefix"
                    )
            target.find_stale(self._all_shards)
        return targets

    def write(self, targets: Sequence[Target], run: Callable[..., list[bool]]) -> list[list[PackedShard]]:
        """Write the shards, then what describes them; returns the shards that each target lacked."""
        copy = self._job.copy
        missing = [target.missing(self.shards, self._task, run) for target in targets]
        if copy is not None:
            existing = next(folder for folder in (copy.resolve(), *copy.resolve().parents) if folder.is_dir())
            num_bytes, free = sum(shard.num_bytes for shard in missing[1]), shutil.disk_usage(existing).free
            if num_bytes > free:
                raise StoreError(f"'{copy}' has {free} bytes free, the copy takes {num_bytes} more; name another disk")
        written = WrittenShards(
            names=[posixpath.basename(shard.name) for shard in self._all_shards],
            num_samples=sum(shard.num_samples for shard in self._all_shards),
            num_bytes=sum(shard.num_bytes for shard in self._all_shards),
        )
        for target, lacking in zip(targets, missing, strict=True):
            if not target.store.exists():
                target.store.create()
            if not target.holds(record_names(target.prefix)[0], written.to_bytes()):
                target.delete(record_names(target.prefix))
                write_record(target.store, target.prefix, written)
            if lacking:
                target.delete(_descriptions(target.prefix, (shard.name for shard in lacking)))
        # A shard goes to the store, to the copy, or to both in one stream.
        lacks = [{shard.name for shard in lacking} for lacking in missing]
        wanted = [shard for shard in self.shards if any(shard.name in names for names in lacks)]

        def target_of(name: str) -> StreamTarget | None:
            main = targets[0].access if name in lacks[0] else None
            return CopiedTarget(target=main, directory=copy) if copy is not None and name in lacks[1] else main

        run(write_file, (self._task(shard, target=target_of(shard.name)) for shard in wanted), wanted, what="pack")
        for target in targets:
            self._finish(target)
        return missing

    def _finish(self, target: Target) -> None:
        """Delete the shards beyond the last one; write the class table and what was done to photos, if they differ."""
        if target.stale:
            target.delete([*_descriptions(target.prefix, target.stale), *target.stale])
        tables = {classes_name(target.prefix): class_table_file(self._source.classes)}
        if self.steps:
            tables[recoded_name(target.prefix)] = write_steps(self.steps)
        if not all(target.holds(name, data) for name, data in tables.items()):
            target.delete(_descriptions(target.prefix, ()))
            for name, data in tables.items():
                target.store.write(name, data)
        if not self.steps:
            target.delete([recoded_name(target.prefix)])

    def _task(
        self, shard: PackedShard, *, target: StreamTarget | None = None, stored: Stored | None = None
    ) -> ShardTask:
        """The task that writes or compares a shard."""
        entries = list(map(self.entry, shard.numbers))
        return ShardTask(name=shard.name, num_bytes=shard.num_bytes, target=target, stored=stored, entries=entries)


def _descriptions(prefix: str, shards: Iterable[str]) -> list[str]:
    """The objects that describe a set with these shards."""
    return [manifest_name(prefix), columns_name(prefix), *map(index_name, shards)]
