"""Compute how often each sample comes in a pass, and from which data set of a mixture each position takes its sample.

This is pure arithmetic; a sample is named by its ordinal. Excluded ordinals and factors for classes say how often a
sample comes. Exclusion costs memory for the excluded samples only; factors cost some bytes for every sample.
"""

import hashlib
import math
import sys
from collections.abc import Mapping, Sequence
from fractions import Fraction
from numbers import Integral, Real
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from dali_pipes.arrays import Int64s, UInt64s
from dali_pipes.order.randomness import Stream

Copies = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]


class Selection:
    """The samples of a pass, and how often each comes.

    A class of n samples that are not excluded, with factor f, gives exactly ``round(n * f)`` samples a pass (half to
    even, as Python rounds). The whole class comes as many times as fit, and some of its samples come once more; each
    pass draws them anew. Four samples of class 3:

    ======  ==========  =======================================================
    factor  a pass has  copies of each sample
    ======  ==========  =======================================================
    0       0           0
    0.5     2           1 for two samples, 0 for the others; the next pass draws anew
    1       4           1, the same as without a factor
    1.5     6           2 for two samples, 1 for the others
    2       8           2
    ======  ==========  =======================================================

    If several data sets are mixed, each has its own passes and these counts hold for each of them: see `SetSelection`.

    Args:
        num_samples: Samples of the manifest, or of all manifests together.
        excluded: Ordinals that are left out, in any order.
        labels: int64 [num_samples], class ids; needed with ``oversample`` only.
        oversample: Class id to factor, a finite number >= 0; all other classes have 1.

    Raises:
        ValueError: If a class has no sample, a factor is impossible, or nothing is left.
        TypeError: If a class id is not an integer.

    >>> Selection(6, labels=np.array([3, 3, 3, 3, 8, 8]), oversample={3: 1.5}).num_per_pass
    8
    """

    def __init__(
        self,
        num_samples: int,
        *,
        excluded: Sequence[int] | Int64s = (),
        labels: Int64s | None = None,
        oversample: Mapping[int, float] | None = None,
    ) -> None:
        self.num_samples = num_samples
        self.excluded = union(np.asarray(excluded, np.int64), np.empty(0, np.int64))
        """int64, sorted: ordinals that are in no pass."""
        self._labels: Int64s | None = None
        self._factors: dict[int, float] = {}
        if oversample:
            assert labels is not None
            self._set_factors(labels, oversample)
        self._parts: dict[tuple[int, int], SetSelection] = {}
        self.num_per_pass = self.part(0, num_samples).num_per_pass
        """Samples of each pass, copies counted, if the whole is one data set."""
        if not self.num_per_pass:
            raise ValueError(f"nothing to read: {num_samples} samples, {len(self.excluded)} excluded")

    @property
    def digest(self) -> str:
        """SHA-256, hexadecimal, of the selection, in whatever way it was given: an input of the order.

        A factor of 1 counts as no factor, and a factor of 0 as the exclusion of the class's samples.
        """
        state = hashlib.sha256()
        if len(self.excluded):
            state.update(b"excluded\0")
            state.update(np.ascontiguousarray(self.excluded, "<i8").data)
        for label, factor in sorted(self._factors.items()):
            state.update(f"factor\0{label}\0{factor!r}\0".encode())
        return state.hexdigest()

    def part(self, start: int, stop: int) -> "SetSelection":
        """Return the selection of one data set of several, the one with the ordinals in ``[start, stop)``."""
        if (start, stop) not in self._parts:
            first, last = np.searchsorted(self.excluded, [start, stop])
            labels = None if self._labels is None else self._labels[start:stop]
            self._parts[start, stop] = SetSelection(start, stop, self.excluded[first:last], labels, self._factors)
        return self._parts[start, stop]

    def _set_factors(self, labels: Int64s, given: Mapping[int, float]) -> None:
        oversample: dict[int, float] = {}
        for label, factor in cast("Mapping[Any, Any]", given).items():
            if isinstance(label, bool) or not isinstance(label, Integral) or not -(2**63) <= int(label) < 2**63:
                raise TypeError(f"oversample must name classes by integers, as 'cls' holds them, got {label!r}")
            if (
                isinstance(factor, bool)
                or not isinstance(factor, Real)
                or not 0 <= cast("float", factor) <= sys.float_info.max
            ):
                raise ValueError(f"oversample[{label}] must be a finite number, not negative, got {factor!r}")
            oversample[int(label)] = float(factor)
        named = np.array(sorted(oversample), np.int64)
        places, is_named = _places(named, labels)
        missing = named[np.bincount(places[is_named], minlength=len(named)) == 0]
        if len(missing):
            found = np.unique(labels)
            shown = ", ".join(map(str, found[:8])) + (", ..." if len(found) > 8 else "")
            raise ValueError(f"oversample names class {missing[0]}, which no sample has (found: {shown})")
        is_left_out = np.array([oversample[int(label)] == 0 for label in named])
        if is_left_out.any():
            self.excluded = np.union1d(self.excluded, np.flatnonzero(is_named & is_left_out[places]))
        # The factor of a class whose samples are all excluded has no effect.
        left = np.bincount(places[is_named], minlength=len(named))
        gone = self.excluded[is_named[self.excluded]]
        left -= np.bincount(places[gone], minlength=len(named))
        self._factors = {
            label: oversample[label]
            for label, num_left in zip(named.tolist(), left, strict=True)
            if num_left and oversample[label] != 1
        }
        self._labels = labels if self._factors else None


def union(first: Int64s, second: Int64s) -> Int64s:
    """The ordinals of both, sorted, each once. A sorted array is not copied if the other one is empty."""
    if len(first) and len(second):
        return np.union1d(first, second)
    ordinals = first if len(first) else second
    return ordinals if bool((ordinals[1:] > ordinals[:-1]).all()) else np.unique(ordinals)


class SetSelection:
    """One data set's part of a selection, made by `Selection.part`: the ordinals in ``[start, stop)``."""

    def __init__(
        self, start: int, stop: int, excluded: Int64s, labels: Int64s | None, factors: Mapping[int, float]
    ) -> None:
        self._start = start
        self.num_excluded = len(excluded)
        self.num_per_pass = stop - start - len(excluded)
        """Samples of each pass, copies counted."""
        self.max_copies = 1
        self.min_copies: Copies | None = None
        """uint16 or uint32 [stop - start]: the fewest copies of each sample in any pass; ``None``: 1, excluded: 0."""
        if labels is None or not factors:
            return
        named = np.array(sorted(factors), np.int64)
        places, is_named = _places(named, labels)
        is_named[excluded - start] = False
        chosen = np.flatnonzero(is_named)
        # [class, sample]: by class, and within a class by ordinal, since the sort is stable.
        chosen = chosen[np.argsort(places[chosen], kind="stable")]
        counts = np.bincount(places[chosen], minlength=len(named))
        wanted = [round(int(count) * factors[int(label)]) for label, count in zip(named, counts, strict=True)]
        shares = [divmod(total, max(1, int(count))) for total, count in zip(wanted, counts, strict=True)]
        self.max_copies = max([1] + [whole + (more > 0) for whole, more in shares])
        if self.max_copies >= 1 << 32:
            raise ValueError(f"oversample asks for {self.max_copies} copies of a sample; the limit is 2**32")
        self.num_per_pass += sum(wanted) - int(counts.sum())
        wide = self.max_copies >= 1 << 16
        copies: Copies = np.ones(stop - start, np.uint32) if wide else np.ones(stop - start, np.uint16)
        copies[excluded - start] = 0
        copies[chosen] = np.repeat(np.array([whole for whole, _ in shares], copies.dtype), counts)
        self.min_copies = copies
        # If a factor does not divide evenly, each pass draws the samples that come once more.
        more = np.array([rest for _, rest in shares], np.int64)
        self._drawn = chosen[np.repeat(more > 0, counts)]
        stops = np.cumsum(counts[more > 0])
        self._groups = list(
            zip((stops - counts[more > 0]).tolist(), stops.tolist(), more[more > 0].tolist(), strict=True)
        )

    @property
    def max_copies_of_each(self) -> Copies | None:
        """uint16 or uint32 [stop - start]: the most copies of each sample in any pass; ``None``: one."""
        if self.min_copies is None:
            return None
        copies = self.min_copies.copy()
        copies[self._drawn] += 1
        return copies

    def copies(self, seed: int, pass_: int) -> Copies | None:
        """Compute how often each sample comes in a pass: [stop - start]; ``None``: once, excluded samples never."""
        if self.min_copies is None:
            return None
        copies = self.min_copies.copy()
        words = Stream(seed, pass_, "order/oversample").words(self._drawn + self._start)
        for start, stop, num in self._groups:
            copies[self._drawn[start:stop][_are_first(words[start:stop], num)]] += 1
        return copies


def _are_first(words: UInt64s, num: int) -> npt.NDArray[np.bool_]:
    """Mark the ``num`` words that a stable sort puts first: bool [words]."""
    last = np.partition(words, num - 1)[num - 1]
    are_first: npt.NDArray[np.bool_] = words < last
    # Equal words hardly ever occur, but even then the order must be the same everywhere.
    are_first[np.flatnonzero(words == last)[: num - int(are_first.sum())]] = True
    return are_first


def _places(named: Int64s, labels: Int64s) -> tuple[Int64s, npt.NDArray[np.bool_]]:
    """Find the position of each label in ``named`` (sorted), and whether it is there."""
    places = np.minimum(np.searchsorted(named, labels), len(named) - 1).astype(np.int64)
    return places, named[places] == labels


# Mixtures: from which data set each position takes its sample

# The epoch is cut into blocks of about so many positions. Each block holds every data set in its proportion, to within
# one sample, in an order of its own. So the mixture is right in every part of the epoch, and finding a position costs
# no more than permuting its block: a millisecond. A rare data set can come anywhere in so large a block.
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

    That is: weight * length >= samples, before anything is rounded.

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
