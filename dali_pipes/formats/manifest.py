"""The manifest: one file beside all shards of a data set, with a row for each shard.

``samples-manifest.safetensors``, version 2, for S shards; a file as in `dali_pipes.formats.column_file`:

====================  ========  =====================================================================================
column                dtype     holds
====================  ========  =====================================================================================
``name/bytes``        uint8     the shards' names, relative to the bucket or directory: no ``..``, not absolute, no NUL
``name/ends``         int64 S   where each name ends
``bytes``             int64 S   of each shard
``checksum``          uint64 S  XXH64 of each shard, what AIS calls xxhash2
``samples``           int64 S   in each shard
``index_bytes``       int64 S   of each shard's index
``index_checksum``    uint64 S  XXH64 of each shard's index
====================  ========  =====================================================================================

Its header, in JSON, sums up the whole data set, so that a loader can refuse what the data set cannot give before it
reads any shard index:

* ``classes`` is the class table.
* ``components`` counts the samples that have each component.
* ``photos`` counts the formats of each component that is a photo by its name, ``{"image.jpg": {"JPEG": 990, "unknown":
  10}}``, and under ``unsized`` the photos without height and width, if their number differs from that of ``unknown``.
* ``labels`` has the smallest and the largest class id, ``{"min": 1, "max": 37}``, if there are any.

(Version 1 had neither ``photos`` nor ``labels``.)

Shards that are read through an ETL (``prep index --etl NAME``) have files of the same formats, named after the ETL:
``samples-manifest.NAME.etl.safetensors``. The header of such a manifest has ``etl``, the ETL's name.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import xxhash

from dali_pipes.errors import DataError
from dali_pipes.formats.column_file import ColumnFile, are_counts, is_int64, save_columns
from dali_pipes.formats.photo_header import PHOTO_FORMATS
from dali_pipes.formats.shard_index import ShardIndex
from dali_pipes.formats.texts import Texts, object_name_problem, pack_texts

MANIFEST_VERSION = 2
MANIFEST_KIND = "dali-pipes manifest"
UNSIZED = "unsized"
"""A key of `Manifest.photos` besides the formats: photos whose header gives no height and width."""
# AIStore's rule. It matters here that a name has no dot.
_ETL_NAME = re.compile("[a-z0-9-]{1,64}")
_CLASS_ID = re.compile("-?[0-9]{1,19}")
_HALVES = re.compile("[\ud800-\udfff]")
Int64s = npt.NDArray[np.int64]
UInt64s = npt.NDArray[np.uint64]


# Attribute of a manifest -> name and dtype of its column, which has an entry for each shard.
SHARD_COLUMNS: dict[str, tuple[str, type[np.generic]]] = {
    "shard_bytes": ("bytes", np.int64),
    "checksums": ("checksum", np.uint64),
    "samples": ("samples", np.int64),
    "index_bytes": ("index_bytes", np.int64),
    "index_checksums": ("index_checksum", np.uint64),
}


def checksum(data: bytes | memoryview) -> int:
    """XXH64 with seed 0. AIStore calls it ``xxhash2``, so a listing can be compared with the manifest."""
    return cast("int", xxhash.xxh64_intdigest(data))


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """One row for each shard, and the class table: all that a plan needs before any shard index is read."""

    names: Sequence[str]
    """Any sequence; it is kept as `Texts`."""
    shard_bytes: Int64s
    checksums: UInt64s
    samples: Int64s
    index_bytes: Int64s
    index_checksums: UInt64s
    components: Mapping[str, int] = field(default_factory=dict)
    """component -> the number of samples of the whole data set that have it."""
    classes: Mapping[int, str] = field(default_factory=dict)
    """class id, as ``cls`` holds it -> name; empty if there is no class table."""
    photos: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """component that is a photo by its name -> format of `PHOTO_FORMATS` -> the number of such photos in the whole data
    set; and `UNSIZED` -> the number without height and width, if it differs from the number of unknown photos."""
    labels: Mapping[str, int] = field(default_factory=dict)
    """``{"min": 1, "max": 37}``: the smallest and largest class id of the whole data set; empty if it has none."""
    etl: str = ""
    """The ETL through which these shards are read; empty: as they are stored. For a mixture with ETLs: those of its
    sets in their order, ``;`` between them."""

    def __post_init__(self) -> None:
        if not isinstance(self.names, Texts):
            object.__setattr__(self, "names", Texts(*pack_texts(self.names)))

    @property
    def num_shards(self) -> int:
        return len(self.names)

    @property
    def num_samples(self) -> int:
        return int(self.samples.sum())

    @property
    def total_bytes(self) -> int:
        return int(self.shard_bytes.sum())

    @cached_property
    def digest(self) -> str:
        """Identifies the data set: SHA-256, hexadecimal, of names, sizes, checksums and sample counts in their order.

        Shards that are read through an ETL are another data set, even if the ETL changes no byte.
        """
        name_bytes, name_ends = pack_texts(self.names)
        # 1 is the digest's own version: a data set stays the same when its manifest's format changes.
        state = hashlib.sha256(f"{MANIFEST_KIND} 1{f' etl {self.etl}' if self.etl else ''}\n".encode())
        for column in (name_bytes, name_ends, self.shard_bytes, self.checksums, self.samples):
            state.update(np.ascontiguousarray(column).data)
        return state.hexdigest()

    def rows_of(self, names: Sequence[str], *, where: str) -> Int64s:
        """The rows of these shards in the manifest, in the order given: int64 [len(names)].

        Raises:
            DataError: If a name is not in this manifest; ``where`` names it.
        """
        if self.names == names:
            return np.arange(self.num_shards, dtype=np.int64)
        wanted = set(names)
        rows = {name: row for row, name in enumerate(self.names) if name in wanted}
        missing = [name for name in names if name not in rows]
        if missing:
            raise DataError(
                f"manifest '{where}' lists {self.num_shards} shards, not '{missing[0]}'"
                f"{f' and {len(missing) - 1} more' if len(missing) > 1 else ''}; index them: dali-pipes prep index URL"
            )
        return np.fromiter((rows[name] for name in names), np.int64, len(names))

    def select(self, names: Sequence[str], *, where: str) -> "Manifest":
        """The manifest of some of its shards, in the order given; see `rows_of`."""
        return self.take(self.rows_of(names, where=where))

    def take(self, chosen: Int64s) -> "Manifest":
        """The manifest of some rows, in the order given; itself if these are all rows in their own order.

        Counts of the whole data set (`components`, `photos`, `labels`) are kept: for a selection they are upper bounds.
        """
        if np.array_equal(chosen, np.arange(self.num_shards)):
            return self
        columns: dict[str, Any] = {name: getattr(self, name)[chosen] for name in SHARD_COLUMNS}
        return replace(self, names=cast("Texts", self.names).take(chosen), **columns)

    def shard_index(self, row: int, data: bytes, *, where: str) -> ShardIndex:
        """The index of the shard in a row, read from the bytes of its file.

        Raises:
            DataError: If ``data`` is not a shard index, or is the index of another shard, or of other bytes than this
                manifest lists; ``where`` names the file.
        """
        index, name = ShardIndex.from_bytes(data, where=where), self.names[row]
        found = (index.num_samples, index.shard_bytes, index.shard_checksum)
        expected = (int(self.samples[row]), int(self.shard_bytes[row]), int(self.checksums[row]))
        # In the manifest of a mixture, the data set's name stands before the shard's own name.
        if found == expected and index.shard in (name, name.partition("/")[2]):
            return index
        described = "shard '{}': {} samples, {} bytes, xxhash2 {:016x}"
        raise DataError(
            f"index '{where}' is of {described.format(index.shard, *found)}; the manifest lists "
            f"{described.format(name, *expected)}; rebuild it: dali-pipes prep index URL"
        )

    def to_bytes(self) -> bytes:
        """The manifest's file; the same manifest always gives the same bytes."""
        name_bytes, name_ends = pack_texts(self.names)
        columns = {column: getattr(self, name) for name, (column, _) in SHARD_COLUMNS.items()}
        columns |= {"name/bytes": name_bytes, "name/ends": name_ends}
        header = {
            "kind": MANIFEST_KIND,
            "version": MANIFEST_VERSION,
            "components": dict(sorted(self.components.items())),
            "photos": {c: dict(sorted(counts.items())) for c, counts in sorted(self.photos.items())},
            "labels": dict(sorted(self.labels.items())),
            "classes": {str(label): self.classes[label] for label in sorted(self.classes)},
            **({"etl": self.etl} if self.etl else {}),
        }
        return save_columns(columns, header)

    @classmethod
    def from_bytes(cls, data: bytes, *, where: str) -> "Manifest":
        """Read a manifest: its names are safe as parts of paths, its counts are at least 0 and their sums fit int64.

        Raises:
            DataError: If ``data`` is not a manifest of this version, or holds invalid values; ``where`` names it.
        """
        file = ColumnFile.open(data, where=where, kind=MANIFEST_KIND, version=MANIFEST_VERSION)
        names = file.texts("name")
        if problem := object_name_problem(names):
            raise file.refused("names of shards", problem)
        columns: dict[str, Any] = {}
        for name, (column, dtype) in SHARD_COLUMNS.items():
            values = columns[name] = file.column(column, dtype, len(names))
            if dtype is np.int64 and ((values < 0).any() or values.sum(dtype=np.float64) >= 2**62):
                raise file.refused(f"column '{column}' of counts with a sum under 2**62", "other values")
        file.expect_no_more()
        etl = file.text("etl") if "etl" in file.header else ""
        if etl and not _ETL_NAME.fullmatch(etl):
            raise file.refused("'etl' to be an ETL's name", f"{etl!r:.40}")
        classes = file.entry("classes", "names by class id", _are_classes)
        photos = file.entry("photos", "whole numbers by component and format", _are_photos)
        if unknown := set().union(*photos.values()) - {*PHOTO_FORMATS, UNSIZED}:
            raise file.refused(f"photos to be in one of {', '.join(PHOTO_FORMATS)}", f"'{min(unknown)}'")
        return cls(
            names=names,
            **columns,
            components=file.entry("components", "whole numbers by name", are_counts),
            classes={int(label): name for label, name in classes.items()},
            photos=photos,
            labels=file.entry("labels", "min and max", _is_range),
            etl=etl,
        )


def _are_classes(value: object) -> bool:
    return isinstance(value, dict) and all(
        str(class_id(label)) == label and is_class_name(name) for label, name in value.items()
    )


def class_id(text: str) -> int | None:
    """The class id that a text stands for; ``None`` if it is not an integer of 64 bits."""
    label = int(text) if _CLASS_ID.fullmatch(text) else None
    return label if is_int64(label) else None


def is_class_name(value: object) -> bool:
    """Whether a value of JSON is a text that UTF-8 can hold: JSON's escapes can also name halves of characters."""
    return isinstance(value, str) and not _HALVES.search(value)


def _are_photos(value: object) -> bool:
    return isinstance(value, dict) and all(map(are_counts, value.values()))


def _is_range(value: object) -> bool:
    return value == {} or (
        isinstance(value, dict) and value.keys() == {"min", "max"} and all(map(is_int64, value.values()))
    )
