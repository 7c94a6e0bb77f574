"""Find the keys of a source that the data set has, or another one beside it, such as the other split."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from dali_pipes.data_set.data_set import DataSet
from dali_pipes.data_set.indexing import read_manifest
from dali_pipes.errors import DataError, printable, shown
from dali_pipes.formats.names import manifest_name
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
