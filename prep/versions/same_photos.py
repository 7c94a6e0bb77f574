"""Tell how many added photos a data set has already, under other keys.

A shard index has no checksums of photos. So photos are compared by height and width (column files), by size (indexes
of the shards that remain), and by their bytes (ranges of these shards). `MAX_READ_BYTES` limits what is read.
"""

import logging
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from dali_pipes.arrays import Int64s
from dali_pipes.data_set.data_set import DataSet
from dali_pipes.errors import PipesError, printable, shown
from dali_pipes.formats.names import index_name
from dali_pipes.formats.photo_names import photo_roles
from dali_pipes.formats.sample_columns import Columns
from dali_pipes.formats.shard_index import ShardIndex

_log = logging.getLogger(__name__)

MAX_READ_BYTES = 256 << 20
"""Bytes of the data set's indexes and photos: a few seconds from a near store."""
_REQUEST_BYTES = 128 << 10  # a request takes as long as this many bytes


class _LimitError(Exception):
    """The comparison would read more than `MAX_READ_BYTES`."""


class _Photo(NamedTuple):
    key: str
    shard: int
    offset: int
    size: int


class _Photos:
    """Finds and reads photos of a data set, up to `MAX_READ_BYTES`."""

    def __init__(self, data_set: DataSet) -> None:
        self.data_set = data_set
        self._num_read = 0

    def of_shard(self, shard: int, names: Sequence[str], rows: Int64s | None = None) -> Iterator[_Photo]:
        """The photos of a shard, or of some of its rows, by its index."""
        manifest = self.data_set.manifest
        self._count(int(manifest.index_bytes[shard]))
        index = ShardIndex.from_bytes(self.data_set.read_index(shard), where=index_name(manifest.names[shard]))
        for name in filter(index.offsets.__contains__, names):
            for row in np.arange(index.num_samples) if rows is None else rows:
                if (offset := int(index.offsets[name][row])) >= 0:
                    yield _Photo(index.keys[row], shard, offset, int(index.sizes[name][row]))

    def read(self, photo: _Photo) -> bytes:
        self._count(photo.size)
        return self.data_set.read_range(photo.shard, start=photo.offset, size=photo.size)

    def _count(self, num_bytes: int) -> None:
        self._num_read += num_bytes + _REQUEST_BYTES
        if self._num_read > MAX_READ_BYTES:
            raise _LimitError


def warn_of_same_photos(new: DataSet, old: DataSet) -> int:
    """Log how many samples of ``new`` have a photo that ``old`` has, and return the number; an error is logged, too."""
    same: dict[str, str] = {}
    url, note = printable(old.shards.url), ""
    try:
        same.update(_equal_photos(new, old))  # keeps what was found before an error
    except _LimitError:
        note = " (not all photos were compared: it would take long)"
    except PipesError as exc:
        _log.warning("added photos are not compared with those of '%s': %s", url, exc)
        return 0
    if same:
        pairs = [f"'{printable(key)}' is '{printable(known)}'" for key, known in same.items()]
        _log.warning(
            "%d of %d added photos are in '%s' already, under other keys: %s; prep remove --key takes them out%s",
            len(same), new.manifest.num_samples, url, shown(pairs, are_names=False), note,
        )  # fmt: skip
    return len(same)


def _equal_photos(new: DataSet, old: DataSet) -> Iterator[tuple[str, str]]:
    """Keys of samples of ``new`` and ``old`` whose photos have the same bytes."""
    names = photo_roles(new.component_counts[""]).photos
    if not names:
        return
    shapes = [_shapes(columns, name) for _, columns in new.columns_in_parts() for name in names]
    added, known = _Photos(new), _Photos(old)
    of_size: dict[int, list[_Photo]] = {}
    for shard in range(new.manifest.num_shards):
        for photo in added.of_shard(shard, names):
            of_size.setdefault(photo.size, []).append(photo)
    contents: dict[int, list[bytes]] = {}
    for shard, rows in _rows_of_shapes(old, np.concatenate(shapes), names):
        for photo in known.of_shard(shard, names, rows):
            if photo.size not in of_size:
                continue
            if photo.size not in contents:
                contents[photo.size] = [added.read(equal) for equal in of_size[photo.size]]
            content = known.read(photo)
            for equal, data in zip(of_size[photo.size], contents[photo.size], strict=True):
                if data == content:
                    yield equal.key, photo.key


def _shapes(columns: Columns, name: str) -> Int64s:
    """Height and width of each photo as one number: int64 [N]; empty if the column file has no sizes."""
    height, width = columns.samples.sizes.get(name, (np.empty(0, np.int32),) * 2)
    return (height.astype(np.int64) << 32) | width


def _rows_of_shapes(old: DataSet, shapes: Int64s, names: Sequence[str]) -> Iterator[tuple[int, Int64s]]:
    """The shards with photos of one of the shapes, and the rows of these photos, without removed samples."""
    stops = np.cumsum(old.manifest.samples, dtype=np.int64)
    for first, part in old.columns_in_parts():
        hits = [first + np.flatnonzero(np.isin(_shapes(part, name), shapes)) for name in names]
        ordinals = np.setdiff1d(np.concatenate(hits), old.manifest.removed)
        shards = np.searchsorted(stops, ordinals, side="right")
        for shard in np.unique(shards).tolist():
            yield shard, ordinals[shards == shard] - int(stops[shard] - old.manifest.samples[shard])
