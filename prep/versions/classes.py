"""Give the class ids of a source a place in the class table of a data set. Ids of known classes never change."""

from collections.abc import Mapping
from dataclasses import replace

from dali_pipes.errors import DataError, shown
from dali_pipes.formats.manifest import Manifest
from prep.sources.record import Source


def fit_classes(source: Source, manifest: Manifest, *, url: str) -> Source:
    """The source with the class ids of a data set, and with the class table that the data set has afterwards.

    If the source only numbered the names of its classes (`Source.numbers_classes`), a known name gets the data set's
    id, and a new name the next id that is free. Otherwise its ids stay as they are. A table ``{0: "cat", 1: "dog"}``
    and the folders ``bird`` and ``dog`` give ``{0: "cat", 1: "dog", 2: "bird"}``.

    Raises:
        DataError: If the source has other names for known ids, or other ids for known names, and its ids must stay; or
            if only one of both has a class table.
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
    if not source.numbers_classes:
        _check_agree(source, known, url=url)
        return replace(source, classes=dict(source.classes) | known)
    ids = {name: label for label, name in known.items()}
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


def _check_agree(source: Source, known: Mapping[int, str], *, url: str) -> None:
    ids = {name: label for label, name in known.items()}
    for label, name in source.classes.items():
        if name == str(label) and label in known:
            continue  # a source of ids names a class after its id
        if known.get(label, name) != name:
            raise DataError(
                f"class id {label} is '{name}' in {source.name}, and '{known[label]}' in '{url}'; expected one name; "
                "give the class another id in the source"
            )
        if ids.get(name, label) != label:
            raise DataError(
                f"class '{name}' has id {label} in {source.name}, and {ids[name]} in '{url}'; expected one id; give "
                f"the class the id {ids[name]} in the source"
            )
