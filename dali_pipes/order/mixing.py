"""Mix data sets: compute from which data set each position of an epoch takes its sample.

The epoch is cut into blocks of about `BLOCK_POSITIONS` positions. Each block holds every data set in its proportion, to
within one sample, in an order of its own. So the mixture is right in every part of the epoch, and finding a position
costs no more than permuting its block.
"""

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from dali_pipes.arrays import Int64s
from dali_pipes.order.randomness import Stream

# Enough that a rare data set can come anywhere in a block, few enough to permute a block in a millisecond.
BLOCK_POSITIONS = 4096


def split_by_weight(num: int, weights: Sequence[float]) -> list[int]:
    """Split ``num`` samples in proportion to weights, by largest remainder; among equal remainders the first one wins.

    A weight counts as the decimal number that it is written as: 0.3 is exactly three tenths.

    >>> split_by_weight(10, [0.7, 0.2, 0.1]), split_by_weight(10, [1, 1, 1]), split_by_weight(2, [1, 1, 1])
    ([7, 2, 1], [4, 3, 3], [1, 1, 0])
    """
    exact = _normalised(weights)
    shares = [math.floor(num * weight) for weight in exact]
    by_remainder = sorted(range(len(exact)), key=lambda number: shares[number] - num * exact[number])
    for number in by_remainder[: num - sum(shares)]:
        shares[number] += 1
    return shares


def mixed_length(lengths: Sequence[int], weights: Sequence[float]) -> int:
    """Compute the length of the shortest epoch in which each data set's part by weight covers all its samples.

    That is: weight * length >= samples, before anything is rounded. Rounding could make a somewhat shorter epoch have
    all samples, at most the reciprocal of the smallest weight shorter, but then in other proportions: 59 samples of 30
    and 29 instead of 60 of 30 and 30.

    >>> mixed_length([30, 10], [0.5, 0.5]), mixed_length([30, 10], [0.3, 0.7])
    (60, 100)
    """
    exact = _normalised(weights)
    return max(math.ceil(length / weight) for length, weight in zip(lengths, exact, strict=True))


class Mix:
    """The data set of each position of an epoch: in random order with ``shuffle``, else evenly in turn.

    Ten positions, six of data set 0 and four of data set 1, without ``shuffle``:

    ========  =  =  =  =  =  =  =  =  =  =
    position  0  1  2  3  4  5  6  7  8  9
    data set  0  1  0  1  0  0  1  0  1  0
    ========  =  =  =  =  =  =  =  =  =  =

    ``lengths`` are the positions of each data set; the other arguments are the order's.
    """

    def __init__(self, lengths: Sequence[int], *, seed: int, epoch: int, shuffle: bool) -> None:
        self._lengths = list(lengths)
        self.length = sum(lengths)
        """Positions of the epoch."""
        self._num_blocks = -(-self.length // BLOCK_POSITIONS)
        self._stream = Stream(seed, epoch, "order/mix")
        self._shuffle = shuffle
        self._number, self._first, self._block = -1, 0, np.empty(0, np.int64)

    def before(self, position: int) -> list[int]:
        """Count the positions of each data set before ``position``."""
        if position >= self.length:
            return list(self._lengths)
        self._open_block_of(position)
        within = np.bincount(self._block[: position - self._first], minlength=len(self._lengths))
        return [start + int(count) for start, count in zip(self._before_block(self._number), within, strict=True)]

    def sets(self, start: int, stop: int) -> Int64s:
        """int64 [stop - start]: the data set of each position in ``[start, stop)``."""
        parts = []
        while start < stop:
            self._open_block_of(start)
            parts.append(self._block[start - self._first : stop - self._first])
            start += len(parts[-1])
        return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.int64), *parts])

    def most_of(self, number: int, num: int) -> int:
        """An upper bound of the data set's positions in any ``num`` consecutive positions, counted cyclically."""
        smallest = max(1, sum(length // self._num_blocks for length in self._lengths))
        # Two blocks that are cut at the ends, and one more if the end of the epoch lies in between.
        num_blocks = (num - 1) // smallest + 3
        return min(num, num_blocks * -(-self._lengths[number] // self._num_blocks))

    def _before_block(self, block: int) -> list[int]:
        # In Python's integers: the products exceed 64 bits in large epochs.
        return [block * length // self._num_blocks for length in self._lengths]

    def _open_block_of(self, position: int) -> None:
        if self._first <= position < self._first + len(self._block):
            return
        # The position lies in this block or in a later one, since each data set's part of a block is rounded down.
        block = position * self._num_blocks // self.length
        while sum(self._before_block(block + 1)) <= position:
            block += 1
        begin, end = self._before_block(block), self._before_block(block + 1)
        counts = np.array([stop - start for start, stop in zip(begin, end, strict=True)], np.int64)
        sets = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
        first, places = sum(begin), np.arange(len(sets), dtype=np.int64)
        if self._shuffle:
            order = np.argsort(self._stream.words(first + places), kind="stable")
        else:
            # The j-th of n stands at (j + 1/2) / n of the block; at equal places the first data set comes first.
            within = places - np.repeat(np.cumsum(counts) - counts, counts)
            order = np.argsort((2 * within + 1) / (2 * counts[sets]), kind="stable")
        self._number, self._first, self._block = block, first, sets[order]


def _normalised(weights: Sequence[float]) -> list[Fraction]:
    exact = [Fraction(weight) if isinstance(weight, int) else Fraction(repr(float(weight))) for weight in weights]
    total = sum(exact, Fraction(0))
    return [weight / total for weight in exact]
