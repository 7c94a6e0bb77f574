"""Describe what aspect-ratio buckets make of a data set: samples, pixels lost by cropping, short last batches."""

from dataclasses import dataclass, field

import numpy as np

from dali_pipes.data_set.data_set import DataSet, photo_sizes
from dali_pipes.formats.photo_names import ComponentCounts, find_photo
from dali_pipes.order.inputs import OrderInputs
from dali_pipes.order.selection import Selection
from dali_pipes.order.shaped import BucketGrouping, ShapedPlan
from dali_pipes.order.shapes import Buckets
from dali_pipes.store.shard_set import ShardSet


@dataclass(frozen=True, kw_only=True)
class BucketInfo:
    """One bucket."""

    height: int
    width: int
    num_samples: int
    lost: float
    """Mean share of a photo's pixels that is cut off. If photos were fitted into the shape instead, the same share of
    each image would be padding."""
    num_enlarged: int
    """Samples whose photo has fewer rows or columns than the shape, after the cut."""
    num_left: int
    """Samples in the short last steps of the windows of an epoch. ``DROP`` leaves them out."""
    num_repeated: int
    """Samples that ``FILL`` adds to these steps."""


@dataclass(frozen=True, kw_only=True)
class BucketsInfo:
    """All buckets of a data set, for one global batch size and window."""

    photo: str
    global_batch_size: int
    window_bytes: int | str
    num_windows: int
    num_steps: int
    """Steps of an epoch under ``PARTIAL`` and ``FILL``."""
    num_unsized: int
    """Samples without a photo, or whose photo has no readable header; they count as square."""
    lost: float
    """Mean over all samples of `BucketInfo.lost`."""
    lost_if_square: float
    """The same if all photos were cut to squares."""
    buckets: list[BucketInfo] = field(default_factory=list)


def describe_buckets(
    shards: ShardSet, shapes: Buckets, *, global_batch_size: int = 256, window_bytes: int | None = None
) -> BucketsInfo:
    """Plan epoch 0 of seed 0 with buckets, and say what it does to the photos.

    Args:
        shards: The shards.
        shapes: The buckets.
        global_batch_size: Samples of one step of all ranks.
        window_bytes: As of `dali_pipes.options.Shuffle`; ``None``: all shards are one window.

    Raises:
        DataError: If the column file has no heights and widths, or it is not clear which component is the photo.
        ValueError: If no sample is left.
    """
    data_set = DataSet(shards)
    manifest, whole = data_set.manifest, data_set.whole
    photo = shapes.photo or find_photo({"": ComponentCounts(whole.components, whole.num_samples)})
    height, width = photo_sizes(data_set, photo)
    grouping = BucketGrouping(shapes.of(height, width), shapes=shapes.shapes, group_size=global_batch_size)
    plan = ShapedPlan(
        grouping=grouping,
        shard_bytes=manifest.shard_bytes,
        shard_samples=manifest.samples,
        order=OrderInputs(shuffle_window="all" if window_bytes is None else window_bytes, shapes=shapes),
        selection=Selection(manifest.num_samples, excluded=manifest.removed),
    )
    is_kept = np.ones(manifest.num_samples, np.bool_)
    is_kept[manifest.removed] = False
    lost, square = (1 - some.cover(height, width) for some in (shapes, Buckets(area=1, step=1, max_aspect=1)))
    is_unsized = (height == 0) | (width == 0)
    chosen = shapes.shapes[grouping.of]
    is_enlarged = ((height < chosen[:, 0]) | (width < chosen[:, 1])) & ~is_unsized
    counts = grouping.counts(plan.pools)
    left = counts % global_batch_size
    found = []
    for bucket, (rows, columns) in enumerate(shapes.shapes.tolist()):
        samples = is_kept & (grouping.of == bucket)
        found.append(
            BucketInfo(
                height=rows,
                width=columns,
                num_samples=int(samples.sum()),
                lost=float(lost[samples].mean()) if samples.any() else 0.0,
                num_enlarged=int((samples & is_enlarged).sum()),
                num_left=int(left[:, bucket].sum()),
                num_repeated=int((-counts[:, bucket] % global_batch_size).sum()),
            )
        )
    return BucketsInfo(
        photo=photo,
        global_batch_size=global_batch_size,
        window_bytes="all" if window_bytes is None else window_bytes,
        num_windows=len(counts),
        num_steps=plan.num_steps(global_batch_size=global_batch_size, last_batch_policy="PARTIAL"),
        num_unsized=int((is_unsized & is_kept).sum()),
        lost=float(lost[is_kept].mean()),
        lost_if_square=float(square[is_kept].mean()),
        buckets=found,
    )
