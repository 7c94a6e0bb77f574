"""Compute the reservation of a loader: the bytes that it must be able to hold at a time, in any epoch.

It is known before any epoch is planned. The exact need of one epoch comes from its plan:
`dali_pipes.order.plan.Plan.bytes_at_a_time`.
"""

from collections.abc import Sequence

import numpy as np

from dali_pipes.arrays import Int64s
from dali_pipes.order.inputs import OrderInputs
from dali_pipes.order.passes import set_ranges, sum_by_shard, window_bytes
from dali_pipes.order.selection import Selection


def slices_read(order: OrderInputs, *, batch_size: int, rank: int, world_size: int) -> range:
    """Find the slices from which a rank takes samples."""
    each = batch_size * world_size // order.num_slices
    return range(rank * batch_size // each, -(-(rank + 1) * batch_size // each))


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

    Args:
        extent_bytes: int64 [shards], what each shard takes of the cache.
        shard_bytes: int64 [shards]; windows are cut by them.
        shard_samples: int64 [shards].
        order: The inputs of the order.
        global_batch_size: Samples of one step over all ranks.
        num_slices_read: Slices that this rank reads.
        set_shards: Numbers of shards of consecutive data sets; ``None``: one data set.
        selection: Of samples; ``None``: all.
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
            lane = _lane_bytes(extents, sizes, samples, cut=cut, num_samples=each)
            needed = min(needed, num_slices_read * lane)
        reserved += needed
    return reserved


def _lane_bytes(extents: Int64s, sizes: Int64s, samples: Int64s, *, cut: int, num_samples: int) -> int:
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
