"""Load a bucket's shards over S3 with Amazon's ``s3torchconnector`` and a ``DataLoader``.

Settings, for s3torchconnector 1.5 (README): ``S3IterableDataset`` over objects that are named, so that no worker lists
the bucket; ``enable_sharding`` gives each worker its part of them, and there is one worker for each core, kept for all
epochs. ``S3ReaderConstructor.sequential()``, the default, is "best for full reads": the library fetches an object ahead
in parts of 8 MiB, and the tar is cut while it comes. Path style, because a server on an IP address needs it.

The library does not shuffle. Each epoch names the shards in a new order, as `webloader` does. It keeps no shard: each
epoch fetches again. Each photo is decoded as a whole where the batch is made (``collate_fn``), straight into the batch
in shared memory.
"""

import contextlib
import io
import os
from collections.abc import Iterator

from s3torchconnector import S3ClientConfig, S3IterableDataset, S3ReaderConstructor
from torch.utils.data import IterableDataset

from bench.loaders.encoded import STREAM_BUFFER_BYTES, EncodedSample, ShuffledNames, encoded_samples
from bench.loaders.protocol import BenchLoader, LoaderOptions
from bench.loaders.s3 import REGION, S3Place, s3_place
from bench.loaders.workers import num_shard_workers, open_data_loader
from dali_pipes.store.shard_set import ShardSet


def open_loader(shards: ShardSet, *, options: LoaderOptions) -> contextlib.AbstractContextManager[BenchLoader]:
    """Every sample comes exactly once an epoch. A worker gets whole shards, so each worker's last batch is short."""
    place = s3_place(shards)
    samples = _BucketSamples(place, tuple(shards.names), options, is_open=shards.store.endpoint is not None)
    return open_data_loader(samples, shards, options=options, num_workers=num_shard_workers(shards, options))


class _BucketSamples(IterableDataset[EncodedSample]):
    """The samples of one worker's shards; iterated once an epoch."""

    def __init__(self, place: S3Place, names: tuple[str, ...], options: LoaderOptions, *, is_open: bool) -> None:
        self._place, self._is_open = place, is_open
        self._names = ShuffledNames(names, seed=options.seed)

    def __iter__(self) -> Iterator[EncodedSample]:
        # Every worker draws the same order, and the library takes the worker's part of it.
        objects = S3IterableDataset.from_objects(
            [f"s3://{self._place.bucket}/{name}" for name in self._names],
            region=os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or REGION,
            endpoint=self._place.endpoint,
            enable_sharding=True,
            reader_constructor=S3ReaderConstructor.sequential(),
            # AIStore asks for no signature; the credentials of the environment are for other servers.
            s3client_config=S3ClientConfig(force_path_style=self._place.endpoint is not None, unsigned=self._is_open),
        )
        for reader in objects:
            with io.BufferedReader(reader, STREAM_BUFFER_BYTES) as stream:
                yield from encoded_samples(stream, shard=f"s3://{self._place.bucket}/{reader.key}")
