"""WebDataset, tuned: the best that we know how to get out of the library, in its own terms.

Whole batches are made in the workers, so that the main process only receives them; one worker a core, each with one
torch thread (torch's own default in a worker), kept for all epochs; tensors are collated straight into shared memory;
shards, not samples, are shuffled, because dSort has shuffled the samples.
"""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import webdataset
from torch.utils.data import default_collate

from bench.loaders import Loader, LoaderOptions
from bench.loaders.workers import (
    WorkerEpochs,
    shard_urls,
    worker_settings,
)
from bench.transforms import SampleDecoder

if TYPE_CHECKING:
    from prep.urls import ShardSet

__all__ = ["open_loader"]


@contextlib.contextmanager
def open_loader(shards: "ShardSet", *, options: LoaderOptions) -> Iterator[Loader]:
    """The tuned loader.

    The library gives each worker whole shards: no more workers than shards are started, and each worker's last batch
    is short. ``split_by_worker`` deals the shards out, so every sample comes exactly once an epoch.
    """
    from bench.loaders.devices import delivery_device

    num_workers = min(options.num_threads, len(shards.names))
    device = delivery_device(options.device)
    dataset = (
        webdataset.WebDataset(
            shard_urls(shards),
            # detshuffle: another order each epoch, the same in every run.
            shardshuffle=len(shards.names),
            detshuffle=True,
            seed=options.seed,
            # A worker with only empty shards is no error.
            empty_check=False,
        )
        .map(SampleDecoder(options))
        .batched(options.batch_size, collation_fn=default_collate)
    )
    loader = webdataset.WebLoader(
        dataset,
        batch_size=None,
        **worker_settings(shards, options=options, num_workers=num_workers, device=device),
    )
    epochs = WorkerEpochs(
        loader, data_loader=loader.pipeline[0], num_workers=num_workers, decode=options.decode, device=device
    )
    try:
        yield epochs
    finally:
        epochs.close()
