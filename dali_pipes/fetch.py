"""Stage shards: objects of a store to checked extents of the image, several in flight."""

import threading
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from dali_pipes.image import Image
from prep.manifest import Manifest
from prep.store import Store

__all__ = ["Stager"]

# Shards in flight. Enough to hide a store's latency; each costs one connection and one thread that mostly waits.
NUM_FETCHERS = 8


class Stager:
    """Fills the image in the background; owns its threads.

    A shard is fetched once, whoever asks first. An error waits with its shard and is raised to whoever waits for that.
    """

    def __init__(self, store: Store, manifest: Manifest, image: Image) -> None:
        self._store, self._manifest, self._image = store, manifest, image
        self._stopped = threading.Event()
        self._threads = ThreadPoolExecutor(NUM_FETCHERS, thread_name_prefix="dali-pipes-fetch")
        self._staged: dict[int, Future[None]] = {}

    def stage(self, shards: Iterable[int]) -> None:
        """Start to fetch these shards, in this order, those that were not asked for before."""
        for shard in shards:
            if shard not in self._staged:
                self._staged[shard] = self._threads.submit(self._fetch, shard)

    def wait(self, shards: Iterable[int]) -> None:
        """Return when all of these are resident.

        Raises:
            CacheError, DataError, StoreError: What went wrong with the first of them that could not be staged.
        """
        wanted = list(shards)
        self.stage(wanted)
        for shard in wanted:
            self._staged[shard].result()

    def is_ready(self, shards: Iterable[int]) -> bool:
        """Whether all of these are resident already."""
        staged = (self._staged.get(shard) for shard in shards)
        return all(future is not None and future.done() and future.exception() is None for future in staged)

    def close(self) -> None:
        """Stop fetching and end the threads. Can be called twice."""
        self._stopped.set()
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _fetch(self, shard: int) -> None:
        name = self._manifest.names[shard]
        with self._store.open(name) as stream:
            self._image.fill(
                shard,
                stream,
                checksum=int(self._manifest.checksums[shard]),
                name=self._store.locate(name),
                stopped=self._stopped.is_set,
            )
