"""The manifest: one file for all shards of a data set, with a row for each shard.

``samples-manifest.safetensors``, version 4, for S shards; a file as in `dali_pipes.formats.column_file`:

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
* ``turned`` counts the photos of each component whose EXIF orientation is not 1, ``{"image.jpg": 12}``; components
  without such photos are left out.
* ``recoded``, only if photos were resized, optimized or converted: what was done, `dali_pipes.formats.manifest`.

The manifest of a data set that has changed (``prep add``, ``remove``, ``relabel``, ``compact``) has more entries:

* ``data_version`` is the version of the data set, 2 or more; without it, the version is 1.
* ``parts`` lists the column files, ``[["", 10000], ["add-3f9a6c01d2-", 100]]``: the text between the manifest's prefix
  and the name of the file, and the number of shards whose samples it has. Without it, there is one part, ``""``.
* ``history`` has an entry for each version, the oldest first: see `Change`.

If samples were removed, the file has the column ``removed``, int64: their ordinals, sorted. The counts in the header
count the removed samples, too, because the shards still hold them.

Shards that are read through an ETL (``prep index --etl NAME``) have files of the same formats, named after the ETL:
``samples-manifest.NAME.etl.safetensors``. The header of such a manifest has ``etl``, the ETL's name.
"""

import hashlib
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, cast

import numpy as np
import xxhash

from dali_pipes.arrays import Int64s, UInt64s
from dali_pipes.errors import DataError, printable
from dali_pipes.formats.column_file import COUNTS, ColumnFile, fits, is_count, is_int64, is_text, save_columns
from dali_pipes.formats.photo_header import PHOTO_FORMATS
from dali_pipes.formats.shard_index import ShardIndex
from dali_pipes.formats.texts import Texts, join_texts, object_name_problem, pack_texts

MANIFEST_VERSION = 4
MANIFEST_KIND = "dali-pipes manifest"
UNSIZED = "unsized"
"""A key of `Manifest.photos` besides the formats: photos whose header gives no height and width."""
_CLASS_ID = re.compile("-?[0-9]{1,19}")

# Attribute of a manifest -> name and dtype of its column, which has an entry for each shard.
SHARD_COLUMNS: dict[str, tuple[str, type[np.generic]]] = {
    "shard_bytes": ("bytes", np.int64),
    "checksums": ("checksum", np.uint64),
    "samples": ("samples", np.int64),
    "index_bytes": ("index_bytes", np.int64),
    "index_checksums": ("index_checksum", np.uint64),
}


class ShardsPart(NamedTuple):
    """Some shards of a manifest, one after the other, whose samples are in one column file."""

    name: str
    """The text between the manifest's prefix and the column file's name: ``""``, ``"add-3f9a6c01d2-"``."""
    num_shards: int


class Change(NamedTuple):
    """One version of a data set, and how it came to be."""

    version: int
    date: str
    """In UTC, as in ISO 8601: ``2026-03-01T12:00:00Z``; empty if it is not known."""
    what: str
    """``index``, ``add``, ``remove``, ``relabel`` or ``compact``."""
    token: str
    """Identifies the change, so that a command that is run again finds what it did; hexadecimal."""
    command: str
    """The command line that made it."""
    num_samples: int
    """Of the whole data set, without the removed ones."""
    num_shards: int
    digest: str
    """The digest of the manifest before this change; empty for the first version."""


@dataclass(frozen=True, kw_only=True)
class RecodedStep:
    """The settings and the result of one pass over the photos and masks, when they were packed.

    ``prep pack`` writes the steps as ``.dali-pipes/PREFIXrecoded.json``; ``prep shuffle`` copies that file, and
    ``prep index`` puts its content into the manifest. A data set that was packed twice has two steps.
    """

    settings: Mapping[str, int | str | bool]
    """Those that were given: ``{"short_side": 256, "quality": 90}``."""
    counts: Mapping[str, int]
    """What was done -> the number of photos and masks: ``{"resized": 990, "kept": 10}``."""
    bytes_before: int
    """Bytes of all photos and masks that were packed, as they were in the source. (A part of the data set that is
    shuffled into shards of its own keeps the numbers of the whole.)"""
    bytes_after: int


_STEPS = [
    {
        "settings": {is_text: lambda setting: isinstance(setting, int | str)},
        "counts": COUNTS,
        "bytes_before": is_count,
        "bytes_after": is_count,
    }
]
_CHANGES = [{name: is_count if kind is int else is_text for name, kind in Change.__annotations__.items()}]
# The shapes of the header's entries, see `fits`. AIStore says what an ETL's name may be: it matters that it has no dot.
_HEADER: dict[str, Any] = {
    "components": COUNTS,
    "photos": {is_text: {{*PHOTO_FORMATS, UNSIZED}.__contains__: is_count}},
    "labels": lambda labels: labels == {} or fits(labels, {"min": is_int64, "max": is_int64}),
    "turned": COUNTS,
    "recoded": _STEPS,
    "etl": lambda name: is_text(name) and re.fullmatch("(?:[a-z0-9-]{1,64})?", name),
    "data_version": lambda version: is_count(version) and version > 1,
    "parts": [(lambda name: re.fullmatch("(?:(?:add|remove|compact)-[0-9a-f]{10}-)?", name), is_count)],
    "history": _CHANGES,
}


def steps_of(value: object) -> tuple[RecodedStep, ...]:
    """The steps that a value of JSON describes; raises `ValueError` for other values."""
    if not fits(value, _STEPS):
        raise ValueError('expected a list of {"settings": ..., "counts": ..., "bytes_before": ..., "bytes_after": ...}')
    return tuple(RecodedStep(**step) for step in cast("list[Any]", value))


def write_steps(steps: Sequence[RecodedStep]) -> bytes:
    """The file ``PREFIXrecoded.json``; the same steps always give the same bytes."""
    return json.dumps(list(map(asdict, steps)), indent=0, sort_keys=True).encode()


def checksum(data: bytes | memoryview) -> int:
    """XXH64 with seed 0. AIStore calls it ``xxhash2``, so a listing can be compared with the manifest."""
    return cast("int", xxhash.xxh64_intdigest(data))


def _no_ordinals() -> Int64s:
    return np.empty(0, np.int64)


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
    turned: Mapping[str, int] = field(default_factory=dict)
    """component -> the number of its photos in the whole data set whose EXIF orientation is not 1, if there are any."""
    recoded: tuple[RecodedStep, ...] = ()
    """What was done to the photos when the shards were packed, step by step; empty if they have their first bytes."""
    etl: str = ""
    """The ETL through which these shards are read; empty: as they are stored. For a mixture with ETLs: those of its
    sets in their order, ``;`` between them."""
    version: int = 1
    """The version of the data set."""
    parts: tuple[ShardsPart, ...] = ()
    """The column files of a whole manifest; empty: one, beside the manifest. A selection of shards keeps them."""
    history: tuple[Change, ...] = ()
    """All versions up to this one; empty for version 1."""
    removed: Int64s = field(default_factory=_no_ordinals)
    """Ordinals of samples that are in the shards and not in the data set, sorted: int64 [R]."""

    def __post_init__(self) -> None:
        if not isinstance(self.names, Texts):
            object.__setattr__(self, "names", Texts(*pack_texts(self.names)))

    @property
    def num_shards(self) -> int:
        return len(self.names)

    @property
    def num_samples(self) -> int:
        """Samples of all shards, the removed ones included."""
        return int(self.samples.sum())

    @cached_property
    def sample_stops(self) -> Int64s:
        """int64 [shards], the ordinal after each shard's last sample."""
        return np.cumsum(self.samples, dtype=np.int64)

    @property
    def num_kept(self) -> int:
        """Samples of the data set, without the removed ones."""
        return self.num_samples - len(self.removed)

    @property
    def total_bytes(self) -> int:
        return int(self.shard_bytes.sum())

    @cached_property
    def digest(self) -> str:
        """Identifies the data set: `shards_digest`, or if samples were removed, SHA-256 of it and their ordinals."""
        if not len(self.removed):
            return self.shards_digest
        removed = self.removed.astype("<i8").tobytes()
        return hashlib.sha256(f"{MANIFEST_KIND} {self.shards_digest} removed\n".encode() + removed).hexdigest()

    @cached_property
    def shards_digest(self) -> str:
        """SHA-256, hexadecimal, of names, sizes, checksums and sample counts in their order.

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
        removed = self._removed_of(chosen) if len(self.removed) else self.removed
        return replace(self, names=cast("Texts", self.names).take(chosen), removed=removed, **columns)

    @property
    def num_removed(self) -> Int64s:
        """The number of removed samples in each shard: int64 [shards]."""
        stops = np.searchsorted(self.removed, np.cumsum(self.samples, dtype=np.int64))
        return np.diff(stops, prepend=0).astype(np.int64)

    def removed_in(self, row: int) -> Int64s:
        """The removed samples of the shard in a row, as numbers within the shard: int64, sorted."""
        stop = int(self.samples[: row + 1].sum())
        start = stop - int(self.samples[row])
        first, last = np.searchsorted(self.removed, [start, stop])
        return self.removed[first:last] - start

    def _removed_of(self, chosen: Int64s) -> Int64s:
        """The removed samples of these rows, as ordinals of their manifest."""
        stops, counts = np.cumsum(self.samples, dtype=np.int64), self.samples[chosen]
        starts, firsts = (stops - self.samples)[chosen], np.cumsum(counts, dtype=np.int64) - counts
        lows, highs = np.searchsorted(self.removed, starts), np.searchsorted(self.removed, starts + counts)
        moved = [
            self.removed[low:high] - start + first
            for low, high, start, first in zip(lows, highs, starts, firsts, strict=True)
            if low < high
        ]
        return np.concatenate([np.empty(0, np.int64), *moved])

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
        if len(self.removed):
            columns["removed"] = self.removed
        header = {
            "kind": MANIFEST_KIND,
            "version": MANIFEST_VERSION,
            "components": dict(sorted(self.components.items())),
            "photos": {c: dict(sorted(counts.items())) for c, counts in sorted(self.photos.items())},
            "labels": dict(sorted(self.labels.items())),
            "classes": {str(label): self.classes[label] for label in sorted(self.classes)},
            "turned": dict(sorted(self.turned.items())),
            **({"recoded": list(map(asdict, self.recoded))} if self.recoded else {}),
            **({"etl": self.etl} if self.etl else {}),
        }
        if self.version > 1:
            header |= {
                "data_version": self.version,
                "parts": [list(part) for part in self.parts],
                "history": [change._asdict() for change in self.history],
            }
        return save_columns(columns, header)

    @classmethod
    def from_bytes(cls, data: bytes, *, where: str) -> "Manifest":
        """Read a manifest: its names are safe as parts of paths, its counts are at least 0 and their sums fit int64.

        Raises:
            DataError: If ``data`` is not a manifest of this version, or holds invalid values; ``where`` names it.
        """
        file = ColumnFile.of_bytes(data, where=where, kind=MANIFEST_KIND, version=MANIFEST_VERSION)
        with file.checking():
            num_shards = file.length("name/ends")
            dtypes: dict[str, Any] = {column: ([dtype], num_shards) for column, dtype in SHARD_COLUMNS.values()}
            dtypes |= {"name/bytes": ([np.uint8], 0), "name/ends": ([np.int64], num_shards)}
            if "removed" in file:
                dtypes["removed"] = [np.int64], file.length("removed")
            file.declare(dtypes)
            names = file.texts("name")
            if problem := object_name_problem(names):
                raise ValueError(problem)
            columns: dict[str, Any] = {name: file.column(column) for name, (column, _) in SHARD_COLUMNS.items()}
            for name, values in columns.items():
                if values.dtype == np.int64 and ((values < 0).any() or values.sum(dtype=np.float64) >= 2**62):
                    raise ValueError(f"column '{SHARD_COLUMNS[name][0]}' has negative values, or a sum above 2**62")
            removed = file.column("removed") if "removed" in file else _no_ordinals()
            num_samples = int(columns["samples"].sum())
            if (np.diff(removed) <= 0).any() or (len(removed) and not 0 <= removed[0] <= removed[-1] < num_samples):
                raise ValueError(f"column 'removed' does not hold sorted ordinals below {num_samples}")
            return cls(names=names, **columns, **_entries(file.header, num_shards), removed=removed)


def _entries(header: Mapping[str, Any], num_shards: int) -> dict[str, Any]:
    """The attributes of a manifest that its header holds; raises `ValueError` for impossible ones."""
    if missing := {"components", "photos", "labels", "turned"} - header.keys():
        raise ValueError(f"it lacks '{min(missing)}'")
    entries = {name: header[name] for name in _HEADER.keys() & header.keys()}
    for name, value in entries.items():
        if not fits(value, _HEADER[name]):
            raise ValueError(f"'{name}' is {value!r:.60}")
    version = entries.pop("data_version", 1)
    parts, history = (entries.pop(name, ()) for name in ("parts", "history"))
    entries |= {
        "classes": classes_of(header["classes"]),
        "recoded": steps_of(header.get("recoded", [])),
        "version": version,
        "parts": tuple(ShardsPart(*part) for part in parts),
        "history": tuple(Change(**change) for change in history),
    }
    if version > 1 or parts or history:
        if sum(part.num_shards for part in entries["parts"]) != num_shards:
            raise ValueError(f"'parts' are of other shards than the {num_shards} that it lists")
        if len(history) != version or [change["version"] for change in history] != list(range(1, len(history) + 1)):
            raise ValueError(f"'history' does not have the changes 1 to {version}")
    return entries


def classes_of(table: object) -> dict[int, str]:
    """The class table, id -> name, in a value of JSON; raises `ValueError` for other values."""
    if not isinstance(table, dict):
        raise ValueError(f"a {type(table).__name__}")
    classes: dict[int, str] = {}
    for text, name in table.items():
        label = int(text) if _CLASS_ID.fullmatch(text) else None
        if not is_int64(label) or label in classes or not is_text(str(name)):
            raise ValueError(f"'{printable(text, max_chars=60)}': '{printable(str(name), max_chars=60)}'")
        classes[cast("int", label)] = str(name)
    return classes


# Sums of several manifests

_UNKNOWN = "unknown"  # photos of this format have no size either


def concatenate(manifests: Sequence[Manifest]) -> Manifest:
    """The shards of several manifests, one after the other, in one of version 1; sums and class tables are added."""
    classes: dict[int, str] = {}
    components: Counter[str] = Counter()
    turned: Counter[str] = Counter()
    for manifest in manifests:
        classes = dict(manifest.classes) | classes
        components.update(manifest.components)
        turned.update(manifest.turned)
    columns: dict[str, Any] = {
        name: np.concatenate([np.empty(0, dtype), *(getattr(manifest, name) for manifest in manifests)])
        for name, (_, dtype) in SHARD_COLUMNS.items()
    }
    firsts = np.cumsum([0, *(manifest.num_samples for manifest in manifests)])
    removed = [manifest.removed + first for manifest, first in zip(manifests, firsts[:-1], strict=True)]
    ids = [label for manifest in manifests for label in manifest.labels.values()]
    names = [Texts(*pack_texts(manifest.names)) for manifest in manifests]
    return Manifest(
        names=join_texts(names) if names else (),
        **columns,
        components=dict(components),
        classes=classes,
        photos=add_photos(manifest.photos for manifest in manifests),
        labels={"min": min(ids), "max": max(ids)} if ids else {},
        turned=dict(turned),
        recoded=tuple(step for manifest in manifests for step in manifest.recoded),
        removed=np.concatenate([_no_ordinals(), *removed]),
    )


def add_photos(parts: Iterable[Mapping[str, Mapping[str, int]]]) -> dict[str, dict[str, int]]:
    """The sums of several `Manifest.photos`."""
    sums: dict[str, Counter[str]] = defaultdict(Counter)
    for photos in parts:
        for component, counts in photos.items():
            sums[component].update(with_unsized(counts))
    return {component: without_unsized(counts) for component, counts in sums.items()}


def with_unsized(counts: Mapping[str, int]) -> dict[str, int]:
    """Counts of formats with `UNSIZED`, which a manifest leaves out if it is the number of unknown photos."""
    return {UNSIZED: counts.get(_UNKNOWN, 0), **counts}


def without_unsized(counts: Mapping[str, int]) -> dict[str, int]:
    """The inverse of `with_unsized`."""
    is_implied = counts[UNSIZED] == counts.get(_UNKNOWN, 0)
    return {name: count for name, count in counts.items() if not (is_implied and name == UNSIZED)}
