"""A peer that reads a local copy of the shards: the smallest loader with a conversion."""

import contextlib
from pathlib import Path

from bench.loaders.peers import webloader
from bench.loaders.protocol import BenchLoader, LoaderOptions, Prepared
from dali_pipes.store.shard_set import ShardSet
from dali_pipes.store.urls import resolve_shards


def prepare(shards: ShardSet, *, directory: Path) -> None:
    for name in shards.names:
        (directory / name).write_bytes(shards.store.read(name))


def open_loader(
    shards: ShardSet, *, options: LoaderOptions, prepared: Prepared
) -> contextlib.AbstractContextManager[BenchLoader]:
    return webloader.open_loader(resolve_shards(prepared.url, endpoint=None), options=options)
