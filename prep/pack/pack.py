"""Records to WebDataset shards in a bucket or a directory, original bytes kept.

Everything that can be known before a byte is written is known then: which records are bad, how many shards there will
be and how large, and what is in their place already. Then shards are streamed to where they go, several at a time, each
by a process of its own; there is no copy on the local disk, unless one is asked for. The same records give the same
shards, byte for byte, so a pack that was interrupted is finished by running it again.

# Note [memory]: of the records, their names and sizes; of the bytes, a process holds 1 MiB of the one shard that it is
at (`tar_stream.CHUNK_BYTES`), whatever the shards' and files' sizes, and its task: paths, and up to 8 MiB of components
that are not in files (`record_check.MAX_SENT_BYTES`; a shard with more of them is written by the owner of the bytes).
"""

import json
import re
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from dali_pipes.errors import DataError, StoreError, shown
from dali_pipes.formats.names import classes_name, columns_name, index_name, manifest_name
from dali_pipes.progress import bar
from dali_pipes.store.ais import AisStore
from dali_pipes.store.base import ObjectEntry, Store
from dali_pipes.store.checksums import DEFAULT_CHECKSUM_TYPE
from dali_pipes.store.local import LocalStore
from dali_pipes.store.shard_names import extension_of
from dali_pipes.store.transfer import BucketAccess, RemoteFile
from dali_pipes.store.urls import check_object_name, is_remote, open_store
from prep.pack.check import MAX_SENT_BYTES, as_entry, check_records
from prep.pack.plan import ShardPlan, plan_shards
from prep.pack.second_copy import CopiedTarget
from prep.pack.tasks import ShardTask, StreamTarget, digest_of, is_stored, write_shard
from prep.sources.record import Source
from prep.workers import Report, Workers, default_jobs

__all__ = ["DEFAULT_PREFIX", "OnBad", "PackReport", "open_target", "pack"]

OnBad = Literal["fail", "skip", "keep"]
DEFAULT_PREFIX = "samples-"

# AIStore and WebDataset recommend shards of some 100 MB to 1 GB; the count is a second limit, for small samples.
DEFAULT_MAX_COUNT = 10_000
DEFAULT_MAX_BYTES = 256 << 20

# Below this, starting processes takes longer than writing.
MIN_SHARED_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class PackReport:
    """What a pack did, or with ``dry_run`` would do."""

    url: str
    """``ais://pets/samples-``: what all the names start with."""
    shards: tuple[str, ...]
    """All shards of the set, in order."""
    num_written: int
    """Those that were not there already, byte for byte."""
    copy: str | None
    """The directory that has the second copy."""
    num_copied: int
    """Shards that it did not have."""
    num_samples: int
    num_bytes: int
    """Of all the shards."""
    skipped: tuple[str, ...]
    """What was left out, one line each: key and reason."""
    kept: tuple[str, ...]
    """Bad records that were packed all the same, likewise."""
    noted: tuple[str, ...]
    """Photos in another format than their name says, which DALI decodes all the same: packed, likewise."""
    elapsed_s: float
    dry_run: bool


def pack(
    source: Source,
    *,
    store: Store,
    prefix: str = DEFAULT_PREFIX,
    max_count: int = DEFAULT_MAX_COUNT,
    max_bytes: int = DEFAULT_MAX_BYTES,
    on_bad: OnBad = "fail",
    overwrite: bool = False,
    dry_run: bool = False,
    copy: Path | None = None,
    jobs: int | None = None,
    show_progress: bool = False,
) -> PackReport:
    """Write ``PREFIX000000.tar``, ``PREFIX000001.tar``, ... and, last, the class table ``PREFIXclasses.json``.

    Args:
        source: The records, packed in their order, and their class table.
        store: Where to; a bucket that is not there is made.
        prefix: What the names start with.
        max_count: Samples a shard at most.
        max_bytes: Bytes a shard at most; a sample that is larger gets a shard of its own.
        on_bad: What to do about a photo in no format that DALI decodes (one in another format than its extension
            says is packed, and noted), an empty file, a file that is not there or cannot be read, or a mask that is no
            8-bit grey PNG, damaged, or of another size than its photo. ``"fail"``: raise, before anything is written;
            ``"skip"``: leave the record out; ``"keep"``: pack it as it is, without the files that cannot be read; where
            that is all of them it is left out. What the source itself could not read is skipped with ``"skip"``, and an
            error otherwise.
        overwrite: Replace shards of other content under these names, and delete those beyond the last one.
        dry_run: Check and plan only.
        copy: A directory that gets a second copy of shards and class table, under the same names, written as they are
            sent: the files are read once. What it has already stays, and what ``overwrite`` says goes for it, too. By
            default there is none.
        jobs: Shards in flight, each written by a process; 1 does all in this one. By default the cores, at most 16.
            Small sets are packed in this process whatever it says.
        show_progress: Draw bars.

    Raises:
        DataError: If records are bad and ``on_bad`` is ``"fail"``, none is left, a key cannot be a member's name, two
            are equal, or a file's or class's name is not UTF-8; or if source files change while they are packed.
        PipesError: If a worker process died.
        StoreError: If there are other shards under the prefix and ``overwrite`` is false, there is no room for the
            copy, or writing fails. Shards that were complete by then stay, none is half there; running again finishes
            the pack.
        ValueError: If an argument cannot be, the source's own shards lie under the prefix, or the copy would be the
            pack itself.
    """
    started = time.perf_counter()
    jobs = default_jobs() if jobs is None else jobs
    _check_arguments(prefix=prefix, max_count=max_count, max_bytes=max_bytes, on_bad=on_bad, jobs=jobs)
    if isinstance(store, AisStore):
        check_object_name(prefix, url=store.locate(prefix))
    if copy is not None:
        _check_copy(store, copy)
    if source.broken and on_bad != "skip":
        raise DataError(
            f"{len(source.broken)} records of {source.name} cannot be read: {shown(source.broken, are_names=False)}; "
            "leave them out with --on-bad skip"
        )
    with Workers(jobs) as workers:
        checked = check_records(source, workers=workers, show_progress=show_progress)
        bad, noted = checked.bad, checked.noted
        if bad and on_bad == "fail":
            raise DataError(
                f"{len(bad)} of {len(source.records)} records of {source.name} are bad: "
                f"{shown(list(bad.values()), are_names=False)}; "
                "leave them out with --on-bad skip, or pack them as they are with --on-bad keep"
            )
        dropped = bad if on_bad == "skip" else {number: bad[number] for number in sorted(checked.empty)}
        wanted = _without(len(source.records), dropped) if dropped else range(len(source.records))
        left_out = (*source.skipped, *source.broken, *dropped.values())
        if not wanted:
            raise DataError(f"{source.name}: no record is left to pack; {shown(left_out, are_names=False)}")
        plan = plan_shards([checked.sizes[number] for number in wanted], max_count=max_count, max_bytes=max_bytes)
        names = tuple(f"{prefix}{number:06d}.tar" for number in range(len(plan)))

        places = [store, *([LocalStore(copy)] if copy is not None else [])]
        targets = [
            _Target(
                store=place,
                prefix=prefix,
                existing=_listing(place, prefix),
                overwrite=overwrite,
                unread=checked.unread,
            )
            for place in places
        ]
        planned = dict(zip(names, plan, strict=True))
        for target in targets:
            _check_apart(target.store, source, (*names, *target.existing))
        stale = [target.stale(planned) for target in targets]
        shards = [
            _Shard(
                name=name,
                num_bytes=shard.num_bytes,
                numbers=wanted[shard.start : shard.stop],
                held_bytes=sum(checked.held_bytes[number] for number in wanted[shard.start : shard.stop]),
            )
            for name, shard in planned.items()
        ]
        missing: list[list[_Shard]] = [[] for _ in targets]
        if not dry_run:
            if isinstance(store, AisStore) and not store.exists():
                store.create()
            missing = [
                target.missing(source, shards, workers=workers, show_progress=show_progress) for target in targets
            ]
            if copy is not None:
                _check_room(copy, sum(shard.num_bytes for shard in missing[1]))
            _write(source, shards, targets, missing, workers=workers, show_progress=show_progress)
            for target, gone in zip(targets, stale, strict=True):
                target.finish(gone, source.classes)
    return PackReport(
        url=store.locate(prefix),
        shards=names,
        num_written=len(missing[0]),
        copy=None if copy is None else str(copy),
        num_copied=len(missing[-1]) if copy is not None else 0,
        num_samples=len(wanted),
        num_bytes=sum(shard.num_bytes for shard in plan),
        skipped=left_out,
        kept=tuple(text for number, text in bad.items() if number not in dropped),
        noted=tuple(noted[number] for number in wanted if number in noted),
        elapsed_s=time.perf_counter() - started,
        dry_run=dry_run,
    )


def open_target(url: str | Path, *, endpoint: str | None) -> tuple[Store, str]:
    """The store and the prefix that a pack's URL names.

    ``ais://BUCKET[/PREFIX]`` or ``DIRECTORY[/PREFIX]``. A last part that ends in ``-`` or ``_`` is what the shards'
    names start with; any other is a folder, and `DEFAULT_PREFIX` follows.

    Raises:
        ValueError: If the URL names shards and not a prefix, a bucket's or object's name is none, or there is no
            ``endpoint`` for a bucket.
    """
    text = str(url)
    if "{" in text or extension_of(text):
        raise ValueError(f"'{text}' names shards; expected what their names start with, such as ais://pets/samples-")
    if is_remote(text):
        store, prefix = open_store(text, endpoint=endpoint)
        if prefix and not prefix.endswith(("-", "_", "/")):
            prefix += "/"
        return store, prefix if prefix.endswith(("-", "_")) else f"{prefix}{DEFAULT_PREFIX}"
    if text.endswith(("-", "_")) and not Path(text).is_dir():
        return open_store(text, endpoint=endpoint)
    if "://" in text:
        open_store(text, endpoint=endpoint)  # raises, and names the schemes
    return LocalStore(Path(text)), DEFAULT_PREFIX


def _check_arguments(*, prefix: str, max_count: int, max_bytes: int, on_bad: str, jobs: int) -> None:
    if not prefix or prefix.endswith("/") or prefix[-1].isdigit():
        raise ValueError(
            f"prefix must end in a name's start that is no digit, such as 'train/samples-', got '{prefix}'"
        )
    if max_count < 1:
        raise ValueError(f"max_count must be positive, got {max_count}")
    if max_bytes < 1:
        raise ValueError(f"max_bytes must be positive, got {max_bytes}")
    if jobs < 1:
        raise ValueError(f"jobs must be positive, got {jobs}")
    if on_bad not in get_args(OnBad):
        raise ValueError(f"on_bad must be one of {', '.join(get_args(OnBad))}, got '{on_bad}'")


# Before anything is written


def _without(num: int, bad: Mapping[int, str]) -> list[int]:
    return [number for number in range(num) if number not in bad]


def _listing(store: Store, prefix: str) -> dict[str, ObjectEntry]:
    if isinstance(store, AisStore) and not store.exists():
        return {}
    return {entry.name: entry for entry in store.list(prefix)}


def _check_apart(store: Store, source: Source, names: Iterable[str]) -> None:
    """Refuse to write where the source reads.

    Raises:
        ValueError: Names the first such shard.
    """
    if not source.reads:
        return
    for name in names:
        place = store.locate(name)
        if (str(Path(place).resolve()) if isinstance(store, LocalStore) else place) in source.reads:
            raise ValueError(f"'{place}' is read, and would be written over or stand beside; pack under another prefix")


def _check_copy(store: Store, copy: Path) -> None:
    if copy.exists() and not copy.is_dir():
        raise ValueError(f"copy must be a directory, '{copy}' is a file")
    if isinstance(store, LocalStore) and store.directory.resolve() == copy.resolve():
        raise ValueError(f"copy must be another directory than that of the pack, got '{copy}' twice")


def _check_room(copy: Path, num_bytes: int) -> None:
    """Refuse what the disk does not hold, before half of it is there.

    Raises:
        StoreError: Says how much it holds.
    """
    there = next(folder for folder in (copy.resolve(), *copy.resolve().parents) if folder.is_dir())
    free = shutil.disk_usage(there).free
    if num_bytes > free:
        raise StoreError(f"'{copy}' has room for {free} bytes, the copy takes {num_bytes} more; name another disk")


# Writing


class _Shard(NamedTuple):
    """A shard to be."""

    name: str
    num_bytes: int
    numbers: Sequence[int]
    """Its records."""
    held_bytes: int


@dataclass(kw_only=True)
class _Target:
    """The store while it is written to."""

    store: Store
    prefix: str
    existing: Mapping[str, ObjectEntry]
    overwrite: bool
    unread: Mapping[int, frozenset[str]]
    """Components of records that are left out, by the records' numbers."""

    def stale(self, planned: Mapping[str, ShardPlan]) -> list[str]:
        """The shards beyond the last one, to be deleted at the end.

        Raises:
            StoreError: If there are such, or shards of another size in the place of ours, which must stay.
        """
        pattern = re.compile(rf"{re.escape(self.prefix)}[0-9]+\.tar")
        stale = [name for name in self.existing if pattern.fullmatch(name) and name not in planned]
        others = [n for n, shard in planned.items() if n in self.existing and self._size(n) != shard.num_bytes]
        if (stale or others) and not self.overwrite:
            raise StoreError(
                f"'{self.store.locate(self.prefix)}' holds shards of another pack: {shown(stale + others)}; "
                "--overwrite replaces them, or pack under another prefix"
            )
        return stale

    def missing(
        self, source: Source, shards: Sequence[_Shard], *, workers: Workers, show_progress: bool
    ) -> list[_Shard]:
        """The shards that the store does not have, byte for byte.

        Raises:
            StoreError: If it has others of their size, and must not overwrite them.
        """
        suspects = [
            shard for shard in shards if shard.name in self.existing and self._size(shard.name) == shard.num_bytes
        ]
        if not suspects:
            return list(shards)
        tasks = (self.task(source, shard, stored=self._stored(self.existing[shard.name])) for shard in suspects)
        same = _map(is_stored, tasks, suspects, what="compare", workers=workers, show_progress=show_progress)
        there = {shard.name for shard, is_same in zip(suspects, same, strict=True) if is_same}
        others = [shard.name for shard in suspects if shard.name not in there]
        if others and not self.overwrite:
            raise StoreError(
                f"'{self.store.locate(others[0])}' is there with other content"
                f"{f', and {len(others) - 1} more are' if len(others) > 1 else ''}; "
                "--overwrite replaces it, or pack under another prefix"
            )
        return [shard for shard in shards if shard.name not in there]

    def forget(self, shards: Sequence[_Shard]) -> None:
        """Delete what describes shards that are about to be written."""
        if shards:
            self._forget(manifest_name(self.prefix), columns_name(self.prefix), *(index_name(s.name) for s in shards))

    def finish(self, stale: Sequence[str], classes: Mapping[int, str]) -> None:
        """Delete the shards beyond the last one; write the class table, unless the store has it."""
        for name in stale:
            self._forget(manifest_name(self.prefix), columns_name(self.prefix), index_name(name))
            self.store.delete(name)
        table = json.dumps({str(label): classes[label] for label in sorted(classes)}, indent=0, ensure_ascii=False)
        name, data = classes_name(self.prefix), table.encode()
        if name not in self.existing or self.store.read(name) != data:
            self._forget(manifest_name(self.prefix), columns_name(self.prefix))
            self.store.write(name, data)

    def task(
        self,
        source: Source,
        shard: _Shard,
        *,
        target: StreamTarget | None = None,
        stored: "tuple[str, str] | Path | RemoteFile | None" = None,
    ) -> ShardTask:
        none: frozenset[str] = frozenset()
        entries = [
            as_entry(source.records[number], source, without=self.unread.get(number, none)) for number in shard.numbers
        ]
        return ShardTask(shard.name, shard.num_bytes, entries, shard.held_bytes, target, stored)

    def _size(self, name: str) -> int:
        return self.existing[name].size

    def _stored(self, entry: ObjectEntry) -> "tuple[str, str] | Path | RemoteFile":
        if isinstance(access := self.access, BucketAccess):
            # Of a cloud's object the cluster may know what is no checksum of its bytes.
            kind = access.checksum_type if access.provider == "ais" else DEFAULT_CHECKSUM_TYPE
            if entry.checksum and len(entry.checksum) == len(digest_of((), kind)):
                return kind, entry.checksum
            return RemoteFile(access, entry.name, entry.size)
        return Path(self.store.locate(entry.name))

    @cached_property
    def access(self) -> "BucketAccess | LocalStore":
        """The store, as a worker has it."""
        assert isinstance(self.store, AisStore | LocalStore), "there are no other stores"
        return self.store.access() if isinstance(self.store, AisStore) else self.store

    def _forget(self, *names: str) -> None:
        """Delete what describes other shards than the store will hold."""
        for name in names:
            if name in self.existing:
                self.store.delete(name)


def _write(
    source: Source,
    shards: Sequence[_Shard],
    targets: Sequence[_Target],
    missing: Sequence[Sequence[_Shard]],
    *,
    workers: Workers,
    show_progress: bool,
) -> None:
    """Write each shard that the store or the copy lacks, to those that lack it, of one stream."""
    for target, lacking in zip(targets, missing, strict=True):
        target.forget(lacking)
    lacks = [{shard.name for shard in lacking} for lacking in missing]
    wanted = [shard for shard in shards if any(shard.name in names for names in lacks)]
    if not wanted:
        return

    def goes_to(name: str) -> StreamTarget:
        main = targets[0].access if name in lacks[0] else None
        if len(targets) == 1 or name not in lacks[1]:
            assert main is not None, "one of them lacks it"
            return main
        copy = targets[1].access
        assert isinstance(copy, LocalStore), "a copy is in a directory"
        return CopiedTarget(target=main, copy=copy)

    tasks = (targets[0].task(source, shard, target=goes_to(shard.name)) for shard in wanted)
    _map(write_shard, tasks, wanted, what="pack", workers=workers, show_progress=show_progress)


def _map(
    function: "Callable[[ShardTask, Report], bool]",
    tasks: Iterable[ShardTask],
    shards: Sequence[_Shard],
    *,
    what: str,
    workers: Workers,
    show_progress: bool,
) -> list[bool]:
    num_samples = sum(len(shard.numbers) for shard in shards)
    is_small = len(shards) == 1 or sum(shard.num_bytes for shard in shards) < MIN_SHARED_BYTES
    with bar(what=what, total=num_samples, unit="samples", shown=show_progress) as drawn:
        return workers.map(
            function,
            tasks,
            inline=lambda task: is_small or task.held_bytes > MAX_SENT_BYTES,
            on_progress=drawn.update,
        )
