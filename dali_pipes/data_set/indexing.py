"""Index shards: read each tar once, and make its shard index, the manifest and the columns.

`prep.index` writes the results to the store. A loader of shards without a manifest keeps them in memory.
"""

import json
import re
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from dali_pipes.errors import DataError
from dali_pipes.formats.manifest import UNSIZED, Manifest, checksum
from dali_pipes.formats.names import LABEL_COMPONENT, classes_name, columns_name, index_name, manifest_name
from dali_pipes.formats.photo_header import PHOTO_FORMATS, is_photo, read_photo_header
from dali_pipes.formats.sample_columns import ColumnsBuilder, SampleColumns
from dali_pipes.formats.shard_index import PhotoColumns, ShardIndex
from dali_pipes.formats.tar_reader import ArchiveReader, Member
from dali_pipes.progress import bar
from dali_pipes.store.base import Store
from dali_pipes.store.shard_set import ShardSet

# Shards read at a time. Parsing holds the GIL, so more gain nothing.
NUM_READERS = 4
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
    """The manifest beside the shards, with all shards that it lists; ``None`` if there is none.

    Raises:
        DataError: If it is not a manifest of this version, or was made for shards read through another ETL.
    """
    name = manifest_name(shards.prefix)
    data = shards.store.find(name)
    if data is None:
        return None
    where = shards.store.locate(name)
    manifest = Manifest.from_bytes(data, where=where)
    if manifest.etl != shards.store.etl:
        found, expected = (
            f"as ETL '{etl}' gives them" if etl else "as they are stored" for etl in (manifest.etl, shards.store.etl)
        )
        raise DataError(
            f"manifest '{where}' describes shards {found}, expected one of shards {expected}; was it renamed? "
            f"{shards.index_command}"
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
    with drawn, ThreadPoolExecutor(NUM_READERS) as readers:
        try:
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
        except BaseException:
            readers.shutdown(cancel_futures=True)
            raise
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
    try:
        return {int(label): str(text) for label, text in json.loads(data).items()}
    except (ValueError, AttributeError) as exc:
        raise DataError(f'class table \'{store.locate(name)}\': expected {{"1": "name", ...}} ({exc})') from exc


def parse_label(data: bytes, *, shard: str, key: str) -> int:
    """The class id in the bytes of a ``cls`` component: an integer in ASCII digits, with white space allowed around it.

    Raises:
        DataError: If it is anything else, or does not fit int64.
    """
    text = data.strip()
    if not _INTEGER.fullmatch(text) or not -(2**63) <= (label := int(text)) < 2**63:
        shown = data[:40].decode("ascii", "backslashreplace")
        raise DataError(
            f"shard '{shard}', key '{key}': component '{LABEL_COMPONENT}' holds '{shown}', expected an integer"
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
        row.label = parse_label(member.read(), shard=shard, key=key)
        if classes and row.label not in classes:
            table = f"{len(classes)} classes, {min(classes)} to {max(classes)}"
            raise DataError(f"{where}: class id {row.label} is not in the class table ({table})")
    elif is_photo(component):
        header = read_photo_header(member.read())
        has_size = all(isinstance(side, int) and 0 < side < 2**31 for side in (header.height, header.width))
        height, width = (header.height, header.width) if has_size else (0, 0)
        row.photos[component] = (height, width, PHOTO_FORMATS.index(header.format))


def check_member_name(name: str, *, shard: str) -> None:
    """Refuse a member's name that is not UTF-8 or holds a control character: messages and lists have a key per line."""
    if name.isprintable() or not _CONTROL.search(name):
        return
    shown = name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    found = "is not UTF-8" if _SURROGATE.search(name) else "holds a control character"
    shown = _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", shown)
    raise DataError(f"shard '{shard}', member '{shown}': its name {found}; rename it and pack again")


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
