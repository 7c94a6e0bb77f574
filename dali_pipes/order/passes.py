"""Permute one data set, pass after pass, into windows of shards and their samples.

A *pass* is one reading of one data set. It has three levels, each a permutation by a counter-based generator
(`dali_pipes.order.randomness`), with the number of the pass in place of an epoch's:

* the list of shards, cut into ``num_slices`` slices;
* each slice, cut into windows: runs of shards that are resident together;
* the samples of each window.

Cost and memory grow with the window, not with the data set. There are two exceptions: the permutation of the shard
list, and class factors, which draw the copies of a pass for all samples at once.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np

from dali_pipes.arrays import Int64s
from dali_pipes.order.inputs import OrderInputs
from dali_pipes.order.randomness import Stream
from dali_pipes.order.selection import Copies, Selection

# Shards of a window that is read in order: enough to keep the fetch threads busy.
SEQUENTIAL_SHARDS = 8
# An epoch that needs more than one pass takes the further ones from this number on. No job has so many epochs.
FURTHER_PASSES = 1 << 32
# Passes of one data set to keep: one that ends, the next one, and one for shards that are staged further ahead.
NUM_PASSES_KEPT = 3


def window_bytes(order: OrderInputs, shard_bytes: Int64s) -> int | Literal["all"]:
    """Compute the size of windows. Without a shuffle they do not change the order, so they need not be large."""
    if order.shuffle or order.shuffle_window != "all":
        return order.shuffle_window
    return SEQUENTIAL_SHARDS * max(1, int(shard_bytes.max(initial=0)))


def cut_windows(shard_bytes: Int64s, *, shuffle_window: int | Literal["all"]) -> Iterator[tuple[int, int]]:
    """Cut a list of shards into ranges ``[start, stop)`` of at most ``shuffle_window`` bytes, but at least one shard.

    >>> list(cut_windows(np.array([4, 4, 4, 9, 1]), shuffle_window=8))
    [(0, 2), (2, 3), (3, 4), (4, 5)]
    """
    num, start = len(shard_bytes), 0
    following = None
    if shuffle_window != "all" and num:
        # Where a window ends, for each shard that may begin it: one search for all is faster than one for each window.
        stops = np.cumsum(shard_bytes)
        # No window is larger than all shards, and a sum with a larger number may overflow.
        most = min(shuffle_window, int(stops[-1]))
        following = np.searchsorted(stops, stops - shard_bytes + most, side="right")
    while start < num:
        stop = num if following is None else max(start + 1, int(following[start]))
        yield start, stop
        start = stop


class Passes:
    """The passes of one data set.

    ``shards`` are its first shard and the one after its last. The columns are of all data sets: ``shard_bytes`` int64
    [shards], ``shard_starts`` int64 [shards + 1], the first ordinal of each and the end, ``shard_kept`` int64 [shards],
    samples that are not excluded. ``name`` is for errors, empty if there is only one data set.

    Raises:
        ValueError: If it has nothing to read, or fewer shards than slices.
    """

    def __init__(
        self,
        *,
        shards: tuple[int, int],
        shard_bytes: Int64s,
        shard_starts: Int64s,
        shard_kept: Int64s,
        selection: Selection,
        order: OrderInputs,
        name: str = "",
    ) -> None:
        self.order, self.name = order, name
        self.shard_bytes, self.shard_starts = shard_bytes, shard_starts
        self.first_shard, self._stop_shard = shards
        self.excluded = selection.excluded
        ordinals = int(shard_starts[shards[0]]), int(shard_starts[shards[1]])
        self.first_ordinal = ordinals[0]
        self.part = selection.part(*ordinals)
        if not self.part.num_per_pass:
            which = f" in data set '{name}'" if name else ""
            raise ValueError(
                f"nothing to read{which}: {ordinals[1] - ordinals[0]} samples, {self.part.num_excluded} excluded; "
                "select other samples, or leave the data set out"
            )
        self.window_bytes = window_bytes(order, shard_bytes)
        self._kept = shard_kept[slice(*shards)]
        self._check_slices()
        self._passes: dict[int, Pass] = {}
        # A single slice has all samples. Several slices are as long as the longest one, which differs between passes.
        self.constant_length = self.part.num_per_pass if order.num_slices == 1 else None
        """Positions of a slice, if every pass has the same number."""
        if self.constant_length is None and not order.shuffle and self.part.min_copies is None:
            self.constant_length = self.pass_(0).length

    def pass_(self, number: int) -> "Pass":
        if number not in self._passes:
            while len(self._passes) >= NUM_PASSES_KEPT:
                del self._passes[min(self._passes)]
            self._passes[number] = Pass(self, number)
        return self._passes[number]

    def _check_slices(self) -> None:
        # Now, not first in the pass in which a slice would be empty.
        num_shards = int(np.count_nonzero(self._kept))
        which = "" if num_shards == len(self._kept) else " with anything left to read"
        if self.part.min_copies is not None and self.order.num_slices > 1:
            # A pass reads every shard that has a fixed copy, and at least the shards that it takes to hold its samples.
            fullest = np.sort(self.kept(self.part.max_copies_of_each))[::-1]
            at_least = int(np.searchsorted(np.cumsum(fullest), self.part.num_per_pass)) + 1
            num_shards = max(at_least, int(np.count_nonzero(self.kept(self.part.min_copies))))
            which = " that every pass reads"
        if self.order.num_slices > num_shards:
            raise ValueError(
                f"slices must not exceed the number of shards{which}, {num_shards}, got {self.order.num_slices}"
            )

    def kept(self, copies: Copies | None) -> Int64s:
        """Samples of each shard of the data set in a pass with these copies: int64 [shards]."""
        if copies is None:
            return self._kept
        return sum_by_shard(copies, self.shard_starts[self.first_shard : self._stop_shard + 1])

    def sum_of_read(self, values: Int64s) -> int:
        """The sum of a column of the manifest over the shards that have a sample left."""
        return int(values[self.first_shard : self._stop_shard][self._kept > 0].sum())

    def ordinals(self, shards: Int64s) -> Int64s:
        """List the samples of these shards that are not excluded, shard by shard."""
        starts = self.shard_starts[shards]
        counts = self.shard_starts[shards + 1] - starts
        # First ordinal of each shard, minus the start of its run in the concatenation, plus the position there.
        offsets = np.repeat(starts - (np.cumsum(counts) - counts), counts)
        ordinals = offsets + np.arange(len(offsets), dtype=np.int64)
        if len(self.excluded):
            # Both are sorted, so the cost depends on the window, not on the number of excluded samples.
            places = np.minimum(np.searchsorted(self.excluded, ordinals), len(self.excluded) - 1)
            ordinals = ordinals[self.excluded[places] != ordinals]
        return ordinals


class Pass:
    """One pass of one data set, in slices; a shard without samples in this pass is in no slice."""

    def __init__(self, passes: Passes, number: int) -> None:
        order = passes.order
        self._passes, self._number = passes, number
        self._copies = passes.part.copies(order.seed, number)
        self._kept = passes.kept(self._copies)
        shards = np.flatnonzero(self._kept).astype(np.int64, copy=False) + passes.first_shard
        assert len(shards) >= order.num_slices, "every pass has a shard for every slice"
        if order.shuffle:
            shards = shards[self._ranked("shards", shards)]
        self.slices = np.array_split(shards, order.num_slices)
        """The shards of each slice, in reading order."""
        self.slice_samples = [int(self._kept[shards - passes.first_shard].sum()) for shards in self.slices]
        self.length = max(self.slice_samples)
        """Positions of each slice; those that have fewer samples wrap."""
        self.num_turns = -(-self.length // min(self.slice_samples))
        self._windows: dict[int, tuple[Int64s, Int64s]] = {}

    def windows(self, slice_: int) -> tuple[Int64s, Int64s]:
        """The cuts of a slice's list of shards, int64 [windows + 1], and each window's samples, int64 [windows].

        The cost does not depend on the number of samples.
        """
        if slice_ not in self._windows:
            passes, shards = self._passes, self.slices[slice_]
            ranges = cut_windows(passes.shard_bytes[shards], shuffle_window=passes.window_bytes)
            cuts = np.fromiter(itertools.chain([0], (stop for _, stop in ranges)), np.int64)
            self._windows[slice_] = cuts, np.add.reduceat(self._kept[shards - passes.first_shard], cuts[:-1])
        return self._windows[slice_]

    def window_sums(self, slice_: int, values: Int64s) -> Int64s:
        """The sum of a column of the manifest over the shards of each window: int64 [windows]."""
        return np.add.reduceat(values[self.slices[slice_]], self.windows(slice_)[0][:-1])

    def members(self, shards: Int64s) -> tuple[Int64s, Int64s | None]:
        """The samples of a window in the manifest's order, and their copy numbers (``None``: no sample has a copy)."""
        passes = self._passes
        ordinals, copies = passes.ordinals(shards), None
        if self._copies is not None:
            times = self._copies[ordinals - passes.first_ordinal].astype(np.int64)
            ordinals = np.repeat(ordinals, times)
            copies = np.arange(len(ordinals), dtype=np.int64) - np.repeat(np.cumsum(times) - times, times)
        return ordinals, copies

    def samples(self, shards: Int64s) -> tuple[Int64s, Int64s | None]:
        """The samples of a window in reading order, and their copy numbers (``None``: no sample has a copy)."""
        ordinals, copies = self.members(shards)
        if self._passes.order.shuffle:
            rank = self._ranked("samples", ordinals, copies)
            ordinals, copies = ordinals[rank], None if copies is None else copies[rank]
        return ordinals, copies

    def _ranked(self, purpose: str, values: Int64s, copies: Int64s | None = None) -> Int64s:
        # Sort by 64 random bits of each sample. The sort is stable, so equal bits, too, give the same order everywhere.
        stream = Stream(self._passes.order.seed, self._number, f"order/{purpose}")
        words = stream.words(values, occurrence=0 if copies is None else copies)
        return np.argsort(words, kind="stable")


class Turn(NamedTuple):
    """The windows that an epoch takes of one reading of a slice, one after the other; `Piece` explains the names."""

    number: int
    repeat: int
    pass_: Pass
    windows: range
    """The numbers of the windows in the slice."""
    begins: Int64s
    """int64 [windows]."""
    stops: Int64s
    """int64 [windows]."""


class Piece(NamedTuple):
    """The samples that an epoch takes of one window."""

    number: int
    """Number of windows of this slice before it in the epoch."""
    repeat: int
    """Number of the reading: it counts passes, and within a pass the turns of a slice that wraps. Two readings of one
    epoch that have a sample in common have different numbers, in any slices."""
    pass_: Pass
    shards: Int64s
    begin: int
    """First sample to take, in the window's order."""
    stop: int
    """The sample after the last one. The last piece ends with its window, even if the epoch ends before that."""


class Span:
    """The part of a data set that one epoch takes: ``length`` positions of every slice, of one pass or several.

    An epoch without a fixed length begins with a new pass, whose number is the epoch's. An epoch with a fixed length
    continues where the epoch before it stopped, also within a pass. For 10 samples, of which an epoch takes 6:

    ==========  =======================  ================================
    epoch       fixed length             no fixed length
    ==========  =======================  ================================
    0           pass 0, samples 0 to 5   pass 0, samples 0 to 9: all of it
    1           6 to 9, pass 1, 0 and 1  pass 1
    2           pass 1, 2 to 7           pass 2
    ==========  =======================  ================================
    """

    def __init__(self, passes: Passes, *, length: int) -> None:
        self.passes, self.length = passes, length
        order = passes.order
        self._first_pass, self._offset, self._next_pass = order.epoch, 0, FURTHER_PASSES
        if order.epoch_samples is not None:
            self._first_pass, self._offset = self._find(order.epoch * length)
            self._next_pass = 1

    @property
    def first_pass(self) -> Pass:
        return self.passes.pass_(self._first_pass)

    @property
    def is_one_pass(self) -> bool:
        """Whether the epoch ends in the pass in which it begins."""
        return self._offset + self.length <= self.first_pass.length

    def pieces(self, slice_: int, *, start: int = 0) -> Iterator[Piece]:
        """Yield the pieces of a slice, in order, from position ``start`` of the epoch on.

        The cost does not depend on the number of samples. The last piece may have more samples than the epoch takes.
        """
        for turn in self.turns(slice_, start=start):
            cuts, shards = turn.pass_.windows(slice_)[0], turn.pass_.slices[slice_]
            for place, window in enumerate(turn.windows):
                yield Piece(
                    turn.number + place,
                    turn.repeat,
                    turn.pass_,
                    shards[cuts[window] : cuts[window + 1]],
                    int(turn.begins[place]),
                    int(turn.stops[place]),
                )

    def turns(self, slice_: int, *, start: int = 0) -> Iterator[Turn]:
        """As `pieces`: for each reading of the slice, the windows of its pieces at once."""
        if start >= self.length:
            return
        pass_number, number, repeat = self._first_pass, 0, 0
        pass_start = -self._offset
        while pass_start < self.length:
            pass_ = self.passes.pass_(pass_number)
            pass_stop = pass_start + pass_.length
            limit = min(pass_stop, self.length)
            _, counts = pass_.windows(slice_)
            turn_start, turn = pass_start, 0
            while turn_start < limit:
                stops = turn_start + np.cumsum(counts)
                starts = stops - counts
                read_to = np.minimum(stops, limit)
                # Windows before the first position belong to the epoch before.
                first, last = int(np.searchsorted(read_to, 0, side="right")), int(np.searchsorted(starts, limit))
                if first < last:
                    windows = range(max(first, int(np.searchsorted(read_to, start, side="right"))), last)
                    each, begins = counts[windows.start : last], starts[windows.start : last]
                    yield Turn(
                        number + windows.start - first,
                        repeat + turn,
                        pass_,
                        windows,
                        np.maximum(0, max(start, 0) - begins),
                        # The end of a pass cuts a turn short, except in the epoch's last pass.
                        each if pass_stop >= self.length else np.minimum(each, pass_stop - begins),
                    )
                    number += last - first
                turn_start, turn = int(stops[-1]), turn + 1
            pass_start, pass_number, repeat = pass_stop, pass_number + self._next_pass, repeat + pass_.num_turns

    def _find(self, position: int) -> tuple[int, int]:
        """Find the pass of a position in the endless sequence of passes, and the position within it."""
        if self.passes.constant_length is not None:
            return divmod(position, self.passes.constant_length)
        number = 0
        while position >= (length := self.passes.pass_(number).length):
            position, number = position - length, number + 1
        return number, position


def sum_by_shard(copies: Copies, shard_starts: Int64s) -> Int64s:
    """Sum the copies of each shard's samples: int64 [shards]; ``shard_starts``: first ordinals, and the end."""
    kept = np.zeros(len(shard_starts) - 1, np.int64)
    # Shards without samples are left out: reduceat would give them the next shard's first value.
    full = np.flatnonzero(np.diff(shard_starts))
    kept[full] = np.add.reduceat(copies, shard_starts[full] - shard_starts[0], dtype=np.int64)
    return kept


def set_ranges(set_shards: Sequence[int] | None, num_shards: int) -> list[tuple[int, int]]:
    """Find the first shard of each data set, and the one after its last; ``None``: all shards are one data set."""
    sizes = [num_shards] if set_shards is None else set_shards
    return list(itertools.pairwise([0, *itertools.accumulate(int(num) for num in sizes)]))


# What a loader reserves before any epoch is planned; `Plan.bytes_at_a_time` is the need of one epoch.


def reserved_bytes(
    extent_bytes: Int64s,
    shard_bytes: Int64s,
    shard_samples: Int64s,
    *,
    order: OrderInputs,
    global_batch_size: int,
    num_slices_read: int = 1,
    set_shards: Sequence[int] | None = None,
    selection: Selection | None = None,
) -> int:
    """Compute the bytes that a loader reserves at its start: two windows never exceed them, in any epoch.

    It counts two windows of every data set in every slice that the loader reads, without shards that have no sample.
    Columns are int64 [shards]; ``extent_bytes`` is what each shard takes of the cache; windows are cut by
    ``shard_bytes``. The other arguments are those of `dali_pipes.order.plan.Plan`.
    """
    cut = window_bytes(order, shard_bytes)
    each = -(-global_batch_size // order.num_slices)
    starts = np.concatenate([[0], np.cumsum(shard_samples, dtype=np.int64)])
    kept = np.asarray(shard_samples, np.int64)
    if selection is not None:
        left_out = np.searchsorted(starts[1:], selection.excluded, side="right")
        kept = kept - np.bincount(left_out, minlength=len(kept))
    reserved = 0
    for first, stop in set_ranges(set_shards, len(shard_bytes)):
        at_least = kept[first:stop]
        read = at_least > 0
        if selection is not None:
            fewest = selection.part(int(starts[first]), int(starts[stop])).min_copies
            if fewest is not None:
                at_least = sum_by_shard(fewest, starts[first : stop + 1])
        extents, sizes = extent_bytes[first:stop][read], shard_bytes[first:stop][read]
        needed = int(extents.sum())
        if cut != "all" and sizes.any():
            samples = np.maximum(1, at_least[read])
            lane = _most_lane_bytes(extents, sizes, samples, cut=cut, num_samples=each)
            needed = min(needed, num_slices_read * lane)
        reserved += needed
    return reserved


def _most_lane_bytes(extents: Int64s, sizes: Int64s, samples: Int64s, *, cut: int, num_samples: int) -> int:
    """Bound the bytes of the cache that two windows of a lane take, or all windows that a step spans.

    All arrays are int64 [shards]; ``num_samples`` are those of a step.
    """
    # A window has at most ``cut`` bytes, or is one shard that is larger; and no shard is in two windows.
    largest = np.sort(sizes)[::-1][:2].tolist()
    by_bytes = _most_extents(extents, sizes, sum(max(cut, size) for size in largest))
    num_shards = max(1, int(np.searchsorted(np.cumsum(np.sort(sizes)), cut, side="right")))
    by_shards = int(np.sort(extents)[::-1][: 2 * num_shards].sum())
    # Every window but the last one of a slice has at least this many bytes: a step that needs fewer spans at most two.
    least = max(0, cut - largest[0])
    # If it spans more, it reads all but two of them whole.
    whole = samples <= num_samples - 2
    step = _most_extents(extents[whole], samples[whole], num_samples - 2)
    return min(by_bytes, by_shards) + (step if least < step else 0)


def _most_extents(extents: Int64s, weights: Int64s, limit: int) -> int:
    """Bound the bytes of the cache that shards take whose weights add up to ``limit`` at most.

    An extent is longer than its shard, by its alignment and the shard's index. So shards count in the order of bytes of
    the cache for each unit of weight, and the shard at the limit counts in part.

    >>> _most_extents(np.array([200, 200, 200]), np.array([175, 175, 175]), 263)
    300
    """
    ratios = np.divide(extents, weights, out=np.full(len(extents), np.inf), where=weights > 0)
    order = np.argsort(-ratios, kind="stable")
    stops = np.cumsum(weights[order])
    whole = int(np.searchsorted(stops, limit, side="right"))
    most = int(extents[order[:whole]].sum())
    if whole < len(order):
        left = limit - (int(stops[whole - 1]) if whole else 0)
        most += left * int(extents[order[whole]]) // int(weights[order[whole]])
    return most
