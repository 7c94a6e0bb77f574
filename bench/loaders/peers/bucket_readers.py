"""Load shards of a bucket with AIStore's and Amazon's own data sets for PyTorch, and a ``DataLoader``.

``aistore``, for aistore 2.0: ``AISIterDataset`` over an object group for each worker, which names the worker's shards:
no worker lists the bucket, or asks for the sizes of other workers' shards. It yields a whole shard at a time.
``AISBatchIterDataset`` (Get-Batch) and ``AISParallelMapDataset`` took no less CPU time, ``AISShardReader`` took twice
as much and cuts keys otherwise.

``s3torchconnector``, for s3torchconnector 1.5 (README): ``S3IterableDataset`` over objects that are named;
``enable_sharding`` gives each worker its part of them; ``S3ReaderConstructor.sequential()``, the default, is "best for
full reads": an object is fetched ahead in parts of 8 MiB, and the tar is cut while it comes. Path style, because a
server on an IP address needs it.

In both there is one worker for each core, kept for all epochs. Their iterable sets do not shuffle: each epoch names the
shards in a new order, as `webloader` does. Neither keeps fetched shards. This module cuts shards into samples. Each
photo is decoded where the batch is made (``collate_fn``), straight into the batch in shared memory. A worker gets whole
shards, so its last batch is short.
"""

import contextlib
import io
import os
from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from bench.loaders.encoded import STREAM_BUFFER_BYTES, EncodedSample, ShuffledNames, encoded_samples
from bench.loaders.protocol import BenchLoader, LoaderOptions
from bench.loaders.s3 import REGION, s3_place
from bench.loaders.workers import num_shard_workers, open_data_loader
from dali_pipes.store.shard_set import ShardSet


def open_aistore(shards: ShardSet, *, options: LoaderOptions) -> contextlib.AbstractContextManager[BenchLoader]:
    samples = _AistoreSamples(shards, options)
    return open_data_loader(samples, shards, options=options, num_workers=num_shard_workers(shards, options))


class _AistoreSamples(IterableDataset[EncodedSample]):
    """The samples of one worker's shards; iterated once an epoch."""

    def __init__(self, shards: ShardSet, options: LoaderOptions) -> None:
        store = shards.store.need_cluster("the SDK reads buckets")
        self._endpoint, self._bucket, self._provider = store.endpoint, store.bucket, store.provider
        self._names = ShuffledNames(shards.names, seed=options.seed)
        self._client: Any = None

    def __iter__(self) -> Iterator[EncodedSample]:
        from aistore import Client
        from aistore.pytorch import AISIterDataset

        if self._client is None:
            # The client is made in the worker, because connections cannot be sent to another process.
            self._client = Client(self._endpoint)
        # All workers draw the same order. The library gives each worker its own group.
        names, info = list(self._names), get_worker_info()
        num_groups = 1 if info is None else info.num_workers
        bucket = self._client.bucket(self._bucket, provider=self._provider)
        groups = [bucket.objects(obj_names=names[number::num_groups]) for number in range(num_groups)]
        for name, data in AISIterDataset(groups, partition_sources_by_worker=True):
            yield from encoded_samples(io.BytesIO(data), shard=name)


def open_s3torchconnector(
    shards: ShardSet, *, options: LoaderOptions
) -> contextlib.AbstractContextManager[BenchLoader]:
    samples = _S3Samples(shards, options)
    return open_data_loader(samples, shards, options=options, num_workers=num_shard_workers(shards, options))


class _S3Samples(IterableDataset[EncodedSample]):
    """The samples of one worker's shards; iterated once an epoch."""

    def __init__(self, shards: ShardSet, options: LoaderOptions) -> None:
        self._place = s3_place(shards)
        # AIStore needs no signature. Credentials in the environment belong to other servers.
        self._is_open = shards.store.endpoint is not None
        self._names = ShuffledNames(shards.names, seed=options.seed)

    def __iter__(self) -> Iterator[EncodedSample]:
        from s3torchconnector import S3ClientConfig, S3IterableDataset, S3ReaderConstructor

        # Every worker draws the same order, and the library takes the worker's part of it.
        objects = S3IterableDataset.from_objects(
            [f"s3://{self._place.bucket}/{name}" for name in self._names],
            region=os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or REGION,
            endpoint=self._place.endpoint,
            enable_sharding=True,
            reader_constructor=S3ReaderConstructor.sequential(),
            s3client_config=S3ClientConfig(force_path_style=self._place.endpoint is not None, unsigned=self._is_open),
        )
        readers = map(_requested, objects)
        following = next(readers, None)
        while (reader := following) is not None:
            following = next(readers, None)  # asks for the next object before this one is cut
            with io.BufferedReader(reader, STREAM_BUFFER_BYTES) as stream:
                yield from encoded_samples(stream, shard=f"s3://{self._place.bucket}/{reader.key}")


def _requested(reader: Any) -> Any:
    reader.prefetch()
    return reader
