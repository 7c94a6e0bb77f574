"""Stage shards: bring objects of a store into checked extents of the cache file, several at a time, in plan order.

`dali_pipes.fetch.demand.Demand` lists the wanted shards: those that open segments *need*, and those of the windows
*ahead*. Wanted shards are held, so that they stay in the cache. Needed shards come before shards ahead, for threads and
for space.
"""

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Sequence

from dali_pipes import profiling
from dali_pipes.cache.cache import Take
from dali_pipes.cache.locks import shielded
from dali_pipes.cache.share import CacheShare
from dali_pipes.errors import CacheError
from dali_pipes.fetch.fetcher import NUM_FETCHERS, Fetcher, Wanted
from dali_pipes.fetch.staging_requests import StagingRequests
from dali_pipes.formats.manifest import Manifest
from dali_pipes.formats.names import index_name

_log = logging.getLogger(__name__)

# How often to ask the cache again for shards that another process fills, or for space that another must free first.
POLL_S = 0.005
# Shards to ask the cache for at a time, once it was asked for all: the cost of one shard must not grow with the window.
NUM_ASKED = 256
# A caller that takes only what fits waits this long for space: blocks may be about to be freed.
FULL_AFTER_S = 0.5
# Log a wait for space that takes this long: the process that holds it may be stopped, in a debugger for instance.
LOG_AFTER_S = 30.0

_THREAD_NAME = "dali-pipes-fetch"


def in_fetcher() -> bool:
    """Whether this is a thread of a `Stager`: the garbage collector may finalize the thread's owner there."""
    return threading.current_thread().name == _THREAD_NAME


class Stager(StagingRequests):
    """Fills the cache file in the background; owns its threads.

    The threads are daemons: a program that ends does not wait for shards that nobody will read. Each of the
    ``num_fetchers`` threads opens its own fetcher. ``manifest`` numbers shards as ``share`` does; ``locate`` returns an
    object's URL, for errors.
    """

    def __init__(
        self,
        share: CacheShare,
        manifest: Manifest,
        *,
        open_fetcher: Callable[[], Fetcher],
        locate: Callable[[str], str],
        num_fetchers: int = NUM_FETCHERS,
    ) -> None:
        super().__init__(share)
        self._manifest, self._open_fetcher, self._locate = manifest, open_fetcher, locate
        self._num_fetchers = num_fetchers
        # The condition's lock guards everything below.
        self._threads: list[threading.Thread] = []
        self._filling: set[int] = set()
        self._abandoned: set[int] = set()  # being filled, but to be left for an urgent one. Note [urgent]
        self._elsewhere: set[int] = set()  # urgent shards that another process fills or drops
        self._asking = False
        self._num_asked = NUM_ASKED
        self._no_space_since: float | None = None
        self._logged_at = 0.0
        self.fetched_bytes = 0
        """Bytes of shards that this loader brought into the cache file so far, indexes included."""

    @property
    def num_threads(self) -> int:
        """The number of threads so far: a new one is started only if more shards are missing than there are threads."""
        return len(self._threads)

    def close(self) -> None:
        """Stop fetching and end the threads. Can be called twice."""
        self._stopped.set()
        if sys.is_finalizing():
            return  # daemon threads do not end while the interpreter ends: a join would wait for ever
        shielded(self._close_waiters)
        interrupt: BaseException | None = None
        for thread in list(self._threads):
            # The garbage collector may have called this in one of them.
            while thread is not threading.current_thread() and thread.is_alive():
                try:
                    thread.join()
                except BaseException as exc:  # noqa: BLE001 (raised below)
                    # Raised only after the threads have ended: they write to the descriptor of the cache file, whose
                    # number another file can get once it is closed. They check several times a second whether to stop.
                    interrupt = exc
        if interrupt is not None:
            raise interrupt

    def _ask_for(self, num_asked: int) -> None:
        """Ask the cache once for this many shards: resident ones must be held before other loaders evict them."""
        self._num_asked = max(self._num_asked, num_asked)
        while len(self._threads) < min(self._num_fetchers, self._num_wanted()):
            thread = threading.Thread(target=self._work, name=_THREAD_NAME, daemon=True)
            try:
                thread.start()
            except RuntimeError:
                if not self._threads:
                    raise
                break  # the process may not start more threads; the existing ones do the work
            self._threads.append(thread)
        self._changed.notify_all()

    def _num_wanted(self) -> int:
        return max(len(self._demand.needed_missing), len(self._demand.ahead_missing))

    def _work(self) -> None:
        is_open = False
        try:
            with contextlib.closing(self._open_fetcher()) as fetcher:
                is_open = True
                while (taken := self._next()) is not None:
                    self._fill(taken[0], fetcher, is_there=taken[1])
        except Exception as exc:  # noqa: BLE001 (no fetcher, or a broken cache: raised in the callers that wait)
            with self._changed:
                self._threads.remove(threading.current_thread())
                if is_open or not self._threads:
                    wanted = (*self._demand.needed_missing, *self._demand.ahead_missing)
                    self._fail([shard for shard in wanted if shard not in self._filling], exc)
                self._changed.notify_all()
            _log.debug("a thread that fetches ended", exc_info=True)

    def _next(self) -> tuple[int, bool] | None:
        """Wait for the next shard to fill, and learn whether it only needs checking; ``None`` at the end.

        One thread at a time asks the cache. It also holds the shards that are resident by now.
        """
        with self._changed:
            while not self._stopped.is_set():
                if self._asking or not (wanted := self._missing()):
                    self._changed.wait()
                    continue
                self._asking = True
                try:
                    # Begin no other shard while one is urgent: a thread that fills another shard would learn too late
                    # that another process has staged the urgent one.
                    urgent = [shard for shard in wanted if shard in self._urgent]
                    taken = self._ask(urgent or wanted)
                    is_elsewhere = taken.fill is None and taken.blocked == "busy"
                    self._elsewhere = set(urgent).difference(taken.ready.tolist()) if is_elsewhere else set()
                    self._take_over(taken)
                    if taken.fill is not None:
                        return taken.fill, taken.is_there
                    if not len(taken.ready) and taken.blocked == "busy":
                        self._num_asked = max(self._num_asked, 2 * len(wanted))  # others fill all of these
                    if taken.blocked:
                        self._changed.wait(POLL_S)
                finally:
                    self._asking = False
                    self._changed.notify()
            return None

    def _missing(self) -> list[int]:
        return self._demand.missing(
            filling=self._filling,
            failed=self._failed.keys(),
            most=self._num_asked,
            max_bytes=self._share.reserved,
            # Shards ahead must not take the space that a needed one waits for.
            only_needed=self._no_space_since is not None,
        )

    def _ask(self, wanted: Sequence[int]) -> Take:
        self._num_asked = NUM_ASKED
        self._changed.release()
        try:
            return self._share.take(wanted)
        finally:
            self._changed.acquire()

    def _take_over(self, taken: Take) -> None:
        ready = taken.ready.tolist()
        for shard in ready:
            self._hold(shard)
        if taken.fill is not None:
            self._filling.add(taken.fill)
        self._release_unwanted(ready)  # asking took a moment: they may not be wanted any more
        if taken.blocked == "space":
            self._make_space()
        else:
            self._no_space_since = None

    def _make_space(self) -> None:
        """Release the shards ahead for a needed one that does not fit; if necessary, wait for other loaders."""
        missing = [shard for shard in self._demand.needed_missing if shard not in self._filling]
        if not missing:
            self._no_space_since = None
            return
        released = [] if self._stopped.is_set() else self._demand.release_ahead()
        if released:
            self._release(released)
        now = time.monotonic()
        if self._no_space_since is None:
            self._no_space_since = self._logged_at = now
        is_stuck = not released and not self._filling and self._share.is_stuck()
        only_fitting = [waiter for waiter in self._waiters if waiter.only_fitting]
        directory = self._share.space.directory
        if only_fitting and not self._filling and (is_stuck or now - self._no_space_since > FULL_AFTER_S):
            for waiter in only_fitting:
                self._refuse(waiter, missing)
        elif is_stuck:
            name = self._locate(self._manifest.names[missing[0]])
            error = CacheError(
                f"no space for shard '{name}', and all loaders that share the cache in '{directory}' wait for each "
                "other to release shards; pass cache=dali_pipes.Cache(max_bytes="
                f"{2 * self._share.cache_bytes}) or more (--cache-bytes), or start them at the same place"
            )
            self._fail(missing[:1], error)
        elif now - self._logged_at > LOG_AFTER_S:
            self._logged_at = now
            _log.warning("waiting for space in '%s' for %d shards: other loaders hold it", directory, len(missing))

    def _fill(self, shard: int, fetcher: Fetcher, *, is_there: bool) -> None:
        error: Exception | None = None
        try:
            with profiling.busy("stage"):
                is_whole = (is_there and self._is_whole(shard)) or self._fetch(shard, fetcher)
                if is_whole:
                    self._share.finish(shard)
        except Exception as exc:  # noqa: BLE001 (raised in the callers that need the shard)
            is_whole, error = False, exc
        try:
            if not is_whole:
                self._share.fail(shard)
        finally:
            with self._changed:
                self._filling.discard(shard)
                self._abandoned.discard(shard)
                if is_whole:
                    self._hold(shard)
                elif error is not None:
                    self._fail([shard], error)
                self._release_unwanted([shard])

    def _fetch(self, shard: int, fetcher: Fetcher) -> bool:
        name = self._manifest.names[shard]
        self._share.reserve_blocks(shard, name=self._locate(name))
        wanted = [
            Wanted(name, self._share.shard_extent(shard), int(self._manifest.checksums[shard])),
            Wanted(index_name(name), self._share.index_extent(shard), int(self._manifest.index_checksums[shard])),
        ]
        with self._changed:
            # Idle threads lend their connections where fewer shards are wanted than there are threads.
            connections = max(1, self._num_fetchers // max(1, self._num_wanted()))
        with profiling.busy("fetch"):
            is_whole = fetcher.fetch(wanted, stopped=lambda: self._is_abandoned(shard), num_connections=connections)
        if is_whole:
            with self._changed:
                self.fetched_bytes += sum(one.extent.size for one in wanted)
        return is_whole

    def _is_abandoned(self, shard: int) -> bool:
        """Whether to stop fetching a shard: the stager is closed, or an urgent shard has no thread.

        Note [urgent]: in a resumed job all threads may be fetching the epoch's first shards, which were wanted when the
        loader was made. The first batch must not wait for them. An abandoned shard is fetched again when its turn
        comes. So this is for the first batch of a feed only: at every window's edge it would cost a second fetch.
        """
        if self._stopped.is_set() or shard in self._abandoned:
            return True
        if not self._urgent or shard in self._demand.needs:  # no lock: this is called again
            return False
        with self._changed:
            without_thread = self._urgent - self._filling - self._elsewhere - self._failed.keys()
            if shard in self._demand.needs or len(without_thread) <= len(self._abandoned):
                return False
            self._abandoned.add(shard)
            return True

    def _is_whole(self, shard: int) -> bool:
        """Whether the bytes from before the machine's last start are still correct."""
        found = self._share.shard_extent(shard).checksum(), self._share.index_extent(shard).checksum()
        return found == (int(self._manifest.checksums[shard]), int(self._manifest.index_checksums[shard]))
