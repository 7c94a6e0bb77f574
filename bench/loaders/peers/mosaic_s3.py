"""Load MDS shards from the shards' own bucket, over S3, with Mosaic Streaming.

Settings as in `mosaic`, and the library's defaults for a remote ("Shard Retrieval"): ``predownload`` of eight batches,
no ``cache_limit``, so that the first epoch downloads each MDS shard once into ``local``, and later epochs read files.
``S3_ENDPOINT_URL`` names a server that is not Amazon's.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from bench.loaders.peers import mosaic
from bench.loaders.protocol import BenchLoader, LoaderOptions, Prepared
from bench.loaders.s3 import client_environment, s3_place
from bench.loaders.uploads import remove_uploads, upload_folder, uploaded_prefix
from bench.tools.folders import RunFolder
from dali_pipes.store.shard_set import ShardSet


def prepare(shards: ShardSet, *, directory: Path) -> None:
    """Convert as `mosaic.prepare` does, and upload the result.

    Raises:
        DataError: If samples have different components.
        StoreError: If the bucket cannot be written.
    """
    mosaic.prepare(shards, directory=directory)
    upload_folder(shards, directory)


def remove(shards: ShardSet, directory: Path) -> None:
    """Delete the upload."""
    remove_uploads(shards, directory)


@contextlib.contextmanager
def open_loader(shards: ShardSet, *, options: LoaderOptions, prepared: Prepared) -> Iterator[BenchLoader]:
    """Every sample comes exactly once an epoch."""
    place = s3_place(shards)
    remote = f"s3://{place.bucket}/{uploaded_prefix(prepared.url)}"
    with (
        client_environment(shards, S3_ENDPOINT_URL=place.endpoint),
        RunFolder() as folder,
        mosaic.opened(shards, options=options, local=str(folder.new()), remote=remote) as loader,
    ):
        yield loader
