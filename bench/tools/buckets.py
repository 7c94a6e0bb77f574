"""Make the buckets that benchmarks read and write."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from dali_pipes.store.cluster.ais import AisStore
from dali_pipes.store.cluster.endpoint import check_endpoint
from dali_pipes.store.shard_set import ShardSet


@contextlib.contextmanager
def new_bucket(endpoint: str, name: str) -> Iterator[AisStore]:
    """Make a bucket for a benchmark; it is destroyed at the end."""
    check_endpoint(endpoint)
    store = AisStore(endpoint, name)
    if store.exists():
        raise ValueError(
            f"bucket '{store.url}' is there already at {endpoint}: another benchmark runs, or one was killed; "
            "destroy the bucket, it holds nothing else"
        )
    store.create()
    try:
        yield store
    finally:
        with store.asking(store.url):
            store.client.bucket(name).delete(missing_ok=True)


def upload_shards(shards: ShardSet, endpoint: str, bucket: str) -> ShardSet:
    """Copy local shards into a new bucket of a server; their index is not copied."""
    store = AisStore(endpoint, bucket)
    store.create()
    for name in shards.names:
        store.upload(name, Path(shards.store.locate(name)))
    return ShardSet(store=store, names=shards.names)
