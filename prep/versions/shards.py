"""Arithmetic on manifests of data sets that lose shards: what is left of the sums."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from dali_pipes.data_set.indexing import read_index, sums_of
from dali_pipes.formats.manifest import UNSIZED, Manifest
from dali_pipes.formats.names import LABEL_COMPONENT, index_name
from dali_pipes.formats.sample_columns import SampleColumns
from dali_pipes.formats.shard_index import ShardIndex
from dali_pipes.store.base import Store

_UNKNOWN = "unknown"  # photos of this format have no size either
Int64s = npt.NDArray[np.int64]


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
        gone = lost.get(component, {})
        own = _less(_with_unsized(counts), _with_unsized(gone))
        # A manifest gives this number only if it differs from the number of unknown photos.
        if own.get(UNSIZED, 0) == own.get(_UNKNOWN, 0):
            own.pop(UNSIZED, None)
        elif UNSIZED not in own:
            own[UNSIZED] = 0
        if own:
            left[component] = own
    return left


def _with_unsized(counts: Mapping[str, int]) -> dict[str, int]:
    return {UNSIZED: counts.get(_UNKNOWN, 0), **counts}


def _labels_of(columns: SampleColumns) -> dict[str, Any]:
    if columns.labels is None:
        return {}
    mask = columns.has[LABEL_COMPONENT]
    labels = columns.labels if mask is None else columns.labels[mask]
    return {"min": int(labels.min()), "max": int(labels.max())} if len(labels) else {}
