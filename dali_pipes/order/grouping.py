"""Group the samples of a window by the bucket of their photos.

A group is one step of all ranks, so that all of them have one shape.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dali_pipes.order.plan import LastBatchPolicyName, rank_block
from dali_pipes.order.randomness import Int64s, Stream
from dali_pipes.order.shapes import BucketIds

Integers = npt.NDArray[np.integer[Any]]

# The number of a group in its pool has so many bits, the number of the pool the others.
_GROUP_BITS = 32


class Groups(NamedTuple):
    """The groups of a pool, in reading order; columns are int64 [groups]."""

    size: Int64s
    """Samples."""
    first: Int64s
    """The group's first sample among the arranged samples of the pool."""
    bucket: Int64s
    """The bucket."""


class Rows(NamedTuple):
    """A batch of one rank: places among the arranged samples of a pool."""

    rows: Int64s
    """int64 [batch]."""
    again: Int64s
    """int64 [batch]: how often the epoch had each before, for samples that ``FILL`` repeats; 0 otherwise."""
    num_valid: int


class BucketGrouping:
    """Groups of one bucket each: full ones first, then a short one for each bucket with samples left.

    Args:
        of: uint16 [samples], the bucket of each ordinal.
        shapes: int64 [buckets, 2], height and width of each.
        group_size: Samples of a full group: those of one step of all ranks.
    """

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
        )

    def arranged(self, ordinals: Int64s) -> Integers:
        """Sort the samples of a pool by bucket; within a bucket the order stays: their places, [samples]."""
        return np.argsort(self.of[ordinals], kind="stable")

    def deal(
        self, groups: Groups, number: int, *, batch_size: int, rank: int, world_size: int, policy: LastBatchPolicyName
    ) -> Rows:
        """Deal the samples of one group to the ranks; see `dali_pipes.order.shaped.ShapedPlan`."""
        size, first, bucket = (int(column[number]) for column in groups)
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

    def shape(self, groups: Groups, number: int) -> tuple[int, int]:
        """Return height and width of a group's bucket."""
        height, width = self.shapes[groups.bucket[number]].tolist()
        return height, width
