"""The two files that describe a data set: one shard index beside each shard, one manifest beside them all.

Both are safetensors files: typed columns behind a JSON header, read without copying or parsing, in any language.
Version 1. Texts (shard names, keys) are one run of UTF-8 bytes and the column of their end offsets.

Shard index, ``samples-000000.index.safetensors``, for N samples:

====================  ========  =====================================================================================
column                dtype     holds
====================  ========  =====================================================================================
``key/bytes``         uint8     the keys, one after the other
``key/ends``          int64 N   where each key ends
``label``             int64 N   the class id in ``cls``, 0 where a sample lacks it; only in shards that have ``cls``
``offset/C``          int64 N   component C's first byte in the shard, a multiple of 512; -1 where the sample lacks C
``size/C``            int64 N   component C's bytes
``height/C``          int32 N   photos only: rows as stored, before any EXIF rotation; 0 where the header says nothing
``width/C``           int32 N   columns, likewise
``format/C``          uint8 N   index into `prep.photos.PHOTO_FORMATS`; 0 where the header is none of these
====================  ========  =====================================================================================

Manifest, ``samples-manifest.safetensors``, for S shards: ``name/bytes``, ``name/ends``; ``bytes`` int64, ``checksum``
uint64 (XXH64 of the shard, what AIS calls xxhash2), ``samples`` int64; ``index_bytes`` int64, ``index_checksum`` uint64
of the shard's index. The header, JSON, keeps the class table and how many samples have each component.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import xxhash
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from prep.errors import DataError

__all__ = [
    "Manifest",
    "PhotoColumns",
    "ShardIndex",
    "checksum",
    "classes_name",
    "index_name",
    "manifest_name",
    "pack_texts",
    "unpack_texts",
]

VERSION = 1
INDEX_KIND = "dali-pipes shard index"
MANIFEST_KIND = "dali-pipes manifest"

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


def classes_name(prefix: str) -> str:
    """``a/x-`` -> ``a/x-classes.json``: the class table that `pack` leaves, ``{"1": "Abyssinian", ...}``."""
    return f"{prefix}classes.json"


def checksum(data: bytes | memoryview) -> int:
    """XXH64, seed 0: what AIS calls ``xxhash2``, so that a listing can be held against the manifest."""
    return cast("int", xxhash.xxh64_intdigest(data))


def pack_texts(texts: Sequence[str]) -> tuple[UInt8s, Int64s]:
    """Texts as one run of UTF-8 bytes and their end offsets.

    >>> data, ends = pack_texts(["ab", "", "c"])
    >>> bytes(data), ends.tolist()
    (b'abc', [2, 2, 3])
    """
    encoded = [text.encode() for text in texts]
    ends = np.cumsum(np.fromiter((len(item) for item in encoded), np.int64, len(encoded)), dtype=np.int64)
    return np.frombuffer(b"".join(encoded), np.uint8), ends


def unpack_texts(data: UInt8s, ends: Int64s, rows: Sequence[int] | Int64s | None = None) -> list[str]:
    """The texts at ``rows`` (all where ``None``), as `pack_texts` stored them."""
    blob = data.tobytes()
    stops = ends.tolist()
    starts = [0, *stops[:-1]]
    wanted = range(len(stops)) if rows is None else rows
    return [blob[starts[row] : stops[row]].decode() for row in wanted]


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
    keys: tuple[str, ...]
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
            "version": VERSION,
            "shard": self.shard,
            "shard_bytes": self.shard_bytes,
            "shard_checksum": f"{self.shard_checksum:016x}",
        }
        return _save(columns, header)

    @classmethod
    def from_bytes(cls, data: bytes, *, where: str) -> "ShardIndex":
        """Read a shard index.

        Raises:
            DataError: If ``data`` is not a shard index of this version; ``where`` names it.
        """
        columns, header = _load(data, where=where, kind=INDEX_KIND)
        # Sorted: safetensors gives columns in no order of its own.
        components = sorted(name.removeprefix("offset/") for name in columns if name.startswith("offset/"))
        photos = {
            component: PhotoColumns(
                height=columns[f"height/{component}"],
                width=columns[f"width/{component}"],
                format=columns[f"format/{component}"],
            )
            for component in components
            if f"height/{component}" in columns
        }
        return cls(
            shard=header["shard"],
            shard_bytes=header["shard_bytes"],
            shard_checksum=int(header["shard_checksum"], 16),
            keys=tuple(unpack_texts(columns["key/bytes"], columns["key/ends"])),
            offsets={component: columns[f"offset/{component}"] for component in components},
            sizes={component: columns[f"size/{component}"] for component in components},
            labels=columns.get("label"),
            photos=photos,
        )


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """One row a shard, and the class table: all that a plan needs before any shard index is read."""

    names: tuple[str, ...]
    shard_bytes: Int64s
    checksums: UInt64s
    samples: Int64s
    index_bytes: Int64s
    index_checksums: UInt64s
    components: Mapping[str, int] = field(default_factory=dict)
    """component -> how many samples of the whole data set have it."""
    classes: Mapping[int, str] = field(default_factory=dict)
    """class id, as ``cls`` holds it -> name; empty where nobody gave names."""

    @property
    def num_shards(self) -> int:
        return len(self.names)

    @property
    def num_samples(self) -> int:
        return int(self.samples.sum())

    @property
    def total_bytes(self) -> int:
        return int(self.shard_bytes.sum())

    @property
    def digest(self) -> str:
        """SHA-256, hexadecimal, of names, sizes, checksums and sample counts in their order: which data set this is."""
        name_bytes, name_ends = pack_texts(self.names)
        state = hashlib.sha256(f"{MANIFEST_KIND} {VERSION}\n".encode())
        for column in (name_bytes, name_ends, self.shard_bytes, self.checksums, self.samples):
            state.update(column.tobytes())
        return state.hexdigest()

    def select(self, names: Sequence[str], *, where: str) -> "Manifest":
        """The manifest of some of its shards, in the order given.

        Raises:
            DataError: If a name is not in this manifest; ``where`` names it.
        """
        if tuple(names) == self.names:
            return self
        rows = {name: row for row, name in enumerate(self.names)}
        missing = [name for name in names if name not in rows]
        if missing:
            raise DataError(
                f"manifest '{where}' lists {self.num_shards} shards, not '{missing[0]}'"
                f"{f' and {len(missing) - 1} more' if len(missing) > 1 else ''}; index them: dali-pipes prep index URL"
            )
        wanted = np.fromiter((rows[name] for name in names), np.int64, len(names))
        return Manifest(
            names=tuple(names),
            shard_bytes=self.shard_bytes[wanted],
            checksums=self.checksums[wanted],
            samples=self.samples[wanted],
            index_bytes=self.index_bytes[wanted],
            index_checksums=self.index_checksums[wanted],
            components=self.components,
            classes=self.classes,
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
            "version": VERSION,
            "components": dict(sorted(self.components.items())),
            "classes": {str(label): self.classes[label] for label in sorted(self.classes)},
        }
        return _save(columns, header)

    @classmethod
    def from_bytes(cls, data: bytes, *, where: str) -> "Manifest":
        """Read a manifest.

        Raises:
            DataError: If ``data`` is not a manifest of this version; ``where`` names it.
        """
        columns, header = _load(data, where=where, kind=MANIFEST_KIND)
        return cls(
            names=tuple(unpack_texts(columns["name/bytes"], columns["name/ends"])),
            shard_bytes=columns["bytes"],
            checksums=columns["checksum"],
            samples=columns["samples"],
            index_bytes=columns["index_bytes"],
            index_checksums=columns["index_checksum"],
            components=header["components"],
            classes={int(label): name for label, name in header["classes"].items()},
        )


def _save(columns: Mapping[str, npt.NDArray[Any]], header: Mapping[str, Any]) -> bytes:
    # One entry: safetensors writes several in the order of a hash map, another in every process.
    metadata = {"header": json.dumps(header)}
    contiguous = {name: np.ascontiguousarray(column) for name, column in columns.items()}
    return cast("bytes", save_tensors(contiguous, metadata=metadata))


def _load(data: bytes, *, where: str, kind: str) -> tuple[dict[str, Any], dict[str, Any]]:
    expected = f"expected a {kind}, version {VERSION}"
    try:
        columns: dict[str, Any] = load_tensors(data)
        header_stop = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(json.loads(data[8:header_stop])["__metadata__"]["header"])
    except (SafetensorError, ValueError, KeyError, TypeError) as exc:
        found = f"{len(data)} bytes of something else ({exc})"
        raise DataError(f"'{where}': {expected}, found {found}; rebuild it: dali-pipes prep index URL") from exc
    if header.get("kind") != kind or header.get("version") != VERSION:
        found = f"a {header.get('kind')}, version {header.get('version')}"
        raise DataError(f"'{where}': {expected}, found {found}; rebuild it: dali-pipes prep index URL")
    return columns, header
