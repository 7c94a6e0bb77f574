"""Shards that are named, to an image that they can be staged into: manifest, place, threads. Needs no DALI."""

import contextlib
import logging
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dali_pipes.errors import DataError
from dali_pipes.extents import EXTENT_ALIGNMENT, extent_starts
from dali_pipes.fetch import NUM_FETCHERS, Fetcher, Stager
from dali_pipes.image import Image, image_key
from dali_pipes.local import LocalFetcher, WithIndexes
from dali_pipes.placement import place
from dali_pipes.samples import index_reader
from prep.endpoint import cluster
from prep.index import find_manifest, index_in_memory
from prep.manifest import Manifest, index_name, manifest_name
from prep.store import AisStore, LocalStore, Store
from prep.urls import ShardSet, ShardUrls, is_remote, resolve_shards

__all__ = ["Indexed", "find_shards", "open_image", "open_stager"]

_log = logging.getLogger(__name__)

Int64s = npt.NDArray[np.int64]


class Indexed:
    """Shards, with the manifest of all that were indexed together and of those that are wanted.

    Args:
        shards: Which ones.
        alignment: Of their extents, by the room that they go to.

    Raises:
        DataError: If a manifest or index is broken, or a shard is not in the manifest.
    """

    def __init__(self, shards: ShardSet, *, alignment: int = EXTENT_ALIGNMENT) -> None:
        self.shards, self.alignment = shards, alignment
        self.indexes: dict[str, bytes] | None = None
        """Shard indexes that were made on the fly, by object name; ``None`` where the store has them."""
        found = find_manifest(shards)
        if found is None:
            found = self._index()
        self.whole: Manifest = found
        self.rows = found.rows_of(shards.names, where=shards.store.locate(manifest_name(shards.prefix)))
        """Where each shard stands in ``whole``: int64 [shards]."""
        self.manifest = found.take(self.rows)
        if self.manifest.num_samples == 0:
            raise DataError(f"'{shards.url}': {self.manifest.num_shards} shards hold no sample")

    @property
    def extent_bytes(self) -> Int64s:
        """What each shard takes of a cache: int64 [shards]."""
        manifest = self.manifest
        return np.diff(extent_starts(manifest.shard_bytes, manifest.index_bytes, alignment=self.alignment))

    def read_index(self, shard: int) -> bytes:
        """A shard's index, from the store or as it was made."""
        if self.indexes is not None:
            return self.indexes[index_name(self.manifest.names[shard])]
        return index_reader(self.shards.store, self.manifest)(shard)

    def _index(self) -> Manifest:
        started = time.perf_counter()
        made = index_in_memory(self.shards)
        self.indexes = dict(made.indexes)
        _log.warning(
            "no manifest beside the shards of '%s': indexed %d of them in %.1f s; store the index to be spared that: "
            "dali-pipes prep index '%s'",
            self.shards.url,
            made.manifest.num_shards,
            time.perf_counter() - started,
            self.shards.url,
        )
        return made.manifest


def find_shards(
    shards: ShardUrls, *, endpoint: str | None, embedded_dir: Path | None, resources: contextlib.ExitStack
) -> ShardSet:
    """The shards that are named, in a bucket of the cluster at ``endpoint`` or in a directory.

    Args:
        shards: See `prep.urls.resolve_shards`.
        endpoint: AIStore's proxy. ``None``: an embedded node is started where shards are in a bucket.
        embedded_dir: Its storage.
        resources: Closes what is opened here.
    """
    first = shards if isinstance(shards, str | Path) else next(iter(shards), "")
    if is_remote(first):
        endpoint = resources.enter_context(cluster(endpoint, embedded_dir=embedded_dir))
    return resolve_shards(shards, endpoint=endpoint)


def open_stager(indexed: Indexed, image: Image, *, num_fetchers: int = NUM_FETCHERS) -> Stager:
    """What brings these shards into the image."""
    store = indexed.shards.store
    made = indexed.indexes

    def open_fetcher() -> Fetcher:
        fetcher = fetcher_of(store)
        return WithIndexes(fetcher, made) if made is not None else fetcher

    return Stager(image, indexed.manifest, open_fetcher=open_fetcher, locate=store.locate, num_fetchers=num_fetchers)


def fetcher_of(store: Store) -> Fetcher:
    """What fetches objects of a store in one thread."""
    if isinstance(store, LocalStore):
        return LocalFetcher(store.directory)
    assert isinstance(store, AisStore)
    from dali_pipes.transport import Connection, ObjectFetcher

    return ObjectFetcher(Connection.from_environment(store.endpoint), store.bucket, provider=store.provider)


def open_image(
    indexed: Indexed,
    *,
    reserved: int | None,
    is_windowed: bool,
    group: int,
    cache_dir: Path | None,
    cache_bytes: int | None,
) -> Image:
    """A share in the image of these shards.

    Args:
        indexed: The shards.
        reserved: Bytes that must be resident at a time; ``None``: as many as fit.
        is_windowed: Whether they are two windows.
        group: See `dali_pipes.image.Image`.
        cache_dir: Where images lie; ``None``: see `dali_pipes.placement`.
        cache_bytes: What all images there may take.

    Raises:
        CacheError: If there is no room.
    """
    total = int(indexed.extent_bytes.sum())
    placement = place(
        cache_dir,
        cache_bytes,
        key=image_key(indexed.whole, alignment=indexed.alignment),
        reserved=0 if reserved is None else reserved,
        total=total,
        is_windowed=is_windowed,
    )
    return Image(
        indexed.whole,
        indexed.rows,
        room=placement.room,
        source=indexed.shards.url,
        group=group,
        reserved=min(total, placement.cache_bytes) if reserved is None else reserved,
        cache_bytes=placement.cache_bytes,
        keep=placement.keep,
        alignment=indexed.alignment,
    )
