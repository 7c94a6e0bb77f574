"""Stage shards: objects of a store to checked extents of the image, several in flight."""

import sys
import threading
from collections import deque
from collections.abc import Iterable

from dali_pipes.image import Image
from prep.manifest import Manifest
from prep.store import Store

__all__ = ["Stager"]

# Shards in flight. Enough to hide a store's latency; each costs one connection and one thread that mostly waits.
NUM_FETCHERS = 8


class Stager:
    """Fills the image in the background; owns its threads.

    A shard is fetched once, whoever asks first, and again only after an error was raised to whoever waited for it. The
    threads are daemons: a program that ends does not wait for shards that nobody will read.
    """

    def __init__(self, store: Store, manifest: Manifest, image: Image) -> None:
        self._store, self._manifest, self._image = store, manifest, image
        self._changed = threading.Condition()
        # All below is guarded by the condition's lock.
        self._queue: deque[int] = deque()
        self._asked: set[int] = set()
        self._ready: set[int] = set()
        self._failed: dict[int, Exception] = {}
        self._threads: list[threading.Thread] = []
        self._stopped = threading.Event()

    def stage(self, shards: Iterable[int]) -> None:
        """Start to fetch these shards, in this order, those that were not asked for before."""
        with self._changed:
            new = [shard for shard in shards if shard not in self._asked]
            self._asked.update(new)
            self._queue.extend(new)
            self._start_threads()
            self._changed.notify_all()

    def wait(self, shards: Iterable[int]) -> None:
        """Return when all of these are resident; they are fetched before all others.

        Raises:
            CacheError, DataError, StoreError: What went wrong with one of them. The next call tries again.
        """
        wanted = list(shards)
        self.stage(wanted)
        with self._changed:
            first = [shard for shard in wanted if shard in self._queue]
            for shard in reversed(first):
                self._queue.remove(shard)
                self._queue.appendleft(shard)
            while not self._ready.issuperset(wanted):
                failed = next((shard for shard in wanted if shard in self._failed), None)
                if failed is not None:
                    self._asked.discard(failed)
                    raise self._failed.pop(failed)
                self._changed.wait()

    def is_ready(self, shards: Iterable[int]) -> bool:
        """Whether all of these are resident already."""
        with self._changed:
            return self._ready.issuperset(shards)

    def close(self) -> None:
        """Stop fetching and end the threads. Can be called twice."""
        self._stopped.set()
        with self._changed:
            self._queue.clear()
            self._changed.notify_all()
        if sys.is_finalizing():
            return  # daemons are stopped where they stand when the interpreter ends: a join would wait for ever
        for thread in self._threads:
            # The garbage collector may have called this in one of them.
            if thread is not threading.current_thread():
                thread.join()

    def _start_threads(self) -> None:
        while len(self._threads) < min(NUM_FETCHERS, len(self._asked)):
            thread = threading.Thread(target=self._work, name="dali-pipes-fetch", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._stopped.is_set():
                    self._changed.wait()
                if self._stopped.is_set():
                    return
                shard = self._queue.popleft()
            try:
                self._fetch(shard)
            except Exception as exc:  # noqa: BLE001 (handed to whoever waits for the shard)
                with self._changed:
                    self._failed[shard] = exc
                    self._changed.notify_all()
            else:
                with self._changed:
                    self._ready.add(shard)
                    self._changed.notify_all()

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
