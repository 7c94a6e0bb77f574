"""Ordinals to what the shard indexes know of each sample: where its components lie, its label, its photos' sizes.

The index of a shard is read when a segment first names the shard, and forgotten with its window: memory is that of the
windows that are read, whatever the size of the data set. `Rows` are the columns of one segment's samples; a `Batch` is
some of these rows in a run: what the seam's arrays are computed from.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt

from dali_pipes.errors import DataError
from dali_pipes.formats.column_file import checksum
from dali_pipes.formats.manifest import Manifest
from dali_pipes.formats.names import LABEL_COMPONENT, classes_name, index_name
from dali_pipes.formats.photo_header import MAX_PIXELS, PHOTO_FORMATS
from dali_pipes.formats.sample_columns import NO_LABEL
from dali_pipes.formats.shard_index import ShardIndex
from dali_pipes.order.randomness import Stream
from dali_pipes.store.base import Store
from dali_pipes.store.urls import shared_prefix

__all__ = ["Batch", "Labels", "Missing", "Places", "Rows", "Samples", "index_reader"]

# Shard indexes read at a time while one that is at fault is looked for; the wait is the store's latency.
NUM_READERS = 16
UNDECODABLE = ("unknown", "GIF")
_UNDECODABLE_CODES = [PHOTO_FORMATS.index(kind) for kind in UNDECODABLE]
# Columns of a component's table.
OFFSET, SIZE, HEIGHT, WIDTH, FORMAT = range(5)
_COLUMNS = ("offset", "size", "height", "width", "format")
NO_PHOTO = -1

Int64s = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]
Labels = Literal["raw", "contiguous"]
Missing = Literal["error", "skip", "empty"]


@dataclass(frozen=True, kw_only=True)
class Places:
    """One component of some samples; all are int64 [N]."""

    offset: Int64s
    """First byte in the shard; -1 where the sample lacks the component."""
    size: Int64s
    """Bytes."""
    height: Int64s
    """Rows of a photo as stored; 0 for what is no photo."""
    width: Int64s
    format: Int64s
    """Index into `dali_pipes.formats.photo_header.PHOTO_FORMATS`, -1 for what is no photo by its name."""


class Samples:
    """What is known of every sample, a shard at a time.

    Args:
        manifest: The loader's shards.
        read_index: A shard's number to its index's bytes, already checked. May be set anew: first the store is read,
            later the image.
        whole: The manifest that ``manifest`` is a part of, whose sums its header has; ``manifest`` where ``None``.
        labels: ``"raw"``: class ids as ``cls`` holds them; ``"contiguous"``: from 0, by the order of the ids in the
            class table.
        missing: What is made of a sample that lacks a component: refused; left out, which the plan sees to; or let
            through: a photo as one of 1 x 1 pixel, a class id as -1.
        max_pixels: Photos of more pixels are bad.
    """

    def __init__(
        self,
        manifest: Manifest,
        read_index: Callable[[int], bytes],
        *,
        whole: Manifest | None = None,
        labels: Labels = "raw",
        missing: Missing = "error",
        max_pixels: int = MAX_PIXELS,
    ) -> None:
        self.manifest = manifest
        self.read_index = read_index
        self._whole = whole or manifest
        self._labels = labels
        self.missing: Missing = missing
        self.excluded = np.empty(0, np.int64)
        """Ordinals that no plan names, sorted: nothing is checked of them."""
        self.max_pixels = max_pixels
        self._stops = np.cumsum(manifest.samples, dtype=np.int64)
        self._starts = self._stops - manifest.samples
        self._class_ids = np.array(sorted(manifest.classes), np.int64)
        self._tables: dict[int, _ShardTable] = {}
        # Looked for once: a graph is built anew when an iteration was cut short, and then not all indexes can be read.
        self._found: set[str] = set()

    def __len__(self) -> int:
        return int(self._stops[-1]) if len(self._stops) else 0

    def shard_of(self, ordinals: Int64s) -> Int64s:
        """The shard of each ordinal: int64 [N]."""
        return np.searchsorted(self._stops, ordinals, side="right").astype(np.int64)

    def rows(self, ordinals: Int64s) -> "Rows":
        """The columns of these samples, in this order. Their shards' indexes must be there to be read.

        Raises:
            DataError: If an index is not what it must be.
        """
        return self._gather(ordinals, self._table)

    def _gather(self, ordinals: Int64s, table_of: "Callable[[int], _ShardTable]") -> "Rows":
        shard = self.shard_of(ordinals)
        order = np.argsort(shard, kind="stable")
        named, firsts = np.unique(shard[order], return_index=True)
        parts = [
            _Part(table_of(int(number)), where, ordinals[where] - self._starts[number])
            for number, where in zip(named, np.split(order, firsts[1:]), strict=True)
        ]
        return Rows(self, ordinals, shard, parts)

    def rows_from(self, ordinals: Int64s, read_index: Callable[[int], bytes]) -> "Rows":
        """As `rows`, by indexes that ``read_index`` gives, and nothing is kept."""
        tables: dict[int, _ShardTable] = {}

        def table_of(shard: int) -> _ShardTable:
            if shard not in tables:
                tables[shard] = self._load(shard, read_index)
            return tables[shard]

        return self._gather(ordinals, table_of)

    def neighbours(self, ordinal: int) -> Iterator[Int64s]:
        """The other samples that are not excluded, a shard at a time: of its own shard those before it, then those
        after, each way the nearest first; then the shards that follow, and from the first one on, in their order.
        """
        shard = int(self.shard_of(np.array([ordinal]))[0])
        before = np.arange(ordinal - 1, int(self._starts[shard]) - 1, -1, dtype=np.int64)
        own = np.concatenate([before, np.arange(ordinal + 1, int(self._stops[shard]), dtype=np.int64)])
        num_shards = self.manifest.num_shards
        for number in range(shard, shard + num_shards):
            next_ = number % num_shards
            others = own if number == shard else np.arange(self._starts[next_], self._stops[next_], dtype=np.int64)
            wanted = others[~np.isin(others, self.excluded)]
            if len(wanted):
                yield wanted

    def forget(self, shards: Iterable[int]) -> None:
        """Give up what is known of these shards; it is read again when it is wanted."""
        for shard in shards:
            self._tables.pop(shard, None)

    def example(self) -> "Batch":
        """A batch of the first sample that is not excluded: what a graph's arrays are like is learned from it."""
        is_left = self.excluded != np.arange(len(self.excluded))
        first = np.array([np.argmax(is_left) if is_left.any() else len(self.excluded)], np.int64)
        once = np.zeros(1, np.int64)
        batch = Batch(self.rows(first), 0, 1, once, num_valid=1, stream=lambda name: Stream(0, 0, name))
        self.forget(batch.rows.shard.tolist())
        return batch

    def name(self, ordinal: int) -> str:
        """Shard and key of one sample, as errors give them."""
        shard = int(self.shard_of(np.array([ordinal]))[0])
        key = self._table(shard).index.keys[ordinal - int(self._starts[shard])]
        return f"shard '{self.manifest.names[shard]}', key '{key}'"

    def check_component(self, component: str) -> None:
        """Refuse a component that a sample lacks, by what the manifest says, before any shard is read.

        Args:
            component: Its name, or alternatives as DALI's reader takes them: ``"jpg;jpeg;png"``, the first that is
                there.

        Raises:
            DataError: If a sample has none of them; names the first.
        """
        names = component.split(";")
        counts = [self._whole.components.get(name, 0) for name in names]
        if max(counts) == self._whole.num_samples or component in self._found:
            return
        if self.missing != "error":
            if not max(counts):
                there = ", ".join(f"'{name}'" for name in self._whole.components)
                raise DataError(f"no sample has component '{component}'; the data set has {there or 'none'}")
            self._found.add(component)
            return
        for table in self._scan():
            missing = np.flatnonzero((table.column(names)[:, OFFSET] < 0) & self._is_wanted(table))
            if not len(missing):
                continue
            row = int(missing[0])
            lacking = self._whole.num_samples - max(counts)
            more = (
                f"; {lacking} of {self._whole.num_samples} samples lack it" if len(names) == 1 and lacking > 1 else ""
            )
            found = ", ".join(table.components_of(row)) or "none"
            raise DataError(f"{self._name_in(table, row)}: no component '{component}' (found: {found}){more}")
        self._found.add(component)

    def check_sized(self, component: str) -> None:
        """Refuse a component whose height and width are asked for, where it is no photo by its name.

        Raises:
            DataError: Names the first.
        """
        names = component.split(";")
        if all(name in self._whole.photos for name in names):
            return
        for table in self._scan():
            columns = table.column(names)
            unsized = np.flatnonzero(
                (columns[:, FORMAT] == NO_PHOTO) & (columns[:, OFFSET] >= 0) & self._is_wanted(table)
            )
            if len(unsized):
                raise DataError(
                    f"{self._name_in(table, int(unsized[0]))}: component '{component}' has no height and width in the "
                    "index, because its name is not a photo's; name it .jpg, .png or the like when packing"
                )

    def check_photos(self, component: str) -> None:
        """Refuse what DALI cannot decode, by the headers that were read when the shards were indexed.

        Args:
            component: As in `check_component`.

        Raises:
            DataError: If a photo is a GIF, or its header is none that is known; names the first.
        """
        names = component.split(";")
        formats = [self._whole.photos[name] for name in names if name in self._whole.photos]
        num_bad = sum(found.get(kind, 0) for found in formats for kind in (*UNDECODABLE, "unsized"))
        if not num_bad:
            return
        for table in self._scan():
            columns = table.column(names)
            bad = np.flatnonzero(_is_undecodable(columns) & (columns[:, OFFSET] >= 0) & self._is_wanted(table))
            if not len(bad):
                continue
            row = int(bad[0])
            problem = photo_problem(columns[row], max_pixels=self.max_pixels)
            # Of a data set of which some samples are left out it is not known how many of those are among the others.
            more = f"; so do {num_bad - 1} more samples" if num_bad > 1 and not len(self.excluded) else ""
            raise DataError(
                f"{self._name_in(table, row)}: component '{component}' {problem}{more}; pass on_error='substitute', "
                "leave it out (exclude=), or pack without it: dali-pipes prep pack --on-bad skip"
            )

    def check_labels(self) -> None:
        """Refuse to give labels that are not there.

        Raises:
            DataError: If a sample has no ``cls``, or there is no class table to make ids contiguous by.
        """
        self.check_component(LABEL_COMPONENT)
        if self._labels == "contiguous" and not len(self._class_ids):
            table = classes_name(shared_prefix(self.manifest.names))
            raise DataError(
                f"labels='contiguous' needs a class table, and the manifest has none; write '{table}' beside the "
                'shards, {"1": "name", ...}, and index them anew: dali-pipes prep index URL'
            )

    def labels_of(self, table: "_ShardTable", rows: Int64s) -> Int64s:
        """The class ids of some rows of a shard: int64 [N]."""
        if table.index.labels is None and self.missing != "empty":
            raise DataError(f"{self._name_in(table, int(rows[0]))}: no component '{LABEL_COMPONENT}'")
        if self.missing == "empty":
            is_there = table.column([LABEL_COMPONENT])[rows, OFFSET] >= 0
            labels = np.full(len(rows), NO_LABEL, np.int64)
            if is_there.any():
                labels[is_there] = self._known_labels(table, rows[is_there])
            return labels
        return self._known_labels(table, rows)

    def _known_labels(self, table: "_ShardTable", rows: Int64s) -> Int64s:
        assert table.index.labels is not None
        raw = table.index.labels[rows]
        if self._labels == "raw":
            return raw
        contiguous = np.searchsorted(self._class_ids, raw)
        known = self._class_ids[np.minimum(contiguous, len(self._class_ids) - 1)] == raw
        if not known.all():
            row = int(rows[np.argmin(known)])
            raise DataError(
                f"{self._name_in(table, row)}: class id {table.index.labels[row]} is not in the class table "
                f"({len(self._class_ids)} classes, {self._class_ids[0]} to {self._class_ids[-1]}); add it to the table "
                "and index the shards anew: dali-pipes prep index URL"
            )
        return contiguous.astype(np.int64)

    def _table(self, shard: int) -> "_ShardTable":
        if shard not in self._tables:
            self._tables[shard] = self._load(shard)
        return self._tables[shard]

    def _load(self, shard: int, read_index: Callable[[int], bytes] | None = None) -> "_ShardTable":
        name = self.manifest.names[shard]
        index = ShardIndex.from_bytes((read_index or self.read_index)(shard), where=index_name(name))
        expected = (int(self.manifest.samples[shard]), int(self.manifest.shard_bytes[shard]))
        if (index.num_samples, index.shard_bytes) != expected:
            raise DataError(
                f"index '{index_name(name)}' lists {index.num_samples} samples in {index.shard_bytes} bytes, the "
                f"manifest says {expected[0]} in {expected[1]}; rebuild it: dali-pipes prep index URL"
            )
        return _ShardTable(shard, index, fills=self.missing != "error")

    def _scan(self) -> Iterator["_ShardTable"]:
        """All shards' tables, in order, kept by nobody."""
        with ThreadPoolExecutor(NUM_READERS) as readers:
            for first in range(0, self.manifest.num_shards, 16 * NUM_READERS):
                shards = range(first, min(first + 16 * NUM_READERS, self.manifest.num_shards))
                yield from readers.map(self._load, shards)

    def _is_wanted(self, table: "_ShardTable") -> npt.NDArray[np.bool_]:
        """Which samples of a shard are not excluded: bool [N]."""
        first = int(self._starts[table.shard])
        wanted = np.ones(table.index.num_samples, np.bool_)
        start, stop = np.searchsorted(self.excluded, [first, first + len(wanted)])
        wanted[self.excluded[start:stop] - first] = False
        return wanted

    def _name_in(self, table: "_ShardTable", row: int) -> str:
        return f"shard '{self.manifest.names[table.shard]}', key '{table.index.keys[row]}'"


class _ShardTable:
    """One shard's index, with a table for each component expression that was asked for."""

    def __init__(self, shard: int, index: ShardIndex, *, fills: bool) -> None:
        self.shard, self.index, self._fills = shard, index, fills
        self._columns: dict[tuple[str, ...], Int64s] = {}

    def column(self, names: Sequence[str]) -> Int64s:
        """The first of ``names`` that each sample has: int64 [N, 5], see `OFFSET` and the others."""
        if (kept := self._columns.get(tuple(names))) is not None:
            return kept
        found = np.zeros((self.index.num_samples, 5), np.int64)
        found[:, OFFSET] = -1
        found[:, FORMAT] = NO_PHOTO
        for name in names:
            if name not in self.index.offsets:
                continue
            rows = np.flatnonzero((found[:, OFFSET] < 0) & (self.index.offsets[name] >= 0))
            found[rows, OFFSET], found[rows, SIZE] = self.index.offsets[name][rows], self.index.sizes[name][rows]
            if (photo := self.index.photos.get(name)) is not None:
                found[rows, HEIGHT], found[rows, WIDTH] = photo.height[rows], photo.width[rows]
                found[rows, FORMAT] = photo.format[rows]
        if self._fills:  # what is not there is 1 x 1 pixel, so that windows can be drawn and sizes divided by
            lacking = found[:, OFFSET] < 0
            found[lacking, HEIGHT] = found[lacking, WIDTH] = 1
        self._columns[tuple(names)] = found
        return found

    def components_of(self, row: int) -> list[str]:
        return [name for name, offsets in self.index.offsets.items() if offsets[row] >= 0]


@dataclass(frozen=True)
class _Part:
    """The rows of one shard among others'."""

    table: _ShardTable
    where: Int64s  # positions among the rows
    rows: Int64s  # rows of the shard


class Rows:
    """The columns of some samples, in their order; made by `Samples.rows`."""

    def __init__(self, samples: Samples, ordinals: Int64s, shard: Int64s, parts: Sequence[_Part]) -> None:
        self.ordinals = ordinals
        self.shard = shard
        """int64 [N]: the shard of each."""
        self._samples, self._parts = samples, parts
        self._places: dict[str, Places] = {}
        self._refused: dict[tuple[str, ...], npt.NDArray[np.bool_]] = {}
        self._tables = {part.table.shard: part for part in parts}

    def __len__(self) -> int:
        return len(self.ordinals)

    def places(self, component: str) -> Places:
        """Where one component of each lies.

        Args:
            component: Its name, or alternatives: ``"jpg;jpeg"``, the first that is there.
        """
        if component not in self._places:
            names = component.split(";")
            table = np.empty((len(self.ordinals), 5), np.int64)
            for part in self._parts:
                table[part.where] = part.table.column(names)[part.rows]
            columns = np.ascontiguousarray(table.T)
            self._places[component] = Places(
                offset=columns[OFFSET],
                size=columns[SIZE],
                height=columns[HEIGHT],
                width=columns[WIDTH],
                format=columns[FORMAT],
            )
        return self._places[component]

    def of(self, ordinals: Int64s) -> "Rows":
        """The columns of other samples of the same shards; nothing is read for it."""
        return self._samples._gather(ordinals, lambda shard: self._tables[shard].table)

    def refused(self, components: Sequence[str]) -> npt.NDArray[np.bool_]:
        """Which must not be decoded, by what the shard index says of these components: bool [N]."""
        if tuple(components) not in self._refused:
            refused = np.zeros(len(self.ordinals), np.bool_)
            for component in components:
                places = self.places(component)
                columns = np.stack([places.offset, places.size, places.height, places.width, places.format], axis=1)
                is_bad = _is_undecodable(columns) | (places.height * places.width > self._samples.max_pixels)
                refused |= is_bad & (places.offset >= 0)
            self._refused[tuple(components)] = refused
        return self._refused[tuple(components)]

    def problem(self, position: int, components: Sequence[str]) -> tuple[str, str]:
        """The component for which one is refused, and why."""
        for component in components:
            places = self.places(component)
            columns = np.array([getattr(places, name)[position] for name in _COLUMNS])
            if places.offset[position] >= 0 and (text := photo_problem(columns, max_pixels=self._samples.max_pixels)):
                return component, text
        raise AssertionError("asked for a sample that is not refused")

    @cached_property
    def labels(self) -> Int64s:
        """The class id of each: int64 [N]."""
        labels = np.empty(len(self.ordinals), np.int64)
        for part in self._parts:
            labels[part.where] = self._samples.labels_of(part.table, part.rows)
        return labels

    def key(self, position: int) -> str:
        """The key of one."""
        part = self._tables[int(self.shard[position])]
        at = int(np.searchsorted(part.where, position))  # positions of a shard are in order: the sort was stable
        return part.table.index.keys[int(part.rows[at])]

    def shard_name(self, position: int) -> str:
        """The shard of one."""
        return self._samples.manifest.names[int(self.shard[position])]

    def name(self, position: int) -> str:
        """Shard and key of one, as errors give them."""
        return f"shard '{self.shard_name(position)}', key '{self.key(position)}'"


class Batch:
    """One batch's rows: what the seam's arrays are computed from. All arrays are [B], in the order of the batch."""

    def __init__(
        self,
        rows: Rows,
        start: int,
        stop: int,
        occurrences: Int64s,
        *,
        num_valid: int,
        stream: Callable[[str], Stream],
        substituted: tuple[int, ...] = (),
    ) -> None:
        self.rows = rows
        self._start, self._stop = start, stop
        self.ordinals = rows.ordinals[start:stop]
        """int64 [B]: which samples."""
        self.occurrences = occurrences
        """int64 [B]: how often the epoch had each before."""
        self.num_valid = num_valid
        self.substituted = substituted
        """Positions at which another sample stands in for a bad one."""
        self._stream = stream

    def replaced(
        self, ordinals: Int64s, occurrences: Int64s, *, substituted: tuple[int, ...], rows: "Rows | None" = None
    ) -> "Batch":
        """The batch with other samples in it: of its own shards, or of those that ``rows`` has."""
        return Batch(
            (rows or self.rows).of(ordinals),
            0,
            len(ordinals),
            occurrences,
            num_valid=self.num_valid,
            stream=self._stream,
            substituted=substituted,
        )

    def places(self, component: str) -> Places:
        """Where one component of each lies; see `Rows.places`."""
        places, rows = self.rows.places(component), slice(self._start, self._stop)
        return Places(**{name: getattr(places, name)[rows] for name in _COLUMNS})

    def refused(self, components: Sequence[str]) -> dict[int, tuple[str, str]]:
        """Those that must not be decoded: position -> component and reason; see `Rows.refused`."""
        bad = np.flatnonzero(self.rows.refused(components)[self._start : self._stop]).tolist()
        return {position: self.rows.problem(self._start + position, components) for position in bad}

    def __len__(self) -> int:
        return self._stop - self._start

    @property
    def labels(self) -> Int64s:
        """The class ids: int64 [B]."""
        return self.rows.labels[self._start : self._stop]

    def size(self, component: str) -> tuple[Int32s, Int32s]:
        """A component's photo heights and widths as stored: int32 [B] each."""
        places = self.rows.places(component)
        rows = slice(self._start, self._stop)
        return places.height[rows].astype(np.int32), places.width[rows].astype(np.int32)

    @cached_property
    def keys(self) -> list[str]:
        """The samples' keys."""
        return [self.rows.key(position) for position in range(self._start, self._stop)]

    def name(self, position: int) -> tuple[str, str]:
        """Shard and key of one of its samples."""
        return self.rows.shard_name(self._start + position), self.rows.key(self._start + position)

    def uniforms(self, stream: str, num: int) -> npt.NDArray[np.float64]:
        """``num`` numbers in [0, 1) for each sample, its own in this epoch: float64 [B, num]."""
        return self._stream(stream).uniforms(self.ordinals, num, occurrence=self.occurrences)


def photo_problem(columns: Int64s, *, max_pixels: int) -> str | None:
    """Why a photo with these columns cannot be decoded, ``None`` where nothing speaks against it."""
    height, width, format_ = (int(columns[number]) for number in (HEIGHT, WIDTH, FORMAT))
    expected = "expected JPEG, PNG or another format that DALI decodes"
    if format_ == PHOTO_FORMATS.index("GIF"):
        return f"holds a GIF, {expected}"
    if format_ >= 0 and (format_ == PHOTO_FORMATS.index("unknown") or not height):
        return f"holds an image whose header cannot be read, {expected}"
    if height * width > max_pixels:
        return f"holds a photo of {height} x {width} pixels, expected at most max_pixels={max_pixels}"
    return None


def _is_undecodable(columns: Int64s) -> npt.NDArray[np.bool_]:
    """By format and size: bool [N], of columns [N, 5]."""
    format_ = columns[:, FORMAT]
    bad: npt.NDArray[np.bool_] = np.isin(format_, _UNDECODABLE_CODES) | ((format_ >= 0) & (columns[:, HEIGHT] == 0))
    return bad


def index_reader(store: Store, manifest: Manifest) -> Callable[[int], bytes]:
    """Reads a shard's index from the store.

    Returns:
        A function that raises `DataError` if an index is not the one that the manifest was made with.
    """

    def read(shard: int) -> bytes:
        name = index_name(manifest.names[shard])
        data = store.read(name)
        if len(data) != manifest.index_bytes[shard] or checksum(data) != manifest.index_checksums[shard]:
            raise DataError(
                f"'{store.locate(name)}' is not the index that the manifest was made with: {len(data)} bytes, xxhash2 "
                f"{checksum(data):016x}; expected {manifest.index_bytes[shard]}, "
                f"{manifest.index_checksums[shard]:016x}; index the shards anew: dali-pipes prep index URL"
            )
        return data

    return read
