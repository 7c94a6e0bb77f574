"""Give samples other classes: remove them and add them anew, in one version; or give classes other names."""

import difflib
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dali_pipes.data_set.data_set import DataSet
from dali_pipes.errors import DataError, shown
from dali_pipes.formats.names import LABEL_COMPONENT, index_name
from dali_pipes.formats.sample_columns import lack
from prep.sources.record import Record, Source
from prep.sources.tables import KEY_COLUMNS, LABEL_COLUMNS, Fields, column_names, find_known, read_columns, source_of
from prep.tar.writer import Range
from prep.versions.add import AddReport, add
from prep.versions.fit import fit_classes, sets_beside
from prep.versions.publish import TOKEN_DIGITS, Newest, write_version


def relabel(old: Newest, path: Path, *, new_classes: bool = False, **how: Any) -> AddReport:
    """Write a version in which the samples of a table have its classes: names, or if all are integers, ids; see `add`.

    `DataError` for unknown keys or classes, two classes of a key, samples without one, bytes that are not as indexed.
    """
    names = column_names(path)
    key, label = find_known(names, KEY_COLUMNS), find_known(names, ("class", *LABEL_COLUMNS))
    if key is None or label is None:
        raise DataError(f"'{path}' must have the columns key and class (found: {shown(names)})")
    table, known = read_columns(path, [key, label]), old.manifest.classes
    listed = source_of(table, Fields(key=key, label=label), name=f"'{path}'", names=names)
    listed = listed if known or listed.numbers_classes else replace(listed, classes={})  # both have ids alone
    for name in listed.classes.values() if known else ():
        if listed.numbers_classes or int(name) not in known:
            _check_class(name, old, or_new=new_classes)
    fitted = fit_classes(listed, old.manifest, url=old.url, beside=(other.manifest for other in sets_beside(old)))
    wanted: dict[str, int | None] = {}
    for row, record in enumerate(fitted.records):
        if wanted.setdefault(record.key, record.label) != record.label:
            raise DataError(f"{table.where(row)}: key '{record.key}' has another class in a line before")
    samples, removed = DataSet(old.shards).columns().samples, set(old.manifest.removed.tolist())
    rows = {row: key for row, key in enumerate(samples.keys) if key in wanted and row not in removed}
    if unknown := sorted(wanted.keys() - rows.values()):
        raise DataError(f"'{old.url}' has no sample of {len(unknown)} of {len(wanted)} listed keys: {shown(unknown)}")
    bare = [rows[row] for row in np.flatnonzero(lack(samples, [LABEL_COMPONENT])).tolist() if row in rows]
    if bare or samples.labels is None:
        raise DataError(f"samples of '{old.url}' have no component '{LABEL_COMPONENT}': {shown(bare)}")
    labels = {row: wanted[key] for row, key in rows.items() if samples.labels[row] != wanted[key]}
    new = dict(fitted.classes.items() - known.items())
    source = Source(name=listed.name, records=list(_records(old, labels)), classes=new)
    return add(source, old, drop=np.array(sorted(removed | {*labels})), compare_keys=False, on_bad="keep", **how)


def rename(old: Newest, names: Mapping[str, str], *, command: str = "", dry_run: bool = False) -> int:
    """Write a version in which classes have other names, old -> new; returns its number. `DataError` if it cannot."""
    for name in names:
        _check_class(name, old)
    table = {label: names.get(name, name) for label, name in old.manifest.classes.items()}
    if twice := [name for name in names.values() if list(table.values()).count(name) > 1]:
        raise DataError(f"two classes of '{old.url}' would be '{twice[0]}'; to join them, relabel the samples of one")
    if dry_run or table == old.manifest.classes:
        return old.manifest.version
    token = hashlib.sha256(repr((old.manifest.digest, sorted(table.items()))).encode()).hexdigest()[:TOKEN_DIGITS]
    changed = replace(old.manifest, classes=table)
    return write_version(old, changed, old.parts, what="relabel", token=token, command=command).version


def _check_class(name: str, old: Newest, *, or_new: bool = False) -> None:
    """Refuse a name that no class has, unless it may be a new one's, and a name that several classes have."""
    names = list(old.manifest.classes.values())
    if (number := names.count(name)) != 1 and (number or not or_new):
        near = difflib.get_close_matches(name, names, 1)
        guess = f"did you mean '{near[0]}'?" if near else f"it has {shown(names) or 'ids alone'};"
        hint = "list ids" if number else f"{guess} --new-classes makes new ones of LABELS"
        raise DataError(f"'{old.url}' has {number} classes called '{name}'; {hint}")


def _records(old: Newest, labels: Mapping[int, int | None]) -> Iterator[Record]:
    """The samples, by ordinal, with new class ids; their bytes are compared with the checksums, a shard's at a time."""
    manifest, data_set, access = old.manifest, DataSet(old.shards), old.store.access()
    ordinals = np.array(list(labels), np.int64)
    shards = np.searchsorted(manifest.sample_stops, ordinals, side="right")
    for shard in np.unique(shards).tolist():
        name, start = manifest.names[shard], int(manifest.sample_stops[shard] - manifest.samples[shard])
        index = manifest.shard_index(shard, data_set.read_index(shard), where=index_name(name))
        own = (ordinals[shards == shard] - start).tolist()
        file = access.file(name, size=int(manifest.shard_bytes[shard]))
        places = {row: [at for part in index.offsets if (at := index.range_of(part, row, shard=name))] for row in own}
        data_set.read_ranges([place for parts in places.values() for place in parts])
        for row, parts in places.items():
            components = {place.component: Range(file, place.start, place.size) for place in parts}
            yield Record(key=index.keys[row], components=components, label=labels[start + row])
