"""Two of the files that describe a data set: one shard index beside each shard, one manifest beside them all.

The third, by which samples are chosen, is `prep.columns`. All are safetensors files: typed columns behind a JSON
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
``format/C``          uint8 N   index into `prep.photos.PHOTO_FORMATS`; 0 where the header is none of these
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
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import xxhash
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from prep.errors import DataError
from prep.photos import PHOTO_FORMATS
from prep.texts import Texts, object_name_problem, pack_texts

__all__ = [
    "LABEL_COMPONENT",
    "UNSIZED",
    "ColumnFile",
    "Manifest",
    "PhotoColumns",
    "ShardIndex",
    "Texts",
    "checksum",
    "classes_name",
    "columns_name",
    "index_name",
    "manifest_name",
    "pack_texts",
    "save_columns",
    "transformed_name",
]

LABEL_COMPONENT = "cls"
"""The component that holds a class id in ASCII digits: WebDataset's name for it."""
UNSIZED = "unsized"
"""Beside the formats in `Manifest.photos`: photos whose header gives no height and width."""

INDEX_VERSION = 1
MANIFEST_VERSION = 2
INDEX_KIND = "dali-pipes shard index"
MANIFEST_KIND = "dali-pipes manifest"

# As AIStore has it; what matters here is that there is no dot.
_ETL_NAME = re.compile("[a-z0-9-]{1,64}")
# Members of a tar start at a block.
BLOCK = 512

Int64s = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]
UInt8s = npt.NDArray[np.uint8]
UInt64s = npt.NDArray[np.uint64]


def index_name(shard: str) -> str:
    """``a/x-000000.tar`` -> ``a/x-000000.index.safetensors``."""
    return f"{shard.removesuffix('.tar')}.index.safetensors"


def manifest_name(prefix: str) -> str:
    """``a/x-`` -> ``a/x-manifest.safetensors``."""
    return f"{prefix}manifest.safetensors"


def columns_name(prefix: str) -> str:
    """``a/x-`` -> ``a/x-columns.safetensors``: see `prep.columns`."""
    return f"{prefix}columns.safetensors"


def classes_name(prefix: str) -> str:
    """``a/x-`` -> ``a/x-classes.json``: the class table that `pack` leaves, ``{"1": "Abyssinian", ...}``."""
    return f"{prefix}classes.json"


def transformed_name(name: str, *, etl: str) -> str:
    """What an index, manifest or column file of shards is called that says how an ETL gives them.

    Never the name of such a file of other shards, nor of another ETL's: theirs end in ``index``, ``manifest`` or
    ``columns`` before the suffix, and an ETL's name has no dot.

    >>> transformed_name("a/x-000000.index.safetensors", etl="pets-npy")
    'a/x-000000.index.pets-npy.etl.safetensors'
    """
    return f"{name.removesuffix('.safetensors')}.{etl}.etl.safetensors"


def checksum(data: bytes | memoryview) -> int:
    """XXH64, seed 0: what AIS calls ``xxhash2``, so that a listing can be held against the manifest."""
    return cast("int", xxhash.xxh64_intdigest(data))


@dataclass(frozen=True, kw_only=True)
class PhotoColumns:
    """What the headers of one component's photos say; int32 [N], int32 [N], uint8 [N]."""

    height: Int32s
    width: Int32s
    format: UInt8s


@dataclass(frozen=True, kw_only=True)
class ShardIndex:
    """Where every component of every sample of one shard lies, and what is known of it without decoding."""

    shard: str
    shard_bytes: int
    shard_checksum: int
    keys: Sequence[str]
    """As `Texts` where it was read from a file: a key is decoded when it is asked for."""
    offsets: Mapping[str, Int64s]
    """component -> int64 [N], bytes from the shard's start, -1 where the sample lacks the component."""
    sizes: Mapping[str, Int64s]
    labels: Int64s | None
    photos: Mapping[str, PhotoColumns]

    @property
    def num_samples(self) -> int:
        return len(self.keys)

    def to_bytes(self) -> bytes:
        """The shard index's file. The same index always gives the same bytes."""
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
        """Read a shard index; every place that it names is within a shard of ``shard_bytes``.

        Raises:
            DataError: If ``data`` is not a shard index of this version, or says what no shard index may say; ``where``
                names it.
        """
        file = ColumnFile.open(data, where=where, kind=INDEX_KIND, version=INDEX_VERSION)
        shard_bytes = file.whole_number("shard_bytes")
        keys = file.texts("key")
        # Sorted: safetensors gives columns in no order of its own.
        components = sorted(name.removeprefix("offset/") for name in file.columns if name.startswith("offset/"))
        offsets = {c: file.column(f"offset/{c}", np.int64, len(keys)) for c in components}
        sizes = {c: file.column(f"size/{c}", np.int64, len(keys)) for c in components}
        photos = {
            c: PhotoColumns(
                height=file.column(f"height/{c}", np.int32, len(keys)),
                width=file.column(f"width/{c}", np.int32, len(keys)),
                format=file.column(f"format/{c}", np.uint8, len(keys)),
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
                raise file.refused(f"photos '{c}' of no negative height or width", "one")
            if (photo.format >= len(PHOTO_FORMATS)).any():
                raise file.refused(f"formats of photos '{c}' below {len(PHOTO_FORMATS)}", str(photo.format.max()))
        return cls(
            shard=file.text("shard"),
            shard_bytes=shard_bytes,
            shard_checksum=file.hexadecimal("shard_checksum"),
            keys=keys,
            offsets=offsets,
            sizes=sizes,
            labels=labels,
            photos=photos,
        )


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
    """component that is a photo by its name -> format, of `prep.photos.PHOTO_FORMATS`, -> how many photos of the whole
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


def _check_places(file: "ColumnFile", component: str, offsets: Int64s, sizes: Int64s, *, shard_bytes: int) -> None:
    is_there = offsets >= 0
    # The size that is left is subtracted from the shard's: a sum of two that a file holds may overflow.
    fits = (offsets <= shard_bytes) & (sizes <= shard_bytes - np.minimum(offsets, shard_bytes))
    right = np.where(is_there, fits & (offsets % BLOCK == 0) & (sizes >= 0), (offsets == -1) & (sizes == 0))
    wrong = np.flatnonzero(~right)
    if len(wrong):
        row = int(wrong[0])
        raise file.refused(
            f"component '{component}', row {row}, within the shard's {shard_bytes} bytes and at a multiple of {BLOCK}",
            f"{sizes[row]} bytes at {offsets[row]}",
        )


def save_columns(columns: Mapping[str, npt.NDArray[Any]], header: Mapping[str, Any]) -> bytes:
    """The bytes of a file of columns, which are always the same for the same columns and header."""
    # One entry: safetensors writes several in the order of a hash map, another in every process.
    metadata = {"header": json.dumps(header)}
    contiguous = {name: np.ascontiguousarray(column) for name, column in columns.items()}
    return cast("bytes", save_tensors(contiguous, metadata=metadata))


@dataclass(frozen=True, kw_only=True)
class ColumnFile:
    """Columns and header of one file, of which nothing is believed before it was looked at."""

    where: str
    kind: str
    columns: dict[str, npt.NDArray[Any]]
    """Those that nobody has taken yet."""
    header: dict[str, Any]

    @classmethod
    def open(cls, data: bytes, *, where: str, kind: str, version: int) -> "ColumnFile":
        """Read a file; ``where`` names it.

        Raises:
            DataError: If it is none of this kind and version.
        """
        expected = f"expected a {kind}, version {version}"
        try:
            columns = load_tensors(data)
            header_stop = 8 + int.from_bytes(data[:8], "little")
            header = json.loads(json.loads(data[8:header_stop])["__metadata__"]["header"])
        except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as exc:
            found = f"{len(data)} bytes of something else ({exc})"
            raise DataError(f"'{where}': {expected}, found {found}; rebuild it: dali-pipes prep index URL") from exc
        if not isinstance(header, dict):
            header = {}
        if header.get("kind") != kind or header.get("version") != version:
            found = f"a {header.get('kind')}, version {header.get('version')}"
            raise DataError(f"'{where}': {expected}, found {found}; rebuild it: dali-pipes prep index URL")
        return cls(where=where, kind=kind, columns=columns, header=header)

    def refused(self, expected: str, found: str) -> DataError:
        """What to raise for a file that says what it may not."""
        return DataError(
            f"'{self.where}' is a broken {self.kind}: expected {expected}, found {found}; "
            "rebuild it: dali-pipes prep index URL"
        )

    def column(self, name: str, dtype: type[np.generic], length: int | None = None) -> npt.NDArray[Any]:
        """Take a column, which must be there, of this dtype and length."""
        column = self.columns.pop(name, None)
        expected = f"column '{name}' of {'' if length is None else f'{length} '}{np.dtype(dtype)}"
        if column is None:
            raise self.refused(expected, "none")
        if column.dtype != dtype or column.ndim != 1 or (length is not None and len(column) != length):
            raise self.refused(expected, f"{column.dtype} of shape {list(column.shape)}")
        return column

    def texts(self, name: str) -> Texts:
        """Take the two columns of texts."""
        texts = Texts(self.column(f"{name}/bytes", np.uint8), self.column(f"{name}/ends", np.int64))
        try:
            texts.check()
        except ValueError as exc:
            raise self.refused(f"columns '{name}/bytes' and '{name}/ends' that hold texts", str(exc)) from exc
        return texts

    def expect_no_more(self) -> None:
        """Refuse columns that nobody has taken."""
        if self.columns:
            raise self.refused("no other columns", ", ".join(f"'{name}'" for name in sorted(self.columns)[:3]))

    def whole_number(self, name: str) -> int:
        """A count in the header."""
        value = self.header.get(name)
        if not _is_count(value):
            raise self.refused(f"'{name}' to be a whole number", f"{value!r:.40}")
        return cast("int", value)

    def text(self, name: str) -> str:
        """A text in the header."""
        value = self.header.get(name)
        if not isinstance(value, str):
            raise self.refused(f"'{name}' to be a text", f"{value!r:.40}")
        return value

    def hexadecimal(self, name: str) -> int:
        """A number of 16 hexadecimal digits in the header."""
        value = self.header.get(name)
        try:
            number = int(value, 16) if isinstance(value, str) and len(value) == 16 else -1
        except ValueError:
            number = -1
        if number < 0:
            raise self.refused(f"'{name}' to be 16 hexadecimal digits", f"{value!r:.40}")
        return number

    def counts(self, value: object, name: str) -> dict[str, int]:
        """Counts by name, called ``name`` in the header."""
        if not isinstance(value, dict) or not all(map(_is_count, value.values())):
            raise self.refused(f"'{name}' to be whole numbers by name", f"{value!r:.40}")
        return value

    def classes(self) -> dict[int, str]:
        """The class table in the header."""
        value = self.header.get("classes")
        try:
            if not isinstance(value, dict) or not all(isinstance(name, str) for name in value.values()):
                raise TypeError("not a table")
            return {int(label): name for label, name in value.items()}
        except (TypeError, ValueError) as exc:
            raise self.refused("'classes' to be names by class id", f"{value!r:.40}") from exc

    def photos(self) -> dict[str, dict[str, int]]:
        """Counts of formats by component, in the header."""
        value = self.header.get("photos")
        if not isinstance(value, dict):
            raise self.refused("'photos' to be counts by component", f"{value!r:.40}")
        photos = {component: self.counts(counts, f"photos of {component}") for component, counts in value.items()}
        for counts in photos.values():
            if unknown := counts.keys() - {*PHOTO_FORMATS, UNSIZED}:
                raise self.refused(f"photos to be in one of {', '.join(PHOTO_FORMATS)}", f"'{min(unknown)}'")
        return photos

    def labels(self) -> dict[str, int]:
        """The range of class ids in the header."""
        value = self.header.get("labels")
        if value == {}:
            return {}
        if not isinstance(value, dict) or value.keys() != {"min", "max"} or not all(map(_is_int64, value.values())):
            raise self.refused("'labels' to be min and max", f"{value!r:.40}")
        return value


def _is_int64(value: object) -> bool:
    return type(value) is int and -(2**63) <= value < 2**63


def _is_count(value: object) -> bool:
    return _is_int64(value) and cast("int", value) >= 0
