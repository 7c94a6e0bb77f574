"""Index shards: read each tar once, and make its shard index, the manifest and the columns; and read what was made.

`prep.index` writes the results to the store. A loader of shards without a manifest keeps them in memory. A *run* of
shards is a task that a worker does on any machine (`index_run`); `join_runs` makes the manifest of all.

# Note [indexed before]: a command that was interrupted goes on when it is run again: a shard index that is there is
taken over, and its shard not read, if it is surely the one that would be written. It is that of the shard's bytes as
they are now by AIStore's checksum, or, where a store has none, because it was written after the shard's last change. If
the manifest lists the same bytes, it lists this index. And it is in the form that this release writes.
"""

import json
import re
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from dali_pipes.errors import DataError, StoreError, printable
from dali_pipes.formats.column_spool import ColumnsBuilder
from dali_pipes.formats.manifest import (
    SHARD_COLUMNS,
    UNSIZED,
    Manifest,
    RecodedStep,
    ShardsPart,
    checksum,
    classes_of,
    concatenate,
    steps_of,
    without_unsized,
)
from dali_pipes.formats.names import (
    LABEL_COMPONENT,
    classes_name,
    columns_name,
    index_name,
    manifest_name,
    read_json,
    recoded_name,
    version_name,
    version_start,
)
from dali_pipes.formats.orientation import UPRIGHT, read_orientation
from dali_pipes.formats.photo_header import (
    MAX_PHOTO_BYTES,
    PHOTO_FORMATS,
    is_photo,
    read_photo_header,
    read_whole_photo_header,
)
from dali_pipes.formats.sample_columns import ColumnRanges, SampleColumns, read_columns
from dali_pipes.formats.shard_index import PhotoColumns, ShardIndex
from dali_pipes.formats.tar_reader import READ_BYTES, ArchiveReader, Member
from dali_pipes.progress import bar
from dali_pipes.store.base import Store
from dali_pipes.store.checksums import XXH64_TYPES
from dali_pipes.store.patience import PatientThreads
from dali_pipes.store.shard_names import ObjectEntry
from dali_pipes.store.shard_set import ShardSet, check_bytes, index_command

# Shards read at a time. Parsing holds the GIL, so more gain nothing.
NUM_READERS = 4
MAX_LABEL_BYTES = 1000
"""Bytes of a ``cls`` component. Python refuses to convert more than 4,300 digits."""
_INTEGER = re.compile(rb"[+-]?[0-9]+")
_SURROGATE = re.compile("[\ud800-\udfff]")
_CONTROL = re.compile("[\x00-\x1f\x7f\x80-\x9f\ud800-\udfff]")
_VERSION = re.compile("[1-9][0-9]{0,8}")


# One shard


def index_shard(
    stream: BinaryIO, *, shard: str, size: int | None = None, classes: Mapping[int, str] | None = None
) -> ShardIndex:
    """Read one tar front to back and return its index.

    Long, non-ASCII and spaced names in ustar, GNU and PAX archives are read correctly (DALI's own inference and
    ``wds2idx`` each get some of these wrong). Directories, links, devices and names that belong to no sample are
    skipped. A name is used as a key, never as a path: ``../a.jpg`` and ``/b/a.jpg`` have the keys ``../a`` and
    ``/b/a``.

    Args:
        stream: The tar's bytes.
        shard: Its name.
        size: Its size in bytes, if known: see `ArchiveReader`.
        classes: The class table.

    Raises:
        DataError: If the archive or a name in it is broken, a sample's members do not stand together, a component
            occurs twice, or a label is not an integer or not in the class table; names the shard.
    """
    archive = ArchiveReader(stream, shard=shard, size=size)
    rows: list[IndexRow] = []
    keys: set[str] = set()
    for member in archive:
        _add_member(rows, keys, member, shard=shard, classes=classes)
    return index_of_rows(rows, shard=shard, archive=archive)


def parse_label(data: bytes, *, shard: str, key: str) -> int:
    """The class id in the bytes of a ``cls`` component: an integer in ASCII digits, with white space allowed around it.

    Raises:
        DataError: If it is anything else, does not fit int64, or is longer than `MAX_LABEL_BYTES`.
    """
    text = data[: MAX_LABEL_BYTES + 1].strip()
    is_integer = len(data) <= MAX_LABEL_BYTES and _INTEGER.fullmatch(text)
    if not is_integer or not -(2**63) <= (label := int(text)) < 2**63:
        # Bytes that are not UTF-8 become surrogates, which `printable` shows as bytes.
        found = printable(text.decode("utf-8", "surrogateescape"), max_chars=60)
        expected = "an integer that fits 64 bits" if is_integer else "an integer"
        raise DataError(
            f"shard '{shard}', key '{key}': component '{LABEL_COMPONENT}' holds '{found}', expected {expected}"
        )
    return label


@dataclass(kw_only=True)
class IndexRow:
    """One sample of a shard index."""

    key: str
    label: int = 0
    places: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    """Component -> offset, size, checksum."""
    photos: dict[str, tuple[int, int, int, int]] = field(default_factory=dict)
    """Component -> height, width, format, orientation."""

    def add_photo(self, component: str, member: Member) -> bytes:
        """Add format and size of a photo, by its head and its end, and its orientation; returns the bytes read."""
        data = member.take(READ_BYTES)
        if len(data) < member.size and (member.size > MAX_PHOTO_BYTES or read_photo_header(data).format == "unknown"):
            header, orientation = read_photo_header(data), UPRIGHT
        else:
            data += member.read()
            header = read_whole_photo_header(data)
            orientation = read_orientation(data, header.format).value
        self.photos[component] = (header.height, header.width, PHOTO_FORMATS.index(header.format), orientation)
        return data


def _add_member(
    rows: list[IndexRow], keys: set[str], member: Member, *, shard: str, classes: Mapping[int, str] | None
) -> None:
    key, component = member.key, member.component
    check_member_name(member.name, shard=shard)
    where = f"shard '{shard}', key '{key}'"
    if not rows or rows[-1].key != key:
        if key in keys:
            raise DataError(
                f"{where}: member '{member.name}' comes after other samples; the members of a sample must stand "
                "together: sort the files by name before you pack them"
            )
        keys.add(key)
        rows.append(IndexRow(key=key))
    row = rows[-1]
    if component in row.places:
        raise DataError(f"{where}: component '{component}' occurs twice (member '{member.name}')")
    data = member.take(MAX_LABEL_BYTES + 1) if component == LABEL_COMPONENT else b""
    if is_photo(component):
        row.add_photo(component, member)
    row.places[component] = (
        member.offset,
        member.size,
        member.checksum(),
    )  # an archive that was cut off is named first
    if component == LABEL_COMPONENT:
        row.label = parse_label(data, shard=shard, key=key)
        if classes and row.label not in classes:
            table = f"{len(classes)} classes, {min(classes)} to {max(classes)}"
            raise DataError(f"{where}: class id {row.label} is not in the class table ({table})")


def check_member_name(name: str, *, shard: str) -> None:
    """Refuse a member's name that is not UTF-8 or holds a control character: messages and lists have a key per line."""
    if name.isprintable() or not _CONTROL.search(name):
        return
    found = "is not UTF-8" if _SURROGATE.search(name) else "holds a control character"
    raise DataError(f"shard '{shard}', member '{printable(name)}': its name {found}; rename it and pack again")


def index_of_rows(rows: list[IndexRow], *, shard: str, archive: ArchiveReader) -> ShardIndex:
    """The index of a shard with these samples, after ``archive`` was read."""
    components = sorted({component for row in rows for component in row.places})
    places = {c: [row.places.get(c, (-1, 0, 0)) for row in rows] for c in components}
    photos = {}
    for component in filter(is_photo, components):
        header = np.array([row.photos.get(component, (0, 0, 0, UPRIGHT)) for row in rows], np.int64)
        photos[component] = PhotoColumns(
            height=header[:, 0].astype(np.int32),
            width=header[:, 1].astype(np.int32),
            format=header[:, 2].astype(np.uint8),
            orientation=header[:, 3].astype(np.uint8),
        )
    return ShardIndex(
        shard=shard,
        shard_bytes=archive.num_bytes,
        shard_checksum=archive.checksum,
        keys=tuple(row.key for row in rows),
        offsets={c: np.array([place[0] for place in column], np.int64) for c, column in places.items()},
        sizes={c: np.array([place[1] for place in column], np.int64) for c, column in places.items()},
        checksums={c: np.array([place[2] for place in column], np.uint64) for c, column in places.items()},
        labels=np.array([row.label for row in rows], np.int64) if LABEL_COMPONENT in places else None,
        photos=photos,
    )


# A run of shards


@dataclass(frozen=True, kw_only=True)
class IndexRun:
    """Shards to be indexed, one after the other; pickles."""

    shards: ShardSet
    entries: Sequence[ObjectEntry]
    """The store's entry of each shard."""
    classes: Mapping[int, str] | None
    is_indexed: bool = False
    """Read the shard indexes in the store, which must be there, and not the shards."""
    before: Sequence[ObjectEntry | None] = ()
    """For each shard the index that may be taken over: see Note [indexed before]; empty: all shards are read."""
    listed: Mapping[str, tuple[int, int, int]] = field(default_factory=dict)
    """Shard -> its checksum, and bytes and checksum of its index, as the manifest that is there has them."""


class IndexedRun(NamedTuple):
    """The result of `index_run`."""

    manifest: Manifest
    """Of the run's shards, without class table and recoded steps."""
    columns: SampleColumns
    num_before: int
    """The number of shard indexes that were taken over."""


def index_run(run: IndexRun, keep: Callable[[str, bytes], None], on_done: Callable[[int], object]) -> IndexedRun:
    """Index shards, and pass each shard index that is made, with its object's name, to ``keep``.

    Args:
        run: The shards.
        keep: Called in the shards' order.
        on_done: Called with the bytes of each shard that is done; with 1 if an ETL gives the shards.
    """
    names = run.shards.names
    num, num_before = len(names), 0
    rows: dict[str, Any] = {column: np.zeros(num, dtype) for column, (_, dtype) in SHARD_COLUMNS.items()}
    columns = ColumnsBuilder()

    def indexes(readers: PatientThreads) -> Iterator[ShardIndex]:
        nonlocal num_before
        # Only a few ahead, because finished indexes wait in memory.
        ahead = deque(readers.submit(_index_one, run, row) for row in range(min(2 * NUM_READERS, num)))
        for row, name in enumerate(names):
            index, data, is_new = ahead.popleft().result()
            if row + 2 * NUM_READERS < num:
                ahead.append(readers.submit(_index_one, run, row + 2 * NUM_READERS))
            if is_new:
                keep(index_name(name), data)
            num_before += not is_new
            rows["shard_bytes"][row], rows["checksums"][row] = index.shard_bytes, index.shard_checksum
            rows["index_bytes"][row], rows["index_checksums"][row] = len(data), checksum(data)
            rows["samples"][row] = index.num_samples
            columns.add(index)
            yield index
            on_done(1 if run.shards.store.etl else index.shard_bytes)

    with PatientThreads(NUM_READERS) as readers:
        sums = sums_of(indexes(readers))
    return IndexedRun(Manifest(names=names, **rows, **sums), columns.finish(), num_before)


def _index_one(run: IndexRun, row: int) -> tuple[ShardIndex, bytes, bool]:
    """A shard's index, its bytes, and whether it is to be written."""
    store, name, entry = run.shards.store, run.shards.names[row], run.entries[row]
    if run.is_indexed:
        return *_stored_index(run.shards, entry, name), False
    if (found := _taken_over(run, row)) is not None:
        return *found, False
    try:
        with store.open(name) as stream:
            # The size of a transformed shard is not known before it is read.
            size = None if store.etl else entry.size
            index = index_shard(stream, shard=name, size=size, classes=run.classes)
        check_bytes(store, entry, index.shard_checksum)
    except DataError as exc:
        if not store.etl:
            raise
        # If a transform fails halfway, its shard looks cut off.
        raise DataError(f"{exc} (as ETL '{store.etl}' returned it)") from exc
    return index, index.to_bytes(), True


def _taken_over(run: IndexRun, row: int) -> tuple[ShardIndex, bytes] | None:
    """The stored index of a shard, and its bytes, if it is what would be written: see Note [indexed before]."""
    store, name, entry = run.shards.store, run.shards.names[row], run.entries[row]
    before = run.before[row] if run.before else None
    if before is None or store.etl:
        return None
    kind, _ = store.access().known_checksum(entry) or ("", "")
    is_newer = before.written_ns and entry.written_ns and before.written_ns[0] > entry.written_ns[1]
    if not (kind in XXH64_TYPES or is_newer):
        return None
    try:
        index, data = _stored_index(run.shards, entry, name)
    except DataError:
        return None
    listed = run.listed.get(name)
    if listed is not None and listed[0] == index.shard_checksum and listed[1:] != (len(data), checksum(data)):
        return None
    # If a class id is not in the table, reading the shard tells the sample.
    labels = () if index.labels is None else np.unique(index.labels[index.has_label]).tolist()
    is_in_table = not run.classes or run.classes.keys() >= set(labels)
    return (index, data) if index.shard == name and index.to_bytes() == data and is_in_table else None


def _stored_index(shards: ShardSet, entry: ObjectEntry, name: str) -> tuple[ShardIndex, bytes]:
    """The shard index that is stored beside a shard, and its bytes.

    Raises:
        DataError: If there is none, or it is not the one of this shard, by size and, if the store knows it, checksum.
    """
    where = shards.store.locate(index_name(name))
    again = f"index the shard again: {shards.index_command} --part I/N, with the I and N of its part, or without --part"
    data = shards.store.find(index_name(name))
    if data is None:
        raise DataError(f"'{where}' does not exist: not all parts are indexed; {again}")
    index = ShardIndex.from_bytes(data, where=where)
    if shards.store.etl:
        return index, data  # the transformed shard's size and checksum are not known
    kind, known = shards.store.access().known_checksum(entry) or ("", "")
    if index.shard_bytes != entry.size or (kind in XXH64_TYPES and known != f"{index.shard_checksum:016x}"):
        raise DataError(f"'{where}' is the index of other bytes than the shard has now; {again}")
    return index, data


def sums_of(indexes: Iterable[ShardIndex]) -> dict[str, Any]:
    """The sums over some shards, as their manifest has them, by the names of its attributes."""
    components: Counter[str] = Counter()
    turned: Counter[str] = Counter()
    photos: dict[str, Counter[str]] = defaultdict(Counter)
    extremes: list[int] = []
    for index in indexes:
        is_there = {component: offsets >= 0 for component, offsets in index.offsets.items()}
        components.update({component: int(rows.sum()) for component, rows in is_there.items()})
        for component, photo in index.photos.items():
            rows = is_there[component]
            formats = np.bincount(photo.format[rows], minlength=len(PHOTO_FORMATS))
            counts = {PHOTO_FORMATS[code]: int(formats[code]) for code in np.flatnonzero(formats)}
            photos[component].update({UNSIZED: int(np.count_nonzero(photo.height[rows] == 0)), **counts})
            if photo.orientation is not None and (num := np.count_nonzero(photo.orientation[rows] != UPRIGHT)):
                turned[component] += int(num)
        if index.labels is not None:
            # At least one sample has the label, or the component would not be listed.
            labels = index.labels[index.has_label]
            extremes = [min([*extremes, int(labels.min())]), max([*extremes, int(labels.max())])]
    return {
        "components": dict(components),
        "photos": {component: without_unsized(counts) for component, counts in photos.items()},
        "labels": dict(zip(("min", "max"), extremes, strict=True)) if extremes else {},
        "turned": dict(turned),
    }


# A data set


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
    manifests: list[Manifest] = []
    for run in runs:
        manifests.append(run.manifest)
        columns.add_columns(run.columns, shard=run.manifest.names[0])
    return replace(
        concatenate(manifests),
        classes=classes or {},
        recoded=read_recoded(shards.store, shards.prefix),
        etl=shards.store.etl,
    )


# The files beside the shards


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
    files = open_columns(shards, manifest)
    return None if files is None else read_columns(files, np.arange(manifest.num_shards))


def open_columns(shards: ShardSet, manifest: Manifest) -> list[ColumnRanges] | None:
    """The files of `find_columns`, opened to be read by ranges; ``None`` if one is not there.

    Raises:
        DataError: As `find_columns`.
    """
    if not has_columns(shards, manifest):
        return None
    files, first = [], 0
    for part in manifest.parts or (ShardsPart("", manifest.num_shards),):
        name = columns_name(f"{shards.prefix}{part.name}")
        own = manifest.take(np.arange(first, first + part.num_shards))
        files.append(
            ColumnRanges(
                lambda start, size, name=name: shards.store.read_range(name, start=start, size=size),  # type: ignore[misc]
                samples=own.samples,
                manifest=own.shards_digest,
                where=shards.store.locate(name),
            )
        )
        first += part.num_shards
    return files


def has_columns(shards: ShardSet, manifest: Manifest) -> bool:
    """Whether all column files of ``manifest`` are beside the shards."""
    names = [part.name for part in manifest.parts] or [""]
    return all(shards.store.size(columns_name(f"{shards.prefix}{name}")) is not None for name in names)


def read_class_table(store: Store, prefix: str) -> dict[int, str] | None:
    """The class table that `pack` wrote beside the shards; ``None`` if there is none."""
    name = classes_name(prefix)
    data = store.find(name)
    if data is None:
        return None
    try:
        return classes_of(read_json(data))
    except ValueError as exc:
        raise DataError(
            f'class table \'{store.locate(name)}\': expected {{"1": "name", ...}} with ids of 64 bits, each once, '
            f"found {exc}"
        ) from exc


def class_table_file(classes: Mapping[int, str]) -> bytes:
    """The file of a class table, as `read_class_table` reads it."""
    table = {str(label): classes[label] for label in sorted(classes)}
    return json.dumps(table, indent=0, ensure_ascii=False).encode()


def read_recoded(store: Store, prefix: str) -> tuple[RecodedStep, ...]:
    """What `pack` did to the photos, by its file beside the shards; empty if there is none."""
    name = recoded_name(prefix)
    data = store.find(name)
    if data is None:
        return ()
    try:
        return steps_of(read_json(data))
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
