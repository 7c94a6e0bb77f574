"""The shard index: one file beside each shard that says where each component of each sample lies.

``samples-000000.index.safetensors``, version 3, for N samples; a file as in `dali_pipes.formats.column_file`:

====================  ========  =====================================================================================
column                dtype     holds
====================  ========  =====================================================================================
``key/bytes``         uint8     the keys, one after the other
``key/ends``          int64 N   where each key ends
``label``             int64 N   the class id in ``cls``, 0 if a sample lacks it; only in shards that have ``cls``
``offset/C``          int64 N   component C's first byte in the shard, a multiple of 512; -1 if the sample lacks C
``size/C``            int64 N   component C's bytes; offset + size is within the shard
``height/C``          int32 N   photos only: rows as stored, before any EXIF rotation; 0 if the header gives no size
``width/C``           int32 N   photos only: columns, likewise
``format/C``          uint8 N   photos only: index into `PHOTO_FORMATS`; 0 (unknown) for any other header
``orientation/C``     uint8 N   photos only: 1 to 8, the EXIF orientation; only if one is not 1
====================  ========  =====================================================================================

Its header, JSON: ``shard``, ``shard_bytes``, ``shard_checksum`` (16 hexadecimal digits).

Without the column ``orientation/C`` all photos of C are upright.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from dali_pipes.arrays import Int32s, Int64s
from dali_pipes.formats.column_file import ColumnFile, is_count, save_columns
from dali_pipes.formats.names import LABEL_COMPONENT
from dali_pipes.formats.orientation import UPRIGHT, upright_size
from dali_pipes.formats.photo_header import PHOTO_FORMATS
from dali_pipes.formats.tar_reader import BLOCK
from dali_pipes.formats.texts import pack_texts

INDEX_VERSION = 3
INDEX_KIND = "dali-pipes shard index"
UInt8s = npt.NDArray[np.uint8]


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
    labels: Int64s | None
    photos: Mapping[str, PhotoColumns]

    @property
    def num_samples(self) -> int:
        return len(self.keys)

    @property
    def has_label(self) -> npt.NDArray[np.bool_]:
        """Whether each sample has a class: bool [N]."""
        return self.offsets[LABEL_COMPONENT] >= 0 if self.labels is not None else np.zeros(self.num_samples, np.bool_)

    def take(self, rows: Int64s) -> "ShardIndex":
        """The index of some of the samples, in the order given; places in the shard stay."""
        photos = {
            name: PhotoColumns(
                height=photo.height[rows],
                width=photo.width[rows],
                format=photo.format[rows],
                orientation=None if photo.orientation is None else photo.orientation[rows],
            )
            for name, photo in self.photos.items()
        }
        return replace(
            self,
            keys=[self.keys[row] for row in rows.tolist()],
            offsets={name: column[rows] for name, column in self.offsets.items()},
            sizes={name: column[rows] for name, column in self.sizes.items()},
            labels=None if self.labels is None else self.labels[rows],
            photos=photos,
        )

    def to_bytes(self) -> bytes:
        """The shard index's file; the same index always gives the same bytes."""
        key_bytes, key_ends = pack_texts(self.keys)
        columns: dict[str, npt.NDArray[Any]] = {"key/bytes": key_bytes, "key/ends": key_ends}
        if self.labels is not None:
            columns["label"] = self.labels
        for component, offsets in self.offsets.items():
            columns[f"offset/{component}"] = offsets
            columns[f"size/{component}"] = self.sizes[component]
        for component, photo in self.photos.items():
            columns[f"height/{component}"] = photo.height
            columns[f"width/{component}"] = photo.width
            columns[f"format/{component}"] = photo.format
            if photo.orientation is not None and (photo.orientation != UPRIGHT).any():
                columns[f"orientation/{component}"] = photo.orientation
        header = {
            "kind": INDEX_KIND,
            "version": INDEX_VERSION,
            "shard": self.shard,
            "shard_bytes": self.shard_bytes,
            "shard_checksum": f"{self.shard_checksum:016x}",
        }
        return save_columns(columns, header)

    @classmethod
    def from_bytes(cls, data: bytes, *, where: str) -> "ShardIndex":
        """Read a shard index: all places are checked to lie within a shard of ``shard_bytes``.

        Raises:
            DataError: If ``data`` is not a shard index of this version, or holds invalid values; ``where`` names it.
        """
        file = ColumnFile.open(data, where=where, kind=INDEX_KIND, version=INDEX_VERSION)
        shard_bytes = file.entry("shard_bytes", "a whole number", is_count)
        shard_checksum = file.entry("shard_checksum", "16 hexadecimal digits", _is_checksum)
        keys = file.texts("key")
        # Sorted, because safetensors returns columns in any order.
        components = sorted(name.removeprefix("offset/") for name in file.columns if name.startswith("offset/"))
        offsets = {c: file.column(f"offset/{c}", np.int64, len(keys)) for c in components}
        sizes = {c: file.column(f"size/{c}", np.int64, len(keys)) for c in components}
        photos = {
            c: PhotoColumns(
                height=file.column(f"height/{c}", np.int32, len(keys)),
                width=file.column(f"width/{c}", np.int32, len(keys)),
                format=file.column(f"format/{c}", np.uint8, len(keys)),
                orientation=(
                    file.column(f"orientation/{c}", np.uint8, len(keys)) if f"orientation/{c}" in file.columns else None
                ),
            )
            for c in components
            if f"format/{c}" in file.columns
        }
        labels = file.column("label", np.int64, len(keys)) if LABEL_COMPONENT in components else None
        file.expect_no_more()
        for c in components:
            _check_places(file, c, offsets[c], sizes[c], shard_bytes=shard_bytes)
        for c, photo in photos.items():
            if (photo.height < 0).any() or (photo.width < 0).any():
                raise file.refused(f"photos '{c}' without negative heights and widths", "one")
            if (photo.format >= len(PHOTO_FORMATS)).any():
                raise file.refused(f"formats of photos '{c}' below {len(PHOTO_FORMATS)}", str(photo.format.max()))
            if photo.orientation is not None and ((photo.orientation < 1) | (photo.orientation > 8)).any():
                raise file.refused(f"orientations of photos '{c}' from 1 to 8", "another")
        return cls(
            shard=file.text("shard"),
            shard_bytes=shard_bytes,
            shard_checksum=int(shard_checksum, 16),
            keys=keys,
            offsets=offsets,
            sizes=sizes,
            labels=labels,
            photos=photos,
        )


def _is_checksum(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9a-fA-F]{16}", value) is not None


def _check_places(file: ColumnFile, component: str, offsets: Int64s, sizes: Int64s, *, shard_bytes: int) -> None:
    is_there = offsets >= 0
    # Subtracted, not added: the sum of two numbers from a file may overflow.
    fits = (offsets <= shard_bytes) & (sizes <= shard_bytes - np.minimum(offsets, shard_bytes))
    right = np.where(is_there, fits & (offsets % BLOCK == 0) & (sizes >= 0), (offsets == -1) & (sizes == 0))
    wrong = np.flatnonzero(~right)
    if len(wrong):
        row = int(wrong[0])
        raise file.refused(
            f"component '{component}', row {row}, within the shard's {shard_bytes} bytes and at a multiple of {BLOCK}",
            f"{sizes[row]} bytes at {offsets[row]}",
        )
