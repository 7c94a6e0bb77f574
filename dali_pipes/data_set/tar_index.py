"""Index one shard: read its tar front to back, and say where each component of each sample lies."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from dali_pipes.errors import DataError, printable
from dali_pipes.formats.names import LABEL_COMPONENT
from dali_pipes.formats.orientation import UPRIGHT, read_orientation
from dali_pipes.formats.photo_header import (
    MAX_PHOTO_BYTES,
    PHOTO_FORMATS,
    PhotoHeader,
    is_photo,
    read_photo_header,
    read_whole_photo_header,
)
from dali_pipes.formats.shard_index import PhotoColumns, ShardIndex
from dali_pipes.formats.tar_reader import READ_BYTES, ArchiveReader, Member

MAX_LABEL_BYTES = 1000
"""Bytes of a ``cls`` component. Python refuses to convert more than 4,300 digits."""
_INTEGER = re.compile(rb"[+-]?[0-9]+")
_SURROGATE = re.compile("[\ud800-\udfff]")
_CONTROL = re.compile("[\x00-\x1f\x7f\x80-\x9f\ud800-\udfff]")
Int64s = npt.NDArray[np.int64]


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
    photos: dict[str, tuple[int, int, int, int]] = field(default_factory=dict)
    """Component -> height, width, format, orientation."""


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
        header, orientation = _photo_header(member)
        row.photos[component] = (header.height, header.width, PHOTO_FORMATS.index(header.format), orientation)


def _photo_header(member: Member) -> tuple[PhotoHeader, int]:
    """Format and size of a photo, by its head and its end, and its orientation."""
    data = member.take(READ_BYTES)
    if len(data) < member.size:
        header = read_photo_header(data)
        if header.format == "unknown" or member.size > MAX_PHOTO_BYTES:
            return header, UPRIGHT
        data += member.read()
    header = read_whole_photo_header(data)
    return header, read_orientation(data, header.format).code


def check_member_name(name: str, *, shard: str) -> None:
    """Refuse a member's name that is not UTF-8 or holds a control character: messages and lists have a key per line."""
    if name.isprintable() or not _CONTROL.search(name):
        return
    found = "is not UTF-8" if _SURROGATE.search(name) else "holds a control character"
    raise DataError(f"shard '{shard}', member '{printable(name)}': its name {found}; rename it and pack again")


def _columns(rows: list[_Row], *, shard: str, archive: ArchiveReader) -> ShardIndex:
    components = sorted({component for row in rows for component in row.places})
    places = {c: np.array([row.places.get(c, (-1, 0)) for row in rows], np.int64) for c in components}
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
        offsets={c: place[:, 0] for c, place in places.items()},
        sizes={c: place[:, 1] for c, place in places.items()},
        labels=np.array([row.label for row in rows], np.int64) if LABEL_COMPONENT in places else None,
        photos=photos,
    )
