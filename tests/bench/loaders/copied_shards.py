"""A peer that reads a local copy of the shards: the smallest loader with a conversion."""

import contextlib
import os
from pathlib import Path

from bench.loaders.peers import webloader
from bench.loaders.protocol import BenchLoader, LoaderOptions
from dali_pipes.store.shard_set import ShardSet
from dali_pipes.store.urls import resolve_shards


def prepare(shards: ShardSet, *, directory: Path) -> None:
    for name in shards.names:
        (directory / name).write_bytes(shards.store.read(name))


def open_loader(
    shards: ShardSet, *, options: LoaderOptions, place: str
) -> contextlib.AbstractContextManager[BenchLoader]:
    """Open a loader of the copy in the shards' own bucket. S3 clients find the bucket by the environment."""
    assert os.environ["AWS_ENDPOINT_URL"] == os.environ["S3_ENDPOINT_URL"] == f"{shards.store.endpoint}/s3"
    url = place.replace("s3://", "ais://", 1)
    return webloader.open_loader(resolve_shards(f"{url}/", endpoint=shards.store.endpoint), options=options)
