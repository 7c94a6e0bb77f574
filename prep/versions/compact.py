"""Write the shards anew that hold removed samples, as the next version; and delete what only older versions need.

Only these shards are read. Each is compared with its checksum first. The shard written anew stands in its place, so the
order of the samples that are left does not change.
"""

import hashlib
from dataclasses import dataclass, replace

import numpy as np
import xxhash

from dali_pipes.data_set.data_set import DataSet
from dali_pipes.data_set.indexing import index_each, stored_versions
from dali_pipes.errors import DataError
from dali_pipes.formats.manifest import Manifest, ShardsPart, concatenate
from dali_pipes.formats.names import columns_name, index_name, version_name
from dali_pipes.formats.shard_index import ShardIndex
from dali_pipes.store.base import Store
from dali_pipes.store.shard_set import ShardSet
from prep.pack.target import PackedShard, plan_shards, run_tasks
from prep.pack.tasks import ShardTask, write_file
from prep.tar.writer import Entry, Range, tar_bytes
from prep.versions.add import TOKEN_DIGITS
from prep.versions.publish import Newest, find_version, write_version
from prep.versions.remove import read_indexes, without_shards
from prep.workers import Workers

WHAT = "compact"
_BLOCK_BYTES = 1 << 20


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
    """Bytes of the shards in their place; with ``dry_run`` and nothing planned yet, 0."""
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

    Args:
        old: The data set: see `prep.versions.publish.open_newest`.
        drop_old: Delete the older versions afterwards: their manifests, and the shards, indexes and column files that
            the newest version does not have. Jobs that still read them fail.
        command: The command line, for the history.
        dry_run: Check and plan only.
        jobs: The number of processes.
        show_progress: Draw bars.

    Raises:
        DataError: If a shard is not as the manifest says. Nothing is written then.
        StoreError: If another command wrote the next version meanwhile.
    """
    manifest, store = old.manifest, old.store
    counts = manifest.num_removed
    affected = np.flatnonzero(counts)
    report = CompactReport(
        url=old.url,
        version=manifest.version,
        num_rewritten=len(affected),
        num_dropped=int((counts[affected] == manifest.samples[affected]).sum()),
        num_removed=int(counts.sum()),
        bytes_before=int(manifest.shard_bytes[affected].sum()),
        bytes_after=0,
        dry_run=dry_run,
    )
    if len(affected):
        token = hashlib.sha256(f"{WHAT} {manifest.digest}".encode()).hexdigest()[:TOKEN_DIGITS]
        indexes = [index for _, index in read_indexes(store, manifest, affected.tolist())]
        part = f"{WHAT}-{token}-"
        planned = _plan(old, affected.tolist(), indexes, part)
        report = replace(report, bytes_after=sum(task.num_bytes for task in planned.values()))
        if not dry_run:
            for row in affected.tolist():
                _check_bytes(store, manifest, row)
            shards = [PackedShard(task.name, task.num_bytes, range(len(task.entries))) for task in planned.values()]
            with Workers(jobs) as workers:
                run_tasks(workers, write_file, planned.values(), shards, what=WHAT, show_progress=show_progress)
            made = _manifest_of(old, planned, indexes, part)
            parts = [ShardsPart(part, made.num_shards)]
            manifest = write_version(old, made, parts, what=WHAT, token=token, command=command)
            report = replace(report, version=manifest.version)
    if drop_old:
        versions, objects = _only_of_older(replace(old, manifest=manifest))
        for name in () if dry_run else objects:
            store.delete(name)
        report = replace(report, dropped_versions=versions, deleted=tuple(map(store.locate, objects)))
    return report


def _plan(old: Newest, rows: list[int], indexes: list[ShardIndex], part: str) -> dict[int, ShardTask]:
    """Row of each shard that has samples left -> what is written in its place."""
    manifest, access = old.manifest, old.store.access()
    planned: dict[int, ShardTask] = {}
    for row, index in zip(rows, indexes, strict=True):
        file = access.file(manifest.names[row], size=int(manifest.shard_bytes[row]))
        entries: list[Entry] = []
        sizes: list[int] = []
        for sample in np.setdiff1d(np.arange(index.num_samples), manifest.removed_in(row)).tolist():
            key = index.keys[sample]
            places = sorted(
                (int(at[sample]), name, int(index.sizes[name][sample])) for name, at in index.offsets.items()
            )
            members = [(name, Range(file, at, size)) for at, name, size in places if at >= 0]
            entries.append((key, members))
            sizes.append(sum(tar_bytes(f"{key}.{name}", content.size) for name, content in members))
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


def _manifest_of(old: Newest, planned: dict[int, ShardTask], indexes: list[ShardIndex], part: str) -> Manifest:
    """Index the shards that were written, write the column file, and return the manifest, which is not written."""
    manifest, store = old.manifest, old.store
    affected = np.flatnonzero(manifest.num_removed)
    columns = DataSet(old.shards).sample_columns()
    columns = columns.take(np.setdiff1d(np.arange(len(columns)), manifest.removed))
    made = without_shards(manifest, affected, indexes, columns)
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
        manifest = find_version(store, prefix, version)
        if manifest is not None:
            found |= dict.fromkeys(_objects_of(replace(newest, manifest=manifest)))
    needed = set(_objects_of(newest))
    names = [name for name in found if name not in needed]
    return tuple(versions), [*names, *(version_name(prefix, version) for version in versions)]


def _objects_of(data_set: Newest) -> list[str]:
    """The names of a version's shards, indexes and column files."""
    columns = [columns_name(f"{data_set.prefix}{part.name}") for part in data_set.parts]
    return [*data_set.manifest.names, *map(index_name, data_set.manifest.names), *columns]
