"""Index shards: read each tar once, and make its shard index, the manifest and the columns.

`prep.index` writes the results to the store. A loader of shards without a manifest keeps them in memory.
"""

import re
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from dali_pipes.errors import DataError, printable
from dali_pipes.formats.json_texts import read_json
from dali_pipes.formats.manifest import UNSIZED, Manifest, checksum, class_id, is_class_name
from dali_pipes.formats.names import LABEL_COMPONENT, classes_name, columns_name, index_name, manifest_name
from dali_pipes.formats.photo_header import (
    MAX_PHOTO_BYTES,
    PHOTO_FORMATS,
    PhotoHeader,
    is_photo,
    read_photo_header,
    read_whole_photo_header,
)
from dali_pipes.formats.sample_columns import ColumnsBuilder, SampleColumns
from dali_pipes.formats.shard_index import PhotoColumns, ShardIndex
from dali_pipes.formats.tar_reader import READ_BYTES, ArchiveReader, Member
from dali_pipes.progress import bar
from dali_pipes.store.base import Store
from dali_pipes.store.patience import Ahead, PatientThreads
from dali_pipes.store.shard_set import ShardSet, index_command

# Shards read at a time. Parsing holds the GIL, so more gain nothing.
NUM_READERS = 4
MAX_LABEL_BYTES = 1000
"""Bytes of a ``cls`` component. Python refuses to convert more than 4,300 digits."""
_INTEGER = re.compile(rb"[+-]?[0-9]+")
_SURROGATE = re.compile("[\ud800-\udfff]")
_CONTROL = re.compile("[\x00-\x1f\x7f\x80-\x9f\ud800-\udfff]")
Int64s = npt.NDArray[np.int64]


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


def read_manifest(store: Store, prefix: str) -> Manifest | None:
    """The manifest of the shards whose names start with ``prefix``; ``None`` if there is none.

    Raises:
        DataError: If it is not a manifest of this version, or was made for shards read through another ETL.
    """
    if store.cluster is not None:
        # Fetchers look at the map before they ask for shards, which come next; here it costs no time.
        Ahead(store.cluster.learn_map)
    name = manifest_name(prefix)
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
    """The columns of all samples of ``manifest``, from the file beside the shards; ``None`` if there is no such file.

    Raises:
        DataError: If it is not a column file of this version, or belongs to another manifest.
    """
    name = columns_name(shards.prefix)
    data = shards.store.find(name)
    return None if data is None else SampleColumns.from_bytes(data, manifest=manifest, where=shards.store.locate(name))


def index_each(
    shards: ShardSet, keep: Callable[[str, bytes], None], *, classes: Mapping[int, str] | None, show_progress: bool
) -> tuple[Manifest, SampleColumns]:
    """Pass each shard index, with its object's name, to ``keep``; afterwards only its columns stay in memory."""
    store, names = shards.store, shards.names
    etl = store.etl
    stored_sizes = [entry.size for entry in shards.entries()]
    if classes is None:
        classes = read_class_table(store, shards.prefix)

    def index_one(row: int) -> tuple[ShardIndex, bytes]:
        try:
            with store.open(names[row]) as stream:
                # The size of a transformed shard is not known before it is read.
                size = None if etl else stored_sizes[row]
                index = index_shard(stream, shard=names[row], size=size, classes=classes)
        except DataError as exc:
            if not etl:
                raise
            # If a transform fails halfway, its shard looks cut off.
            raise DataError(f"{exc} (as ETL '{etl}' returned it)") from exc
        return index, index.to_bytes()

    shard_bytes, samples, index_bytes = (np.zeros(len(names), np.int64) for _ in range(3))
    checksums, index_checksums = (np.zeros(len(names), np.uint64) for _ in range(2))
    totals, columns = _Totals(), ColumnsBuilder()
    drawn = bar(
        what="index",
        total=len(names) if etl else sum(stored_sizes),
        unit="shards" if etl else "B",
        shown=show_progress,
    )
    with drawn, PatientThreads(NUM_READERS) as readers:
        # Only a few ahead, because finished indexes wait in memory.
        ahead = deque(readers.submit(index_one, row) for row in range(min(2 * NUM_READERS, len(names))))
        for row, name in enumerate(names):
            index, data = ahead.popleft().result()
            if row + 2 * NUM_READERS < len(names):
                ahead.append(readers.submit(index_one, row + 2 * NUM_READERS))
            keep(index_name(name), data)
            shard_bytes[row], checksums[row] = index.shard_bytes, index.shard_checksum
            index_bytes[row], index_checksums[row] = len(data), checksum(data)
            samples[row] = index.num_samples
            totals.add(index)
            columns.add(index)
            drawn.update(1 if etl else index.shard_bytes)
    manifest = Manifest(
        names=names,
        shard_bytes=shard_bytes,
        checksums=checksums,
        samples=samples,
        index_bytes=index_bytes,
        index_checksums=index_checksums,
        components=totals.components,
        classes=classes or {},
        photos=totals.format_counts(),
        labels=totals.labels,
        etl=etl,
    )
    return manifest, columns.finish()


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
    rows: list[_Row] = []
    keys: set[str] = set()
    for member in archive:
        _add_member(rows, keys, member, shard=shard, classes=classes)
    return _columns(rows, shard=shard, archive=archive)


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
class _Row:
    key: str
    label: int = 0
    places: dict[str, tuple[int, int]] = field(default_factory=dict)
    photos: dict[str, tuple[int, int, int]] = field(default_factory=dict)


def _add_member(
    rows: list[_Row], keys: set[str], member: Member, *, shard: str, classes: Mapping[int, str] | None
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
        rows.append(_Row(key=key))
    row = rows[-1]
    if component in row.places:
        raise DataError(f"{where}: component '{component}' occurs twice (member '{member.name}')")
    row.places[component] = (member.offset, member.size)
    if component == LABEL_COMPONENT:
        data = member.take(MAX_LABEL_BYTES + 1)
        for _ in member.pieces():
            pass  # so that an archive that was cut off here is named first
        row.label = parse_label(data, shard=shard, key=key)
        if classes and row.label not in classes:
            table = f"{len(classes)} classes, {min(classes)} to {max(classes)}"
            raise DataError(f"{where}: class id {row.label} is not in the class table ({table})")
    elif is_photo(component):
        header = _photo_header(member)
        row.photos[component] = (header.height, header.width, PHOTO_FORMATS.index(header.format))


def _photo_header(member: Member) -> PhotoHeader:
    """Format and size of a photo, by its head and its end."""
    data = member.take(READ_BYTES)
    if len(data) < member.size:
        header = read_photo_header(data)
        if header.format == "unknown" or member.size > MAX_PHOTO_BYTES:
            return header
        data += member.read()
    return read_whole_photo_header(data)


def check_member_name(name: str, *, shard: str) -> None:
    """Refuse a member's name that is not UTF-8 or holds a control character: messages and lists have a key per line."""
    if name.isprintable() or not _CONTROL.search(name):
        return
    found = "is not UTF-8" if _SURROGATE.search(name) else "holds a control character"
    raise DataError(f"shard '{shard}', member '{printable(name)}': its name {found}; rename it and pack again")


@dataclass(kw_only=True)
class _Totals:
    """Sums over all shard indexes, for the manifest."""

    components: dict[str, int] = field(default_factory=dict)
    labels: dict[str, int] = field(default_factory=dict)
    _formats: dict[str, Int64s] = field(default_factory=dict)
    """component -> int64 [number of formats + 1]; the last counts photos without a size."""

    def add(self, index: ShardIndex) -> None:
        is_there = {component: offsets >= 0 for component, offsets in index.offsets.items()}
        for component, rows in is_there.items():
            self.components[component] = self.components.get(component, 0) + int(rows.sum())
        for component, photo in index.photos.items():
            rows = is_there[component]
            counts = self._formats.setdefault(component, np.zeros(len(PHOTO_FORMATS) + 1, np.int64))
            counts[:-1] += np.bincount(photo.format[rows], minlength=len(PHOTO_FORMATS))
            counts[-1] += np.count_nonzero(photo.height[rows] == 0)
        if index.labels is not None:
            # At least one sample has the label, or the component would not be listed.
            labels = index.labels[is_there[LABEL_COMPONENT]]
            self.labels["min"] = min(int(labels.min()), self.labels.get("min", 2**63))
            self.labels["max"] = max(int(labels.max()), self.labels.get("max", -(2**63)))

    def format_counts(self) -> dict[str, dict[str, int]]:
        """`Manifest.photos`."""
        photos = {}
        for component, counts in self._formats.items():
            photos[component] = {PHOTO_FORMATS[code]: int(counts[code]) for code in np.flatnonzero(counts[:-1])}
            if counts[-1] != photos[component].get("unknown", 0):
                photos[component][UNSIZED] = int(counts[-1])
        return photos


def _columns(rows: list[_Row], *, shard: str, archive: ArchiveReader) -> ShardIndex:
    components = sorted({component for row in rows for component in row.places})
    places = {c: np.array([row.places.get(c, (-1, 0)) for row in rows], np.int64) for c in components}
    photos = {}
    for component in filter(is_photo, components):
        header = np.array([row.photos.get(component, (0, 0, 0)) for row in rows], np.int64)
        photos[component] = PhotoColumns(
            height=header[:, 0].astype(np.int32),
            width=header[:, 1].astype(np.int32),
            format=header[:, 2].astype(np.uint8),
        )
    return ShardIndex(
        shard=shard,
        shard_bytes=archive.num_bytes,
        shard_checksum=archive.checksum,
        keys=tuple(row.key for row in rows),
        offsets={c: place[:, 0] for c, place in places.items()},
        sizes={c: place[:, 1] for c, place in places.items()},
        labels=np.array([row.label for row in rows], np.int64) if LABEL_COMPONENT in places else None,
        photos=photos,
    )


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
