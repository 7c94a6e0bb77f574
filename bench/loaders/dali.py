"""Shards to batches by ``dali_pipes.loader``, opened as a training script opens it.

Its index lies beside the shards; `prepare` shows what making that takes.
"""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from bench.loaders import ALL_PARTS, Batch, Loader, LoaderOptions
from bench.loaders._indexing import prepare
from bench.loaders.devices import delivery_device
from bench.loaders.workers import endpoint_of, shard_urls

if TYPE_CHECKING:
    from dali_pipes.store.urls import ShardSet

__all__ = ["open_loader", "prepare"]


@contextlib.contextmanager
def open_loader(shards: "ShardSet", *, options: LoaderOptions) -> Iterator[Loader]:
    """``dali_pipes.loader`` with ``segmentation``; its shards stay staged for all epochs."""
    import dali_pipes as dp

    with dp.loader(
        shard_urls(shards),
        dp.segmentation(crop=options.crop, photo=options.photo, mask=options.mask),
        batch_size=options.batch_size,
        seed=options.seed,
        last_batch_policy="PARTIAL",
        device=options.device,
        num_threads=options.num_threads,
        with_keys=True,
        endpoint=endpoint_of(shards),
    ) as loader:
        yield _DaliEpochs(loader, device=delivery_device(options.device))


class _DaliEpochs:
    num_workers = 0
    decode = "dali"
    gives = ALL_PARTS

    def __init__(self, loader: Any, *, device: str) -> None:
        self._loader = loader
        self._epochs = 0
        self.device = device

    def epoch(self) -> Iterator[Batch]:
        if self._epochs:
            self._loader.reset()
        self._epochs += 1
        for (batch,) in self._loader:
            yield {
                "image": batch["image"],
                "trimap": batch["trimap"],
                "label": batch["label"],
                "key": batch["key"],
            }
