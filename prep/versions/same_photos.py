"""Warn of added photos whose bytes a data set has already, under other keys.

A shard index has the sizes of photos, and no checksums. So photos are compared by height and width (column files), by
bytes (indexes of the shards that are left), and by content (ranges of these shards). `MAX_READ` limits what is read.
"""

import logging
from collections.abc import Iterator
from functools import cache

import numpy as np
import numpy.typing as npt

from dali_pipes.data_set.data_set import DataSet
from dali_pipes.errors import DataError, PipesError, printable, shown
from dali_pipes.formats.manifest import checksum
from dali_pipes.formats.names import index_name
from dali_pipes.formats.photo_names import find_photo
from dali_pipes.formats.sample_columns import Columns
from dali_pipes.formats.shard_index import ShardIndex

MAX_READ = 256 << 20
"""Bytes of the data set's indexes and photos: a few seconds from a store that is near."""
_REQUEST = 128 << 10  # a request takes as long as this many bytes
_log = logging.getLogger(__name__)

Int64s = npt.NDArray[np.int64]


def warn_of_same_photos(new: DataSet, old: DataSet) -> int:
    """Log how many samples of ``new`` have a photo that ``old`` has, and return the number. What fails is logged."""
    found: dict[str, str] = {}
    url = printable(old.shards.url)
    try:
        is_whole = _match_photos(new, old, found)
    except PipesError as exc:
        _log.warning("added photos are not compared with those of '%s': %s", url, exc)
        return 0
    if found:
        pairs = [f"'{printable(key)}' is '{printable(known)}'" for key, known in found.items()]
        _log.warning(
            "%d of %d added photos are in '%s' already, under other keys: %s; prep remove --key takes them out%s",
            len(found), new.manifest.num_samples, url, shown(pairs, are_names=False),
            "" if is_whole else " (not all photos were compared: it would take long)",
        )  # fmt: skip
    return len(found)


def _match_photos(new: DataSet, old: DataSet, found: dict[str, str]) -> bool:
    """Map keys of ``new`` to those of the same photos in ``old``; tells whether all photos were compared."""
    try:
        names = find_photo(new.component_counts).split(";")
    except DataError:
        return True  # no photo, or several in a sample
    shapes = np.unique(np.concatenate([_shapes(part, name) for _, part in new.columns_in_parts() for name in names]))
    places: dict[int, list[tuple[str, int, int]]] = {}  # bytes -> key, shard, offset
    for shard in range(new.manifest.num_shards):
        for key, start, size in _photos(new, shard, names):
            places.setdefault(size, []).append((key, shard, start))

    budget = MAX_READ

    @cache
    def checksums(size: int) -> dict[str, int]:
        nonlocal budget
        budget -= (size + _REQUEST) * len(places[size])
        if budget < 0:
            return {}
        return {key: checksum(new.read_range(shard, start=start, size=size)) for key, shard, start in places[size]}

    for shard, rows in _rows_of_shapes(old, shapes, names):
        photos = [photo for photo in _photos(old, shard, names, rows) if photo[2] in places]
        budget -= int(old.manifest.index_bytes[shard]) + sum(size for *_, size in photos) + _REQUEST * (1 + len(photos))
        if budget < 0:
            return False
        for known, start, size in photos:
            same = checksum(old.read_range(shard, start=start, size=size))
            found |= {key: known for key, value in checksums(size).items() if value == same}
    return budget >= 0


def _shapes(columns: Columns, name: str) -> Int64s:
    """Height and width of each photo as one number: int64 [N]; without any, if the column file has none."""
    height, width = columns.samples.sizes.get(name, (np.empty(0, np.int32),) * 2)
    return (height.astype(np.int64) << 32) | width


def _rows_of_shapes(old: DataSet, shapes: Int64s, names: list[str]) -> Iterator[tuple[int, Int64s]]:
    """The shards with photos of one of the shapes, and the rows of these photos; removed samples do not count."""
    stops = np.cumsum(old.manifest.samples, dtype=np.int64)
    for first, part in old.columns_in_parts():
        hits = [first + np.flatnonzero(np.isin(_shapes(part, name), shapes)) for name in names]
        ordinals = np.setdiff1d(np.concatenate(hits), old.manifest.removed)
        shards = np.searchsorted(stops, ordinals, side="right")
        for shard in np.unique(shards).tolist():
            yield shard, ordinals[shards == shard] - int(stops[shard] - old.manifest.samples[shard])


def _photos(
    data_set: DataSet, shard: int, names: list[str], rows: Int64s | None = None
) -> Iterator[tuple[str, int, int]]:
    """Key, offset and bytes of the photos of a shard, or of some of its rows."""
    index = ShardIndex.from_bytes(data_set.read_index(shard), where=index_name(data_set.manifest.names[shard]))
    for name in names:
        for row in np.arange(index.num_samples) if rows is None else rows:
            if name in index.offsets and index.offsets[name][row] >= 0:
                yield index.keys[row], int(index.offsets[name][row]), int(index.sizes[name][row])
