"""Load LitData's chunks from the shards' own bucket, over S3.

Settings as in `litdata`, and the library's defaults for a bucket (README, "Stream from the cloud"): chunks are
downloaded ahead into ``cache_dir``, and stay there while they fit into ``max_cache_size``. The README's way to another
server is ``AWS_ENDPOINT_URL``.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from litdata import StreamingDataLoader
from litdata.streaming import downloader

from bench.loaders.peers import litdata
from bench.loaders.protocol import BenchLoader, LoaderOptions, Prepared
from bench.loaders.s3 import client_environment, s3_place
from bench.loaders.uploads import remove_uploads, upload_folder, uploaded_prefix
from bench.loaders.workers import open_data_loader
from bench.tools.folders import RunFolder
from dali_pipes.store.shard_set import ShardSet

# Its fast client, obstore, gets these options and no others: without this one it refuses a server without TLS, and the
# environment cannot allow it. Workers import this module with the data set's class.
downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = "true"


def prepare(shards: ShardSet, *, directory: Path) -> None:
    """Convert as `litdata.prepare` does, and upload the result.

    Raises:
        PipesError: If ``litdata.optimize`` fails.
        StoreError: If the bucket cannot be written.
    """
    litdata.prepare(shards, directory=directory)
    upload_folder(shards, directory)


def remove(shards: ShardSet, directory: Path) -> None:
    """Delete the upload."""
    remove_uploads(shards, directory)


@contextlib.contextmanager
def open_loader(shards: ShardSet, *, options: LoaderOptions, prepared: Prepared) -> Iterator[BenchLoader]:
    """Every sample comes exactly once an epoch."""
    place = s3_place(shards)
    remote = f"s3://{place.bucket}/{uploaded_prefix(prepared.url)}"
    with client_environment(shards, AWS_ENDPOINT_URL=place.endpoint), RunFolder() as folder:
        samples = _BucketSamples(remote, options, cache_dir=str(folder.new()))
        with open_data_loader(samples, shards, options=options, loader_class=StreamingDataLoader) as loader:
            yield loader


class _BucketSamples(litdata.ChunkSamples):
    """`litdata.ChunkSamples` of this module."""
