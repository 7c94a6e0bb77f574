"""Return the same tensors of the right shapes again and again: the upper bound of a training step.

No other loader makes the step faster. The difference to another loader is the time that the step waits for it.
"""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import torch

from bench.loaders.protocol import BenchBatch, BenchLoader, LoaderOptions
from dali_pipes.store.shard_set import ShardSet
from prep.inspect.indexed_set import IndexedSet

if TYPE_CHECKING:
    from dali_pipes.formats.manifest import Manifest


def open_loader(shards: ShardSet, *, options: LoaderOptions) -> contextlib.AbstractContextManager[BenchLoader]:
    """An epoch has as many samples as the shards hold; only this number is read."""
    return contextlib.nullcontext(_SameBatch(IndexedSet(shards).manifest, options))


class _SameBatch:
    num_workers = 0
    decode = "none"

    def __init__(self, manifest: "Manifest", options: LoaderOptions) -> None:
        self.device = options.delivery_device
        self._num_samples, self._rows = manifest.num_samples, options.batch_size
        rows, crop = options.batch_size, options.crop
        draw = torch.Generator().manual_seed(options.seed)
        self._batch: BenchBatch = {
            "label": torch.randint(1, 38, (rows,), generator=draw).to(self.device),
            "key": [f"synthetic/{row:06d}" for row in range(rows)],
        }
        if options.recipe == "encoded":
            size = round(manifest.total_bytes / max(1, manifest.num_samples))
            self._batch["encoded"] = torch.zeros(rows * size, dtype=torch.uint8)
            self._batch["cu_seqlens"] = torch.arange(rows + 1, dtype=torch.int32) * size
        else:
            self._batch["image"] = torch.randn(rows, 3, crop, crop, generator=draw).to(self.device)
        if options.mask is not None:
            masks = torch.randint(1, 4, (rows, 1, crop, crop), dtype=torch.uint8, generator=draw)
            self._batch["mask"] = masks.to(self.device)

    def epoch(self) -> Iterator[BenchBatch]:
        for start in range(0, self._num_samples, self._rows):
            rows = min(self._rows, self._num_samples - start)
            ends: dict[str, int] = {}
            if "cu_seqlens" in self._batch:
                ends = {"encoded": int(self._batch["cu_seqlens"][rows]), "cu_seqlens": rows + 1}
            parts = cast("dict[str, Any]", self._batch)
            yield cast("BenchBatch", {name: part[: ends.get(name, rows)] for name, part in parts.items()})
