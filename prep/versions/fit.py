"""Fit the records of a source to a data set: its class ids, the keys that are there, the components of its samples."""

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Set
from dataclasses import replace

from dali_pipes.data_set.data_set import DataSet
from dali_pipes.data_set.indexing import read_manifest
from dali_pipes.errors import DataError, printable, shown
from dali_pipes.formats.manifest import Manifest
from dali_pipes.formats.names import LABEL_COMPONENT, manifest_name
from prep.sources.record import Source
from prep.versions.publish import Newest

_log = logging.getLogger(__name__)

# Classes


def fit_classes(source: Source, manifest: Manifest, *, url: str) -> Source:
    """The source with the class ids of a data set, and with the class table that the data set has afterwards.

    If the source only numbered the names of its classes (`Source.numbers_classes`), a known name gets the data set's
    id, and a new name the next id that is free. Otherwise its ids stay as they are. A table ``{0: "cat", 1: "dog"}``
    and the folders ``bird`` and ``dog`` give ``{0: "cat", 1: "dog", 2: "bird"}``.

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
    for name in sorted(source.classes.values()):
        ids.setdefault(name, max(ids.values(), default=-1) + 1)
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
    source: Source, data_set: DataSet, old: Newest, *, skip: bool, shares_keys: bool
) -> tuple[Source, int, dict[str, int]]:
    """Leave out records whose keys samples of the data set have, or of one beside it; removed samples do not count.

    Args:
        source: The records.
        data_set: All shards of ``old``.
        old: The data set.
        skip: Leave the records out; otherwise they are an error.
        shares_keys: Take keys that only other data sets have.

    Returns:
        The records that are left, how many keys the data set has, and URL -> how many another one beside it has.

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
    for other in () if shares_keys or known == asked else _sets_beside(old):
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
        numbers = [number for number, record in enumerate(source.records) if record.key not in dropped]
        doubtful = {place: source.doubtful[number] for place, number in enumerate(numbers) if number in source.doubtful}
        source = replace(source, records=[source.records[number] for number in numbers], doubtful=doubtful)
    return source, len(known), {url: len(keys) for url, keys in elsewhere.items()}


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
