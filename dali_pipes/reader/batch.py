"""The samples of a segment and of one batch; the graph's arrays are computed from them.

`Rows` are the samples of one segment, or of a few shards; a `Batch` is a run of these rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dali_pipes.errors import printable
from dali_pipes.formats.orientation import upright_size
from dali_pipes.formats.photo_header import PHOTO_FORMATS, PhotoHeader
from dali_pipes.formats.photo_rules import PhotoRules
from dali_pipes.order.randomness import Stream
from dali_pipes.reader.shard_table import ShardTable

# Keys of a batch that an error names.
NUM_NAMED = 8

Int64s = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Places:
    """The places of one component of some samples; all columns are int64 [N]."""

    offset: Int64s
    """First byte in the shard; -1 where the sample lacks the component."""
    size: Int64s
    """Bytes."""
    height: Int64s
    """Rows of a photo as stored; 0 for a component that is not a photo."""
    width: Int64s
    format: Int64s
    """Index into `dali_pipes.formats.photo_header.PHOTO_FORMATS`; -1 if the component's name is not that of a photo."""
    orientation: Int64s
    """A code of `dali_pipes.formats.orientation`; 1 for a component that is not a photo, and if the index does not know
    it."""

    def part(self, rows: slice) -> "Places":
        """Take a run of the samples."""
        return Places(*(getattr(self, field.name)[rows] for field in fields(self)))

    def header(self, position: int) -> PhotoHeader:
        """The header of one photo."""
        format, height, width = (int(column[position]) for column in (self.format, self.height, self.width))
        return PhotoHeader(PHOTO_FORMATS[format] if format >= 0 else "unknown", height, width)

    def sizes(self, *, orient: bool) -> tuple[Int64s, Int64s]:
        """Heights and widths of the upright photos if ``orient``, else as stored: int64 [N] each."""
        return upright_size(self.height, self.width, self.orientation) if orient else (self.height, self.width)

    def are_refused(self, rules: PhotoRules) -> Bools:
        """Tell which are bad photos, as `PhotoRules.problem` says for one: bool [N]."""
        bad: Bools = (self.format >= 0) & rules.are_bad(self.format, self.height, self.width)
        return bad


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
            columns = np.empty((len(self), 6), np.int64)
            for part in self._parts.values():
                columns[part.where] = part.table.column(component)[part.rows]
            self._places[component] = Places(*np.ascontiguousarray(columns.T))
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
        part = self._parts[int(self.shard[position])]
        return part.table.name, part.table.key(int(part.rows[np.searchsorted(part.where, position)]))


class Batch:
    """One batch: the rows from ``start`` to ``stop``. All arrays are [B], in the order of the batch."""

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
        shape: tuple[int, int] | None = None,
    ) -> None:
        self.rows = rows
        self._start, self._stop = start, stop
        self.ordinals = rows.ordinals[start:stop]
        """int64 [B]."""
        self.occurrences = occurrences
        """int64 [B]: how often the epoch had each sample before."""
        self.num_valid = num_valid
        self.substituted = substituted
        """Positions at which another sample replaces a bad one."""
        self.shape = shape
        """Height and width of the batch's bucket; ``None`` without buckets."""
        self._stream = stream

    def __len__(self) -> int:
        return self._stop - self._start

    def replaced(
        self, ordinals: Int64s, occurrences: Int64s, *, substituted: tuple[int, ...], rows: Rows | None = None
    ) -> "Batch":
        """Make a batch of other samples in the place of this one, from its own shards or from those of ``rows``."""
        return Batch(
            (rows or self.rows).of(ordinals),
            0,
            len(ordinals),
            occurrences,
            num_valid=self.num_valid,
            stream=self._stream,
            substituted=substituted,
            shape=self.shape,
        )

    def places(self, component: str) -> Places:
        """Locate one component of each sample; see `Rows.places`."""
        return self.rows.places(component).part(slice(self._start, self._stop))

    @property
    def labels(self) -> Int64s:
        """The class ids: int64 [B]."""
        return self.rows.labels[self._start : self._stop]

    def size(self, component: str, *, orient: bool = False) -> tuple[Int32s, Int32s]:
        """Return heights and widths of a component's photos: of the upright ones if ``orient``, else as stored.

        They are int32 [B] each.
        """
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
        return self.rows.name(self._start + position)

    def uniforms(self, stream: str, num: int) -> npt.NDArray[np.float64]:
        """Draw ``num`` numbers in [0, 1) for each sample, by its ordinal and the epoch: float64 [B, num]."""
        return self._stream(stream).uniforms(self.ordinals, num, occurrence=self.occurrences)
