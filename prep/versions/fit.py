"""Fit the records of a source to a data set: its class ids, its keys and photos, the components of its samples."""

import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace

import numpy as np

from dali_pipes.arrays import Int64s
from dali_pipes.data_set.data_set import DataSet
from dali_pipes.data_set.indexing import read_manifest
from dali_pipes.errors import DataError, printable, shown
from dali_pipes.formats.manifest import Manifest
from dali_pipes.formats.names import LABEL_COMPONENT, MANIFEST_ENDING, described, index_name, start_of
from dali_pipes.formats.photo_names import photo_roles
from dali_pipes.formats.sample_columns import Columns
from dali_pipes.formats.shard_index import ShardIndex
from dali_pipes.store.shard_set import ShardSet
from prep.sources.record import Source
from prep.versions.publish import Newest

MAX_READ_BYTES = 256 << 20
"""The most bytes of shard indexes that are read for a warning of equal photos: a few seconds from a near store."""
_REQUEST_BYTES = 128 << 10  # a request takes as long as this many bytes
_log = logging.getLogger(__name__)

# Classes


def fit_classes(source: Source, manifest: Manifest, *, url: str, beside: Iterable[Manifest] = ()) -> Source:
    """The source with the class ids of a data set, and with the class table that the data set has afterwards.

    If the source only numbered the names of its classes (`Source.numbers_classes`), a known name gets the data set's
    id, and a new name the next id that is free. Otherwise its ids stay as they are. A table ``{0: "cat", 1: "dog"}``
    and the folders ``bird`` and ``dog`` give ``{0: "cat", 1: "dog", 2: "bird"}``.

    Data sets ``beside`` it with the same classes, such as the other parts of a split, keep one meaning for each id: a
    new name gets the id that one of them has for it, or an id that none of them has. They are read for new names only.

    Raises:
        DataError: If the source has other names for known ids, or other ids for known names, and its ids must stay; or
            if the data set has ids alone, and the source names.
    """
    known = dict(manifest.classes)
    if not source.classes:
        # Ids that the table lacks are refused when the shards are indexed.
        return replace(source, classes=known, numbers_classes=False)
    if not known and manifest.labels:
        raise DataError(
            f"'{url}' has class ids from {manifest.labels['min']} to {manifest.labels['max']} and no class table, and "
            f"{source.name} has names of classes ({shown(list(source.classes.values()))}); pack the source with ids "
            "(--label), or make the data set anew with a class table"
        )
    ids = {name: label for label, name in known.items()}
    if not source.numbers_classes:
        for label, name in source.classes.items():
            is_unnamed = name == str(label) and label in known  # a source of ids names a class after its id
            if is_unnamed or (known.get(label, name), ids.get(name, label)) == (name, label):
                continue
            in_set = f"'{name}' has id {ids[name]}" if name in ids else f"class id {label} is '{known[label]}'"
            raise DataError(
                f"class id {label} is '{name}' in {source.name}, and in '{url}' {in_set}; give the class the same name "
                "and id"
            )
        return replace(source, classes=dict(source.classes) | known)
    if new_names := sorted(set(source.classes.values()) - ids.keys()):
        tables = [other.classes for other in beside if other.classes.items() & known.items()]
        alike = [table for table in tables if all(known.get(label, name) == name for label, name in table.items())]
        elsewhere = {name: label for table in alike for label, name in table.items()}
        for name in new_names:
            used = set(ids.values())
            unused = max(used.union(elsewhere.values()), default=-1) + 1
            label = elsewhere.get(name, unused)
            ids[name] = unused if label in used else label
    numbers = {label: ids[name] for label, name in source.classes.items()}
    # From here on the ids are the data set's: nothing may number the classes again.
    source = replace(source, classes={label: name for name, label in ids.items()}, numbers_classes=False)
    if all(label == number for label, number in numbers.items()):
        return source
    records = [
        record if record.label is None else replace(record, label=numbers[record.label]) for record in source.records
    ]
    return replace(source, records=records)


# Keys


def leave_out_known(
    source: Source, old: Newest, *, skip: bool, shares_keys: bool
) -> tuple[Source, int, dict[str, int]]:
    """Leave out records whose keys samples of the data set have, or of one beside it; removed samples do not count.

    Without ``skip``, such records are an error; with ``shares_keys``, keys that only other data sets have are taken.

    Returns:
        The records that are left, how many keys the data set has, and URL -> how many another one beside it has.

    Raises:
        DataError: If keys are known and ``skip`` is false, or a manifest or column file is broken.
    """
    asked = {record.key for record in source.records}
    known = _keys_in(DataSet(old.shards), asked)
    if known and not skip:
        raise DataError(
            f"'{old.url}' has {len(known)} of the {len(source.records)} keys of {source.name} already: "
            f"{shown(sorted(known))}; leave them out with --known skip, or give the records other keys"
        )
    elsewhere: dict[str, set[str]] = {}
    for other in () if shares_keys or known == asked else sets_beside(old):
        opened = DataSet(other.shards)
        if not opened.has_columns():
            _log.warning(
                "'%s' has no column file, so keys are not compared with it; index it anew: %s",
                printable(other.url), other.shards.index_command,
            )  # fmt: skip
        elif found := _keys_in(opened, asked - known):
            elsewhere[printable(other.url)] = found
    if elsewhere and not skip:
        counts = ", ".join(f"'{url}' has {len(keys)} ({shown(sorted(keys)[:1])})" for url, keys in elsewhere.items())
        raise DataError(
            f"keys of {source.name} are in other data sets beside '{old.url}': {counts}; is one of them held out for "
            "evaluation? leave these records out with --known skip, or, if the data sets may have the same keys, add "
            "them with --shared-keys"
        )
    if dropped := known.union(*elsewhere.values()):  # else the records of a table stay unmade
        source = leave_out(source, dropped)
    return source, len(known), {url: len(keys) for url, keys in elsewhere.items()}


def leave_out(source: Source, keys: Set[str]) -> Source:
    """The source without the records of some keys."""
    numbers = [number for number, record in enumerate(source.records) if record.key not in keys]
    doubtful = {place: source.doubtful[number] for place, number in enumerate(numbers) if number in source.doubtful}
    return replace(source, records=[source.records[number] for number in numbers], doubtful=doubtful)


def _keys_in(data_set: DataSet, asked: set[str]) -> set[str]:
    removed = set(data_set.manifest.removed.tolist())
    # In parts: all keys of a billion samples take 40 GB.
    parts = ((first, columns.samples.keys) for first, columns in data_set.columns_in_parts())
    return {key for first, keys in parts for row, key in enumerate(keys, first) if key in asked and row not in removed}


def sets_beside(old: Newest) -> Iterator[Newest]:
    """The other data sets of the same folder that have a manifest."""
    folder, slash, _ = old.prefix.rpartition("/")
    folder += slash
    for name in old.store.list_names(described(folder)):
        prefix = start_of(name, MANIFEST_ENDING)
        if not name.endswith(MANIFEST_ENDING) or prefix == old.prefix or "/" in prefix[len(folder) :]:
            continue
        manifest = read_manifest(old.store, prefix)
        if manifest is not None:
            yield Newest(store=old.store, prefix=prefix, manifest=manifest)


# Components


def check_components(old: Newest, name: str, samples: Iterable[Set[str]]) -> None:
    """Refuse samples that lack a component which all samples have: a loader that takes it would refuse the data set."""
    usual = {component for component, number in old.manifest.components.items() if number == old.manifest.num_samples}
    lacking: Counter[str] = Counter()
    seen: set[str] = set()
    for components in samples:
        lacking.update(usual - components)
        seen |= components
    if lacking:
        counted = ", ".join(f"'{component}' ({number} records)" for component, number in sorted(lacking.items()))
        way = "name the components alike, or add the records as they are with --any-components"
        if LABEL_COMPONENT in lacking:
            way = f"for photos of a new class, give the folder that holds the class folder; or {way}"
        raise DataError(
            f"{name}: records lack components that every sample of '{old.url}' has: {counted}; found: "
            f"{shown(sorted(seen))}; {way}"
        )


# Photos


def find_same_photos(new: DataSet, known: Iterable[Newest], *, max_bytes: int | None) -> dict[str, tuple[str, str]]:
    """Find the samples of ``new`` all whose photos known data sets have; their removed samples do not count.

    Photos are compared by height and width (column files), then by size and XXH64 (indexes of the shards that remain).

    Args:
        new: The data set with the samples.
        known: The data sets in which the photos are searched.
        max_bytes: Stop after so many bytes of indexes, with a line in the log.

    Returns:
        Key of ``new`` -> a sample that has one of its photos: URL of its data set, and its key there.
    """
    names = _photo_names(new)
    if not names:
        return {}
    shapes = np.concatenate([_shapes(columns, name) for _, columns in new.columns_in_parts() for name in names])
    lacking: defaultdict[str, set[tuple[int, int]]] = defaultdict(set)
    added: defaultdict[tuple[int, int], set[str]] = defaultdict(set)
    for shard in range(new.manifest.num_shards):
        for key, photo in _photos(new, shard, names):
            added[photo].add(key)
            lacking[key].add(photo)
    same: dict[str, tuple[str, str]] = {}
    num_read = 0
    for one in known:
        data_set, manifest = DataSet(one.shards), one.manifest
        names = _photo_names(data_set)
        for first, part in data_set.columns_in_parts() if names and data_set.has_columns() else ():
            hits = [first + np.flatnonzero(np.isin(_shapes(part, name), shapes)) for name in names]
            ordinals = np.setdiff1d(np.concatenate(hits), manifest.removed)
            shards = np.searchsorted(manifest.sample_stops, ordinals, side="right")
            for shard in np.unique(shards).tolist():
                num_read += int(manifest.index_bytes[shard]) + _REQUEST_BYTES
                if max_bytes is not None and num_read > max_bytes:
                    _log.warning("not all photos are compared with those that are known: it would take long")
                    return {key: found for key, found in same.items() if not lacking[key]}
                start = int(manifest.sample_stops[shard] - manifest.samples[shard])
                for key, photo in _photos(data_set, shard, names, ordinals[shards == shard] - start):
                    for equal in added.get(photo, ()):
                        same.setdefault(equal, (one.url, key))
                        lacking[equal].discard(photo)
    return {key: found for key, found in same.items() if not lacking[key]}


def same_photos_text(same: Mapping[str, tuple[str, str]], shards: ShardSet) -> str:
    """Say which samples of ``shards`` have photos that are elsewhere: see `find_same_photos`."""
    assert shards.manifest is not None
    pairs = [f"'{printable(key)}' is '{printable(known)}' of '{printable(url)}'" for key, (url, known) in same.items()]
    number = shards.manifest.num_samples
    return f"{len(same)} of {number} photos are known, under other keys: {shown(pairs, are_names=False)}"


def _photo_names(data_set: DataSet) -> Sequence[str]:
    return photo_roles(data_set.component_counts[""]).photos


def _photos(
    data_set: DataSet, shard: int, names: Sequence[str], rows: Int64s | None = None
) -> Iterator[tuple[str, tuple[int, int]]]:
    """Key, and size and XXH64, of each photo of a shard, or of some of its rows, by its index."""
    name = data_set.manifest.names[shard]
    index = ShardIndex.from_bytes(data_set.read_index(shard), where=index_name(name))
    for component in filter(index.offsets.__contains__, names):
        for row in range(index.num_samples) if rows is None else rows.tolist():
            if (place := index.range_of(component, row, shard=name)) is not None:
                yield place.key, (place.size, place.checksum)


def _shapes(columns: Columns, name: str) -> Int64s:
    """Height and width of each photo as one number: int64 [N]; empty if the column file has no sizes."""
    height, width = columns.samples.sizes.get(name, (np.empty(0, np.int32),) * 2)
    return (height.astype(np.int64) << 32) | width
