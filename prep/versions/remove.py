"""Remove samples or shards from a data set, and compact it: write the shards that hold removed samples anew.

A removal reads and writes no shard. Samples are removed by their ordinals, which the next version's manifest lists,
shards by leaving out their rows. A compaction reads only shards that hold removed samples, and compares each with its
checksum first. The shard written anew stands in its place, so the order of the samples that are left does not change.
"""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import xxhash

from dali_pipes.arrays import Int64s
from dali_pipes.data_set.data_set import DataSet
from dali_pipes.data_set.exclusions import excluded_ordinals
from dali_pipes.data_set.indexing import index_each, read_index, stored_versions, sums_of
from dali_pipes.errors import DataError, shown
from dali_pipes.formats.manifest import UNSIZED, Manifest, ShardsPart, concatenate, with_unsized, without_unsized
from dali_pipes.formats.names import LABEL_COMPONENT, columns_name, index_name, version_name
from dali_pipes.formats.quarantine import Exclusion
from dali_pipes.formats.sample_columns import SampleColumns
from dali_pipes.formats.shard_index import ShardIndex
from dali_pipes.store.base import Store
from dali_pipes.store.shard_set import ShardSet
from prep.pack.target import PackedShard, ShardTask, plan_shards, run_tasks, write_file
from prep.tar.writer import Range, tar_bytes
from prep.versions.publish import TOKEN_DIGITS, Newest, find_version, write_version
from prep.workers import Workers

_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class RemoveReport:
    """The result of a removal, or with ``dry_run`` the result that it would have."""

    url: str
    version: int
    """The version without the samples; with ``dry_run``, the version that there is."""
    num_removed: int
    """Samples that were in the data set, and are not any more; those of removed shards are among them."""
    num_removed_shards: int
    num_shards: int
    num_samples: int
    dry_run: bool


def remove(
    old: Newest,
    *,
    lists: Sequence[str | Path] = (),
    keys: Sequence[str] = (),
    shards: Sequence[str] = (),
    command: str = "",
    dry_run: bool = False,
) -> RemoveReport:
    """Remove samples and shards from a data set, as its next version.

    ``lists`` are files that list samples by key, or by shard and key: see `dali_pipes.formats.quarantine`. Every sample
    that has one of the ``keys`` is removed. ``shards`` are names as the manifest has them; ``command`` is for the
    history.

    Raises:
        DataError: If a key, or a key of a listed shard, is not there; if a shard is not in the data set; or if there is
            no column file. Nothing is written then.
        StoreError: If another command wrote the next version meanwhile.
        ValueError: If no sample is left.
    """
    manifest, data_set = old.manifest, DataSet(old.shards)
    dropped, removed = _rows_of_shards(old, shards), manifest.removed
    if lists or keys:
        entries = [Exclusion(shard=None, key=key, file="--key", line=0) for key in keys]
        removed = excluded_ordinals(data_set, exclude=lists, entries=entries).excluded
    without = replace(manifest, removed=removed)
    kept = np.setdiff1d(np.arange(manifest.num_shards), dropped)
    made = without.take(kept)
    if not made.num_kept:
        raise ValueError(f"no sample of '{old.url}' is left without these; delete its objects instead")
    report = RemoveReport(
        url=old.url,
        version=manifest.version,
        num_removed=manifest.num_kept - made.num_kept,
        num_removed_shards=len(dropped),
        num_shards=made.num_shards,
        num_samples=made.num_kept,
        dry_run=dry_run,
    )
    if dry_run or not (report.num_removed or len(dropped)):
        return report
    state = hashlib.sha256(manifest.digest.encode())
    for ordinals in (removed, dropped):
        state.update(f"{len(ordinals)} ".encode() + ordinals.astype("<i8").tobytes())
    token, parts = state.hexdigest()[:TOKEN_DIGITS], old.parts
    if len(dropped):
        columns = data_set.sample_columns().of_shards(manifest.samples, kept)
        made = _without_shards(without, dropped, _read_indexes(old, dropped), columns)
        part = f"remove-{token}-"
        old.store.write(columns_name(f"{old.prefix}{part}"), columns.to_bytes(manifest=made.shards_digest))
        parts = (ShardsPart(part, made.num_shards),)
    written = write_version(old, made, parts, what="remove", token=token, command=command)
    return replace(report, version=written.version)


def _rows_of_shards(old: Newest, shards: Sequence[str]) -> Int64s:
    """The rows of the named shards, sorted; shards that only older versions have were removed before."""
    there = set(old.manifest.names)
    unknown = [name for name in dict.fromkeys(shards) if name not in there]
    for version in stored_versions(old.store, old.prefix) if unknown else ():
        found = find_version(old.store, old.prefix, version)
        earlier = set() if found is None else set(found.names)
        unknown = [name for name in unknown if name not in earlier]
    if unknown:
        raise DataError(
            f"no shard {shown(unknown)} in '{old.url}', version {old.manifest.version}; expected names such as "
            f"'{old.manifest.names[0]}'"
        )
    return np.sort(old.manifest.rows_of([name for name in dict.fromkeys(shards) if name in there], where=old.url))


@dataclass(frozen=True, kw_only=True)
class CompactReport:
    """The result of a compaction, or with ``dry_run`` the result that it would have."""

    url: str
    version: int
    """The newest version afterwards; with ``dry_run``, the one that there is."""
    num_rewritten: int
    """Shards that held removed samples."""
    num_dropped: int
    """Those among them that held nothing else, and have no successor."""
    num_removed: int
    """Removed samples that no shard of the newest version holds any more."""
    bytes_before: int
    """Bytes of the shards that held removed samples."""
    bytes_after: int
    dropped_versions: tuple[int, ...] = ()
    """Older versions that were deleted, or would be."""
    deleted: tuple[str, ...] = ()
    """URLs or paths of the objects that were deleted, or would be."""
    dry_run: bool


def compact(
    old: Newest,
    *,
    drop_old: bool = False,
    command: str = "",
    dry_run: bool = False,
    jobs: int | None = None,
    show_progress: bool = False,
) -> CompactReport:
    """Write the shards that hold removed samples anew, as the next version, and maybe delete all older versions.

    With ``drop_old``, the older versions are deleted afterwards: their manifests, and the shards, indexes and column
    files that the newest version does not have. Jobs that still read them fail.

    Raises:
        DataError: If a shard is not as the manifest says. Nothing is written then.
        StoreError: If another command wrote the next version meanwhile.
    """
    manifest, store, counts = old.manifest, old.store, old.manifest.num_removed
    affected = np.flatnonzero(counts)
    token = hashlib.sha256(f"compact {manifest.digest}".encode()).hexdigest()[:TOKEN_DIGITS]
    part, indexes = f"compact-{token}-", _read_indexes(old, affected)
    planned = _plan(old, affected, indexes, part)
    report = CompactReport(
        url=old.url,
        version=manifest.version,
        num_rewritten=len(affected),
        num_dropped=int((counts[affected] == manifest.samples[affected]).sum()),
        num_removed=int(counts.sum()),
        bytes_before=int(manifest.shard_bytes[affected].sum()),
        bytes_after=sum(task.num_bytes for task in planned.values()),
        dry_run=dry_run,
    )
    if len(affected) and not dry_run:
        for row in affected.tolist():
            _check_bytes(store, manifest, row)
        shards = [PackedShard(task.name, task.num_bytes, range(len(task.entries))) for task in planned.values()]
        with Workers(jobs) as workers:
            run_tasks(workers, write_file, planned.values(), shards, what="compact", show_progress=show_progress)
        made = _compacted(old, planned, indexes, part)
        parts = [ShardsPart(part, made.num_shards)]
        manifest = write_version(old, made, parts, what="compact", token=token, command=command)
        report = replace(report, version=manifest.version)
    if drop_old:
        versions, objects = _only_of_older(replace(old, manifest=manifest))
        for name in () if dry_run else objects:
            store.delete(name)
        report = replace(report, dropped_versions=versions, deleted=tuple(map(store.locate, objects)))
    return report


def _plan(old: Newest, rows: Int64s, indexes: list[ShardIndex], part: str) -> dict[int, ShardTask]:
    """Row of each shard that has samples left -> what is written in its place."""
    manifest, access = old.manifest, old.store.access()
    planned: dict[int, ShardTask] = {}
    for row, index in zip(rows.tolist(), indexes, strict=True):
        file = access.file(manifest.names[row], size=int(manifest.shard_bytes[row]))
        entries, sizes = [], []
        for sample in np.setdiff1d(np.arange(index.num_samples), manifest.removed_in(row)).tolist():
            places = sorted((int(at[sample]), name) for name, at in index.offsets.items() if at[sample] >= 0)
            members = [(name, Range(file, at, int(index.sizes[name][sample]))) for at, name in places]
            entries.append((index.keys[sample], members))
            sizes.append(sum(tar_bytes(f"{index.keys[sample]}.{name}", content.size) for name, content in members))
        if entries:
            (shard,) = plan_shards(sizes, max_count=len(sizes), max_bytes=2**62)
            name = f"{old.prefix}{part}{len(planned):06d}.tar"
            planned[row] = ShardTask(name=name, num_bytes=shard.num_bytes, target=access, entries=entries)
    return planned


def _check_bytes(store: Store, manifest: Manifest, row: int) -> None:
    """Refuse a shard that is damaged: it would get a new checksum, with which nobody notices that any more."""
    name, state, num_bytes = manifest.names[row], xxhash.xxh64(), 0
    with store.open(name) as stream:
        while block := stream.read(_BLOCK_BYTES):
            state.update(block)
            num_bytes += len(block)
    expected = (int(manifest.shard_bytes[row]), int(manifest.checksums[row]))
    if (num_bytes, state.intdigest()) != expected:
        raise DataError(
            f"shard '{store.locate(name)}' has {num_bytes} bytes, xxhash2 {state.intdigest():016x}; the manifest says "
            f"{expected[0]}, {expected[1]:016x}; put the right shard back, or remove it: dali-pipes prep remove "
            f"--shard '{name}'"
        )


def _compacted(old: Newest, planned: dict[int, ShardTask], indexes: list[ShardIndex], part: str) -> Manifest:
    """Index the shards that were written, write the column file, and return the manifest, which is not written."""
    manifest, store = old.manifest, old.store
    affected = np.flatnonzero(manifest.num_removed)
    columns = DataSet(old.shards).sample_columns()
    columns = columns.take(np.setdiff1d(np.arange(len(columns)), manifest.removed))
    made = _without_shards(manifest, affected, indexes, columns)
    rows = np.setdiff1d(np.arange(manifest.num_shards), affected).tolist()
    if planned:
        names = tuple(task.name for task in planned.values())
        shards = ShardSet(store=store, names=names, manifest_prefix=f"{old.prefix}{part}")
        added, _ = index_each(shards, store.write, classes=manifest.classes, show_progress=False)
        # The recoding is that of the data set, not one more.
        made = replace(concatenate([made, added]), recoded=manifest.recoded)
    made = made.take(np.argsort([*rows, *planned], kind="stable"))
    store.write(columns_name(f"{old.prefix}{part}"), columns.to_bytes(manifest=made.shards_digest))
    return made


def _only_of_older(newest: Newest) -> tuple[tuple[int, ...], list[str]]:
    """The older versions, and the names of what only they have: their manifests come last."""
    store, prefix = newest.store, newest.prefix
    versions = [version for version in stored_versions(store, prefix) if version < newest.manifest.version]
    found: dict[str, None] = {}
    for version in versions:
        if (manifest := find_version(store, prefix, version)) is not None:
            found |= dict.fromkeys(_objects_of(replace(newest, manifest=manifest)))
    needed = set(_objects_of(newest))
    names = [name for name in found if name not in needed]
    return tuple(versions), [*names, *(version_name(prefix, version) for version in versions)]


def _objects_of(data_set: Newest) -> list[str]:
    """The names of a version's shards, indexes and column files."""
    columns = [columns_name(f"{data_set.prefix}{part.name}") for part in data_set.parts]
    return [*data_set.manifest.names, *map(index_name, data_set.manifest.names), *columns]


# The sums that remain


def _read_indexes(old: Newest, rows: Int64s) -> list[ShardIndex]:
    manifest, store = old.manifest, old.store
    return [
        manifest.shard_index(row, read_index(store, manifest, row), where=store.locate(index_name(manifest.names[row])))
        for row in rows.tolist()
    ]


def _without_shards(
    whole: Manifest, dropped: Int64s, indexes: Sequence[ShardIndex], columns: SampleColumns
) -> Manifest:
    """A manifest without some rows, whose indexes are given, and with the sums of the others.

    ``columns`` are those of the samples that stay.
    """
    lost, photos, labels = sums_of(indexes), {}, columns.labels
    for component, counts in whole.photos.items():
        if left := _less(with_unsized(counts), with_unsized(lost["photos"].get(component, {}))):
            photos[component] = without_unsized({UNSIZED: 0, **left})
    if labels is not None and (has_label := columns.has[LABEL_COMPONENT]) is not None:
        labels = labels[has_label]
    return replace(
        whole.take(np.setdiff1d(np.arange(whole.num_shards), dropped)),
        components=_less(whole.components, lost["components"]),
        photos=photos,
        turned=_less(whole.turned, lost["turned"]),
        labels={} if labels is None or not len(labels) else {"min": int(labels.min()), "max": int(labels.max())},
    )


def _less(counts: Mapping[str, int], lost: Mapping[str, int]) -> dict[str, int]:
    """The counts that are left, without those of zero."""
    return dict(Counter(counts) - Counter(lost))
