"""Group the samples of a window: by the bucket of their photos, or packed by their tokens.

A group of a bucket is one step of all ranks, so that all of them have one shape. A group that is packed is one batch of
one rank.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from dali_pipes.order.plan import LastBatchPolicyName, rank_block
from dali_pipes.order.randomness import Int64s, Stream
from dali_pipes.order.shapes import BucketIds, Buckets
from dali_pipes.order.tokens import TokenBudget, pack_photos

Int32s = npt.NDArray[np.int32]
Integers = npt.NDArray[np.integer[Any]]
Bools = npt.NDArray[np.bool_]

# The number of a group in its pool has so many bits, the number of the pool the others.
_GROUP_BITS = 32


class Groups(NamedTuple):
    """The groups of a pool, in reading order; columns are int64 [groups]."""

    size: Int64s
    """Samples."""
    first: Int64s
    """The group's first sample among the arranged samples of the pool."""
    bucket: Int64s
    """The bucket; 0 without buckets."""
    order: Int64s | Int32s
    """[samples] instead: the samples of the pool group by group, as places in the order's own order; empty if they are
    sorted by bucket."""


class Rows(NamedTuple):
    """A batch of one rank: places among the arranged samples of a pool."""

    rows: Int64s
    """int64 [batch]."""
    again: Int64s
    """int64 [batch]: how often the epoch had each before, for samples that ``FILL`` repeats; 0 otherwise."""
    num_valid: int


class Grouping(Protocol):
    """How the samples of a window become batches."""

    group_size: int
    """The largest number of samples in a group; an input of the order."""
    is_by_order: bool
    """Whether the sizes of the groups depend on the order of the samples."""

    def groups(self, ordinals: Int64s, words: Stream | None, *, pool: int) -> Groups:
        """Group the samples of a pool, in any order unless `is_by_order`; ``words`` shuffle the groups, if given."""

    def arranged(self, ordinals: Int64s, groups: Groups) -> Integers:
        """Arrange the samples of a pool, which are in the order's own order: their places, [samples]."""

    def num_at_once(self, global_batch_size: int) -> int:
        """Count the groups of one step of all ranks."""

    def are_whole(self, groups: Groups, first: Int64s, stop: Int64s, *, num: int) -> Bools:
        """Tell which steps ``DROP`` delivers: bool [steps].

        Their groups are ``[first, stop)``, and ``num`` groups make a step.
        """

    def deal(
        self, groups: Groups, step: slice, *, batch_size: int, rank: int, world_size: int, policy: LastBatchPolicyName
    ) -> Rows:
        """Find the batch of a rank in the step of the groups ``step``."""

    def shape(self, groups: Groups, step: slice) -> tuple[int, int] | TokenBudget:
        """Return what the graph is told of a step of these groups."""


class BucketGrouping:
    """Groups of one bucket each: full ones first, then a short one for each bucket with samples left.

    Args:
        of: uint16 [samples], the bucket of each ordinal.
        shapes: int64 [buckets, 2], height and width of each.
        group_size: Samples of a full group: those of one step of all ranks.
    """

    is_by_order = False

    def __init__(self, of: BucketIds, *, shapes: Int64s, group_size: int) -> None:
        self.of, self.shapes, self.group_size = of, shapes, group_size

    def name(self, bucket: int) -> str:
        """Name a bucket by its height and width: ``"192 x 320"``."""
        height, width = self.shapes[bucket].tolist()
        return f"{height} x {width}"

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
            order=np.empty(0, np.int64),
        )

    def arranged(self, ordinals: Int64s, groups: Groups) -> Integers:
        """Sort by bucket; within a bucket the order stays."""
        return np.argsort(self.of[ordinals], kind="stable")

    def num_at_once(self, global_batch_size: int) -> int:
        """Count the groups of one step of all ranks: one."""
        assert global_batch_size == self.group_size, "the plan is made for its batch size"
        return 1

    def are_whole(self, groups: Groups, first: Int64s, stop: Int64s, *, num: int) -> Bools:
        """Tell which groups are full."""
        whole: Bools = groups.size[first] == self.group_size
        return whole

    def deal(
        self, groups: Groups, step: slice, *, batch_size: int, rank: int, world_size: int, policy: LastBatchPolicyName
    ) -> Rows:
        """Deal the group's samples to the ranks; see `dali_pipes.order.shaped.ShapedPlan`."""
        size, first, bucket = (int(column[step.start]) for column in groups[:3])
        rows: Int64s = np.arange(first, first + size, dtype=np.int64)
        again: Int64s = np.zeros(size, np.int64)
        if policy == "FILL" and size < self.group_size:
            extra = np.arange(self.group_size - size, dtype=np.int64)
            of_bucket = groups.bucket == bucket
            num = int(groups.size[of_bucket].sum())
            rows = np.concatenate([rows, groups.first[of_bucket].min() + extra % num])
            again = np.concatenate([again, extra // num + 1])
        begin, end = rank_block(len(rows), rank, world_size, batch_size)
        num_valid = max(0, min(end, size) - begin)
        if begin == end:
            begin, end = 0, 1
        return Rows(rows[begin:end], again[begin:end], num_valid)

    def shape(self, groups: Groups, step: slice) -> tuple[int, int]:
        """Return height and width of the bucket."""
        height, width = self.shapes[groups.bucket[step.start]].tolist()
        return height, width


class TokenGrouping:
    """Groups of as many photos as a budget of tokens allows, packed in the order's own order.

    Args:
        tokens: int32 [samples], the patches of each ordinal's photo.
        budget: The budget.
        group_size: The largest number of photos in a batch of one rank.
    """

    is_by_order = True

    def __init__(self, tokens: Integers, *, budget: TokenBudget, group_size: int) -> None:
        self.tokens, self.budget, self.group_size = tokens, budget, group_size

    def groups(self, ordinals: Int64s, words: Stream | None, *, pool: int) -> Groups:
        """Pack the samples; the order is random already, so the groups are not shuffled."""
        packed = pack_photos(
            self.tokens[ordinals].tolist(), max_tokens=self.budget.max_tokens, max_photos=self.group_size
        )
        size = np.fromiter(map(len, packed), np.int64, len(packed))
        order = np.fromiter(itertools.chain.from_iterable(packed), np.int32, len(ordinals))
        return Groups(size=size, first=np.cumsum(size) - size, bucket=np.zeros_like(size), order=order)

    def arranged(self, ordinals: Int64s, groups: Groups) -> Integers:
        """List the samples group by group."""
        return groups.order

    def num_at_once(self, global_batch_size: int) -> int:
        """Count the groups of one step of all ranks: one for each."""
        return global_batch_size // self.group_size

    def are_whole(self, groups: Groups, first: Int64s, stop: Int64s, *, num: int) -> Bools:
        """Tell which steps have a group for each rank."""
        whole: Bools = stop - first == num
        return whole

    def deal(
        self, groups: Groups, step: slice, *, batch_size: int, rank: int, world_size: int, policy: LastBatchPolicyName
    ) -> Rows:
        """Deal a group to each rank; see `dali_pipes.order.shaped.ShapedPlan`."""
        number, num = step.start + rank, len(groups.size)
        if number < step.stop:
            first, size = int(groups.first[number]), int(groups.size[number])
            return Rows(np.arange(first, first + size), np.zeros(size, np.int64), size)
        if policy != "FILL":
            return Rows(groups.first[step.start : step.start + 1], np.zeros(1, np.int64), 0)
        turn, number = divmod(number - step.stop, num)
        first, size = int(groups.first[number]), int(groups.size[number])
        return Rows(np.arange(first, first + size), np.full(size, turn + 1, np.int64), 0)

    def shape(self, groups: Groups, step: slice) -> TokenBudget:
        """Return the budget."""
        return self.budget


def group_samples(
    shapes: Buckets | TokenBudget, heights: Integers, widths: Integers, *, batch_size: int, world_size: int
) -> Grouping:
    """Find what the plan must know of each photo, from their heights and widths: int [samples] each."""
    if isinstance(shapes, TokenBudget):
        tokens = shapes.tokens(heights, widths).astype(np.int32)
        return TokenGrouping(tokens, budget=shapes, group_size=batch_size)
    return BucketGrouping(shapes.of(heights, widths), shapes=shapes.shapes, group_size=batch_size * world_size)
