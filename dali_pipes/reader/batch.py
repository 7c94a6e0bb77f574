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
from dali_pipes.formats.photo_rules import PhotoRules, size_problem
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


class DecodedPhotos(NamedTuple):
    """The photos of a sample that a graph decodes."""

    components: tuple[str, ...] = ()
    """Components whose bytes reach an image decoder."""
    same_size: tuple[tuple[str, str], ...] = ()
    """Pairs of components that share a crop, such as a photo and its mask: both must have the same size."""
    upright: frozenset[str] = frozenset()
    """Those of `components` that their decoders turn upright, if the shard indexes keep orientations."""


class _Part(NamedTuple):
    # The rows of one shard among those of other shards.
    table: ShardTable
    where: Int64s  # positions among the rows, ascending
    rows: Int64s  # rows of the shard


class Rows:
    """Some samples, in a given order: ``ordinals`` is int64 [N]; ``tables`` are in the order of the shards."""

    def __init__(self, ordinals: Int64s, tables: Sequence[ShardTable], *, rules: PhotoRules) -> None:
        self.ordinals, self._tables, self._rules = ordinals, tables, rules
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
        self._refused: dict[DecodedPhotos, Bools] = {}

    def __len__(self) -> int:
        return len(self.ordinals)

    def of(self, ordinals: Int64s) -> "Rows":
        """Take other samples of the same shards, without reading anything."""
        return Rows(ordinals, self._tables, rules=self._rules)

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

    def refused(self, photos: DecodedPhotos) -> Bools:
        """Tell which samples must not be decoded, by the shard index's columns of their photos: bool [N]."""
        if photos not in self._refused:
            refused = np.zeros(len(self), np.bool_)
            for places in map(self.places, photos.components):
                refused |= places.are_refused(self._rules) & (places.offset >= 0)
            for photo, mask in photos.same_size:
                refused |= self._differ_in_size(photo, mask, photos.upright)
            self._refused[photos] = refused
        return self._refused[photos]

    def problem(self, position: int, photos: DecodedPhotos) -> tuple[str, str]:
        """Return the component for which a sample is refused, and the reason."""
        for component in photos.components:
            places = self.places(component)
            is_photo = places.offset[position] >= 0 and places.format[position] >= 0
            if is_photo and (text := self._rules.problem(places.header(position))):
                return component, text
        for photo, mask in photos.same_size:
            if self._differ_in_size(photo, mask, photos.upright)[position]:
                stored = [self.places(name).header(position)[1:] for name in (photo, mask)]
                expected, found = (
                    tuple(int(side[position]) for side in self.places(name).sizes(orient=name in photos.upright))
                    for name in (photo, mask)
                )
                return mask, size_problem(photo, expected, found, fit_as_stored=stored[0] == stored[1])
        raise AssertionError("asked for a sample that is not refused")

    def _differ_in_size(self, photo: str, mask: str, upright: frozenset[str]) -> Bools:
        """Tell which samples have a mask of another size than the photo, as both are decoded: bool [N]."""
        both = [(self.places(name), name in upright) for name in (photo, mask)]
        (height, width), (mask_height, mask_width) = (places.sizes(orient=orient) for places, orient in both)
        differ: Bools = (height != mask_height) | (width != mask_width)
        for places, _ in both:
            differ &= (places.offset >= 0) & (places.format >= 0)
        return differ

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

    def refused(self, photos: DecodedPhotos) -> dict[int, tuple[str, str]]:
        """Find the samples that must not be decoded: position -> component and reason; see `Rows.refused`."""
        bad = np.flatnonzero(self.rows.refused(photos)[self._start : self._stop]).tolist()
        return {position: self.rows.problem(self._start + position, photos) for position in bad}

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
