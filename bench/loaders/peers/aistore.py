"""Load shards of a bucket with AIStore's own PyTorch data sets, ``aistore.pytorch``, and a ``DataLoader``.

Settings, for aistore 2.0 and torch: ``AISIterDataset`` over an object group that names the shards, so that no worker
lists the bucket. It divides the shards among the workers: one for each core, kept for all epochs, each with one torch
thread (torch's default in a worker). It yields a whole shard at a time, which this module cuts into samples. On a real
AIS 4.9 fetching the 116 MiB of an epoch in this way took 0.16 to 0.18 CPU-s in two tries. It took no less with
``AISBatchIterDataset`` (Get-Batch, streamed: 0.17; multipart: 0.62) and ``AISParallelMapDataset`` (0.18).
``AISShardReader`` took 0.43, of which cutting is about 0.08; it turns ``0/pet_1.image.jpg`` into the key ``pet_1`` and
the component ``jpg``.

None of these classes shuffles. Each epoch names the shards in a new order, as `webloader` does. None keeps fetched
shards: each epoch fetches again. Each photo is decoded as a whole where the batch is made (``collate_fn``), straight
into the batch in shared memory.
"""

import contextlib
import io
from collections.abc import Iterator
from typing import Any

from aistore.pytorch import AISIterDataset
from torch.utils.data import IterableDataset

from bench.loaders.encoded import EncodedSample, ShuffledNames, encoded_samples
from bench.loaders.protocol import BenchLoader, LoaderOptions
from bench.loaders.workers import num_shard_workers, open_data_loader
from dali_pipes.store.base import Bucket
from dali_pipes.store.cluster.ais import ais_client
from dali_pipes.store.shard_set import ShardSet


def open_loader(shards: ShardSet, *, options: LoaderOptions) -> contextlib.AbstractContextManager[BenchLoader]:
    """Every sample comes exactly once an epoch. A worker gets whole shards, so the last batch of each one is short."""
    store = shards.store.need_cluster("the SDK reads buckets")
    samples = _BucketSamples(store, tuple(shards.names), options)
    return open_data_loader(samples, shards, options=options, num_workers=num_shard_workers(shards, options))


class _BucketSamples(IterableDataset[EncodedSample]):
    """The samples of one worker's shards; iterated once an epoch."""

    def __init__(self, store: Bucket, names: tuple[str, ...], options: LoaderOptions) -> None:
        self._endpoint, self._bucket, self._provider = store.endpoint, store.bucket, store.provider
        self._names = ShuffledNames(names, seed=options.seed)
        self._client: Any = None

    def __iter__(self) -> Iterator[EncodedSample]:
        if self._client is None:
            # The client is made in the worker, because connections cannot be sent to another process.
            self._client = ais_client(self._endpoint)
        # Every worker draws the same order, and the library takes the worker's part of it.
        names = list(self._names)
        bucket = self._client.bucket(self._bucket, provider=self._provider)
        for name, data in AISIterDataset(bucket.objects(obj_names=names)):
            yield from encoded_samples(io.BytesIO(data), shard=name)
