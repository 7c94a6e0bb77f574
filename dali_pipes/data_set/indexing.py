"""Index shards: read each tar once, and make its shard index, the manifest and the columns.

`prep.index` writes the results to the store. A loader of shards without a manifest keeps them in memory.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from dali_pipes.data_set.index_runs import IndexedRun, IndexRun, RunSums, Totals, index_run
from dali_pipes.errors import DataError, StoreError, printable
from dali_pipes.formats.column_file import ReadRange
from dali_pipes.formats.column_ranges import ColumnRanges
from dali_pipes.formats.history import Part
from dali_pipes.formats.json_texts import read_json
from dali_pipes.formats.manifest import Manifest, checksum, class_id, is_class_name
from dali_pipes.formats.names import (
    classes_name,
    columns_name,
    index_name,
    manifest_name,
    recoded_name,
    version_name,
    version_start,
)
from dali_pipes.formats.recoded import RecodedStep, read_steps
from dali_pipes.formats.sample_columns import MAX_COMPONENTS, ColumnsBuilder, SampleColumns, join_columns
from dali_pipes.formats.shard_index import ShardIndex
from dali_pipes.progress import bar
from dali_pipes.store.base import Store
from dali_pipes.store.entries import ObjectEntry
from dali_pipes.store.patience import Ahead
from dali_pipes.store.shard_set import ShardSet, index_command

_VERSION = re.compile("[1-9][0-9]{0,8}")


class IndexedShards(NamedTuple):
    """The result of `index_in_memory`: the files that `prep.index.index_shards` writes."""

    manifest: Manifest
    indexes: Mapping[str, bytes]
    """Name of the shard index's object -> its bytes, in the shards' order."""
    columns: SampleColumns


def index_in_memory(
    shards: ShardSet, *, classes: Mapping[int, str] | None = None, show_progress: bool = False
) -> IndexedShards:
    """Like `prep.index.index_shards`, but keep the files in memory, for shards that are not indexed.

    Each shard is read in full. For a sample of three components, a shard index takes about 70 bytes, the columns 20.
    """
    indexes: dict[str, bytes] = {}
    manifest, columns = index_each(shards, indexes.__setitem__, classes=classes, show_progress=show_progress)
    return IndexedShards(manifest, indexes, columns)


def find_manifest(shards: ShardSet) -> Manifest | None:
    """The manifest beside the shards, with all shards that it lists; ``None`` if there is none: see `read_manifest`."""
    return read_manifest(shards.store, shards.prefix) if shards.manifest is None else shards.manifest


def read_manifest(store: Store, prefix: str, version: int | None = None) -> Manifest | None:
    """The manifest of the shards whose names start with ``prefix``; ``None`` if there is none.

    Args:
        store: The store.
        prefix: The beginning of the shards' names.
        version: The version of the data set; ``None``: the newest.

    Raises:
        DataError: If it is not a manifest of this version, or was made for shards read through another ETL.
        StoreError: If the data set has no such version.
    """
    if store.cluster is not None:
        # Fetchers look at the map before they ask for shards, which come next; here it costs no time.
        Ahead(store.cluster.learn_map)
    if version is not None and (found := _read(store, prefix, version_name(prefix, version))) is not None:
        if found.version != version:
            where = store.locate(version_name(prefix, version))
            raise DataError(f"manifest '{where}' is of version {found.version}, expected {version}; was it renamed?")
        return found
    newest = _read(store, prefix, manifest_name(prefix))
    if version is None or newest is None or newest.version == version:
        return newest
    there = sorted({*stored_versions(store, prefix), newest.version})
    raise StoreError(
        f"no version {version} of '{store.locate(prefix)}' (found: {', '.join(map(str, there))}); "
        f"its history: dali-pipes prep log '{store.locate(prefix)}'"
    )


def stored_versions(store: Store, prefix: str) -> list[int]:
    """The versions whose manifests are stored beside the newest one, sorted; empty if the data set never changed."""
    start, end = version_start(prefix), version_name("", 0).removeprefix(f"{version_start('')}0")
    texts = [entry.name[len(start) :].removesuffix(end) for entry in store.list(start) if entry.name.endswith(end)]
    return sorted(int(text) for text in texts if _VERSION.fullmatch(text))


def _read(store: Store, prefix: str, name: str) -> Manifest | None:
    data = store.find(name)
    if data is None:
        return None
    where = store.locate(name)
    manifest = Manifest.from_bytes(data, where=where)
    if manifest.etl != store.etl:
        found, expected = (
            f"as ETL '{etl}' gives them" if etl else "as they are stored" for etl in (manifest.etl, store.etl)
        )
        raise DataError(
            f"manifest '{where}' describes shards {found}, expected one of shards {expected}; was it renamed? "
            f"{index_command(store, prefix)}"
        )
    return manifest


def find_columns(shards: ShardSet, manifest: Manifest) -> SampleColumns | None:
    """The columns of all samples of ``manifest``, from the files beside the shards; ``None`` if one is not there.

    Raises:
        DataError: If one is not a column file of this version, or belongs to another manifest.
    """
    found: list[tuple[SampleColumns, Mapping[str, int]]] = []
    first = 0
    for part in manifest.parts or (Part("", manifest.num_shards),):
        name = columns_name(f"{shards.prefix}{part.name}")
        data = shards.store.find(name)
        if data is None:
            return None
        own = manifest.take(np.arange(first, first + part.num_shards))
        columns = SampleColumns.from_bytes(data, manifest=own, where=shards.store.locate(name))
        # A component that this file leaves out, because there are too many, is counted in the manifest.
        left_out = manifest.components if len(columns.has) >= MAX_COMPONENTS else {}
        found.append((columns, {**left_out, **dict.fromkeys(columns.has, 1)}))
        first += part.num_shards
    return found[0][0] if len(found) == 1 else join_columns(found)


def open_columns(shards: ShardSet, manifest: Manifest) -> list[ColumnRanges] | None:
    """The files of `find_columns`, opened to be read by ranges; ``None`` if one is not there.

    Raises:
        DataError: As `find_columns`.
    """
    files = []
    first = 0
    for part in manifest.parts or (Part("", manifest.num_shards),):
        name = columns_name(f"{shards.prefix}{part.name}")
        if shards.store.size(name) is None:
            return None
        own = manifest.take(np.arange(first, first + part.num_shards))
        files.append(ColumnRanges(_reader(shards.store, name), manifest=own, where=shards.store.locate(name)))
        first += part.num_shards
    return files


def _reader(store: Store, name: str) -> ReadRange:
    return lambda start, size: store.read_range(name, start=start, size=size)


def index_each(
    shards: ShardSet,
    keep: Callable[[str, bytes], None],
    *,
    classes: Mapping[int, str] | None,
    show_progress: bool,
) -> tuple[Manifest, SampleColumns]:
    """Pass each shard index, with its object's name, to ``keep``; afterwards only its columns stay in memory."""
    if classes is None:
        classes = read_class_table(shards.store, shards.prefix)
    run = IndexRun(shards=shards, entries=shards.entries(), classes=classes)
    columns = ColumnsBuilder()
    with index_bar(shards, run.entries, shown=show_progress) as drawn:
        manifest = join_runs(shards, [index_run(run, keep, drawn.update)], columns, classes=classes)
    return manifest, columns.finish()


def index_bar(shards: ShardSet, entries: Sequence[ObjectEntry], *, shown: bool) -> Any:
    """The bar that `index_run` moves: in bytes, or in shards if an ETL gives them, because their sizes are unknown."""
    if shards.store.etl:
        return bar(what="index", total=len(entries), unit="shards", shown=shown)
    return bar(what="index", total=sum(entry.size for entry in entries), unit="B", shown=shown)


def join_runs(
    shards: ShardSet, runs: Iterable[IndexedRun], columns: ColumnsBuilder, *, classes: Mapping[int, str] | None
) -> Manifest:
    """The manifest of shards whose runs are given in order, by `index_run`; adds their columns to ``columns``.

    The manifest and the columns are the same, however the shards were divided into runs.
    """
    sums: list[RunSums] = []
    totals = Totals()
    first = 0
    for run in runs:
        sums.append(run.sums)
        totals.merge(run.totals)
        num_shards = len(run.sums.samples)
        if run.columns is not None:
            columns.add_columns(run.columns, run.components)
        else:
            # Which components are left out depends on the runs before.
            for name in map(index_name, shards.names[first : first + num_shards]):
                columns.add(ShardIndex.from_bytes(shards.store.read(name), where=shards.store.locate(name)))
        first += num_shards
    joined = RunSums(*map(np.concatenate, zip(RunSums.empty(), *sums, strict=True)))
    return Manifest(
        names=shards.names,
        classes=classes or {},
        recoded=read_recoded(shards.store, shards.prefix),
        etl=shards.store.etl,
        **joined._asdict(),
        **totals.sums(),
    )


def sums_of(indexes: Iterable[ShardIndex]) -> dict[str, Any]:
    """The sums over some shards, as their manifest has them, by the names of its attributes."""
    totals = Totals()
    for index in indexes:
        totals.add(index)
    return totals.sums()


def read_class_table(store: Store, prefix: str) -> dict[int, str] | None:
    """The class table that `pack` wrote beside the shards; ``None`` if there is none."""
    name = classes_name(prefix)
    data = store.find(name)
    if data is None:
        return None
    expected = f'class table \'{store.locate(name)}\': expected {{"1": "name", ...}}'
    try:
        table = read_json(data)
    except ValueError as exc:
        raise DataError(f"{expected} ({exc})") from exc
    if not isinstance(table, dict):
        raise DataError(f"{expected}, found a {type(table).__name__}")
    classes: dict[int, str] = {}
    for text, found in table.items():
        label, shown_label = class_id(text), printable(text, max_chars=60)
        if label is None:
            raise DataError(f"{expected}, found '{shown_label}', which is not an integer of 64 bits")
        if label in classes:
            raise DataError(f"{expected}, found class {label} twice, again as '{shown_label}'")
        if not is_class_name(str(found)):
            raise DataError(f"{expected}, found '{printable(str(found))}' for class {label}, which UTF-8 cannot hold")
        classes[label] = str(found)
    return classes


def read_recoded(store: Store, prefix: str) -> tuple[RecodedStep, ...]:
    """What `pack` did to the photos, by its file beside the shards; empty if there is none."""
    name = recoded_name(prefix)
    data = store.find(name)
    if data is None:
        return ()
    try:
        return read_steps(data)
    except ValueError as exc:
        raise DataError(
            f"'{store.locate(name)}' is damaged: {printable(str(exc))}; delete it, or pack the photos again"
        ) from exc


def read_index(store: Store, manifest: Manifest, shard: int) -> bytes:
    """A shard's index from the store.

    Raises:
        DataError: If it is not the index that the manifest was made with.
    """
    name = index_name(manifest.names[shard])
    data = store.read(name)
    if len(data) != manifest.index_bytes[shard] or checksum(data) != manifest.index_checksums[shard]:
        raise DataError(
            f"'{store.locate(name)}' is not the index that the manifest was made with: {len(data)} bytes, xxhash2 "
            f"{checksum(data):016x}; expected {manifest.index_bytes[shard]}, {manifest.index_checksums[shard]:016x}; "
            "index the shards anew: dali-pipes prep index URL"
        )
    return data
