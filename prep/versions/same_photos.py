"""Find added photos whose bytes a data set has already, under other keys.

A shard index has the sizes of photos, and no checksums. So photos are compared by height and width (column files), by
bytes (indexes of the shards that are left), and by content (ranges of these shards). `MAX_READ` limits what is read.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from dali_pipes.data_set.data_set import DataSet
from dali_pipes.errors import DataError
from dali_pipes.formats.manifest import checksum
from dali_pipes.formats.names import index_name
from dali_pipes.formats.photo_names import find_photo
from dali_pipes.formats.sample_columns import Columns
from dali_pipes.formats.shard_index import ShardIndex

MAX_READ = 256 << 20
"""Bytes of indexes and photos of the data set: a few seconds from a store that is near."""
_REQUEST = 128 << 10  # a request takes as long as this many bytes


def find_same_photos(new: DataSet, old: DataSet) -> tuple[dict[str, str], bool]:
    """Map keys of ``new`` to the keys of samples in ``old`` that have the same photo; and tell if all were compared."""
    found: dict[str, str] = {}
    try:
        names = find_photo(new.component_counts).split(";")
    except DataError:
        return found, True  # no photo, or several in a sample
    shapes = np.unique(np.concatenate([_shapes(part, name) for _, part in new.columns_in_parts() for name in names]))
    added: dict[int, list[tuple[str, int, int]]] = {}  # bytes -> key, shard, offset
    for shard in range(new.manifest.num_shards):
        for key, start, size in _photos(new, shard, names):
            added.setdefault(size, []).append((key, shard, start))
    checksums: dict[int, dict[int, list[str]]] = {}  # bytes -> checksum -> keys
    budget = MAX_READ
    for shard, rows in _alike(old, shapes, names):
        budget -= max(_REQUEST, int(old.manifest.index_bytes[shard]))
        if budget < 0:
            return found, False
        for key, start, size in _photos(old, shard, names, rows):
            if size not in added:
                continue
            budget -= max(_REQUEST, size)
            if budget < 0:
                return found, False
            if size not in checksums:
                checksums[size] = {}
                for new_key, new_shard, new_start in added[size]:
                    data = new.read_range(new_shard, start=new_start, size=size)
                    checksums[size].setdefault(checksum(data), []).append(new_key)
            same = checksums[size].get(checksum(old.read_range(shard, start=start, size=size)), [])
            found |= dict.fromkeys(same, key)
    return found, True


def _shapes(columns: Columns, name: str) -> npt.NDArray[np.int64]:
    """Height and width of each photo as one number: int64 [N]; without any, if the column file has none."""
    height, width = columns.samples.sizes.get(name, (np.empty(0, np.int32),) * 2)
    return (height.astype(np.int64) << 32) | width


def _alike(
    old: DataSet, shapes: npt.NDArray[np.int64], names: list[str]
) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
    """The shards with photos of one of the shapes, and the rows of these photos; removed samples do not count."""
    stops = np.cumsum(old.manifest.samples, dtype=np.int64)
    for first, part in old.columns_in_parts():
        hits = [first + np.flatnonzero(np.isin(_shapes(part, name), shapes)) for name in names]
        ordinals = np.setdiff1d(np.concatenate(hits), old.manifest.removed)
        shards = np.searchsorted(stops, ordinals, side="right")
        for shard in np.unique(shards).tolist():
            yield shard, ordinals[shards == shard] - int(stops[shard] - old.manifest.samples[shard])


def _photos(
    data_set: DataSet, shard: int, names: list[str], rows: npt.NDArray[np.int64] | None = None
) -> Iterator[tuple[str, int, int]]:
    """Key, offset and bytes of the photos of a shard, or of some of its rows."""
    index = ShardIndex.from_bytes(data_set.read_index(shard), where=index_name(data_set.manifest.names[shard]))
    for name in names:
        for row in np.arange(index.num_samples) if rows is None else rows:
            if name in index.offsets and index.offsets[name][row] >= 0:
                yield index.keys[row], int(index.offsets[name][row]), int(index.sizes[name][row])
