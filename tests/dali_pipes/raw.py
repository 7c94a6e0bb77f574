"""A graph that decodes nothing, so that tests can hold every row against the bytes that were packed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import dali_pipes as dp
    from tests.shards import Sample

__all__ = ["check_rows", "raw", "read_epoch"]


def raw(components: dp.Components, random: dp.Random) -> dict[str, Any]:
    """Which sample; its label; length and sum of its photo's bytes, which every changed byte changes."""
    from nvidia.dali import fn, types

    photo = components["image.jpg"]
    return {
        "ordinal": components.array(lambda batch: batch.ordinals),
        "label": components.label,
        "length": photo.shape(),
        "sum": fn.reductions.sum(fn.cast(photo, dtype=types.INT64)),
    }


def check_rows(batch: Mapping[str, Any], samples: Sequence[Sample]) -> list[int]:
    """The ordinals of a batch of `raw`, after each row was held against its sample."""
    columns = [batch[name].flatten().tolist() for name in ("ordinal", "label", "length", "sum")]
    for ordinal, *found in zip(*columns, strict=True):
        components = samples[ordinal].components
        photo = components["image.jpg"]
        assert found == [int(components["cls"]), len(photo), sum(photo)], f"sample {ordinal}"
    return columns[0]


def read_epoch(loaders: Sequence[Any], samples: Sequence[Sample]) -> Counter[int]:
    """How often each sample came in one epoch of all ranks, read in step."""
    count: Counter[int] = Counter()
    iterators = [iter(loader) for loader in loaders]
    for _ in range(len(loaders[0])):
        for loader, iterator in zip(loaders, iterators, strict=True):
            (batch,) = next(iterator)
            count.update(check_rows(batch, samples)[: loader.num_valid])
    for iterator in iterators:
        assert next(iterator, None) is None
    return count
