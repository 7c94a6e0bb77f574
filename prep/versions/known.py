"""Find keys of a source that the data set has, or one beside it, and photos that it has under other keys.

A shard index has the sizes of photos, and no checksums. So photos are compared by height and width (column files), by
bytes (indexes of the shards that remain), and by content (ranges of these shards). `MAX_READ` limits what is read.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from dali_pipes.arrays import Int64s
from dali_pipes.data_set.data_set import DataSet
from dali_pipes.data_set.indexing import read_manifest
from dali_pipes.errors import DataError, PipesError, printable, shown
from dali_pipes.formats.manifest import checksum
from dali_pipes.formats.names import index_name, manifest_name
from dali_pipes.formats.photo_names import find_photo
from dali_pipes.formats.sample_columns import Columns
from dali_pipes.formats.shard_index import ShardIndex
from prep.sources.record import Record, Source
from prep.versions.publish import Newest

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Compared:
    """A source without the records that are not added."""

    source: Source
    num_known: int = 0
    """Records that were left out, because the data set has their keys."""
    elsewhere: Mapping[str, int] | None = None
    """URL of another data set beside it -> the records that were left out, because that one has their keys."""


def leave_out_known(source: Source, data_set: DataSet, old: Newest, *, skip: bool, shares_keys: bool) -> Compared:
    """Leave out records whose keys samples of the data set have, or of one beside it; removed samples do not count.

    Args:
        source: The records.
        data_set: All shards of ``old``.
        old: The data set.
        skip: Leave the records out; otherwise they are an error.
        shares_keys: Take keys that only other data sets have.

    Raises:
        DataError: If keys are known and ``skip`` is false, or a manifest or column file is broken.
    """
    asked = {record.key for record in source.records}
    known = _keys_in(data_set, asked)
    if known and not skip:
        raise DataError(
            f"'{old.url}' has {len(known)} of the {len(source.records)} keys of {source.name} already: "
            f"{shown(sorted(known))}; leave them out with --known skip, or give the records other keys"
        )
    elsewhere: dict[str, set[str]] = {}
    new = asked - known
    for other in _sets_beside(old) if new and not shares_keys else ():
        opened = DataSet(other.shards)
        if not opened.has_columns():
            _log.warning(
                "'%s' has no column file, so keys are not compared with it; index it anew: %s",
                printable(other.url), other.shards.index_command,
            )  # fmt: skip
        elif found := _keys_in(opened, new):
            elsewhere[printable(other.url)] = found
    if elsewhere and not skip:
        counts = ", ".join(f"'{url}' has {len(keys)} ({shown(sorted(keys)[:1])})" for url, keys in elsewhere.items())
        raise DataError(
            f"keys of {source.name} are in other data sets beside '{old.url}': {counts}; is one of them held out for "
            "evaluation? leave these records out with --known skip, or, if the data sets may have the same keys, add "
            "them with --shared-keys"
        )
    dropped = known.union(*elsewhere.values())
    if dropped:
        source = keep_records(source, lambda record: record.key not in dropped)
    return Compared(source, len(known), {url: len(keys) for url, keys in elsewhere.items()})


def _keys_in(data_set: DataSet, asked: set[str]) -> set[str]:
    removed = set(data_set.manifest.removed.tolist())
    # In parts: all keys of a billion samples take 40 GB.
    parts = ((first, columns.samples.keys) for first, columns in data_set.columns_in_parts())
    return {key for first, keys in parts for row, key in enumerate(keys, first) if key in asked and row not in removed}


def _sets_beside(old: Newest) -> Iterator[Newest]:
    """The other data sets of the same folder that have a manifest."""
    folder, slash, _ = old.prefix.rpartition("/")
    folder += slash
    ending = manifest_name("")
    for entry in old.store.list_all(folder):
        prefix = entry.name.removesuffix(ending)
        if prefix in (entry.name, old.prefix) or "/" in prefix[len(folder) :]:
            continue
        manifest = read_manifest(old.store, prefix)
        if manifest is not None:
            yield Newest(store=old.store, prefix=prefix, manifest=manifest)


def keep_records(source: Source, is_kept: Callable[[Record], bool]) -> Source:
    """The source with some of its records; what it says of a record's number is said of its new number."""
    numbers = [number for number, record in enumerate(source.records) if is_kept(record)]
    places = {number: place for place, number in enumerate(numbers)}

    def renumbered(texts: Mapping[int, str]) -> dict[int, str]:
        return {places[number]: text for number, text in texts.items() if number in places}

    records: Sequence[Record] = [source.records[number] for number in numbers]
    return replace(source, records=records, doubtful=renumbered(source.doubtful))


# Photos

MAX_READ = 256 << 20
"""Bytes of the data set's indexes and photos: a few seconds from a store that is near."""
_REQUEST = 128 << 10  # a request takes as long as this many bytes
_log = logging.getLogger(__name__)


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
    added: dict[int, list[_Photo]] = {}
    for shard in range(new.manifest.num_shards):
        for photo in _photos(new, shard, names):
            added.setdefault(photo.size, []).append(photo)
    checksums: dict[int, dict[str, int]] = {}
    num_read = 0
    for shard, rows in _rows_of_shapes(old, shapes, names):
        num_read += int(old.manifest.index_bytes[shard]) + _REQUEST
        if num_read > MAX_READ:
            return False
        for known in _photos(old, shard, names, rows):
            if known.size not in added:
                continue
            of_this_size = [] if known.size in checksums else added[known.size]
            num_read += (1 + len(of_this_size)) * (known.size + _REQUEST)
            if num_read > MAX_READ:
                return False
            if of_this_size:
                checksums[known.size] = {photo.key: photo.checksum(new) for photo in of_this_size}
            same = known.checksum(old)
            found |= {key: known.key for key, value in checksums[known.size].items() if value == same}
    return True


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


class _Photo(NamedTuple):
    key: str
    shard: int
    offset: int
    size: int

    def checksum(self, data_set: DataSet) -> int:
        return checksum(data_set.read_range(self.shard, start=self.offset, size=self.size))


def _photos(data_set: DataSet, shard: int, names: list[str], rows: Int64s | None = None) -> Iterator[_Photo]:
    """The photos of a shard, or of some of its rows."""
    index = ShardIndex.from_bytes(data_set.read_index(shard), where=index_name(data_set.manifest.names[shard]))
    for name in filter(index.offsets.__contains__, names):
        for row in np.arange(index.num_samples) if rows is None else rows:
            if index.offsets[name][row] >= 0:
                yield _Photo(index.keys[row], shard, int(index.offsets[name][row]), int(index.sizes[name][row]))
