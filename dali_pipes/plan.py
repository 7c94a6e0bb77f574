"""Plan an epoch: a manifest's columns and a seed in, the exact samples of every step of this rank out.

Pure arithmetic on integers. The order is a function of `OrderInputs` and the manifest and of nothing else: not of time,
threads, world size, batch size or cache. A sample is named by its ordinal, its position in the manifest's order.

Three levels, each a permutation by a counter-based generator (`dali_pipes.randomness`):

* the list of shards, cut into ``num_slices`` slices;
* each slice, cut into windows: runs of shards that are resident together;
* the samples of each window.

Cost and memory grow with the window, not with the data set, but for the permutation of the shard list.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from dali_pipes.randomness import Stream

__all__ = [
    "LAST_BATCH_POLICIES",
    "LastBatchPolicyName",
    "OrderInputs",
    "Plan",
    "Step",
    "Window",
    "cut_windows",
    "excluded_digest",
    "num_slices_read",
    "num_steps",
    "reserved_bytes",
    "window_bytes",
]

# Shards of a window that is read in order: enough to keep the fetch threads busy.
SEQUENTIAL_SHARDS = 8

# Of memory, while a window's samples are permuted: ordinals, the generator's words and the sort. Measured, at 2e7.
BYTES_PER_SAMPLE = 120

Int64s = npt.NDArray[np.int64]
LastBatchPolicyName = Literal["FILL", "DROP", "PARTIAL"]
LAST_BATCH_POLICIES: tuple[str, ...] = get_args(LastBatchPolicyName)


@dataclass(frozen=True, kw_only=True)
class OrderInputs:
    """All that the order depends on beside the manifest."""

    seed: int = 0
    epoch: int = 0
    shuffle: bool = True
    """``False``: the manifest's order; the other inputs but ``num_slices`` are then without effect."""
    shuffle_window: int | Literal["all"] = "all"
    """Bytes of shards that are shuffled together; ``"all"``: the whole slice, an exact global shuffle."""
    ramp_up: bool = False
    """Start with windows of 1, 2, 4, ... shards, so that the first batch waits for one shard only."""
    num_slices: int = 1
    """Nodes that each stage a share of the shards; each step takes as many samples from every slice."""

    def __post_init__(self) -> None:
        if self.epoch < 0:
            raise ValueError(f"epoch must not be negative, got {self.epoch}")
        if self.num_slices < 1:
            raise ValueError(f"num_slices must be positive, got {self.num_slices}")
        if self.shuffle_window != "all" and not (isinstance(self.shuffle_window, int) and self.shuffle_window > 0):
            raise ValueError(f"shuffle_window must be 'all' or a positive number of bytes, got {self.shuffle_window!r}")


class Window(NamedTuple):
    """Shards that are resident together, and their samples in the order in which they are read."""

    shards: Int64s
    ordinals: Int64s


class Step(NamedTuple):
    """One batch of one rank."""

    ordinals: Int64s
    """int64 [batch]: the samples, in order."""
    occurrences: Int64s
    """int64 [batch]: how often the epoch had the sample before; not 0 only where samples are repeated."""
    num_valid: int
    """How many, from the front, count: fewer than ``len(ordinals)`` only where a rank has nothing in a last batch."""
    finished: tuple[int, ...] = ()
    """For each slice: how many windows, from the epoch's start on, no later step of any rank takes from. The samples
    that ``FILL`` repeats count for none."""


def num_steps(num_samples: int, *, global_batch_size: int, last_batch_policy: LastBatchPolicyName) -> int:
    """Steps of one epoch, the same on every rank.

    >>> [num_steps(7, global_batch_size=2, last_batch_policy=policy) for policy in ("FILL", "DROP", "PARTIAL")]
    [4, 3, 4]
    """
    if last_batch_policy == "DROP":
        return num_samples // global_batch_size
    return -(-num_samples // global_batch_size)


def window_bytes(order: OrderInputs, shard_bytes: Int64s) -> int | Literal["all"]:
    """What windows are cut by. Without a shuffle they change no order, and need not be large."""
    if order.shuffle or order.shuffle_window != "all":
        return order.shuffle_window
    return SEQUENTIAL_SHARDS * max(1, int(shard_bytes.max(initial=0)))


def cut_windows(
    shard_bytes: Int64s, *, shuffle_window: int | Literal["all"], ramp_up: bool
) -> Iterator[tuple[int, int]]:
    """Cut a list of shards into ranges ``[start, stop)`` of at most ``shuffle_window`` bytes, but at least one shard.

    >>> list(cut_windows(np.array([4, 4, 4, 9, 1]), shuffle_window=8, ramp_up=False))
    [(0, 2), (2, 3), (3, 4), (4, 5)]
    >>> list(cut_windows(np.ones(12, np.int64), shuffle_window="all", ramp_up=True))
    [(0, 1), (1, 3), (3, 7), (7, 12)]
    """
    stops = np.cumsum(shard_bytes)
    start, ramp = 0, 1
    while start < len(shard_bytes):
        stop = len(shard_bytes)
        if shuffle_window != "all":
            before = int(stops[start - 1]) if start else 0
            stop = max(start + 1, int(np.searchsorted(stops, before + shuffle_window, side="right")))
        if ramp_up and start + ramp < stop:
            stop = start + ramp
            ramp *= 2
        else:
            ramp_up = False
        yield start, stop
        start = stop


class Plan:
    """The order of one epoch.

    Args:
        shard_bytes: int64 [shards], from the manifest.
        shard_samples: int64 [shards], samples in each.
        order: What the order depends on.
        excluded: Ordinals that are left out, in any order.

    Raises:
        ValueError: If there are fewer shards than slices, or nothing is left to read.
    """

    def __init__(
        self,
        *,
        shard_bytes: Int64s,
        shard_samples: Int64s,
        order: OrderInputs,
        excluded: Sequence[int] | Int64s = (),
    ) -> None:
        if order.num_slices > len(shard_bytes):
            raise ValueError(
                f"num_slices must not exceed the number of shards, {len(shard_bytes)}, got {order.num_slices}"
            )
        self.order = order
        self._shard_bytes = np.asarray(shard_bytes, np.int64)
        self._shard_stops = np.cumsum(shard_samples, dtype=np.int64)
        self._shard_starts = self._shard_stops - shard_samples
        self._excluded = np.unique(np.asarray(excluded, np.int64))
        total = int(self._shard_stops[-1]) if len(self._shard_stops) else 0
        if len(self._excluded) and not 0 <= self._excluded[0] <= self._excluded[-1] < total:
            raise ValueError(
                f"excluded ordinals must be in [0, {total}), got {self._excluded[0]}..{self._excluded[-1]}"
            )
        left_out = np.bincount(self.shard_of(self._excluded), minlength=len(self._shard_bytes))
        self._shard_kept = np.asarray(shard_samples, np.int64) - left_out
        self._slices = np.array_split(self._shard_order(), order.num_slices)
        self._slice_samples = [int(self._shard_kept[shards].sum()) for shards in self._slices]
        self.num_samples = max(self._slice_samples) * order.num_slices
        """Samples of one epoch over all ranks; slices shorter than the longest wrap, which counts."""
        if min(self._slice_samples) == 0:
            raise ValueError(
                f"nothing to read: {total} samples, {len(self._excluded)} excluded, in {order.num_slices} slices"
            )

    def shard_of(self, ordinals: Int64s) -> Int64s:
        """The shard of each ordinal: int64 [N]."""
        return np.searchsorted(self._shard_stops, ordinals, side="right").astype(np.int64)

    def windows(self, slice_: int = 0) -> Iterator[Window]:
        """The windows of one slice, in the order in which they are read."""
        for shards in self.window_shards(slice_):
            yield Window(shards, self._window_ordinals(shards))

    def window_shards(self, slice_: int = 0) -> Iterator[Int64s]:
        """The shards of the windows of one slice, in the order in which they are read; costs nothing a sample."""
        shards = self._slices[slice_]
        window = window_bytes(self.order, self._shard_bytes)
        ramp_up = self.order.ramp_up and self.order.shuffle
        for start, stop in cut_windows(self._shard_bytes[shards], shuffle_window=window, ramp_up=ramp_up):
            yield shards[start:stop]

    def windows_ahead(self, slice_: int = 0, *, start: int = 0) -> Iterator[tuple[int, Int64s]]:
        """The windows of one slice that are read from position ``start`` of the order on, each with its number.

        A slice shorter than the longest wraps: its windows come again, numbered on.
        """
        left, skip = self.num_samples // self.order.num_slices, start // self.order.num_slices
        number = 0
        while left > 0:
            for shards in self.window_shards(slice_):
                kept = self._kept(shards)
                if skip < kept and left > 0:
                    yield number, shards
                skip, left, number = max(0, skip - kept), left - kept, number + 1

    def slices_of(self, *, batch_size: int, rank: int = 0, world_size: int = 1) -> list[int]:
        """The slices from which a rank takes samples, but for a short last step."""
        each = batch_size * world_size // self.order.num_slices
        return list(range(rank * batch_size // each, -(-(rank + 1) * batch_size // each)))

    def bytes_at_a_time(self, extent_bytes: Int64s, slices: Sequence[int], *, global_batch_size: int) -> int:
        """Bytes of these slices' windows that must be resident at a time: two windows, or as many as one step spans.

        Args:
            extent_bytes: int64 [shards], what each shard takes.
            slices: Which slices.
            global_batch_size: Samples of one step over all ranks.
        """
        each = -(-global_batch_size // self.order.num_slices)
        total = 0
        for slice_ in slices:
            windows = list(self.window_shards(slice_))
            sizes = np.array([extent_bytes[shards].sum() for shards in windows], np.int64)
            kept = np.array([self._kept(shards) for shards in windows], np.int64)
            # Round again: after the last window come the first, of the next lap or epoch, or repeated by FILL.
            sizes, kept = np.tile(sizes, 2), np.tile(kept, 2)
            starts, stops = np.concatenate([[0], np.cumsum(sizes)]), np.cumsum(kept)
            # A step that begins with the last sample of window i ends with the sample each - 1 further on.
            last = np.minimum(np.searchsorted(stops, stops - 1 + each - 1, side="right"), len(sizes) - 1)
            spanned = starts[last + 1] - starts[:-1]
            pairs = sizes[:-1] + sizes[1:]
            total += min(int(extent_bytes[self._slices[slice_]].sum()), max(int(spanned.max()), int(pairs.max())))
        return total

    def steps(
        self,
        *,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        last_batch_policy: LastBatchPolicyName = "PARTIAL",
        start: int = 0,
    ) -> Iterator[Step]:
        """The batches of this rank, from position ``start`` of the order on.

        Step *s* takes ``batch_size * world_size`` consecutive samples of the order; rank *r* has the *r*-th block, with
        several slices after the step's samples were grouped by slice. Seven samples, two ranks, batches of two:

        ===========  ==========  ==========================================================
        policy       step 0      step 1 (three samples are left: 4, 5, 6)
        ===========  ==========  ==========================================================
        ``DROP``     0 1 | 2 3   none
        ``FILL``     0 1 | 2 3   4 5 | 6 0: the epoch's first samples fill it
        ``PARTIAL``  0 1 | 2 3   4 5 | 6: dealt evenly, the first ranks one more
        ===========  ==========  ==========================================================

        A rank that would have nothing in a ``PARTIAL`` last step gets the step's first sample, with ``num_valid`` 0.

        Raises:
            ValueError: If ``rank`` is not in ``[0, world_size)``, the policy is unknown, or ``num_slices`` does not
                divide ``batch_size * world_size``.
        """
        global_batch_size = batch_size * world_size
        num_slices = self.order.num_slices
        if batch_size < 1:
            raise ValueError(f"batch_size must be positive, got {batch_size}")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must be in [0, world_size), got rank={rank} with world_size={world_size}")
        if last_batch_policy not in LAST_BATCH_POLICIES:
            raise ValueError(f"last_batch_policy must be one of FILL, DROP, PARTIAL, got {last_batch_policy!r}")
        if global_batch_size % num_slices:
            raise ValueError(
                f"num_slices must divide batch_size * world_size, got {num_slices} and {batch_size} * {world_size}"
            )
        if start % num_slices:
            raise ValueError(f"start must be a multiple of num_slices, {num_slices}, got {start}")
        return self._steps(batch_size, rank, world_size, last_batch_policy, start)

    def _steps(
        self, batch_size: int, rank: int, world_size: int, last_batch_policy: LastBatchPolicyName, start: int
    ) -> Iterator[Step]:
        global_batch_size = batch_size * world_size
        num_slices = self.order.num_slices
        cursors = [_Cursor(self, slice_, start // num_slices) for slice_ in range(num_slices)]
        for position in range(start, self.num_samples, global_batch_size):
            size = min(global_batch_size, self.num_samples - position)
            parts = [cursor.take(size // num_slices) for cursor in cursors]
            if size < global_batch_size:
                if last_batch_policy == "DROP":
                    return
                if last_batch_policy == "FILL":
                    parts = [
                        _join(part, self._repeated(slice_, (global_batch_size - size) // num_slices))
                        for slice_, part in enumerate(parts)
                    ]
                    size = global_batch_size
            ordinals, occurrences = (np.concatenate(column) for column in zip(*parts, strict=True))
            first, stop = _block(size, rank, world_size, batch_size)
            finished = tuple(cursor.finished for cursor in cursors)
            if first == stop:
                yield Step(ordinals[:1], occurrences[:1], 0, finished)
            else:
                yield Step(ordinals[first:stop], occurrences[first:stop], stop - first, finished)

    def _repeated(self, slice_: int, num: int) -> "_Taken":
        """The epoch's first samples again, as often as it takes."""
        samples = max(self._slice_samples)
        # A slice shorter than the longest has already repeated its first samples within the epoch.
        turns = -(-samples // self._slice_samples[slice_])
        ordinals, occurrences = _Cursor(self, slice_, 0).take(min(num, samples))
        lap = np.repeat(np.arange(1, -(-num // samples) + 1), samples)[:num]
        return np.resize(ordinals, num), np.resize(occurrences, num) + lap * turns

    def _shard_order(self) -> Int64s:
        shards = np.arange(len(self._shard_bytes), dtype=np.int64)
        return self._permuted(shards, "shards") if self.order.shuffle else shards

    def _window_ordinals(self, shards: Int64s) -> Int64s:
        counts = self._shard_stops[shards] - self._shard_starts[shards]
        # Each shard's first ordinal, less where its run starts in the concatenation, plus the position in it.
        offsets = np.repeat(self._shard_starts[shards] - (np.cumsum(counts) - counts), counts)
        ordinals = offsets + np.arange(len(offsets), dtype=np.int64)
        if len(self._excluded):
            # Sorted: the place where each would stand is found in the time of the window.
            places = np.minimum(np.searchsorted(self._excluded, ordinals), len(self._excluded) - 1)
            ordinals = ordinals[self._excluded[places] != ordinals]
        return self._permuted(ordinals, "samples") if self.order.shuffle else ordinals

    def _permuted(self, values: Int64s, purpose: str) -> Int64s:
        # Sorted by 64 random bits each; the sort is stable, so that even equal bits give one order everywhere.
        stream = Stream(self.order.seed, self.order.epoch, f"order/{purpose}")
        return values[np.argsort(stream.words(values), kind="stable")]

    def _kept(self, shards: Int64s) -> int:
        return int(self._shard_kept[shards].sum())


_Taken = tuple[Int64s, Int64s]


class _Cursor:
    """Reads one slice's order from a position on, lap after lap; skips windows without permuting them."""

    def __init__(self, plan: Plan, slice_: int, position: int) -> None:
        self._plan, self._slice = plan, slice_
        samples = plan._slice_samples[slice_]
        self._lap, skip = divmod(position, samples)
        self._windows = plan.window_shards(slice_)
        self._ordinals = np.empty(0, np.int64)
        self._opened = self._lap * sum(1 for _ in plan.window_shards(slice_)) if self._lap else 0
        while skip:
            shards = next(self._windows)
            self._opened += 1
            kept = plan._kept(shards)
            if kept > skip:
                self._ordinals = plan._window_ordinals(shards)[skip:]
            skip -= min(kept, skip)

    @property
    def finished(self) -> int:
        """How many windows are read to their end."""
        return self._opened - (len(self._ordinals) > 0)

    def take(self, num: int) -> _Taken:
        ordinals: list[Int64s] = []
        occurrences: list[Int64s] = []
        while num:
            if not len(self._ordinals):
                self._next_window()
                continue
            taken = self._ordinals[:num]
            self._ordinals = self._ordinals[num:]
            ordinals.append(taken)
            occurrences.append(np.full(len(taken), self._lap, np.int64))
            num -= len(taken)
        empty = [np.empty(0, np.int64)]
        return np.concatenate(ordinals or empty), np.concatenate(occurrences or empty)

    def _next_window(self) -> None:
        shards = next(self._windows, None)
        if shards is None:
            self._lap += 1
            self._windows = self._plan.window_shards(self._slice)
            return
        self._ordinals = self._plan._window_ordinals(shards)
        self._opened += 1


def _join(first: _Taken, second: _Taken) -> _Taken:
    return np.concatenate([first[0], second[0]]), np.concatenate([first[1], second[1]])


def _block(size: int, rank: int, world_size: int, batch_size: int) -> tuple[int, int]:
    """The rank's range of a step of ``size`` samples: whole blocks, or a short step dealt evenly."""
    if size == batch_size * world_size:
        return rank * batch_size, (rank + 1) * batch_size
    share, extra = divmod(size, world_size)
    first = rank * share + min(rank, extra)
    return first, first + share + (rank < extra)


def excluded_digest(keys: Sequence[str]) -> str:
    """SHA-256, hexadecimal, of the keys left out, sorted: an input of the order."""
    state = hashlib.sha256()
    for key in sorted(set(keys)):
        state.update(key.encode() + b"\0")
    return state.hexdigest()


def num_slices_read(order: OrderInputs, *, batch_size: int, rank: int, world_size: int) -> int:
    """How many slices a rank takes samples from."""
    each = batch_size * world_size // order.num_slices
    return -(-(rank + 1) * batch_size // each) - rank * batch_size // each


def reserved_bytes(
    extent_bytes: Int64s,
    shard_bytes: Int64s,
    shard_samples: Int64s,
    *,
    order: OrderInputs,
    global_batch_size: int,
    num_slices_read: int = 1,
) -> int:
    """Bytes that two windows never exceed, whichever epoch: what a loader has promised to it at its start.

    Args:
        extent_bytes: int64 [shards], what each shard takes.
        shard_bytes: int64 [shards], which windows are cut by.
        shard_samples: int64 [shards].
        order: What the order depends on.
        global_batch_size: Samples of one step over all ranks.
        num_slices_read: Slices that this rank reads.
    """
    total = int(extent_bytes.sum())
    cut = window_bytes(order, shard_bytes)
    if cut == "all" or not shard_bytes.any():
        return total
    largest = int(shard_bytes.max())
    counted = shard_samples > 0
    per_sample = int(np.ceil((extent_bytes[counted] / shard_samples[counted]).max(initial=0.0)))
    # Every window but a slice's last holds at least this much: a step that needs less than that spans two at most.
    least = max(0, cut - largest)
    step = per_sample * -(-global_batch_size // order.num_slices)
    windows = _most_extents(extent_bytes, shard_bytes, 2 * max(cut, largest))
    return min(total, num_slices_read * (windows + (step if least < step else 0)))


def _most_extents(extent_bytes: Int64s, shard_bytes: Int64s, num_bytes: int) -> int:
    """The most that shards of ``num_bytes`` together can take: those first that are longest for their size.

    An extent is longer than its shard, by its alignment and the shard's index, and most so for small shards.
    """
    order = np.argsort(-extent_bytes / np.maximum(shard_bytes, 1), kind="stable")
    stops = np.cumsum(shard_bytes[order])
    whole = int(np.searchsorted(stops, num_bytes, side="right"))
    # One more that is cut off counts in full.
    return int(extent_bytes[order[: whole + 1]].sum())
