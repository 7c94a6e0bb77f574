"""Return the same tensors of the right shapes again and again: the upper bound of a training step.

No other loader makes the step faster. The difference to another loader is the time that the step waits for it.
"""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

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
        self._num_samples = manifest.num_samples
        rows, crop = options.batch_size, options.crop
        draw = torch.Generator().manual_seed(options.seed)
        self._image = torch.randn(rows, 3, crop, crop, generator=draw).to(self.device)
        self._has_mask = options.mask is not None
        self._mask = torch.randint(1, 4, (rows, 1, crop, crop), dtype=torch.uint8, generator=draw).to(self.device)
        self._label = torch.randint(1, 38, (rows,), generator=draw).to(self.device)
        self._keys = [f"synthetic/{row:06d}" for row in range(rows)]

        size = round(manifest.total_bytes / max(1, manifest.num_samples))
        self._encoded = torch.zeros(rows * size, dtype=torch.uint8) if options.recipe == "encoded" else None
        self._cu_seqlens = torch.arange(rows + 1, dtype=torch.int32) * size

    def epoch(self) -> Iterator[BenchBatch]:
        rows = len(self._keys)
        for start in range(0, self._num_samples, rows):
            stop = min(rows, self._num_samples - start)
            batch: BenchBatch = {
                "image": self._image[:stop],
                "label": self._label[:stop],
                "key": self._keys[:stop],
            }
            if self._encoded is not None:
                end = int(self._cu_seqlens[stop])
                yield {
                    "encoded": self._encoded[:end],
                    "cu_seqlens": self._cu_seqlens[: stop + 1],
                    "label": batch["label"],
                    "key": batch["key"],
                }
                continue
            yield {**batch, "mask": self._mask[:stop]} if self._has_mask else batch
