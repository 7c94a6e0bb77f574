"""No shards to batches: tensors of the right shapes, made once and given out again and again. The step's upper bound.

There is nothing to set. What a training step reaches with it, no loader can lift; what it lacks of that with a loader
is what it waits.
"""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from bench.loaders import Batch, Loader, LoaderOptions
from bench.loaders.devices import delivery_device
from prep.inspect.info import IndexedSet

if TYPE_CHECKING:
    from dali_pipes.store.urls import ShardSet

__all__ = ["open_loader"]


@contextlib.contextmanager
def open_loader(shards: "ShardSet", *, options: LoaderOptions) -> Iterator[Loader]:
    """As many samples an epoch as the shards hold; nothing else is taken of them."""
    yield _SameBatch(IndexedSet(shards).manifest.num_samples, options, device=delivery_device(options.device))


class _SameBatch:
    num_workers = 0
    decode = "none"
    gives = frozenset[str]()

    def __init__(self, num_samples: int, options: LoaderOptions, *, device: str) -> None:
        self.device = device
        self._num_samples = num_samples
        rows, crop = options.batch_size, options.crop
        draw = torch.Generator().manual_seed(options.seed)
        self._image = torch.randn(rows, 3, crop, crop, generator=draw).to(device)
        self._trimap = torch.randint(1, 4, (rows, 1, crop, crop), dtype=torch.uint8, generator=draw).to(device)
        self._label = torch.randint(1, 38, (rows,), generator=draw).to(device)
        self._keys = [f"synthetic/{row:06d}" for row in range(rows)]

    def epoch(self) -> Iterator[Batch]:
        rows = len(self._keys)
        for start in range(0, self._num_samples, rows):
            stop = min(rows, self._num_samples - start)
            yield {
                "image": self._image[:stop],
                "trimap": self._trimap[:stop],
                "label": self._label[:stop],
                "key": self._keys[:stop],
            }
