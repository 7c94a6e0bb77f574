"""Compute the reservation of a loader: the bytes that it must be able to hold at a time, in any epoch.

It is known before any epoch is planned. The exact need of one epoch comes from its plan:
`dali_pipes.order.plan.Plan.bytes_at_a_time`.
"""

from collections.abc import Sequence

import numpy as np

from dali_pipes.order.inputs import OrderInputs
from dali_pipes.order.passes import set_ranges, sum_by_shard, window_bytes
from dali_pipes.order.randomness import Int64s
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
            # The most bytes that the shards of a step can take, even if few samples of each shard are read.
            step = int(np.ceil((extents / np.maximum(1, at_least[read])).max())) * each
            needed = min(needed, num_slices_read * _windows_bytes(extents, sizes, cut=cut, step=step))
        reserved += needed
    return reserved


def _windows_bytes(extents: Int64s, sizes: Int64s, *, cut: int, step: int) -> int:
    largest = int(sizes.max())
    # Every window but the last one of a slice has at least this many bytes: a step that needs fewer spans at most two.
    least = max(0, cut - largest)
    return _most_extents(extents, sizes, 2 * max(cut, largest)) + (step if least < step else 0)


def _most_extents(extent_bytes: Int64s, shard_bytes: Int64s, num_bytes: int) -> int:
    """The largest number of bytes of the cache that shards of ``num_bytes`` together can take.

    An extent is longer than its shard, by its alignment and the shard's index. Small shards grow most in proportion, so
    shards count in the order of this proportion.
    """
    order = np.argsort(-extent_bytes / np.maximum(shard_bytes, 1), kind="stable")
    stops = np.cumsum(shard_bytes[order])
    whole = int(np.searchsorted(stops, num_bytes, side="right"))
    # A shard that is cut off counts in full.
    return int(extent_bytes[order[: whole + 1]].sum())
