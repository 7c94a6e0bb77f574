"""Plan an epoch: compute the exact samples of every step of a rank from a manifest's columns and a seed.

This is pure arithmetic on integers. The order depends on `OrderInputs`, the manifest and the selection only: not on
time, threads, world size, batch size or cache. A sample is named by its ordinal, its position in the manifest's order;
several data sets are several manifests in a row.

A *lane* is one data set in one slice. A plan reads its lanes in turn. Each lane has its own windows, in the order of
its passes (`dali_pipes.order.passes`). `dali_pipes.order.selection` chooses the data set of each position, the same for
every slice.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias, get_args

import numpy as np

from dali_pipes.arrays import Int64s
from dali_pipes.order.inputs import OrderInputs
from dali_pipes.order.passes import Passes, Span, set_ranges
from dali_pipes.order.selection import Mix, Selection, mixed_length, split_by_weight
from dali_pipes.processes.ranks import Rank

Taken: TypeAlias = tuple[Int64s, Int64s]
"""Ordinals, and the occurrence of each in the epoch."""


class Cursor:
    """Reads one lane from a position of the epoch on; skips the windows before it without permuting them."""

    def __init__(self, span: Span, slice_: int, position: int) -> None:
        self._pieces = span.pieces(slice_, start=position)
        self._max_copies = span.passes.part.max_copies
        self._ordinals = self._copies = np.empty(0, np.int64)
        self._next = next(self._pieces, None)
        if self._next is not None:
            self._number, self._repeat = self._next.number - 1, self._next.repeat
        else:
            (last,) = span.pieces(slice_, start=span.length - 1)
            is_whole = last.begin + 1 == last.stop
            self._number, self._repeat = last.number - (not is_whole), last.repeat

    @property
    def finished(self) -> int:
        """Number of windows that were read to their end."""
        return self._number + (len(self._ordinals) == 0)

    @property
    def num_occurrences(self) -> int:
        """A number above all occurrences so far."""
        return (self._repeat + 1) * self._max_copies

    def take(self, num: int) -> Taken:
        ordinals: list[Int64s] = []
        occurrences: list[Int64s] = []
        while num:
            if not len(self._ordinals):
                self._open_next()
                continue
            taken = self._ordinals[:num]
            self._ordinals = self._ordinals[num:]
            ordinals.append(taken)
            occurrence = np.full(len(taken), self._repeat * self._max_copies, np.int64)
            if len(self._copies):
                occurrence += self._copies[:num]
                self._copies = self._copies[num:]
            occurrences.append(occurrence)
            num -= len(taken)
        if len(ordinals) == 1:
            return ordinals[0], occurrences[0]
        empty = [np.empty(0, np.int64)]
        return np.concatenate(ordinals or empty), np.concatenate(occurrences or empty)

    def _open_next(self) -> None:
        piece = self._next
        assert piece is not None, "no step takes more samples than the epoch has"
        ordinals, copies = piece.pass_.samples(piece.shards)
        self._ordinals = ordinals[piece.begin : piece.stop]
        if copies is not None:
            self._copies = copies[piece.begin : piece.stop]
        self._number, self._repeat = piece.number, piece.repeat
        self._next = next(self._pieces, None)


# Memory while the samples of a window are permuted: ordinals, random words and the sort. Measured with 2e7 samples.
BYTES_PER_SAMPLE = 120

LastBatchPolicyName = Literal["FILL", "DROP", "PARTIAL"]
LAST_BATCH_POLICIES: tuple[str, ...] = get_args(LastBatchPolicyName)


class Step(NamedTuple):
    """One batch of one rank."""

    ordinals: Int64s
    """int64 [batch]: the samples, in order."""
    occurrences: Int64s
    """int64 [batch]: a different number each time that the epoch has the same sample; 0 if no sample is repeated.
    Without class factors it is the number of the pass, 0, 1, 2, ..., in which the sample comes."""
    num_valid: int
    """Number of samples, from the front, that count: less than ``len(ordinals)`` only in a last batch (of a bucket, if
    there are buckets), with samples that ``FILL`` repeats, or in which the rank has no sample."""
    finished: tuple[int, ...] = ()
    """One number for each lane: its windows, from the epoch's start on, that no later step of any rank reads. Samples
    that ``FILL`` repeats do not count as read."""
    shape: tuple[int, int] | None = None
    """Height and width of the batch's bucket, the same on every rank, if there are buckets."""


@dataclass(frozen=True, kw_only=True)
class Batching:
    """How the samples of an epoch are dealt to batches: batch size, rank and last-batch policy."""

    batch_size: int
    """Samples in a batch of one rank."""
    process: Rank = Rank()  # noqa: RUF009 (frozen)
    last_batch_policy: LastBatchPolicyName = "PARTIAL"

    @property
    def global_batch_size(self) -> int:
        """Samples of one step over all ranks."""
        return self.batch_size * self.process.world_size

    def slices_read(self, num_slices: int) -> range:
        """Find the slices from which the rank takes samples."""
        each = self.global_batch_size // num_slices
        first = self.process.rank * self.batch_size
        return range(first // each, -(-(first + self.batch_size) // each))

    def block(self, size: int) -> tuple[int, int]:
        """Compute the rank's range of a step of ``size`` samples: a whole block, or an even part of a short step."""
        share, extra = divmod(size, self.process.world_size)
        first = self.process.rank * share + min(self.process.rank, extra)
        return first, first + share + (self.process.rank < extra)


class Plan:
    """The order of one epoch.

    Its length, for data sets of 30 and 10 samples in one slice:

    ===================  =============  =======  ==================================================================
    ``epoch_samples``    ``weights``    samples  of each data set
    ===================  =============  =======  ==================================================================
    ``None``             ``None``       40       30 and 10: each sample once
    ``None``             (0.5, 0.5)     60       30 and 30: exactly by weight; three passes of the second
    ``None``             (0.9, 0.1)     100      90 and 10: three passes of the first
    20                   ``None``       20       15 and 5: the next epoch has the others
    20                   (0.5, 0.5)     20       10 and 10: a third of a pass of the first, a pass of the second
    ===================  =============  =======  ==================================================================

    Args:
        shard_bytes: int64 [shards], from the manifest.
        shard_samples: int64 [shards], samples in each.
        order: The inputs of the order.
        set_shards: Numbers of shards of consecutive data sets, in the manifest's order; ``None``: one data set.
        selection: How often each sample comes in a pass; ``None``: once.
        set_names: Names of the data sets, for errors.

    Raises:
        ValueError: If there are fewer shards than slices, no sample is left, or the epoch has none of a data set.
    """

    def __init__(
        self,
        *,
        shard_bytes: Int64s,
        shard_samples: Int64s,
        order: OrderInputs,
        set_shards: Sequence[int] | None = None,
        selection: Selection | None = None,
        set_names: Sequence[str] = (),
    ) -> None:
        self.order = order
        shard_bytes, shard_samples = np.asarray(shard_bytes, np.int64), np.asarray(shard_samples, np.int64)
        ranges = set_ranges(set_shards, len(shard_bytes))
        self.num_sets = len(ranges)
        assert order.weights is None or len(order.weights) == self.num_sets
        starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(shard_samples, dtype=np.int64)])
        self._shard_stops = starts[1:]
        selection = selection or Selection(int(starts[-1]))
        kept = shard_samples
        if len(selection.excluded):
            kept = shard_samples - np.bincount(self.shard_of(selection.excluded), minlength=len(shard_samples))
        sets = [
            Passes(
                shards=shards,
                shard_bytes=shard_bytes,
                shard_starts=starts,
                shard_kept=kept,
                selection=selection,
                order=order,
                name=set_names[number] if set_names else str(number) if len(ranges) > 1 else "",
            )
            for number, shards in enumerate(ranges)
        ]
        lengths = _lengths(order, sets)
        self._spans = [Span(passes, length=length) for passes, length in zip(sets, lengths, strict=True)]
        self._mix = Mix(lengths, seed=order.seed, epoch=order.epoch, shuffle=order.shuffle)
        self.num_samples = self._mix.length * order.num_slices
        """Over all ranks; includes repeated ones of slices shorter than the longest."""
        self.set_samples = tuple(length * order.num_slices for length in lengths)
        """Samples of each data set among them."""

    def num_steps(self, batching: Batching, *, start: int = 0) -> int:
        """Count the steps from position ``start`` on, the same on every rank: ``DROP`` leaves a short one out."""
        left, size = self.num_samples - start, batching.global_batch_size
        return left // size if batching.last_batch_policy == "DROP" else -(-left // size)

    def position(self, num_steps: int, batching: Batching, *, start: int = 0) -> int:
        return min(start + num_steps * batching.global_batch_size, self.num_samples)

    def position_of(self, num_used: int, batching: Batching, *, start: int = 0) -> int:
        """Return the position after so many samples from ``start`` on, those of all ranks that were delivered."""
        return min(start + num_used, self.num_samples)

    def last_edge(self, position: int) -> int:
        """Return the last position up to this one from which an epoch can go on."""
        return position

    def shard_of(self, ordinals: Int64s) -> Int64s:
        """The shard of each ordinal: int64 [N]."""
        return np.searchsorted(self._shard_stops, ordinals, side="right").astype(np.int64)

    def windows_ahead(self, lane: int = 0, *, start: int = 0) -> Iterator[tuple[int, Int64s]]:
        """Yield number and shards of the windows of one lane that are read from position ``start`` of the order on.

        A slice shorter than the longest wraps: its windows come again with new numbers, as they do in the next pass.
        The cost does not depend on the number of samples.
        """
        span, slice_ = self._lane(lane)
        done = self._mix.before(start // self.order.num_slices)[lane % self.num_sets]
        for piece in span.pieces(slice_, start=done):
            yield piece.number, piece.shards

    def finished_at(self, start: int) -> tuple[int, ...]:
        """Count for each lane the windows that end before position ``start``; see `Step.finished`."""
        return tuple(cursor.finished for cursor in self._cursors(start // self.order.num_slices))

    def lanes_of(self, batching: Batching) -> list[int]:
        """List the lanes from which a rank takes samples: those of its slices; a short last step may take others.

        Two slices, three data sets, two ranks:

        ====  ======  =======
        rank  slices  lanes
        ====  ======  =======
        0     0       0 1 2
        1     1       3 4 5
        ====  ======  =======
        """
        slices = batching.slices_read(self.order.num_slices)
        return list(range(slices.start * self.num_sets, slices.stop * self.num_sets))

    def bytes_at_a_time(self, extent_bytes: Int64s, batching: Batching) -> int:
        """Compute the bytes that must be resident at a time: two windows of each lane, or as many as a step spans.

        ``extent_bytes``: int64 [shards], what each shard takes of the cache.
        """
        each = -(-batching.global_batch_size // self.order.num_slices)
        needed = [0] * self.num_sets
        for lane in self.lanes_of(batching):
            number = lane % self.num_sets
            at_once = self._mix.most_of(number, each) if self.num_sets > 1 else each
            needed[number] += _lane_bytes(*self._lane(lane), extent_bytes, num_samples=at_once)
        # No shard is resident twice.
        all_bytes = [span.passes.sum_of_read(extent_bytes) for span in self._spans]
        return sum(map(min, needed, all_bytes))

    def steps(self, batching: Batching, *, start: int = 0) -> Iterator[Step]:
        """Iterate over the batches of a rank, from position ``start`` of the order on.

        Step *s* takes ``batch_size * world_size`` consecutive samples of the order; rank *r* has the *r*-th block of
        them. Several slices are grouped first: the step's samples of slice 0, then of slice 1. Seven samples, two
        ranks, batches of two:

        ===========  ==========  ==========================================================
        policy       step 0      step 1 (three samples are left: 4, 5, 6)
        ===========  ==========  ==========================================================
        ``DROP``     0 1 | 2 3   none
        ``FILL``     0 1 | 2 3   4 5 | 6 0: the epoch's first samples fill it, and do not count
        ``PARTIAL``  0 1 | 2 3   4 5 | 6: dealt evenly, the first ranks one more
        ===========  ==========  ==========================================================

        A rank without a sample in a ``PARTIAL`` last step gets the step's first sample, with ``num_valid`` 0.

        Two data sets, a b c d e f and x y, where the second has positions 2 and 5:

        ====  ======  ======
        rank  step 0  step 1
        ====  ======  ======
        0     a b     d y
        1     x c     e f
        ====  ======  ======
        """
        global_batch_size, num_slices = batching.global_batch_size, self.order.num_slices
        assert global_batch_size % num_slices == start % num_slices == 0, "as the loader's arguments say"
        cursors = self._cursors(start // num_slices)
        for position in range(start, self.num_samples, global_batch_size):
            size = min(global_batch_size, self.num_samples - position)
            parts = self._take(cursors, position // num_slices, size // num_slices)
            num_valid = size // num_slices  # of each slice
            if size < global_batch_size:
                if batching.last_batch_policy == "DROP":
                    return
                if batching.last_batch_policy == "FILL":
                    repeated = self._repeated(cursors, (global_batch_size - size) // num_slices)
                    parts = [
                        (np.concatenate([ordinals, more]), np.concatenate([occurrences, again]))
                        for (ordinals, occurrences), (more, again) in zip(parts, repeated, strict=True)
                    ]
                    size = global_batch_size
            ordinals, occurrences = (np.concatenate(column) for column in zip(*parts, strict=True))
            first, stop = batching.block(size)
            finished = tuple(cursor.finished for cursor in cursors)
            if first == stop:
                yield Step(ordinals[:1], occurrences[:1], 0, finished)
                continue
            ordinals, occurrences = ordinals[first:stop], occurrences[first:stop]
            is_valid = np.arange(first, stop) % (size // num_slices) < num_valid
            if not is_valid.all():  # a rank that reads several slices has repeated samples after those of each
                in_front = np.argsort(~is_valid, kind="stable")
                ordinals, occurrences = ordinals[in_front], occurrences[in_front]
            yield Step(ordinals, occurrences, int(is_valid.sum()), finished)

    def _lane(self, lane: int) -> tuple[Span, int]:
        slice_, number = divmod(lane, self.num_sets)
        return self._spans[number], slice_

    def _cursors(self, position: int) -> list[Cursor]:
        """Open a cursor for each lane, at the same position of every slice."""
        before = self._mix.before(position) if self.num_sets > 1 else [position]
        return [
            Cursor(span, slice_, done)
            for slice_ in range(self.order.num_slices)
            for span, done in zip(self._spans, before, strict=True)
        ]

    def _take(self, cursors: Sequence[Cursor], position: int, num: int) -> list[Taken]:
        """Take the next ``num`` samples of each slice, from the position of all cursors on."""
        if self.num_sets == 1:
            return [cursor.take(num) for cursor in cursors]
        sets = self._mix.sets(position, position + num)
        counts = np.bincount(sets, minlength=self.num_sets).tolist()
        places = np.argsort(sets, kind="stable")  # of the first data set's samples, then of the second's, ...
        taken = []
        for first in range(0, len(cursors), self.num_sets):
            parts = [cursor.take(count) for cursor, count in zip(cursors[first:], counts, strict=False)]
            mixed = np.empty((2, num), np.int64)
            for row, column in zip(mixed, zip(*parts, strict=True), strict=True):
                row[places] = np.concatenate(column)
            taken.append((mixed[0], mixed[1]))
        return taken

    def _repeated(self, cursors: Sequence[Cursor], num: int) -> list[Taken]:
        """Repeat the epoch's first ``num`` samples of each slice, as often as necessary; all cursors are at its end."""
        length = self._mix.length
        first = self._take(self._cursors(0), 0, min(num, length))
        sets = self._mix.sets(0, min(num, length))
        again = np.arange(num, dtype=np.int64) // length + 1
        # Occurrences that the epoch has used: a slice that wraps has repeated its own samples; with several passes,
        # another slice may have had them.
        used = np.array([cursor.num_occurrences for cursor in cursors], np.int64).reshape(-1, self.num_sets)
        for number, span in enumerate(self._spans):
            if not span.is_one_pass:
                used[:, number] = used[:, number].max()
        repeated = []
        for slice_, (ordinals, occurrences) in enumerate(first):
            so_far = np.resize(used[slice_][sets], num)
            repeated.append((np.resize(ordinals, num), np.resize(occurrences, num) + again * so_far))
        return repeated


def _lengths(order: OrderInputs, sets: Sequence[Passes]) -> list[int]:
    """Compute how many positions of a slice each data set has in an epoch."""
    if order.epoch_samples is None:
        lengths = [passes.pass_(order.epoch).length for passes in sets]
        weights = order.weights
        return lengths if weights is None else split_by_weight(mixed_length(lengths, weights), weights)
    sizes = [passes.part.num_per_pass for passes in sets]
    lengths = split_by_weight(order.epoch_samples // order.num_slices, order.weights or sizes)
    if 0 in lengths:
        raise ValueError(
            f"epoch_samples={order.epoch_samples} in {order.num_slices} slices leave no sample for data set "
            f"'{sets[lengths.index(0)].name}', whose share of them is too small; pass more"
        )
    return lengths


def _lane_bytes(span: Span, slice_: int, extent_bytes: Int64s, *, num_samples: int) -> int:
    """Compute the bytes of two windows of a lane, or of all windows that ``num_samples`` consecutive samples span."""
    turns = list(span.turns(slice_))
    sizes = np.concatenate(
        [turn.pass_.window_sums(slice_, extent_bytes)[turn.windows.start : turn.windows.stop] for turn in turns]
    )
    taken = np.concatenate([turn.stops - turn.begins for turn in turns])
    taken[-1] -= taken.sum() - span.length
    # Twice: after the last window come the first ones, of the next epoch or repeated by FILL.
    sizes, taken = np.tile(sizes, 2), np.tile(taken, 2)
    starts, stops = np.concatenate([[0], np.cumsum(sizes)]), np.cumsum(taken)
    # A step that begins with the last sample of window i ends with the sample num_samples - 1 further on.
    last = np.minimum(np.searchsorted(stops, stops - 1 + num_samples - 1, side="right"), len(sizes) - 1)
    spanned = starts[last + 1] - starts[:-1]
    needed = max(int(spanned.max()), int((sizes[:-1] + sizes[1:]).max()))
    return min(needed, int(extent_bytes[span.first_pass.slices[slice_]].sum())) if span.is_one_pass else needed
