"""Index shards: tar bytes in, where every component of every sample lies out; one manifest for the set.

A shard is read once, front to back: its checksum is taken, its members are located, its photos' headers are read.
"""

import json
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import BinaryIO

import numpy as np

from prep.archive import ArchiveReader, Member
from prep.errors import DataError
from prep.manifest import Manifest, PhotoColumns, ShardIndex, checksum, classes_name, index_name, manifest_name
from prep.photos import PHOTO_FORMATS, is_photo, read_photo_header
from prep.progress import bar
from prep.store import Store
from prep.urls import ShardSet

__all__ = ["LABEL_COMPONENT", "index_shard", "index_shards", "parse_label", "read_class_table"]

LABEL_COMPONENT = "cls"
"""The component that holds a class id in ASCII digits: WebDataset's name for it."""

# Shards read at a time. Reading waits for the store; parsing holds the GIL, so more gain nothing.
NUM_READERS = 4
_INTEGER = re.compile(rb"[+-]?[0-9]+")


def index_shards(
    shards: ShardSet, *, classes: Mapping[int, str] | None = None, show_progress: bool = False
) -> Manifest:
    """Write a shard index beside each shard and, last, the manifest beside them all.

    Args:
        shards: The shards, in the order that their samples are to be numbered in.
        classes: Class id -> name; where ``None``, the table that `pack` left beside the shards, if there is one.
        show_progress: Draw a bar, in bytes.

    Raises:
        DataError: If a shard is cut off or empty, samples are interleaved or doubled, a name is not UTF-8, or a label
            is no integer: the text names shard, key and component. Nothing is written for that shard, and no manifest.
        StoreError: If a shard is not there.
    """
    store, prefix = shards.store, shards.prefix
    sizes = _listed_sizes(shards)
    if classes is None:
        classes = read_class_table(store, prefix)

    def index_one(name: str) -> tuple[ShardIndex, bytes]:
        with store.open(name) as stream:
            index = index_shard(stream, shard=name, classes=classes)
        return index, index.to_bytes()

    indexes: list[ShardIndex] = []
    index_files: list[tuple[int, int]] = []
    components: dict[str, int] = {}
    drawn = bar(what="index", total=sum(sizes), unit="B", shown=show_progress)
    with drawn, ThreadPoolExecutor(NUM_READERS) as readers:
        try:
            for index, data in readers.map(index_one, shards.names):
                store.write(index_name(index.shard), data)
                indexes.append(index)
                index_files.append((len(data), checksum(data)))
                for component, offsets in index.offsets.items():
                    components[component] = components.get(component, 0) + int((offsets >= 0).sum())
                drawn.update(index.shard_bytes)
        except BaseException:
            readers.shutdown(cancel_futures=True)
            raise
    manifest = Manifest(
        names=shards.names,
        shard_bytes=np.array([index.shard_bytes for index in indexes], np.int64),
        checksums=np.array([index.shard_checksum for index in indexes], np.uint64),
        samples=np.array([index.num_samples for index in indexes], np.int64),
        index_bytes=np.array([size for size, _ in index_files], np.int64),
        index_checksums=np.array([value for _, value in index_files], np.uint64),
        components=components,
        classes=classes or {},
    )
    store.write(manifest_name(prefix), manifest.to_bytes())
    return manifest


def index_shard(stream: BinaryIO, *, shard: str, classes: Mapping[int, str] | None = None) -> ShardIndex:
    """The index of one tar, read front to back from ``stream``.

    Right for ustar, GNU and PAX archives with long, non-ASCII or spaced names (facts: DALI's own inference and
    ``wds2idx`` each get some of these wrong). Directories, links and names that belong to no sample are passed over.

    Raises:
        DataError: See `index_shards`; ``shard`` names it.
    """
    archive = ArchiveReader(stream, shard=shard)
    rows: list[_Row] = []
    finished: set[str] = set()
    for member in archive:
        _add_member(rows, finished, member, shard=shard, classes=classes)
    return _columns(rows, shard=shard, archive=archive)


def read_class_table(store: Store, prefix: str) -> dict[int, str] | None:
    """The class table that `pack` left beside the shards, ``None`` where there is none."""
    name = classes_name(prefix)
    if store.size(name) is None:
        return None
    try:
        return {int(label): str(text) for label, text in json.loads(store.read(name)).items()}
    except (ValueError, AttributeError) as exc:
        raise DataError(f'class table \'{store.locate(name)}\': expected {{"1": "name", ...}} ({exc})') from exc


def parse_label(data: bytes, *, shard: str, key: str) -> int:
    """A class id from the bytes of a ``cls`` component: an integer in ASCII digits, white space around it allowed.

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
    rows: list[_Row], finished: set[str], member: Member, *, shard: str, classes: Mapping[int, str] | None
) -> None:
    key, component = member.key, member.component
    try:
        member.name.encode()
    except UnicodeEncodeError as exc:
        name = member.name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
        raise DataError(f"shard '{shard}', member '{name}': its name is not UTF-8; rename it and pack again") from exc
    where = f"shard '{shard}', key '{key}'"
    if not rows or rows[-1].key != key:
        if key in finished:
            raise DataError(
                f"{where}: member '{member.name}' comes after other samples; the members of a sample must stand "
                "together: sort the files by name before they are packed"
            )
        finished.add(key)
        rows.append(_Row(key=key))
    row = rows[-1]
    if component in row.places:
        raise DataError(f"{where}: component '{component}' is there twice (member '{member.name}')")
    row.places[component] = (member.offset, member.size)
    if component == LABEL_COMPONENT:
        row.label = parse_label(member.read(), shard=shard, key=key)
        if classes and row.label not in classes:
            raise DataError(f"{where}: class id {row.label} is not in the class table ({_span(classes)})")
    elif is_photo(component):
        header = read_photo_header(member.read())
        row.photos[component] = (header.height, header.width, PHOTO_FORMATS.index(header.format))


def _columns(rows: list[_Row], *, shard: str, archive: ArchiveReader) -> ShardIndex:
    components = sorted({component for row in rows for component in row.places})
    absent = (-1, 0)
    places = {c: np.array([row.places.get(c, absent) for row in rows], np.int64).reshape(-1, 2) for c in components}
    headers = {
        c: np.array([row.photos.get(c, (0, 0, 0)) for row in rows], np.int64).reshape(-1, 3)
        for c in components
        if is_photo(c)
    }
    has_labels = LABEL_COMPONENT in places
    return ShardIndex(
        shard=shard,
        shard_bytes=archive.num_bytes,
        shard_checksum=archive.checksum,
        keys=tuple(row.key for row in rows),
        offsets={c: place[:, 0] for c, place in places.items()},
        sizes={c: place[:, 1] for c, place in places.items()},
        labels=np.array([row.label for row in rows], np.int64) if has_labels else None,
        photos={
            c: PhotoColumns(
                height=header[:, 0].astype(np.int32),
                width=header[:, 1].astype(np.int32),
                format=header[:, 2].astype(np.uint8),
            )
            for c, header in headers.items()
        },
    )


def _listed_sizes(shards: ShardSet) -> list[int]:
    listed = {entry.name: entry.size for entry in shards.store.list(shards.prefix)}
    for name in shards.names:
        # Local shards may lie in several folders, which one listing does not cover.
        if name not in listed and (size := shards.store.size(name)) is not None:
            listed[name] = size
    missing = [name for name in shards.names if name not in listed]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise DataError(f"no shard '{shards.store.locate(missing[0])}'{more}; {len(shards.names)} were named")
    return [listed[name] for name in shards.names]


def _span(classes: Mapping[int, str]) -> str:
    return f"{len(classes)} classes, {min(classes)} to {max(classes)}"
