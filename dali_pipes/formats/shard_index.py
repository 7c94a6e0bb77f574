"""The shard index: one file for each shard that says where each component of each sample lies.

``samples-000000.index.safetensors``, version 4, for N samples; a file as in `dali_pipes.formats.column_file`:

====================  ========  =====================================================================================
column                dtype     holds
====================  ========  =====================================================================================
``key/bytes``         uint8     the keys, one after the other
``key/ends``          int64 N   where each key ends
``label``             int64 N   the class id in ``cls``, 0 if a sample lacks it; only in shards that have ``cls``
``offset/C``          int64 N   component C's first byte in the shard, a multiple of 512; -1 if the sample lacks C
``size/C``            int64 N   component C's bytes; offset + size is within the shard
``checksum/C``        uint64 N  XXH64 of component C's bytes; 0 if the sample lacks C
``height/C``          int32 N   photos only: rows as stored, before any EXIF rotation; 0 if the header gives no size
``width/C``           int32 N   photos only: columns, likewise
``format/C``          uint8 N   photos only: index into `PHOTO_FORMATS`; 0 (unknown) for any other header
``orientation/C``     uint8 N   photos only: 1 to 8, the EXIF orientation; only if one is not 1
====================  ========  =====================================================================================

Its header, JSON: ``shard``, ``shard_bytes``, ``shard_checksum`` (16 hexadecimal digits).

Without the column ``orientation/C`` all photos of C are upright.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from dali_pipes.arrays import Bools, Int32s, Int64s, UInt8s, UInt64s
from dali_pipes.errors import printable
from dali_pipes.formats.column_file import KEY_TYPES, ColumnFile, is_count, save_columns
from dali_pipes.formats.names import LABEL_COMPONENT
from dali_pipes.formats.orientation import UPRIGHT, upright_size
from dali_pipes.formats.photo_header import PHOTO_FORMATS
from dali_pipes.formats.tar_reader import BLOCK
from dali_pipes.formats.texts import pack_texts

INDEX_VERSION = 4
INDEX_KIND = "dali-pipes shard index"
_CHECKSUM = re.compile("[0-9a-fA-F]{16}")

# Columns of a photo, the attributes of `PhotoColumns`, with the least value and the one after the greatest.
_PHOTO_COLUMNS: dict[str, tuple[type[np.generic], int, int]] = {
    "height": (np.int32, 0, 2**31),
    "width": (np.int32, 0, 2**31),
    "format": (np.uint8, 0, len(PHOTO_FORMATS)),
    "orientation": (np.uint8, 1, 9),
}


class ComponentRange(NamedTuple):
    """One component of one sample: bytes ``[start, start + size)`` of its shard."""

    shard: str
    """The shard's object."""
    start: int
    size: int
    checksum: int
    """XXH64 of the bytes."""
    key: str
    component: str

    def is_of(self, data: bytes) -> bool:
        """Whether these are the bytes."""
        return len(data) == self.size and xxhash.xxh64_intdigest(data) == self.checksum


@dataclass(frozen=True, kw_only=True)
class PhotoColumns:
    """Height, width and format from the headers of one component's photos: int32 [N], int32 [N], uint8 [N]."""

    height: Int32s
    """Rows as stored."""
    width: Int32s
    format: UInt8s
    orientation: UInt8s | None = None
    """uint8 [N]: codes of `dali_pipes.formats.orientation`; ``None``: all are 1."""

    @property
    def upright_size(self) -> tuple[Int32s, Int32s]:
        """Heights and widths of the upright photos."""
        if self.orientation is None:
            return self.height, self.width
        return upright_size(self.height, self.width, self.orientation)


@dataclass(frozen=True, kw_only=True)
class ShardIndex:
    """The place of every component of every sample of one shard, with labels and photo sizes."""

    shard: str
    shard_bytes: int
    shard_checksum: int
    keys: Sequence[str]
    """`Texts` if the index was read from a file: a key is decoded when it is asked for."""
    offsets: Mapping[str, Int64s]
    """component -> int64 [N], bytes from the shard's start, -1 if the sample lacks the component."""
    sizes: Mapping[str, Int64s]
    checksums: Mapping[str, UInt64s]
    """component -> uint64 [N], XXH64 of the component's bytes; 0 if the sample lacks it."""
    labels: Int64s | None
    photos: Mapping[str, PhotoColumns]

    @property
    def num_samples(self) -> int:
        return len(self.keys)

    @property
    def has_label(self) -> Bools:
        """Whether each sample has a class: bool [N]."""
        return self.offsets[LABEL_COMPONENT] >= 0 if self.labels is not None else np.zeros(self.num_samples, np.bool_)

    def take(self, rows: Int64s) -> "ShardIndex":
        """The index of some of the samples, in the order given; places in the shard stay."""
        columns = {name: column[rows] for name, column in self._columns().items()}
        return replace(self, keys=[self.keys[row] for row in rows.tolist()], **_attributes(columns))

    def range_of(self, component: str, row: int, *, shard: str, key: str = "") -> ComponentRange | None:
        """The place of a component, or of the first alternative that the sample has; ``None`` if it has none.

        ``shard`` names the shard for `dali_pipes.store.base.Store.read_ranges`; ``key`` saves a look for the key.
        """
        for name in component.split(";"):
            if name in self.offsets and (start := int(self.offsets[name][row])) >= 0:
                size, checksum = int(self.sizes[name][row]), int(self.checksums[name][row])
                return ComponentRange(shard, start, size, checksum, key or self.keys[row], name)
        return None

    def changed(self, checksum: Callable[[int, int], int | None]) -> Iterator[str]:
        """Name component and key of each place with other bytes; ``checksum(start, size)`` is of bytes of the shard."""
        for component, offsets in self.offsets.items():
            for row in np.flatnonzero(offsets >= 0).tolist():
                found = checksum(int(offsets[row]), int(self.sizes[component][row]))
                if found != int(self.checksums[component][row]):
                    yield f"component '{component}' of '{printable(self.keys[row])}'"

    def to_bytes(self) -> bytes:
        """The shard index's file; the same index always gives the same bytes."""
        columns = self._columns()
        columns["key/bytes"], columns["key/ends"] = pack_texts(self.keys)
        header = {
            "kind": INDEX_KIND,
            "version": INDEX_VERSION,
            "shard": self.shard,
            "shard_bytes": self.shard_bytes,
            "shard_checksum": f"{self.shard_checksum:016x}",
        }
        return save_columns(columns, header)

    def _columns(self) -> dict[str, npt.NDArray[Any]]:
        """The file's columns, without the keys."""
        columns: dict[str, npt.NDArray[Any]] = {} if self.labels is None else {"label": self.labels}
        columns |= {f"offset/{component}": column for component, column in self.offsets.items()}
        columns |= {f"size/{component}": column for component, column in self.sizes.items()}
        columns |= {f"checksum/{component}": column for component, column in self.checksums.items()}
        for component, photo in self.photos.items():
            for name in _PHOTO_COLUMNS:
                column = getattr(photo, name)
                if name != "orientation" or (column is not None and (column != UPRIGHT).any()):
                    columns[f"{name}/{component}"] = column
        return columns

    @classmethod
    def from_bytes(cls, data: bytes, *, where: str) -> "ShardIndex":
        """Read a shard index: all places are checked to lie within a shard of ``shard_bytes``.

        Raises:
            DataError: If ``data`` is not a shard index of this version, or holds invalid values; ``where`` names it.
        """
        file = ColumnFile.of_bytes(data, where=where, kind=INDEX_KIND, version=INDEX_VERSION)
        with file.checking():
            shard, shard_bytes, checksum = (file.header[name] for name in ("shard", "shard_bytes", "shard_checksum"))
            if not (isinstance(shard, str) and is_count(shard_bytes) and _CHECKSUM.fullmatch(checksum)):
                raise ValueError(f"it is of shard {shard!r:.60}, {shard_bytes!r:.40} bytes, checksum {checksum!r:.40}")
            num_samples = file.length("key/ends")
            components = file.names("offset/")
            dtypes: dict[str, type[np.generic]] = {"label": np.int64} if LABEL_COMPONENT in components else {}
            dtypes |= {f"{kind}/{c}": np.int64 for c in components for kind in ("offset", "size")}
            dtypes |= {f"checksum/{c}": np.uint64 for c in components}
            for c in (c for c in components if f"format/{c}" in file):
                kinds = [kind for kind in _PHOTO_COLUMNS if kind != "orientation" or f"orientation/{c}" in file]
                dtypes |= {f"{kind}/{c}": _PHOTO_COLUMNS[kind][0] for kind in kinds}
            file.declare({name: ([dtype], num_samples) for name, dtype in (dtypes | KEY_TYPES).items()})
            keys = file.texts("key")
            columns = {name: file.column(name) for name in dtypes}
            for component in components:
                _check_places(component, columns[f"offset/{component}"], columns[f"size/{component}"], shard_bytes)
            # Places that overlap would make a batch of gigabytes out of a shard of kilobytes.
            if (num := sum(columns[f"size/{c}"].sum(dtype=np.float64) for c in components)) > shard_bytes:
                raise ValueError(f"its places have {num:.0f} bytes in all, more than the shard's {shard_bytes}")
            for name, column in columns.items():
                _, least, stop = _PHOTO_COLUMNS.get(name.partition("/")[0], (None, 0, 0))
                if stop and ((column < least) | (column >= stop)).any():
                    raise ValueError(f"column '{name}' has other values than {least} to {stop - 1}")
            return cls(
                shard=shard,
                shard_bytes=shard_bytes,
                shard_checksum=int(checksum, 16),
                keys=keys,
                **_attributes(columns),
            )


def _attributes(columns: Mapping[str, npt.NDArray[Any]]) -> dict[str, Any]:
    """The attributes of a `ShardIndex` that columns of its file hold."""
    by_kind: dict[str, dict[str, Any]] = defaultdict(dict)
    for name, column in columns.items():
        kind, _, component = name.partition("/")
        by_kind[kind][component] = column
    kinds: Any = {c: {kind: by_kind[kind].get(c) for kind in _PHOTO_COLUMNS} for c in by_kind["format"]}
    return {
        "offsets": by_kind["offset"],
        "sizes": by_kind["size"],
        "checksums": by_kind["checksum"],
        "labels": columns.get("label"),
        "photos": {component: PhotoColumns(**columns_of) for component, columns_of in kinds.items()},
    }


def _check_places(component: str, offsets: Int64s, sizes: Int64s, shard_bytes: int) -> None:
    # Subtracted, not added: the sum of two numbers from a file may overflow.
    fits = (offsets <= shard_bytes) & (sizes <= shard_bytes - np.minimum(offsets, shard_bytes))
    is_place = fits & (offsets % BLOCK == 0) & (sizes >= 0)
    wrong = np.flatnonzero(~np.where(offsets >= 0, is_place, (offsets == -1) & (sizes == 0)))
    if len(wrong):
        row = int(wrong[0])
        raise ValueError(
            f"component '{component}', row {row}: {sizes[row]} bytes at {offsets[row]}, expected a place within the "
            f"shard's {shard_bytes} bytes, at a multiple of {BLOCK}"
        )
