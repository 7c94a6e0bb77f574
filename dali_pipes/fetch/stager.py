"""Stage shards: bring objects of a store into checked extents of the cache file, several at a time, in plan order.

`dali_pipes.fetch.demand.Demand` says which shards are wanted: those that open segments *need*, and those of the windows
*ahead*. Wanted shards are held, so that they stay in the cache. Needed shards come before shards ahead, for threads and
for space.

# Note [interrupts]: Ctrl-C can come between any two instructions of the main thread. So the main thread changes a
# stager only in a thread of `shielded`, wholly or not at all, and it waits at a lock of its own, never at the one that
# the threads share. A call that was interrupted may not have learned what it wanted: `Stager.give_up` ends all of it.
"""

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from dali_pipes import profiling
from dali_pipes.cache.cache import Take
from dali_pipes.cache.locks import shielded
from dali_pipes.cache.share import CacheShare
from dali_pipes.errors import CacheError
from dali_pipes.fetch.demand import Demand
from dali_pipes.fetch.fetcher import NUM_FETCHERS, Fetcher, Wanted
from dali_pipes.formats.manifest import Manifest
from dali_pipes.formats.names import index_name

_log = logging.getLogger(__name__)

# How often to ask the cache again for shards that another process fills, or for space that another must free first.
POLL_S = 0.005
# How often the number of missing bytes is reported to a waiting caller.
SHOW_S = 0.2
# Shards to ask the cache for at a time, once it was asked for all: the cost of one shard must not grow with the window.
NUM_ASKED = 256
# A cache without space for this long is full for a caller that takes only what fits: blocks can be about to be freed.
FULL_AFTER_S = 0.5
# Log a wait for space that takes this long: the process that holds it may be stopped, in a debugger for instance.
LOG_AFTER_S = 30.0

_THREAD_NAME = "dali-pipes-fetch"


def in_fetcher() -> bool:
    """Whether this is a thread of a `Stager`: the garbage collector may finalize there what owns the thread."""
    return threading.current_thread().name == _THREAD_NAME


@dataclass(eq=False, kw_only=True)
class _Waiter:
    """A call that waits for shards to be resident."""

    missing: set[int]
    num_bytes: int
    """Of the missing shards."""
    only_fitting: bool
    refused: set[int] = field(default_factory=set)
    """Shards that do not fit."""
    error: Exception | None = None
    over: threading.Lock = field(default_factory=threading.Lock)
    """Locked until nothing is missing, or something went wrong."""


class Stager:
    """Fills the cache file in the background; owns its threads.

    The threads are daemons: a program that ends does not wait for shards that nobody will read.

    Args:
        share: The loader's share of the cache file.
        manifest: Of the shards, numbered as in ``share``.
        open_fetcher: Called in each thread for a fetcher of its own.
        locate: The URL of an object, for errors.
        num_fetchers: Number of threads.
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
        self._share, self._manifest = share, manifest
        self._open_fetcher, self._locate, self._num_fetchers = open_fetcher, locate, num_fetchers
        self._changed = threading.Condition()
        # Everything below is guarded by the condition's lock.
        self._demand = Demand(share.extent_bytes)
        self._filling: set[int] = set()
        # Urgent: a caller waits for them now. Abandoned: being filled, but to be left for an urgent one. Note [urgent].
        self._urgent: set[int] = set()
        self._abandoned: set[int] = set()
        self._elsewhere: set[int] = set()  # urgent shards that another process fills or drops
        # What went wrong with a shard; ``None`` once a caller got the error. The next call that needs it tries again.
        self._failed: dict[int, Exception | None] = {}
        self._waiters: set[_Waiter] = set()
        self._asking = False
        self._num_asked = NUM_ASKED
        self._no_space_since: float | None = None
        self._logged_at = 0.0
        self._threads: list[threading.Thread] = []
        self._stopped = threading.Event()
        self.fetched_bytes = 0
        """Bytes of shards that this loader brought into the cache file so far, indexes included."""

    @property
    def num_threads(self) -> int:
        """The number of threads that fetch now: no more than there is work for."""
        return len(self._threads)

    @property
    def is_short(self) -> bool:
        """Whether less is wanted ahead than may be held, so that another window can be asked for."""
        return self._demand.ahead_bytes < self._share.reserved

    def stage(self, shards: Sequence[int]) -> None:
        """Want these ahead, in this order, after those that are wanted already; `unstage` ends it."""
        shielded(lambda: self._stage(shards))

    def unstage(self, shards: Sequence[int]) -> None:
        """End `stage`; shards that are not needed are released."""
        shielded(lambda: self._unstage(shards))

    def need(
        self, shards: Sequence[int], *, urgent: bool = False, waiting: Callable[[int], None] = lambda _: None
    ) -> None:
        """Return when all of these are resident; they stay until `done`. They are fetched before all others.

        Args:
            shards: What the caller is about to read.
            urgent: If no thread is free for these, have threads abandon shards that are not needed. Note [urgent].
            waiting: Called now and then with the bytes that are still missing.

        Raises:
            CacheError, DataError, StoreError: What went wrong with one of them. Then none is needed, and the next call
                tries again.
            ValueError: If the stager is closed, or was while this waited.
        """
        self._need(shards, waiting, only_fitting=False, urgent=urgent)

    def need_fitting(self, shards: Sequence[int], *, waiting: Callable[[int], None] = lambda _: None) -> list[int]:
        """As `need`, for as many of these as fit into the cache, the first ones first; returns those."""
        refused = self._need(shards, waiting, only_fitting=True, urgent=False)
        return [shard for shard in shards if shard not in refused]

    def need_resident(self, shards: Sequence[int]) -> bool:
        """As `need`, if all of these are resident already; else ``False``, and none is needed."""
        return shielded(lambda: self._need_resident(shards))

    def done(self, shards: Sequence[int]) -> None:
        """End `need`, when the reader that named these is gone."""
        shielded(lambda: self._done(shards))

    def give_up(self) -> None:
        """End all that was needed or staged, by any call. Note [interrupts]."""
        shielded(self._give_up)

    def is_ahead(self, shard: int) -> bool:
        """Whether it is staged."""
        return shard in self._demand.ahead

    def num_missing(self, shards: Iterable[int]) -> tuple[int, int]:
        """How many of these are not resident, and their bytes."""
        missing = self._demand.not_held(shards)
        return len(missing), self._demand.bytes_of(missing)

    def close(self) -> None:
        """Stop fetching and end the threads. Can be called twice."""
        self._stopped.set()
        if sys.is_finalizing():
            return  # daemons never end once the interpreter does: a join would wait for ever
        shielded(self._close_waiters)
        interrupt: BaseException | None = None
        for thread in list(self._threads):
            # The garbage collector may have called this in one of them.
            while thread is not threading.current_thread() and thread.is_alive():
                try:
                    thread.join()
                except BaseException as exc:  # noqa: BLE001 (raised below)
                    # Not before the threads have ended: they write to the descriptor of the cache file, whose number
                    # can be another file's once it is closed. They look several times a second whether to stop.
                    interrupt = exc
        if interrupt is not None:
            raise interrupt

    # What callers want

    def _stage(self, shards: Sequence[int]) -> None:
        with self._changed:
            self._demand.want_ahead(shards)
            self._ask_for(len(self._demand.needed_missing) + len(self._demand.ahead_missing))

    def _unstage(self, shards: Sequence[int]) -> None:
        with self._changed:
            self._demand.unwant_ahead(shards)
            self._release_unwanted(shards)

    def _need(
        self, shards: Sequence[int], waiting: Callable[[int], None], *, only_fitting: bool, urgent: bool
    ) -> set[int]:
        waiter = shielded(lambda: self._begin_wait(shards, only_fitting=only_fitting, urgent=urgent))
        try:
            while not waiter.over.acquire(timeout=SHOW_S):
                waiting(waiter.num_bytes)
            if waiter.error is not None:
                raise waiter.error
            waiting(0)
        except BaseException:
            shielded(lambda: self._cancel_wait(waiter, shards))
            raise
        finally:
            waiter.error = None  # the error holds this frame, which would hold the error
        return waiter.refused

    def _begin_wait(self, shards: Sequence[int], *, only_fitting: bool, urgent: bool) -> _Waiter:
        with self._changed:
            missing = self._demand.not_held(shards)
            waiter = _Waiter(missing=missing, num_bytes=self._demand.bytes_of(missing), only_fitting=only_fitting)
            waiter.over.acquire()
            self._demand.need(shards)
            if urgent:
                self._urgent |= missing
            for shard in shards:
                if self._failed.get(shard, ...) is None:
                    del self._failed[shard]
            if self._stopped.is_set():
                self._end(waiter, _closed())
            elif not missing:
                waiter.over.release()
            elif (failed := next((s for s in self._failed if s in missing), None)) is not None:
                self._end_with_error(waiter, failed)
            else:
                self._waiters.add(waiter)
                self._ask_for(len(self._demand.needed_missing))
            return waiter

    def _cancel_wait(self, waiter: _Waiter, shards: Sequence[int]) -> None:
        with self._changed:
            self._waiters.discard(waiter)
            self._done([shard for shard in shards if shard not in waiter.refused])

    def _need_resident(self, shards: Sequence[int]) -> bool:
        with self._changed:
            if not self._demand.held.issuperset(shards):
                return False
            self._demand.need(shards)
            return True

    def _done(self, shards: Sequence[int]) -> None:
        with self._changed:
            self._demand.end_need(shards)
            self._urgent.difference_update(shards)
            self._release_unwanted(shards)

    def _give_up(self) -> None:
        with self._changed:
            self._close_waiters()
            self._urgent.clear()
            self._release_unwanted(self._demand.clear())

    def _ask_for(self, num_asked: int) -> None:
        """Ask the cache once for this many: the resident ones must be held before others have them evicted."""
        self._num_asked = max(self._num_asked, num_asked)
        while len(self._threads) < min(self._num_fetchers, self._num_wanted()):
            thread = threading.Thread(target=self._work, name=_THREAD_NAME, daemon=True)
            try:
                thread.start()
            except RuntimeError:
                if not self._threads:
                    raise
                break  # the process may have no more threads; the ones that exist do the work
            self._threads.append(thread)
        self._changed.notify_all()

    def _num_wanted(self) -> int:
        return max(len(self._demand.needed_missing), len(self._demand.ahead_missing))

    def _release_unwanted(self, shards: Iterable[int]) -> None:
        unwanted = [shard for shard in shards if not self._demand.is_wanted(shard)]
        for shard in unwanted:
            self._failed.pop(shard, None)  # no caller got the error: the next one that wants the shard tries again
        if not self._stopped.is_set() and (held := {shard for shard in unwanted if shard in self._demand.held}):
            self._demand.release(held)
            self._release(list(held))

    def _release(self, shards: Sequence[int]) -> None:
        self._share.release(shards)
        self._changed.notify_all()

    # Callers that wait

    def _close_waiters(self) -> None:
        with self._changed:
            for waiter in list(self._waiters):
                self._end(waiter, _closed())
            self._changed.notify_all()

    def _hold(self, shard: int) -> None:
        if not self._demand.hold(shard):
            return
        self._failed.pop(shard, None)
        self._urgent.discard(shard)
        for waiter in [waiter for waiter in self._waiters if shard in waiter.missing]:
            self._shorten(waiter, {shard})

    def _refuse(self, waiter: _Waiter, shards: Iterable[int]) -> None:
        """Have a caller go on without these."""
        refused = waiter.missing.intersection(shards)
        waiter.refused |= refused
        self._done(list(refused))
        self._shorten(waiter, refused)

    def _shorten(self, waiter: _Waiter, shards: set[int]) -> None:
        waiter.missing -= shards
        waiter.num_bytes -= self._demand.bytes_of(shards)
        if not waiter.missing:
            self._end(waiter, None)

    def _fail(self, shards: Iterable[int], error: Exception) -> None:
        self._failed.update((shard, error) for shard in shards)
        for waiter in list(self._waiters):
            if (failed := next((s for s in self._failed if s in waiter.missing), None)) is not None:
                self._end_with_error(waiter, failed)

    def _end_with_error(self, waiter: _Waiter, shard: int) -> None:
        error = self._failed[shard]
        # A caller that goes on after one error must not get others from before it.
        self._failed = dict.fromkeys(self._failed)
        self._end(waiter, error)

    def _end(self, waiter: _Waiter, error: Exception | None) -> None:
        waiter.error = error
        self._waiters.discard(waiter)
        waiter.over.release()

    # Threads

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
        """The next shard for this thread to fill, and whether it only needs checking; ``None`` at the end.

        One thread at a time asks the cache. It also holds the shards that are resident by now.
        """
        with self._changed:
            while not self._stopped.is_set():
                if self._asking or not (wanted := self._missing()):
                    self._changed.wait()
                    continue
                self._asking = True
                try:
                    # Begin nothing else while something is urgent: a thread that fills another shard would learn late
                    # that another process has brought the urgent one.
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
        """A needed shard does not fit: release those ahead; where that is not enough, wait for other loaders."""
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

        Note [urgent]: in a resumed job all threads may be fetching what the epoch starts with, which was wanted when
        the loader was made. The first batch must not wait for that. An abandoned shard is fetched again when its turn
        comes. So this is for the first batch of a feed only: at every window's edge it would cost as much again.
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
        """Whether the bytes from before the machine's last start are right."""
        found = self._share.shard_extent(shard).checksum(), self._share.index_extent(shard).checksum()
        return found == (int(self._manifest.checksums[shard]), int(self._manifest.index_checksums[shard]))


def _closed() -> ValueError:
    return ValueError("the loader was closed while it waited for shards")
