"""Stage shards: objects of a store to checked extents of the image, several in flight, in the order of the plan.

A shard is wanted for one of two reasons. *Needed*: a segment that names it is open, or waits to be opened. *Ahead*: its
window is the current one or comes next. What is wanted is held, so that it stays; what is needed goes before what is
ahead, for threads and for room.
"""

import contextlib
import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from dali_pipes.cache import Take
from dali_pipes.errors import CacheError
from dali_pipes.extents import Extent
from dali_pipes.image import Image
from prep.manifest import Manifest, index_name

__all__ = ["Fetcher", "Stager"]

_log = logging.getLogger(__name__)

# Shards in flight. Enough to hide a store's latency; each costs one connection and one thread that mostly waits.
NUM_FETCHERS = 8
# How often the cache is asked again for what another process fills, or for room that another must give up first.
POLL_S = 0.005
# How often somebody who waits is told how far it is.
SHOW_S = 0.2
# A wait for room this long is told: who holds it may be stopped, in a debugger for instance.
TELL_AFTER_S = 30.0


class Fetcher(Protocol):
    """Brings objects of one store into extents; belongs to one thread."""

    def fetch(
        self, name: str, extent: Extent, *, checksum: int, stopped: Callable[[], bool], num_connections: int = 1
    ) -> bool:
        """Whether the object lies in its extent, whole and checked; ``False`` only if ``stopped``."""

    def close(self) -> None:
        """Close its connections. Can be called twice."""


class Stager:
    """Fills the image in the background; owns its threads.

    The threads are daemons: a program that ends does not wait for shards that nobody will read.

    Args:
        image: Where shards go.
        manifest: What they are, numbered as in ``image``.
        open_fetcher: Called in each thread for a fetcher of its own.
        locate: The URL of an object, for errors.
        num_fetchers: Threads.
    """

    def __init__(
        self,
        image: Image,
        manifest: Manifest,
        *,
        open_fetcher: Callable[[], Fetcher],
        locate: Callable[[str], str],
        num_fetchers: int = NUM_FETCHERS,
    ) -> None:
        self._image, self._manifest = image, manifest
        self._open_fetcher, self._locate, self._num_fetchers = open_fetcher, locate, num_fetchers
        self._bytes = image.extent_bytes
        self._changed = threading.Condition()
        # All below is guarded by the condition's lock.
        self._needs: Counter[int] = Counter()
        self._ahead: dict[int, int] = {}  # shard -> how many windows have it, in the order in which they are read
        self._ahead_bytes = 0
        self._held: dict[int, None] = {}
        self._held_bytes = 0
        self._filling: set[int] = set()
        # What went wrong, until it was told to whoever needs the shard; it is then tried again when it is needed again.
        self._failed: dict[int, Exception | None] = {}
        self._asking = False
        self._no_room_since: float | None = None
        self._threads: list[threading.Thread] = []
        self._stopped = threading.Event()
        self.fetched_bytes = 0
        """Bytes of shards that this loader brought into the image so far, indexes included."""

    @property
    def is_short(self) -> bool:
        """Whether less is wanted ahead than may be held: another window can be asked for."""
        with self._changed:
            return self._ahead_bytes < self._image.reserved

    def stage(self, shards: Sequence[int]) -> None:
        """Want these ahead, in this order, after those that are wanted already; `unstage` ends it."""
        with self._changed:
            for shard in shards:
                if shard not in self._ahead:
                    self._ahead_bytes += int(self._bytes[shard])
                self._ahead[shard] = self._ahead.get(shard, 0) + 1
            self._start_threads(len(shards))
            self._changed.notify_all()

    def unstage(self, shards: Sequence[int]) -> None:
        """Want these ahead no more; they are released unless they are needed."""
        with self._changed:
            for shard in shards:
                self._ahead[shard] -= 1
                if not self._ahead[shard]:
                    del self._ahead[shard]
                    self._ahead_bytes -= int(self._bytes[shard])
            self._release_unwanted(shards)

    def need(self, shards: Sequence[int], *, waiting: Callable[[], None] = lambda: None) -> None:
        """Return when all of these are resident; they stay until `done`. They are fetched before all others.

        Args:
            shards: What the caller is about to read.
            waiting: Called now and then meanwhile.

        Raises:
            CacheError, DataError, StoreError: What went wrong with one of them; none is needed then, and the next call
                tries again.
        """
        with self._changed:
            self._needs.update(shards)
            for shard in shards:
                if self._failed.get(shard, ...) is None:
                    del self._failed[shard]
            self._start_threads(len(shards))
            self._changed.notify_all()
            try:
                while not all(shard in self._held for shard in shards):
                    failed = next((shard for shard in shards if shard in self._failed), None)
                    if failed is not None and (error := self._failed[failed]) is not None:
                        self._failed[failed] = None
                        raise error
                    self._changed.wait(SHOW_S)
                    waiting()
            except BaseException:
                self._done(shards)
                raise

    def need_resident(self, shards: Sequence[int]) -> bool:
        """As `need`, if all of these are resident already; else ``False``, and nothing is needed."""
        with self._changed:
            if not all(shard in self._held for shard in shards):
                return False
            self._needs.update(shards)
            return True

    def done(self, shards: Sequence[int]) -> None:
        """The reader that named these is gone."""
        with self._changed:
            self._done(shards)

    def num_missing(self, shards: Iterable[int]) -> tuple[int, int]:
        """How many of these are not resident, and their bytes."""
        with self._changed:
            missing = [shard for shard in shards if shard not in self._held]
        return len(missing), int(self._bytes[missing].sum()) if missing else 0

    def close(self) -> None:
        """Stop fetching and end the threads. Can be called twice."""
        self._stopped.set()
        with self._changed:
            self._changed.notify_all()
        if sys.is_finalizing():
            return  # daemons are stopped where they stand when the interpreter ends: a join would wait for ever
        for thread in list(self._threads):
            # The garbage collector may have called this in one of them.
            if thread is not threading.current_thread():
                thread.join()

    def _start_threads(self, num_wanted: int) -> None:
        while len(self._threads) < min(self._num_fetchers, num_wanted):
            thread = threading.Thread(target=self._work, name="dali-pipes-fetch", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _done(self, shards: Sequence[int]) -> None:
        self._needs.subtract(shards)
        for shard in shards:
            if not self._needs[shard]:
                del self._needs[shard]
        self._release_unwanted(shards)

    def _release_unwanted(self, shards: Iterable[int]) -> None:
        self._release([s for s in shards if s in self._held and s not in self._ahead and s not in self._needs])

    def _release(self, shards: Sequence[int]) -> None:
        if not shards or self._stopped.is_set():
            return
        for shard in dict.fromkeys(shards):
            del self._held[shard]
            self._held_bytes -= int(self._bytes[shard])
        self._image.release(shards)
        self._changed.notify_all()

    def _work(self) -> None:
        try:
            with contextlib.closing(self._open_fetcher()) as fetcher:
                while (taken := self._next()) is not None:
                    self._fill(taken[0], fetcher, is_there=taken[1])
        except Exception as exc:  # noqa: BLE001 (no fetcher, or a broken cache: told to whoever waits)
            with self._changed:
                self._asking = False
                self._failed.update((shard, exc) for shard in (*self._needs, *self._ahead) if shard not in self._held)
                self._threads.remove(threading.current_thread())
                self._changed.notify_all()
            _log.debug("a thread that fetches ended", exc_info=True)

    def _next(self) -> tuple[int, bool] | None:
        """The next shard for this thread to fill, and whether it wants checking only; ``None`` at the end.

        One thread at a time asks the cache; what others have filled meanwhile is held on the way.
        """
        with self._changed:
            while True:
                while not self._stopped.is_set() and (self._asking or not (wanted := self._missing())):
                    self._changed.wait()
                if self._stopped.is_set():
                    return None
                self._asking = True
                try:
                    taken = self._ask(wanted)
                finally:
                    self._asking = False
                for shard in taken.ready.tolist():
                    self._hold(shard)
                if taken.fill is not None:
                    self._filling.add(taken.fill)
                if len(taken.ready) or taken.fill is not None:
                    # It may be wanted no more: asking took a moment.
                    self._release_unwanted(taken.ready.tolist())
                    self._changed.notify_all()
                if taken.fill is not None:
                    return taken.fill, taken.is_there
                if taken.blocked == "room":
                    self._make_room()
                else:
                    self._no_room_since = None
                if taken.blocked:
                    self._asking = True
                    self._changed.wait(POLL_S)
                    self._asking = False

    def _ask(self, wanted: Sequence[int]) -> Take:
        self._changed.release()
        try:
            return self._image.take(wanted)
        finally:
            self._changed.acquire()

    def _missing(self) -> list[int]:
        """What is wanted and neither held nor under way, the most urgent first; of what is ahead as much as may be
        held.
        """
        unheld = [s for s in self._needs if s not in self._held and s not in self._filling and s not in self._failed]
        if self._no_room_since is not None and unheld:
            return unheld  # what is ahead must not take the room for which this waits
        left = self._image.reserved - self._held_bytes - int(self._bytes[[*unheld, *self._filling]].sum())
        for shard in self._ahead:
            if shard in self._held or shard in self._filling or shard in self._needs or shard in self._failed:
                continue
            left -= int(self._bytes[shard])
            if left < 0:
                break
            unheld.append(shard)
        return unheld

    def _make_room(self) -> None:
        """What is needed does not fit: give up what is only ahead; where that is not enough, wait for others."""
        missing = [shard for shard in self._needs if shard not in self._held and shard not in self._filling]
        if not missing:
            return
        ahead = [shard for shard in self._held if shard not in self._needs]
        if ahead:
            self._release(ahead)
        now = time.monotonic()
        self._no_room_since = self._no_room_since or now
        if not ahead and not self._filling and self._image.is_stuck():
            names = self._locate(self._manifest.names[missing[0]])
            error = CacheError(
                f"no room for shard '{names}', and none of the loaders that share the cache in "
                f"'{self._image.room.directory}' will give any up: they wait for each other; pass "
                f"cache_bytes={2 * self._image.cache_bytes} or more (--cache-bytes), or start them at the same place"
            )
            self._failed[missing[0]] = error
            self._changed.notify_all()
        elif now - self._no_room_since > TELL_AFTER_S:
            self._no_room_since = now
            _log.warning(
                "waiting for room in '%s' for %d shards: other loaders hold it",
                self._image.room.directory,
                len(missing),
            )

    def _hold(self, shard: int) -> None:
        if shard not in self._held:
            self._held[shard] = None
            self._held_bytes += int(self._bytes[shard])

    def _fill(self, shard: int, fetcher: Fetcher, *, is_there: bool) -> None:
        error: Exception | None = None
        try:
            whole = (is_there and self._is_whole(shard)) or self._fetch(shard, fetcher)
            if whole:
                self._image.finish(shard)
        except Exception as exc:  # noqa: BLE001 (handed to whoever needs the shard)
            whole, error = False, exc
        if not whole:
            self._image.fail(shard)
        with self._changed:
            self._filling.discard(shard)
            if whole:
                self._hold(shard)
                self._release_unwanted([shard])
            elif error is not None:
                self._failed[shard] = error
            self._changed.notify_all()

    def _fetch(self, shard: int, fetcher: Fetcher) -> bool:
        name = self._manifest.names[shard]
        self._image.reserve_blocks(shard, name=self._locate(name))
        objects = [
            (name, self._image.shard_extent(shard), int(self._manifest.checksums[shard])),
            (index_name(name), self._image.index_extent(shard), int(self._manifest.index_checksums[shard])),
        ]
        for object_name, extent, checksum in objects:
            with self._changed:
                # Idle threads lend their connections where fewer shards are wanted than there are threads.
                num_wanted = len((self._needs.keys() | self._ahead.keys()) - self._held.keys())
                connections = max(1, self._num_fetchers // max(1, num_wanted))
            if not fetcher.fetch(
                object_name, extent, checksum=checksum, stopped=self._stopped.is_set, num_connections=connections
            ):
                return False
        with self._changed:
            self.fetched_bytes += sum(extent.size for _, extent, _ in objects)
        return True

    def _is_whole(self, shard: int) -> bool:
        """Whether bytes from before a start of the machine are what they should be."""
        found = self._image.shard_extent(shard).checksum(), self._image.index_extent(shard).checksum()
        return found == (int(self._manifest.checksums[shard]), int(self._manifest.index_checksums[shard]))
