"""Records to WebDataset shards in a bucket or a directory, original bytes kept.

Everything that can be known before a byte is written is known then: which records are bad, how many shards there will
be and how large, and what is in their place already. Then shards are streamed to where they go, several at a time, each
by a process of its own; there is no copy on the local disk. The same records give the same shards, byte for byte, so a
pack that was interrupted is finished by running it again.

# Note [memory]: of the records, their names and sizes; of the bytes, a process holds 1 MiB of the one shard that it is
at (`tar_stream.CHUNK_BYTES`), whatever the shards' and files' sizes, and its task: paths, and up to 8 MiB of components
that are not in files (`record_check.MAX_SENT_BYTES`; a shard with more of them is written by the owner of the bytes).
"""

import json
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from prep.checksums import DEFAULT_CHECKSUM_TYPE
from prep.errors import DataError, StoreError, shown
from prep.manifest import classes_name, columns_name, index_name, manifest_name
from prep.progress import bar
from prep.record_check import MAX_SENT_BYTES, as_entry, check_records
from prep.records import Source
from prep.shard_plan import ShardPlan, plan_shards
from prep.shard_tasks import ShardTask, StreamTarget, digest_of, is_stored, write_shard
from prep.store import AisStore, LocalStore, ObjectEntry, Store
from prep.transfer import BucketAccess, RemoteFile
from prep.urls import check_object_name, is_remote, open_store
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
            says is packed, and noted), an empty file, or a mask that is no 8-bit grey PNG. ``"fail"``: raise, before
            anything is written; ``"skip"``: leave the record out; ``"keep"``: pack it as it is. What the source could
            not read is skipped with ``"skip"``, and an error otherwise.
        overwrite: Replace shards of other content under these names, and delete those beyond the last one.
        dry_run: Check and plan only.
        jobs: Shards in flight, each written by a process; 1 does all in this one. By default the cores, at most 16.
            Small sets are packed in this process whatever it says.
        show_progress: Draw bars.

    Raises:
        DataError: If records are bad and ``on_bad`` is ``"fail"``, none is left, a key cannot be a member's name, two
            are equal, or a file's or class's name is not UTF-8; or if source files change while they are packed.
        PipesError: If a worker process died.
        StoreError: If there are other shards under the prefix and ``overwrite`` is false, or writing fails. Shards that
            were complete by then stay, none is half there; running again finishes the pack.
        ValueError: If an argument cannot be, or the source's own shards lie under the prefix.
    """
    started = time.perf_counter()
    jobs = default_jobs() if jobs is None else jobs
    _check_arguments(prefix=prefix, max_count=max_count, max_bytes=max_bytes, on_bad=on_bad, jobs=jobs)
    if isinstance(store, AisStore):
        check_object_name(prefix, url=store.locate(prefix))
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
        wanted = range(len(source.records)) if on_bad == "keep" or not bad else _without(len(source.records), bad)
        left_out = (*source.skipped, *source.broken, *(bad.values() if on_bad == "skip" else ()))
        if not wanted:
            raise DataError(f"{source.name}: no record is left to pack; {shown(left_out, are_names=False)}")
        plan = plan_shards([checked.sizes[number] for number in wanted], max_count=max_count, max_bytes=max_bytes)
        names = tuple(f"{prefix}{number:06d}.tar" for number in range(len(plan)))

        existing = _listing(store, prefix)
        _check_apart(store, source, (*names, *existing))
        stale = _check_existing(store, prefix, existing, dict(zip(names, plan, strict=True)), overwrite=overwrite)
        num_written = 0
        if not dry_run:
            if isinstance(store, AisStore) and not store.exists():
                store.create()
            target = _Target(store=store, prefix=prefix, existing=existing, overwrite=overwrite)
            shards = [
                _Shard(
                    name=name,
                    num_bytes=shard.num_bytes,
                    numbers=wanted[shard.start : shard.stop],
                    held_bytes=sum(checked.held_bytes[number] for number in wanted[shard.start : shard.stop]),
                )
                for name, shard in zip(names, plan, strict=True)
            ]
            missing = target.missing(source, shards, workers=workers, show_progress=show_progress)
            target.write(source, missing, workers=workers, show_progress=show_progress)
            target.finish(stale, source.classes)
            num_written = len(missing)
    return PackReport(
        url=store.locate(prefix),
        shards=names,
        num_written=num_written,
        num_samples=len(wanted),
        num_bytes=sum(shard.num_bytes for shard in plan),
        skipped=left_out,
        kept=tuple(bad.values()) if on_bad == "keep" else (),
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
    if "{" in text or text.endswith(".tar"):
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


def _check_existing(
    store: Store,
    prefix: str,
    existing: Mapping[str, ObjectEntry],
    planned: Mapping[str, ShardPlan],
    *,
    overwrite: bool,
) -> list[str]:
    """The shards beyond the last one, to be deleted at the end.

    Raises:
        StoreError: If there are such, or shards of another size in the place of ours, without ``overwrite``.
    """
    stale = [
        name for name in existing if re.fullmatch(rf"{re.escape(prefix)}[0-9]+\.tar", name) and name not in planned
    ]
    others = [name for name, shard in planned.items() if name in existing and existing[name].size != shard.num_bytes]
    if (stale or others) and not overwrite:
        raise StoreError(
            f"'{store.locate(prefix)}' holds shards of another pack: {shown(stale + others)}; "
            "--overwrite replaces them, or pack under another prefix"
        )
    return stale


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
        tasks = (self._task(source, shard, stored=self._stored(self.existing[shard.name])) for shard in suspects)
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

    def write(self, source: Source, shards: Sequence[_Shard], *, workers: Workers, show_progress: bool) -> None:
        """Write them."""
        if not shards:
            return
        self._forget(manifest_name(self.prefix), columns_name(self.prefix), *(index_name(s.name) for s in shards))
        tasks = (self._task(source, shard, target=self._access) for shard in shards)
        _map(write_shard, tasks, shards, what="pack", workers=workers, show_progress=show_progress)

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

    def _task(
        self,
        source: Source,
        shard: _Shard,
        *,
        target: StreamTarget | None = None,
        stored: "tuple[str, str] | Path | RemoteFile | None" = None,
    ) -> ShardTask:
        entries = [as_entry(source.records[number], source) for number in shard.numbers]
        return ShardTask(shard.name, shard.num_bytes, entries, shard.held_bytes, target, stored)

    def _size(self, name: str) -> int:
        return self.existing[name].size

    def _stored(self, entry: ObjectEntry) -> "tuple[str, str] | Path | RemoteFile":
        if isinstance(access := self._access, BucketAccess):
            # Of a cloud's object the cluster may know what is no checksum of its bytes.
            kind = access.checksum_type if access.provider == "ais" else DEFAULT_CHECKSUM_TYPE
            if entry.checksum and len(entry.checksum) == len(digest_of((), kind)):
                return kind, entry.checksum
            return RemoteFile(access, entry.name, entry.size)
        return Path(self.store.locate(entry.name))

    @cached_property
    def _access(self) -> "BucketAccess | LocalStore":
        """The store, as a worker has it."""
        assert isinstance(self.store, AisStore | LocalStore), "there are no other stores"
        return self.store.access() if isinstance(self.store, AisStore) else self.store

    def _forget(self, *names: str) -> None:
        """Delete what describes other shards than the store will hold."""
        for name in names:
            if name in self.existing:
                self.store.delete(name)


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
