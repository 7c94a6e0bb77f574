"""The samples of a shard, of a segment and of one batch; the graph's arrays are computed from them.

A `ShardTable` is a checked shard index with one table for each component that was asked for. `Rows` are the samples of
one segment, or of a few shards; a `Batch` is a run of these rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dali_pipes.arrays import Bools, Int32s, Int64s
from dali_pipes.data_set.data_set import split_set
from dali_pipes.errors import DataError, printable
from dali_pipes.formats.names import LABEL_COMPONENT
from dali_pipes.formats.orientation import UPRIGHT, upright_size
from dali_pipes.formats.photo_header import PHOTO_FORMATS, PhotoHeader, PhotoRules
from dali_pipes.formats.sample_columns import NO_LABEL
from dali_pipes.formats.shard_index import ComponentRange, ShardIndex
from dali_pipes.options import Labels, Missing
from dali_pipes.order.randomness import Stream

NO_PHOTO = -1
"""The format of a component whose name is not that of a photo."""
# The most keys of a batch that an error names.
NUM_NAMED = 8


@dataclass(frozen=True, kw_only=True)
class SampleRules:
    """Rules for reading samples; see `dali_pipes.options`."""

    labels: Labels = "raw"
    missing: Missing = "error"
    photos: PhotoRules = field(default_factory=PhotoRules)
    names_sets: bool = False
    """Whether the shards are those of a mixture, called ``SET/SHARD``; then keys are ``SET/KEY``, too."""


class Places(NamedTuple):
    """The places of one component of some samples; all columns are int64 [N]."""

    offset: Int64s
    """First byte in the shard; -1 where the sample lacks the component."""
    size: Int64s
    """Bytes."""
    height: Int64s
    """Rows of a photo as stored; 0 for a component that is not a photo."""
    width: Int64s
    format: Int64s
    """Index into `dali_pipes.formats.photo_header.PHOTO_FORMATS`; `NO_PHOTO` if its name is not that of a photo."""
    orientation: Int64s
    """The EXIF orientation, 1 to 8; 1 for a component that is not a photo, and if the index does not know it."""

    @classmethod
    def none(cls, num: int) -> "Places":
        zeros = np.zeros((4, num), np.int64)
        return cls(zeros[0] - 1, zeros[1], zeros[2], zeros[3], np.full(num, NO_PHOTO), np.full(num, UPRIGHT))

    @property
    def is_there(self) -> Bools:
        """Which samples have the component: bool [N]."""
        return self.offset >= 0

    def part(self, rows: slice) -> "Places":
        return Places(*(column[rows] for column in self))

    def header(self, position: int) -> PhotoHeader:
        """The header of one photo."""
        format, height, width = (int(column[position]) for column in (self.format, self.height, self.width))
        return PhotoHeader(PHOTO_FORMATS[format] if format >= 0 else "unknown", height, width)

    def sizes(self, *, orient: bool) -> tuple[Int64s, Int64s]:
        """Heights and widths of the upright photos if ``orient``, else as stored: int64 [N] each."""
        return upright_size(self.height, self.width, self.orientation) if orient else (self.height, self.width)


class ShardTable:
    """One shard's samples: ``first`` is the first one's ordinal; ``class_ids`` is the class table, int64, sorted."""

    def __init__(
        self, shard: int, *, name: str, first: int, index: ShardIndex, rules: SampleRules, class_ids: Int64s
    ) -> None:
        self.shard, self.name, self.first = shard, name, first
        self._set = f"{split_set(name)[0]}/" if rules.names_sets else ""
        self._index, self._rules, self._class_ids = index, rules, class_ids
        self._places: dict[str, Places] = {}

    def __len__(self) -> int:
        return self._index.num_samples

    def places(self, component: str) -> Places:
        """Locate a component of all samples, or the first alternative that each has."""
        if component in self._places:
            return self._places[component]
        index = self._index
        found = Places.none(index.num_samples)
        for name in component.split(";"):
            if name not in index.offsets:
                continue
            rows = np.flatnonzero(~found.is_there & (index.offsets[name] >= 0))
            found.offset[rows], found.size[rows] = index.offsets[name][rows], index.sizes[name][rows]
            if (photo := index.photos.get(name)) is not None:
                found.height[rows], found.width[rows] = photo.height[rows], photo.width[rows]
                found.format[rows] = photo.format[rows]
                if photo.orientation is not None:
                    found.orientation[rows] = photo.orientation[rows]
        if self._rules.missing != "error":  # 1 x 1 pixel, so that crops can be drawn and a size can be a divisor
            found.height[~found.is_there] = found.width[~found.is_there] = 1
        self._places[component] = found
        return found

    def key(self, row: int) -> str:
        return f"{self._set}{self._index.keys[row]}"

    def range_of(self, component: str, row: int) -> ComponentRange | None:
        """See `ShardIndex.range_of`."""
        return self._index.range_of(component, row, shard=self.name)

    def components_of(self, row: int) -> list[str]:
        return [name for name, offsets in self._index.offsets.items() if offsets[row] >= 0]

    def name_of(self, row: int) -> str:
        """Name shard and key of one sample, for errors."""
        return f"shard '{self.name}', key '{self.key(row)}'"

    def labels(self, rows: Int64s) -> Int64s:
        """Return class ids: int64 [N]. A `DataError` if a sample has none, or one that is not in the class table."""
        if self._rules.missing != "empty":
            return self._known_labels(rows)
        is_there = self.places(LABEL_COMPONENT).is_there[rows]
        labels = np.full(len(rows), NO_LABEL, np.int64)
        if is_there.any():
            labels[is_there] = self._known_labels(rows[is_there])
        return labels

    def _known_labels(self, rows: Int64s) -> Int64s:
        if self._index.labels is None:
            raise DataError(f"{self.name_of(int(rows[0]))}: no component '{LABEL_COMPONENT}'")
        raw = self._index.labels[rows]
        if self._rules.labels == "raw":
            return raw
        class_ids = self._class_ids
        contiguous = np.searchsorted(class_ids, raw)
        is_known = class_ids[np.minimum(contiguous, len(class_ids) - 1)] == raw
        if not is_known.all():
            at = int(np.argmin(is_known))
            raise DataError(
                f"{self.name_of(int(rows[at]))}: class id {raw[at]} is not in the class table ({len(class_ids)} "
                f"classes, {class_ids[0]} to {class_ids[-1]}); add it to the table and index the shards anew: "
                "dali-pipes prep index URL"
            )
        return contiguous.astype(np.int64)


class _Part(NamedTuple):
    # The rows of one shard among those of other shards.
    table: ShardTable
    where: Int64s  # positions among the rows, ascending
    rows: Int64s  # rows of the shard


class Rows:
    """Some samples, in a given order: ``ordinals`` is int64 [N]; ``tables`` are in the order of the shards."""

    def __init__(self, ordinals: Int64s, tables: Sequence[ShardTable]) -> None:
        self.ordinals, self._tables = ordinals, tables
        at = np.searchsorted(np.array([table.first for table in tables], np.int64), ordinals, side="right") - 1
        self.shard: Int64s = np.array([table.shard for table in tables], np.int64)[at]
        """int64 [N]: the shard of each."""
        order = np.argsort(at, kind="stable")
        named, firsts = np.unique(at[order], return_index=True)
        self._parts = {
            tables[number].shard: _Part(tables[number], where, ordinals[where] - tables[number].first)
            for number, where in zip(named.tolist(), np.split(order, firsts[1:]), strict=True)
        }
        self._places: dict[str, Places] = {}

    def __len__(self) -> int:
        return len(self.ordinals)

    def of(self, ordinals: Int64s) -> "Rows":
        """Take other samples of the same shards, without reading anything."""
        return Rows(ordinals, self._tables)

    def of_whole_shards(self) -> "Rows":
        """Take all samples of the same shards, without reading anything."""
        ordinals = [np.arange(table.first, table.first + len(table), dtype=np.int64) for table in self._tables]
        return self.of(np.concatenate(ordinals))

    def places(self, component: str) -> Places:
        """Locate one component of each sample, or the first that it has of alternatives such as ``"jpg;jpeg"``."""
        if component not in self._places:
            found = Places.none(len(self))
            for part in self._parts.values():
                for column, of_shard in zip(found, part.table.places(component), strict=True):
                    column[part.where] = of_shard[part.rows]
            self._places[component] = found
        return self._places[component]

    @cached_property
    def labels(self) -> Int64s:
        """The class ids: int64 [N]."""
        labels = np.empty(len(self), np.int64)
        for part in self._parts.values():
            labels[part.where] = part.table.labels(part.rows)
        return labels

    def name(self, position: int) -> tuple[str, str]:
        """Return the shard and the key of one sample."""
        table, row = self._row(position)
        return table.name, table.key(row)

    def range_of(self, component: str, position: int) -> ComponentRange | None:
        """See `ShardTable.range_of`."""
        table, row = self._row(position)
        return table.range_of(component, row)

    def _row(self, position: int) -> tuple[ShardTable, int]:
        part = self._parts[int(self.shard[position])]
        return part.table, int(part.rows[np.searchsorted(part.where, position)])


@dataclass(eq=False, repr=False)
class Batch:
    """One batch: the rows from ``start`` to ``stop``. All arrays are [B], in the order of the batch."""

    rows: Rows
    start: int
    stop: int
    occurrences: Int64s
    """int64 [B]: numbers the repetitions of one sample in an epoch, see `dali_pipes.order.plan.Step`."""
    num_valid: int
    stream: Callable[[str], Stream]
    substituted: tuple[int, ...] = ()
    """Positions at which another sample replaces a bad one."""
    shape: tuple[int, int] | None = None
    """Height and width of the batch's bucket; ``None`` without buckets."""

    def __post_init__(self) -> None:
        self.ordinals = self.rows.ordinals[self.start : self.stop]
        """int64 [B]."""

    def __len__(self) -> int:
        return self.stop - self.start

    def replaced(
        self, ordinals: Int64s, occurrences: Int64s, *, substituted: tuple[int, ...], rows: Rows | None = None
    ) -> "Batch":
        """Make a batch of other samples in the place of this one, from its own shards or from those of ``rows``."""
        taken, stop = (rows or self.rows).of(ordinals), len(ordinals)
        return replace(self, rows=taken, start=0, stop=stop, occurrences=occurrences, substituted=substituted)

    def places(self, component: str) -> Places:
        """Locate one component of each sample; see `Rows.places`."""
        return self.rows.places(component).part(slice(self.start, self.stop))

    @property
    def labels(self) -> Int64s:
        """The class ids: int64 [B]."""
        return self.rows.labels[self.start : self.stop]

    def size(self, component: str, *, orient: bool = False) -> tuple[Int32s, Int32s]:
        """Heights and widths of a component's photos, int32 [B]: of the upright ones if ``orient``, else as stored."""
        height, width = self.places(component).sizes(orient=orient)
        return height.astype(np.int32), width.astype(np.int32)

    @cached_property
    def keys(self) -> list[str]:
        """The samples' keys."""
        return [self.name(position)[1] for position in range(len(self))]

    @property
    def some_keys(self) -> str:
        """The first keys, as an error or a line of the log names a batch."""
        return ", ".join(map(printable, self.keys[:NUM_NAMED])) + (", ..." if len(self) > NUM_NAMED else "")

    def name(self, position: int) -> tuple[str, str]:
        """Return the shard and the key of one sample."""
        return self.rows.name(self.start + position)

    def uniforms(self, stream: str, num: int) -> npt.NDArray[np.float64]:
        """Draw ``num`` numbers in [0, 1) for each sample, by its ordinal and the epoch: float64 [B, num]."""
        return self.stream(stream).uniforms(self.ordinals, num, occurrence=self.occurrences)
