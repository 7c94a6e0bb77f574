"""Plan an epoch whose batches are groups of samples, of one bucket each.

The order of `dali_pipes.order.plan.Plan` is cut into *pools*: the samples of one window, or of the whole epoch where
several data sets are mixed. Each pool is arranged anew, in groups: a group is one step of all ranks, so that all of
them have one shape. No group has samples of two pools, so that a step needs the shards of one window only.

A position of an epoch counts samples in the arranged order. At the edges of pools it is the same as in the plain order.
"""

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dali_pipes.arrays import Int64s
from dali_pipes.order.inputs import BucketIds
from dali_pipes.order.passes import Piece
from dali_pipes.order.plan import Batching, Plan, Step
from dali_pipes.order.randomness import Stream

Integers = npt.NDArray[np.integer[Any]]

# The number of a group in its pool has so many bits, the number of the pool the others.
_GROUP_BITS = 32


class Groups(NamedTuple):
    """The groups of a pool, in reading order; columns are int64 [groups]."""

    size: Int64s
    first: Int64s
    """The group's first sample among the arranged samples of the pool."""
    bucket: Int64s


class BucketGrouping:
    """Groups of one bucket each: full ones first, then a short one for each bucket with samples left.

    Args:
        of: uint16 [samples], the bucket of each ordinal.
        shapes: int64 [buckets, 2], height and width of each.
        group_size: Samples of a full group: those of one step of all ranks.
    """

    def __init__(self, of: BucketIds, *, shapes: Int64s, group_size: int) -> None:
        self.of, self.shapes, self.group_size = of, shapes, group_size

    def counts(self, pools: Sequence[Groups]) -> Int64s:
        """int64 [pools, buckets]: samples of each bucket in each pool."""
        num = len(self.shapes)
        counts = [np.bincount(groups.bucket, weights=groups.size, minlength=num) for groups in pools]
        return np.array(counts).reshape(-1, num).astype(np.int64)

    def groups(self, ordinals: Int64s, words: Stream | None, *, pool: int) -> Groups:
        """Cut the samples of each bucket into groups; ``words`` shuffle the full groups, ``None``: by bucket.

        Five samples in bucket 0 and four in bucket 1, in groups of two: the full groups 0 0 1 1 in random order, then a
        short group of bucket 0.
        """
        counts = np.bincount(self.of[ordinals], minlength=len(self.shapes)).astype(np.int64)
        size = self.group_size
        starts = np.cumsum(counts) - counts
        num_full = counts // size
        bucket = np.repeat(np.arange(len(counts), dtype=np.int64), num_full)
        number = np.arange(len(bucket), dtype=np.int64) - np.repeat(np.cumsum(num_full) - num_full, num_full)
        first = starts[bucket] + number * size
        if words is not None:
            order = np.argsort(words.words(np.arange(len(bucket)) + (pool << _GROUP_BITS)), kind="stable")
            bucket, first = bucket[order], first[order]
        short = np.flatnonzero(counts % size).astype(np.int64)
        return Groups(
            size=np.concatenate([np.full(len(bucket), size, np.int64), counts[short] % size]),
            first=np.concatenate([first, starts[short] + num_full[short] * size]),
            bucket=np.concatenate([bucket, short]),
        )

    def arranged(self, ordinals: Int64s) -> Integers:
        """Sort the samples of a pool by bucket; within a bucket the order stays: their places, [samples]."""
        return np.argsort(self.of[ordinals], kind="stable")

    def deal(self, groups: Groups, number: int, batching: Batching) -> tuple[Int64s, Int64s, int]:
        """Deal the samples of one group to the ranks: see `ShapedPlan`.

        Returns:
            The rank's places among the arranged samples of the pool; how often the epoch had each before, if ``FILL``
            repeats it, else 0; the number of samples that count.
        """
        size, first, bucket = (int(column[number]) for column in groups)
        rows: Int64s = np.arange(first, first + size, dtype=np.int64)
        again: Int64s = np.zeros(size, np.int64)
        if batching.last_batch_policy == "FILL" and size < self.group_size:
            extra = np.arange(self.group_size - size, dtype=np.int64)
            of_bucket = groups.bucket == bucket
            num = int(groups.size[of_bucket].sum())
            rows = np.concatenate([rows, groups.first[of_bucket].min() + extra % num])
            again = np.concatenate([again, extra // num + 1])
        begin, end = batching.block(len(rows))
        num_valid = max(0, min(end, size) - begin)
        if begin == end:
            begin, end = 0, 1
        return rows[begin:end], again[begin:end], num_valid


class ShapedPlan(Plan):
    """The order of one epoch, in batches that are groups of samples.

    The last batches of each bucket in each window, for 7 samples of bucket A and 4 of B in a window, two ranks, batches
    of two:

    ===========  =============================  =================================================================
    policy       full steps, in random order    then
    ===========  =============================  =================================================================
    ``DROP``     A A | A A, B B | B B           none: three samples of A are in no batch of this epoch
    ``FILL``     A A | A A, B B | B B           A A | A a: the bucket's first samples fill it, and do not count
    ``PARTIAL``  A A | A A, B B | B B           A A | A: dealt evenly, the first ranks one more
    ===========  =============================  =================================================================

    Another world size with the same ``batch_size * world_size`` deals the same steps to other ranks. Another product
    makes other steps: an epoch that has begun cannot go on with it.

    Raises:
        ValueError: As `Plan`; or if several data sets are mixed in windows.
    """

    def __init__(self, *, grouping: BucketGrouping, **plan: Any) -> None:
        super().__init__(**plan)
        self.grouping = grouping
        order = self.order
        if self.num_sets > 1 and (order.shuffle_window != "all" or not order.shuffle):
            raise ValueError(
                "buckets of several data sets need an exact shuffle: window_bytes='all', got "
                f"window_bytes={order.shuffle_window!r}, shuffle={order.shuffle}; index the shards as one data set, "
                "or leave the windows out"
            )
        self._known_steps: dict[tuple[int, str], Int64s] = {}

    # Pools and their groups

    @functools.cached_property
    def _pool_starts(self) -> Int64s:
        """int64 [pools + 1]: the first position of each pool, and the end of the epoch."""
        if self.num_sets > 1:
            return np.array([0, self.num_samples], np.int64)
        sizes = [piece.stop - piece.begin for piece in self._spans[0].pieces(0)]
        return np.minimum(np.array([0, *itertools.accumulate(sizes)], np.int64), self.num_samples)

    @functools.cached_property
    def pools(self) -> list[Groups]:
        order = self.order
        words = Stream(order.seed, order.epoch, "order/batches") if order.shuffle else None
        return [self.grouping.groups(each, words, pool=pool) for pool, each in enumerate(self._members())]

    def _members(self) -> Iterator[Int64s]:
        """Yield the samples of each pool, in any order: the order would cost a sort."""
        if self.num_sets > 1:
            pieces = [piece for span in self._spans for piece in _cut(span.pieces(0), span.length)]
            yield np.concatenate([_members_of(piece) for piece in pieces])
        else:
            yield from map(_members_of, _cut(self._spans[0].pieces(0), self.num_samples))

    @functools.cached_property
    def _first_groups(self) -> Int64s:
        """int64 [pools + 1]: the first group of each pool, counted over all pools, and the number of groups."""
        return np.array([0, *itertools.accumulate(len(groups.size) for groups in self.pools)], np.int64)

    @functools.cached_property
    def _group_sizes(self) -> Int64s:
        return np.concatenate([np.empty(0, np.int64), *(groups.size for groups in self.pools)])

    @functools.cached_property
    def _group_stops(self) -> Int64s:
        """int64 [groups]: the position at which each group ends."""
        return np.cumsum(self._group_sizes, dtype=np.int64)

    # Steps

    def _steps_from(self, start: int, batching: Batching) -> Int64s:
        """int64 [steps]: the group of each step from position ``start`` on, counted over all pools."""
        assert batching.global_batch_size == self.grouping.group_size, "the plan is made for its batch size"
        policy = batching.last_batch_policy
        if (start, policy) not in self._known_steps:
            first = int(np.searchsorted(self._group_stops, start, side="right"))
            groups = np.arange(first, len(self._group_stops), dtype=np.int64)
            if policy == "DROP":
                groups = groups[self._group_sizes[groups] == self.grouping.group_size]
            self._known_steps[start, policy] = groups
        return self._known_steps[start, policy]

    def num_steps(self, batching: Batching, *, start: int = 0) -> int:
        return len(self._steps_from(start, batching))

    def position(self, num_steps: int, batching: Batching, *, start: int = 0) -> int:
        return int(self._group_stops[self._steps_from(start, batching)[num_steps - 1]]) if num_steps else start

    def position_of(self, num_used: int, batching: Batching, *, start: int = 0) -> int:
        """Return the position after the steps that have at most ``num_used`` samples; what ``DROP`` leaves out between
        them is passed.

        Raises:
            ValueError: Under ``FILL``, which repeats samples in mid-epoch: a number of samples is no position then.
        """
        if batching.last_batch_policy == "FILL":
            raise ValueError(
                "num_samples does not say which step was the last: with buckets, last_batch_policy='FILL' repeats "
                "samples in mid-epoch; pass 'PARTIAL' or 'DROP'"
            )
        used = np.cumsum(self._group_sizes[self._steps_from(start, batching)])
        return self.position(int(np.searchsorted(used, num_used, side="right")), batching, start=start)

    def last_edge(self, position: int) -> int:
        """Return the last position up to this one at which a group ends, or the first begins."""
        at = int(np.searchsorted(self._group_stops, position, side="right"))
        return int(self._group_stops[at - 1]) if at else 0

    def steps(self, batching: Batching, *, start: int = 0) -> Iterator[Step]:
        """Iterate over the batches of a rank, from position ``start`` on, at which a group begins or ends."""
        steps = self._steps_from(start, batching)
        if not len(steps):
            return
        first_pool = int(np.searchsorted(self._first_groups, steps[0], side="right")) - 1
        cursors = self._cursors(int(self._pool_starts[first_pool]))
        num_occurrences = max(cursor.num_occurrences for cursor in self._cursors(self.num_samples))
        for pool in range(first_pool, len(self.pools)):
            finished = tuple(cursor.finished for cursor in cursors)
            begin, end = self._pool_starts[pool : pool + 2].tolist()
            ((ordinals, occurrences),) = self._take(cursors, begin, end - begin)
            at_end = tuple(cursor.finished for cursor in cursors)
            groups = self.pools[pool]
            arranged = self.grouping.arranged(ordinals)
            ordinals, occurrences = ordinals[arranged], occurrences[arranged]
            these = slice(*np.searchsorted(steps, self._first_groups[pool : pool + 2]).tolist())
            for number in range(these.start, these.stop):
                group = int(steps[number] - self._first_groups[pool])
                rows, again, num_valid = self.grouping.deal(groups, group, batching)
                height, width = self.grouping.shapes[groups.bucket[group]].tolist()
                yield Step(
                    ordinals[rows],
                    occurrences[rows] + again * num_occurrences,
                    num_valid,
                    at_end if number == these.stop - 1 else finished,
                    (height, width),
                )

    # Windows

    def windows_ahead(self, lane: int = 0, *, start: int = 0) -> Iterator[tuple[int, Int64s]]:
        return super().windows_ahead(lane, start=self._pool_start(start))

    def finished_at(self, start: int) -> tuple[int, ...]:
        return super().finished_at(self._pool_start(start))

    def _pool_start(self, position: int) -> int:
        # Where the pool of a position begins; at the epoch's end, its end.
        at = int(np.searchsorted(self._pool_starts, position, side="right")) - 1
        return int(self._pool_starts[at])


def _cut(pieces: Iterator[Piece], length: int) -> Iterator[Piece]:
    """Cut the last piece where the epoch ends: it ends with its window otherwise."""
    done = 0
    for piece in pieces:
        stop = min(piece.stop, piece.begin + length - done)
        yield piece._replace(stop=stop)
        done += stop - piece.begin


def _members_of(piece: Piece) -> Int64s:
    members, _ = piece.pass_.members(piece.shards)
    if piece.stop - piece.begin < len(members):  # which ones depends on their order
        members = piece.pass_.samples(piece.shards)[0][piece.begin : piece.stop]
    return members
