"""Manifests of shards that do not exist."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from dali_pipes.formats.manifest import Manifest
from dali_pipes.formats.sample_columns import ColumnRanges, SampleColumns, read_columns
from dali_pipes.formats.shard_index import PhotoColumns, ShardIndex


def manifest_of(samples: list[int], /, **fields: Any) -> Manifest:
    """A manifest of shards ``s-0.tar``, ``s-1.tar``, ... with these numbers of samples, which are all other numbers."""
    numbers = np.array(samples, np.int64)
    columns = {
        "names": [f"s-{row}.tar" for row in range(len(samples))],
        "shard_bytes": numbers,
        "checksums": numbers.astype(np.uint64),
        "samples": numbers,
        "index_bytes": numbers,
        "index_checksums": numbers.astype(np.uint64),
    }
    return Manifest(**(columns | fields))


def read_column_file(data: bytes, *, manifest: Manifest) -> SampleColumns:
    """All columns of a column file that is called ``c``."""
    file = ColumnRanges(
        lambda start, size: data[start : start + size],
        samples=manifest.samples,
        manifest=manifest.shards_digest,
        where="c",
    )
    return read_columns([file], np.arange(manifest.num_shards))


def index_of_rows(rows: Sequence[tuple[Any, ...]]) -> ShardIndex:
    """The index of a shard of samples: key, components, label and, if there are photos, the height of each photo."""
    components = sorted({name for _, names, *_ in rows for name in names})
    offsets = {c: np.array([512 if c in names else -1 for _, names, *_ in rows], np.int64) for c in components}
    photos = {}
    for component in {"jpg", "seg.png"} & {*components}:
        if len(rows[0]) > 3:
            height = np.array([side if component in names else 0 for _, names, _, side in rows], np.int32)
            photos[component] = PhotoColumns(height=height, width=height // 2, format=np.zeros(len(rows), np.uint8))
    labels = np.array([label if "cls" in names else 0 for _, names, label, *_ in rows], np.int64)
    return ShardIndex(
        shard="s.tar",
        shard_bytes=4096,
        shard_checksum=0,
        keys=[key for key, *_ in rows],
        offsets=offsets,
        sizes=offsets,
        checksums={c: np.zeros(len(rows), np.uint64) for c in components},
        labels=labels if "cls" in components else None,
        photos=photos,
    )
