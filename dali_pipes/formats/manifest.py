"""Two of the files that describe a data set: one shard index beside each shard, one manifest beside them all.

The third, by which samples are chosen, is `dali_pipes.formats.sample_columns`. All are safetensors files: typed columns behind a JSON
header, read without parsing, in any language. Texts (shard names, keys) are one run of UTF-8 bytes and the column of
their end offsets. Whoever reads such a file here may rely on what is said below: it is checked before anything is made
of it.

Shard index, ``samples-000000.index.safetensors``, version 1, for N samples:

====================  ========  =====================================================================================
column                dtype     holds
====================  ========  =====================================================================================
``key/bytes``         uint8     the keys, one after the other
``key/ends``          int64 N   where each key ends
``label``             int64 N   the class id in ``cls``, 0 where a sample lacks it; only in shards that have ``cls``
``offset/C``          int64 N   component C's first byte in the shard, a multiple of 512; -1 where the sample lacks C
``size/C``            int64 N   component C's bytes; offset + size is within the shard
``height/C``          int32 N   photos only: rows as stored, before any EXIF rotation; 0 where the header says nothing
``width/C``           int32 N   columns, likewise
``format/C``          uint8 N   index into `dali_pipes.formats.photo_header.PHOTO_FORMATS`; 0 where the header is none of these
====================  ========  =====================================================================================

Its header, JSON: ``shard``, ``shard_bytes``, ``shard_checksum`` (16 hexadecimal digits).

Manifest, ``samples-manifest.safetensors``, version 2, for S shards:

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

Its header, JSON, sums up the whole data set, so that what it cannot give is known before any shard index is read:
``classes`` is the class table; ``components`` counts the samples that have each component; ``photos`` counts, for each
component that is a photo by its name, the formats that were found, ``{"image.jpg": {"JPEG": 990, "unknown": 10}}``, and
under ``unsized`` the photos without height and width, where these are others than the unknown; ``labels`` has the least
and the greatest class id, ``{"min": 1, "max": 37}``, where there is any. (Version 1 had neither ``photos`` nor
``labels``.)

What is said of shards as an ETL gives them (``prep index --etl NAME``) stands in files of the same formats, called
after it: ``samples-manifest.NAME.etl.safetensors``. Such a manifest's header has ``etl``, the ETL's name.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from dali_pipes.errors import DataError
from dali_pipes.formats.column_file import ColumnFile, save_columns
from dali_pipes.formats.texts import Texts, object_name_problem, pack_texts

__all__ = [
    "Manifest",
]


MANIFEST_VERSION = 2
MANIFEST_KIND = "dali-pipes manifest"
# As AIStore has it; what matters here is that there is no dot.
_ETL_NAME = re.compile("[a-z0-9-]{1,64}")
Int64s = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]
UInt8s = npt.NDArray[np.uint8]
UInt64s = npt.NDArray[np.uint64]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """One row a shard, and the class table: all that a plan needs before any shard index is read."""

    names: Sequence[str]
    """Kept as `Texts`, whatever sequence they are given as."""
    shard_bytes: Int64s
    checksums: UInt64s
    samples: Int64s
    index_bytes: Int64s
    index_checksums: UInt64s
    components: Mapping[str, int] = field(default_factory=dict)
    """component -> how many samples of the whole data set have it."""
    classes: Mapping[int, str] = field(default_factory=dict)
    """class id, as ``cls`` holds it -> name; empty where nobody gave names."""
    photos: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """component that is a photo by its name -> format, of `dali_pipes.formats.photo_header.PHOTO_FORMATS`, -> how many photos of the whole
    data set are in it; and `UNSIZED` -> how many have no height and width, where that is not the number of unknowns."""
    labels: Mapping[str, int] = field(default_factory=dict)
    """``{"min": 1, "max": 37}``: the least and greatest class id of the whole data set; empty where it has none."""
    etl: str = ""
    """The ETL through which these shards are read; empty: as they are stored. Of a mixture the names of its sets' ETLs
    in their order, ``;`` between them, where there is any."""

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
        """SHA-256, hexadecimal, of names, sizes, checksums and sample counts in their order: which data set this is.

        Read through an ETL it is another one, also where that changes no byte.
        """
        name_bytes, name_ends = pack_texts(self.names)
        # 1 is the digest's own version: a data set stays the same when its manifest's format changes.
        state = hashlib.sha256(f"{MANIFEST_KIND} 1{f' etl {self.etl}' if self.etl else ''}\n".encode())
        for column in (name_bytes, name_ends, self.shard_bytes, self.checksums, self.samples):
            state.update(np.ascontiguousarray(column).data)
        return state.hexdigest()

    def rows_of(self, names: Sequence[str], *, where: str) -> Int64s:
        """Where these shards stand in the manifest, in the order given: int64 [len(names)].

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
        """The manifest of some rows, in the order given; itself where they are all, in its own order.

        What it counts of the whole data set (`components`, `photos`, `labels`) it keeps: of a selection these are upper
        bounds.
        """
        if np.array_equal(chosen, np.arange(self.num_shards)):
            return self
        return Manifest(
            names=cast("Texts", self.names).take(chosen),
            shard_bytes=self.shard_bytes[chosen],
            checksums=self.checksums[chosen],
            samples=self.samples[chosen],
            index_bytes=self.index_bytes[chosen],
            index_checksums=self.index_checksums[chosen],
            components=self.components,
            classes=self.classes,
            photos=self.photos,
            labels=self.labels,
            etl=self.etl,
        )

    def to_bytes(self) -> bytes:
        """The manifest's file. The same manifest always gives the same bytes."""
        name_bytes, name_ends = pack_texts(self.names)
        columns: dict[str, npt.NDArray[Any]] = {
            "name/bytes": name_bytes,
            "name/ends": name_ends,
            "bytes": self.shard_bytes,
            "checksum": self.checksums,
            "samples": self.samples,
            "index_bytes": self.index_bytes,
            "index_checksum": self.index_checksums,
        }
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
        """Read a manifest; its names may become parts of paths, its counts are no less than 0 and add up in int64.

        Raises:
            DataError: If ``data`` is not a manifest of this version, or says what no manifest may say; ``where`` names
                it.
        """
        file = ColumnFile.open(data, where=where, kind=MANIFEST_KIND, version=MANIFEST_VERSION)
        names = file.texts("name")
        if problem := object_name_problem(names):
            raise file.refused("names of shards", problem)
        counts = {c: file.column(c, np.int64, len(names)) for c in ("bytes", "samples", "index_bytes")}
        for column, values in counts.items():
            if (values < 0).any() or values.sum(dtype=np.float64) >= 2**62:
                raise file.refused(
                    f"column '{column}' of values that are not negative and sum to under 2**62", "others"
                )
        checksums, index_checksums = (file.column(c, np.uint64, len(names)) for c in ("checksum", "index_checksum"))
        file.expect_no_more()
        etl = file.text("etl") if "etl" in file.header else ""
        if etl and not _ETL_NAME.fullmatch(etl):
            raise file.refused("'etl' to be an ETL's name", f"{etl!r:.40}")
        return cls(
            names=names,
            shard_bytes=counts["bytes"],
            checksums=checksums,
            samples=counts["samples"],
            index_bytes=counts["index_bytes"],
            index_checksums=index_checksums,
            components=file.counts(file.header.get("components"), "components"),
            classes=file.classes(),
            photos=file.photos(),
            labels=file.labels(),
            etl=etl,
        )
