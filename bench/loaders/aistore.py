"""Shards in a bucket to batches by AIStore's own PyTorch data sets, ``aistore.pytorch``, and a ``DataLoader``.

Settings, of aistore 2.0 and torch: ``AISIterDataset`` over an object group that names the shards, so that no worker
lists the bucket; it deals the shards out to the workers, one a core, kept for all epochs, each with one torch thread
(torch's own default in a worker). It gives a whole shard at a time, which is cut into samples here. On a real AIS 4.9
to fetch the 116 MiB of an epoch took 0.16 to 0.18 CPU-s that way, in two tries, no less with ``AISBatchIterDataset``
(Get-Batch, streamed: 0.17; multipart: 0.62) and ``AISParallelMapDataset`` (0.18). ``AISShardReader`` took 0.43, which
includes cutting, some 0.08 here; it makes of ``0/pet_1.image.jpg`` the key ``pet_1`` and the component ``jpg``.

None of them shuffles. The order of the shards is drawn anew each epoch, as in `webloader`, by naming them in it. None
keeps what it fetched either: each epoch fetches anew. Photos are decoded where the batch is made (``collate_fn``),
straight into it in shared memory, the whole photo of each.
"""

import contextlib
import io
import random
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from aistore.pytorch import AISIterDataset
from torch.utils.data import DataLoader, IterableDataset

from bench.loaders import Loader, LoaderOptions
from bench.loaders._samples import EncodedSample, encoded_samples
from bench.loaders.workers import WorkerEpochs, worker_settings
from bench.transforms import BatchDecoder
from dali_pipes.store.ais import AisStore, ais_client

if TYPE_CHECKING:
    from dali_pipes.store.urls import ShardSet

__all__ = ["open_loader"]


@contextlib.contextmanager
def open_loader(shards: "ShardSet", *, options: LoaderOptions) -> Iterator[Loader]:
    """The data set in worker processes; every sample exactly once an epoch.

    A worker gets whole shards, so there are no more workers than shards, and each one's last batch is short.
    """
    from bench.loaders.devices import delivery_device

    store = shards.store
    assert isinstance(store, AisStore), "the registry opens it for shards in a bucket"
    num_workers = min(options.num_threads, len(shards.names))
    device = delivery_device(options.device)
    loader: DataLoader[EncodedSample] = DataLoader(
        _Samples(store, shards.names, options),
        batch_size=options.batch_size,
        collate_fn=BatchDecoder(options),
        **worker_settings(shards, options=options, num_workers=num_workers, device=device),
    )
    epochs = WorkerEpochs(loader, data_loader=loader, num_workers=num_workers, decode=options.decode, device=device)
    try:
        yield epochs
    finally:
        epochs.close()


class _Samples(IterableDataset[EncodedSample]):
    """What one worker cuts out of the shards that are its own; iterated once an epoch."""

    def __init__(self, store: AisStore, names: tuple[str, ...], options: LoaderOptions) -> None:
        self._endpoint, self._bucket, self._provider = store.endpoint, store.bucket, store.provider
        self._names = list(names)
        self._seed = options.seed
        self._epochs = 0
        self._client: Any = None

    def __iter__(self) -> Iterator[EncodedSample]:
        if self._client is None:
            # Made where it is used: connections do not travel.
            self._client = ais_client(self._endpoint)
        # Every worker draws the same order, and takes its part of it.
        random.Random(f"{self._seed} {self._epochs}").shuffle(self._names)
        self._epochs += 1
        bucket = self._client.bucket(self._bucket, provider=self._provider)
        for name, data in AISIterDataset(bucket.objects(obj_names=self._names)):
            yield from encoded_samples(io.BytesIO(data), shard=name)
