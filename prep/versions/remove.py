"""Remove samples or shards from a data set: the next version's manifest says that they are not in it.

No shard is read or written. Samples are removed by their ordinals, shards by leaving out their rows;
`prep.versions.compact` writes the shards that hold removed samples anew.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dali_pipes.arrays import Int64s
from dali_pipes.data_set.data_set import DataSet
from dali_pipes.data_set.exclusions import excluded_ordinals
from dali_pipes.data_set.indexing import read_index, stored_versions, sums_of
from dali_pipes.errors import DataError, shown
from dali_pipes.formats.manifest import UNSIZED, Manifest, ShardsPart, with_unsized, without_unsized
from dali_pipes.formats.names import LABEL_COMPONENT, columns_name, index_name
from dali_pipes.formats.quarantine import Exclusion
from dali_pipes.formats.sample_columns import SampleColumns
from dali_pipes.formats.shard_index import ShardIndex
from dali_pipes.store.base import Store
from prep.versions.add import TOKEN_DIGITS
from prep.versions.publish import Newest, find_version, write_version

WHAT = "remove"


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
    """Of the whole data set."""
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

    Args:
        old: The data set: see `prep.versions.publish.open_newest`.
        lists: Files that list samples by key, or by shard and key: see `dali_pipes.formats.quarantine.read_exclusions`.
        keys: Keys. Every sample that has one of them is removed.
        shards: Names of shards, as the manifest has them.
        command: The command line, for the history.
        dry_run: Check only.

    Raises:
        DataError: If a key, or a key of a listed shard, is not there; if a shard is not in the data set; or if there is
            no column file. Nothing is written then.
        StoreError: If another command wrote the next version meanwhile.
        ValueError: If nothing is named, or no sample is left.
    """
    if not (lists or keys or shards):
        raise ValueError("nothing to remove: name keys, lists of keys, or shards")
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
    token = _token_of(manifest, removed, dropped)
    parts = old.parts
    if len(dropped):
        columns = data_set.sample_columns().of_shards(manifest.samples, kept)
        indexes = [index for _, index in read_indexes(old.store, manifest, dropped.tolist())]
        made = without_shards(without, dropped, indexes, columns)
        part = f"{WHAT}-{token}-"
        old.store.write(columns_name(f"{old.prefix}{part}"), columns.to_bytes(manifest=made.shards_digest))
        parts = (ShardsPart(part, made.num_shards),)
    written = write_version(old, made, parts, what=WHAT, token=token, command=command)
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


def _token_of(manifest: Manifest, removed: Int64s, dropped: Int64s) -> str:
    state = hashlib.sha256(manifest.digest.encode())
    for ordinals in (removed, dropped):
        state.update(f"{len(ordinals)} ".encode() + ordinals.astype("<i8").tobytes())
    return state.hexdigest()[:TOKEN_DIGITS]


# The sums that remain


def read_indexes(store: Store, manifest: Manifest, rows: Sequence[int]) -> Iterator[tuple[int, ShardIndex]]:
    """Yield some rows of a manifest, each with its shard's index from the store."""
    for row in rows:
        where = store.locate(index_name(manifest.names[row]))
        yield row, manifest.shard_index(row, read_index(store, manifest, row), where=where)


def without_shards(whole: Manifest, dropped: Int64s, indexes: Sequence[ShardIndex], columns: SampleColumns) -> Manifest:
    """A manifest without some rows, and with the sums of the others.

    Args:
        whole: The manifest.
        dropped: Its rows that are left out.
        indexes: Their indexes.
        columns: The columns of the samples that stay.
    """
    left = whole.take(np.setdiff1d(np.arange(whole.num_shards), dropped))
    lost = sums_of(indexes)
    return replace(
        left,
        components=_less(whole.components, lost["components"]),
        photos=_photos_less(whole.photos, lost["photos"]),
        turned=_less(whole.turned, lost["turned"]),
        labels=_labels_of(columns),
    )


def _less(counts: Mapping[str, int], lost: Mapping[str, int]) -> dict[str, int]:
    left = {name: count - lost.get(name, 0) for name, count in counts.items()}
    return {name: count for name, count in left.items() if count}


def _photos_less(
    photos: Mapping[str, Mapping[str, int]], lost: Mapping[str, Mapping[str, int]]
) -> dict[str, dict[str, int]]:
    left: dict[str, dict[str, int]] = {}
    for component, counts in photos.items():
        own = _less(with_unsized(counts), with_unsized(lost.get(component, {})))
        if own:
            left[component] = without_unsized({UNSIZED: 0, **own})
    return left


def _labels_of(columns: SampleColumns) -> dict[str, Any]:
    if columns.labels is None:
        return {}
    mask = columns.has[LABEL_COMPONENT]
    labels = columns.labels if mask is None else columns.labels[mask]
    return {"min": int(labels.min()), "max": int(labels.max())} if len(labels) else {}
