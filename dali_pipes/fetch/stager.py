"""Stage shards: bring objects of a store into checked extents of the cache file, several at a time, in plan order.

`dali_pipes.fetch.demand.Demand` lists the wanted shards: those that open segments *need*, and those of the windows
*ahead*. Wanted shards are held, so that they stay in the cache. Needed shards come before shards ahead, for threads and
for space.

# Note [interrupts]: Ctrl-C can come after any call in the main thread. The lock that the threads share is free then,
because its ``with`` statement is C code. But the call may be half done, so whoever goes on after an interrupt calls
`Stager.give_up` first, which ends everything. Shards are released in the cache before they count as released.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from functools import partial

from dali_pipes.cache.extents import Extent
from dali_pipes.cache.share import CacheShare, Take
from dali_pipes.errors import CacheError, DataError, printable, shown
from dali_pipes.fetch.demand import Demand, Waiter
from dali_pipes.fetch.fetcher import NUM_FETCHERS, Fetcher, Wanted
from dali_pipes.fetch.samples import Filled, SomeSamples, extent_blocks
from dali_pipes.formats.manifest import Manifest
from dali_pipes.formats.names import index_name
from dali_pipes.formats.shard_index import ShardIndex
from dali_pipes.metrics.counts import ThreadsStage, report_span
from dali_pipes.store.patience import waits_ended_by
from dali_pipes.store.ranges import NUM_THREADS

_log = logging.getLogger(__name__)

# How often to ask the cache again for shards that another process fills, or for space that another must free first.
POLL_S = 0.005
# How often the number of missing bytes is reported to a waiting caller.
SHOW_S = 0.2
# Shards to ask the cache for at a time, once it was asked for all: the cost of one shard must not grow with the window.
NUM_ASKED = 256
# A thread takes several small shards at a time, if there are more shards than threads: not bytes but the store's
# latency bounds their number, so the requests must not wait for each other. Eight threads with so many bytes each fill
# a line of 20 Gbit/s over a round trip of 100 ms.
NUM_TOGETHER = 8
TOGETHER_BYTES = 32 << 20
# A check that can wait pauses this long for each mebibyte while a shard is urgent: ten times what the mebibyte takes.
GIVE_WAY_S = 0.002
# Shards that are whole wait this long for others that were fetched with them, to be marked ready together.
FINISH_S = 0.01
# A caller that takes only what fits waits this long for space: blocks may be about to be freed.
FULL_AFTER_S = 0.5
# Log a wait for space that takes this long: the process that holds it may be stopped, in a debugger for instance.
LOG_AFTER_S = 30.0

_THREAD_NAME = "dali-pipes-fetch"


def in_own_thread() -> bool:
    """Whether this is a thread of ours or of DALI's. The garbage collector may run in it and find the thread's owner.

    The owner waits for the end of its threads when it is closed, so it must not be closed in one of them. Python calls
    a thread that it did not start "Dummy-1", "Dummy-2" and so on.
    """
    return threading.current_thread().name.startswith(("dali-pipes-", "Dummy-"))


@dataclass(eq=False)
class _Filling:
    """A shard that a thread fills or checks."""

    since: float = field(default_factory=time.monotonic)
    received_bytes: int = 0

    def add(self, num_bytes: int) -> None:
        self.received_bytes += num_bytes


class _Thread(threading.Thread):
    """A thread that records its end: after an interrupt in `join`, Python 3.11 reports a running thread as stopped."""

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__(target=work, name=_THREAD_NAME, daemon=True)
        self.over = threading.Event()

    def run(self) -> None:
        try:
            super().run()
        finally:
            self.over.set()

    @property
    def is_running(self) -> bool:
        return self.ident is not None and not self.over.is_set()


class Stager:
    """Fills the cache file in the background; owns its threads.

    The threads are daemons: a program that ends does not wait for shards that nobody will read. Each of the
    ``num_fetchers`` threads opens its own fetcher. ``manifest`` numbers shards as ``share`` does; ``locate`` returns an
    object's URL, for errors. With ``samples`` a shard stands for these of its samples.
    """

    def __init__(
        self,
        share: CacheShare,
        manifest: Manifest,
        *,
        open_fetcher: Callable[[], Fetcher],
        locate: Callable[[str], str],
        num_fetchers: int = NUM_FETCHERS,
        samples: SomeSamples | None = None,
    ) -> None:
        self._share, self._manifest, self._locate = share, manifest, locate
        self._open_fetcher, self._num_fetchers, self._samples = open_fetcher, num_fetchers, samples
        self._stopped = threading.Event()
        self._lock = threading.RLock()  # guards everything below
        self._changed = threading.Condition(self._lock)
        self._demand = Demand(share.extent_bytes)
        self._urgent: set[int] = set()  # a caller waits for these now. Note [urgent]
        # The error of each failed shard; ``None`` once a caller got it. The next call that needs the shard tries again.
        self._failed: dict[int, Exception | None] = {}
        self._waiters: set[Waiter] = set()
        self._threads: list[_Thread] = []
        self._filling: dict[int, _Filling] = {}
        self._asking = False
        self._paused_until: float | None = None
        self._num_asked = NUM_ASKED
        self._no_space_since: float | None = None
        self._logged_at = 0.0
        self._has_warned = False
        self.fetched_bytes: int = 0
        """Bytes of shards that this loader brought into the cache file so far, indexes included."""
        self.num_fetched: int = 0
        self.stage_time: ThreadsStage = ThreadsStage("stage")
        """The threads' work for shards: fetching, free space, checks, the table."""
        self.fetch_time: ThreadsStage = ThreadsStage("fetch")
        """The part in which they bring bytes from the store."""

    @property
    def num_threads(self) -> int:
        """The number of threads so far: a new one is started only if more shards are missing than there are threads."""
        return len(self._threads)

    @property
    def is_short(self) -> bool:
        """Whether less is wanted ahead than may be held, so that another window can be asked for."""
        return self._demand.ahead_bytes < self._share.reserved

    @property
    def held_bytes(self) -> int:
        """Bytes of the cache file that the loader holds."""
        return self._demand.held_bytes

    def close(self) -> None:
        """Stop fetching and end the threads. Can be called twice."""
        self._stopped.set()
        interrupt: BaseException | None = None
        # The garbage collector may have called this in one of the threads.
        threads = [thread for thread in self._threads if thread is not threading.current_thread()]
        is_told = False
        while not is_told or any(thread.is_running for thread in threads):
            try:
                self._close_waiters()
                is_told = True
                for thread in threads:
                    if thread.is_running:
                        thread.over.wait()
            except BaseException as exc:  # noqa: BLE001 (raised below)
                # Raised only after the threads have ended: they write to the descriptor of the cache file, whose
                # number another file can get once it is closed. They check several times a second whether to stop.
                interrupt = exc
        if interrupt is not None:
            raise interrupt

    # What callers want

    def stage(self, shards: Sequence[int]) -> None:
        """Want these ahead, in this order, after those that are wanted already; `unstage` ends it."""
        with self._lock:
            self._demand.want_ahead(shards)
            try:
                self._ask_for(len(self._demand.needed_missing) + len(self._demand.ahead_missing))
            except RuntimeError:  # no thread can start
                self.unstage(shards)
                raise

    def pause(self, seconds: float) -> None:
        """Fetch nothing ahead for this time, or until `resume`, if nothing is wanted yet."""
        with self._lock:
            if not (self._demand.ahead or self._demand.needs):
                self._paused_until = time.monotonic() + seconds

    def resume(self) -> None:
        """End `pause`."""
        with self._lock:
            if self._paused_until is not None:
                self._paused_until = None
                self._changed.notify_all()

    @property
    def is_fetching_ahead(self) -> bool:
        """Whether there is no pause."""
        return self._pause_s() is None

    def unstage(self, shards: Sequence[int]) -> None:
        """End `stage`; shards that are not needed are released."""
        with self._lock:
            self._demand.unwant_ahead(shards)
            self._release_unwanted(shards)

    def need(
        self, shards: Sequence[int], *, urgent: bool = False, waiting: Callable[[int], None] = lambda _: None
    ) -> None:
        """Return when all of these are resident; they stay until `done`. They are fetched before all others.

        Args:
            shards: The shards that the caller is about to read.
            urgent: If no thread is free for these, make threads abandon shards that are not needed. Note [urgent].
            waiting: Called several times a second with the bytes that are still missing.

        Raises:
            CacheError, DataError, StoreError: The error of one of them. Then they are no longer needed, and the next
                call tries again.
            ValueError: If the stager is closed, or was closed during the wait.
        """
        self._need(shards, waiting, only_fitting=False, urgent=urgent)

    def need_fitting(self, shards: Sequence[int], *, waiting: Callable[[int], None] = lambda _: None) -> list[int]:
        """Like `need`, for as many of these as fit into the cache, in their order; returns the shards that fit."""
        refused = self._need(shards, waiting, only_fitting=True, urgent=False)
        return [shard for shard in shards if shard not in refused]

    def need_resident(self, shards: Sequence[int]) -> bool:
        """Like `need`, if all of these are resident already; else return ``False``, and need none of them."""
        with self._lock:
            if not self._demand.held.issuperset(shards):
                return False
            self._demand.need(shards)
            return True

    def done(self, shards: Sequence[int]) -> None:
        """End `need`, when the reader that named these is gone."""
        with self._lock:
            self._demand.end_need(shards)
            self._urgent.difference_update(shards)
            self._release_unwanted(shards)

    def give_up(self) -> None:
        """End everything that any call needed or staged. Note [interrupts]."""
        with self._lock:
            self._close_waiters()
            self._urgent.clear()
            self._release_unwanted(self._demand.clear())

    def is_ahead(self, shard: int) -> bool:
        """Whether the shard is staged."""
        return shard in self._demand.ahead

    def num_missing(self, shards: Iterable[int]) -> tuple[int, int]:
        """Count the shards of these that are not resident, and their bytes."""
        missing = self._demand.not_held(shards)
        return len(missing), self._demand.bytes_of(missing)

    def progress(self, shards: Sequence[int]) -> str:
        """Say how far these shards have come, which a caller needs; empty if all are there or there is no space."""
        with self._lock:
            missing = [shard for shard in shards if shard not in self._demand.held]
            if not missing or self._no_space_since is not None:
                return ""
            shard = min(missing, key=lambda shard: (shard not in self._filling, shards.index(shard)))
            url, pid = self._locate(self._manifest.names[shard]), self._share.filled_by(shard)
            text = f"{len(missing)} of {len(shards)} are missing, '{printable(url)}' among them: "
            if filling := self._filling.get(shard):
                return (
                    f"{text}{filling.received_bytes / 2**20:.1f} of {self._num_bytes(shard) / 2**20:.1f} MiB came in "
                    f"{time.monotonic() - filling.since:.0f} s; look at the store, the network and the cache's disk; "
                    "if they can do more, Cache(fetchers=) fetches more shards at a time"
                )
            if pid is not None:
                return f"{text}process {pid} of this node is bringing it: look at its log"
            return f"{text}all threads are busy with other shards: Cache(fetchers=) makes more"

    def _need(
        self, shards: Sequence[int], waiting: Callable[[int], None], *, only_fitting: bool, urgent: bool
    ) -> set[int]:
        waiter = self._begin_wait(shards, only_fitting=only_fitting, urgent=urgent)
        try:
            with self._lock:
                if waiter in self._waiters:
                    self._ask_for(len(self._demand.needed_missing))
            while not waiter.over.acquire(timeout=SHOW_S):
                waiting(waiter.num_bytes)
            if waiter.error is not None:
                raise waiter.error
            waiting(0)
        except BaseException:
            with self._lock:
                self._waiters.discard(waiter)
                self.done([shard for shard in shards if shard not in waiter.refused])
            raise
        finally:
            waiter.error = None  # the error holds this frame, which would hold the error
        return waiter.refused

    def _begin_wait(self, shards: Sequence[int], *, only_fitting: bool, urgent: bool) -> Waiter:
        with self._lock:
            missing = self._demand.not_held(shards)
            waiter = Waiter(missing=missing, num_bytes=self._demand.bytes_of(missing), only_fitting=only_fitting)
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
            else:
                self._waiters.add(waiter)
                self._end_failed()
            return waiter

    def _release_unwanted(self, shards: Iterable[int]) -> None:
        demand = self._demand
        unwanted = [shard for shard in shards if shard not in demand.ahead and shard not in demand.needs]
        for shard in unwanted:
            self._failed.pop(shard, None)  # no caller got the error: the next one that wants the shard tries again
        if not self._stopped.is_set() and (held := demand.held.intersection(unwanted)):
            self._release(list(held))
            demand.release(held)

    def _release(self, shards: Sequence[int]) -> None:
        self._share.release(shards)
        self._changed.notify_all()

    # What the threads tell the callers that wait

    def _close_waiters(self) -> None:
        with self._lock:
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

    def _shorten(self, waiter: Waiter, shards: set[int]) -> None:
        waiter.missing -= shards
        waiter.num_bytes -= self._demand.bytes_of(shards)
        if not waiter.missing:
            self._end(waiter, None)

    def _fail(self, shards: Iterable[int], error: Exception) -> None:
        self._failed.update((shard, error) for shard in shards)
        self._end_failed()

    def _end_failed(self) -> None:
        """End the calls that wait for a shard that failed."""
        errors = self._failed
        for waiter in list(self._waiters):
            if (failed := next((shard for shard in errors if shard in waiter.missing), None)) is not None:
                # A caller that continues after one error must not get others from before it.
                self._failed = dict.fromkeys(errors)
                self._end(waiter, errors[failed])

    def _end(self, waiter: Waiter, error: Exception | None) -> None:
        waiter.error = error
        if waiter.over.locked():  # not if Ctrl-C came after it, in the main thread, and the waiter ends once more
            waiter.over.release()
        self._waiters.discard(waiter)  # last: a waiter that is forgotten before it ends waits for ever

    # The threads

    def _ask_for(self, num_asked: int) -> None:
        """Ask the cache once for this many shards: resident ones must be held before other loaders evict them."""
        self._num_asked = max(self._num_asked, num_asked)
        # An interrupt may have come before a thread began.
        self._threads = [thread for thread in self._threads if thread.ident is not None or thread.is_alive()]
        while len(self._threads) < min(self._num_fetchers, self._demand.num_missing):
            thread = _Thread(self._work)
            self._threads.append(thread)  # first: `close` must know it, whatever interrupts the start
            try:
                thread.start()
            except RuntimeError:
                self._threads.remove(thread)
                if not self._threads:
                    raise
                break  # the process may not start more threads; the existing ones do the work
        self._changed.notify_all()

    def _work(self) -> None:
        is_open = False
        try:
            with contextlib.closing(self._open_fetcher()) as fetcher, waits_ended_by(self._stopped):
                is_open = True
                while (taken := self._next()) is not None:
                    self._fill(taken[0], fetcher, is_there=taken[1])
        except Exception as exc:  # noqa: BLE001 (no fetcher, or a broken cache: raised in the callers that wait)
            with self._lock:
                self._threads = [thread for thread in self._threads if thread is not threading.current_thread()]
                if is_open or not self._threads:
                    wanted = (*self._demand.needed_missing, *self._demand.ahead_missing)
                    self._fail([shard for shard in wanted if shard not in self._filling], exc)
                self._changed.notify_all()
            _log.debug("a thread that fetches ended", exc_info=True)

    def _next(self) -> tuple[list[int], bool] | None:
        """Wait for the next shards to fill, and learn whether they only need checking; ``None`` at the end.

        One thread at a time asks the cache. It also holds the shards that are resident by now.
        """
        with self._lock:
            while not self._stopped.is_set():
                pause_s = self._pause_s()  # once: it may end between two looks, and nobody would end the wait
                if self._asking or not (wanted := self._missing(only_needed=pause_s is not None)):
                    self._changed.wait(pause_s)
                    continue
                self._asking = True
                try:
                    # Begin no other shard while one is urgent: a thread that fills another shard would learn too late
                    # that another process has staged the urgent one.
                    urgent = [shard for shard in wanted if shard in self._urgent]
                    taken = self._ask(urgent or wanted)
                    fill, ready = taken.fill.tolist(), taken.ready.tolist()
                    for shard in ready:
                        self._hold(shard)
                    self._filling.update((shard, _Filling()) for shard in fill)
                    self._release_unwanted(ready)  # asking took a moment: they may not be wanted any more
                    if taken.blocked == "space":
                        self._make_space()
                    else:
                        self._no_space_since = None
                    if fill:
                        return fill, taken.is_there
                    if not ready and taken.blocked == "busy":
                        self._num_asked = max(self._num_asked, 2 * len(wanted))  # others fill all of these
                    if taken.blocked:
                        self._changed.wait(POLL_S)
                finally:
                    self._asking = False
                    self._changed.notify()
            return None

    def _pause_s(self) -> float | None:
        """How long nothing is fetched ahead; ``None`` if there is no pause, or no longer."""
        until = self._paused_until  # once: another thread may end the pause
        left = 0.0 if until is None else until - time.monotonic()
        return left if left > 0 else None

    def _missing(self, *, only_needed: bool) -> list[int]:
        if only_needed and not self._demand.needed_missing:
            return []
        return self._demand.next_missing(
            filling=self._filling,
            failed=self._failed.keys(),
            most=self._num_asked,
            max_bytes=self._share.reserved,
            # Shards ahead must not take the space that a needed one waits for.
            only_needed=self._no_space_since is not None,
        )

    def _ask(self, wanted: Sequence[int]) -> Take:
        self._num_asked = NUM_ASKED
        # Idle threads take their part.
        most = min(NUM_TOGETHER, -(-self._demand.num_missing // self._num_fetchers))
        if self._samples is not None:
            most = NUM_THREADS  # a store's answer to one request has ranges of all of them
        self._changed.release()
        try:
            return self._share.take(wanted, most=max(1, most), most_bytes=TOGETHER_BYTES)
        finally:
            self._changed.acquire()

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
            for waiter in only_fitting:  # goes on without these
                refused = waiter.missing.intersection(missing)
                waiter.refused |= refused
                self.done(list(refused))
                self._shorten(waiter, refused)
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

    def _fill(self, shards: Sequence[int], fetcher: Fetcher, *, is_there: bool) -> None:
        started = time.perf_counter()
        unfinished = dict.fromkeys(shards)
        errors: dict[int, Exception] = {}
        try:
            with self.stage_time:
                if is_there:
                    self._finish(unfinished, self._whole(unfinished), are_new=False)
                if unfinished and not self._is_abandoned(unfinished):
                    errors = self._fetch(unfinished, fetcher)
        except Exception as exc:  # noqa: BLE001 (raised in the callers that need the shards)
            errors = dict.fromkeys(unfinished, exc)
        try:
            if unfinished:
                self._share.fail(list(unfinished))
        finally:
            with self._lock:
                for shard in unfinished:
                    self._filling.pop(shard, None)
                for shard in unfinished:
                    if shard in errors:
                        self._fail([shard], errors[shard])
                self._release_unwanted(unfinished)
        report_span(
            "stage",
            seconds=time.perf_counter() - started,
            error=next(iter(errors.values()), None),
            first_shard=self._locate(self._manifest.names[shards[0]]),
            num_shards=len(shards),
            bytes=self._demand.bytes_of(shards),
        )

    def _finish(
        self,
        unfinished: dict[int, None],
        shards: Sequence[int],
        *,
        are_new: bool = True,
        filled: Mapping[int, Filled] | None = None,
    ) -> None:
        """Mark shards ready that are whole, and take them from ``unfinished``; ``filled``: what some samples take."""
        if not shards:
            return
        sizes = None if filled is None else [filled[shard].taken_bytes for shard in shards]
        self._share.finish(shards, are_new=are_new, sizes=sizes)
        with self._lock:
            for shard in shards:
                del unfinished[shard]
                self._filling.pop(shard, None)
                if are_new:
                    self.fetched_bytes += self._num_bytes(shard) if filled is None else filled[shard].fetched_bytes
                    self.num_fetched += 1
                self._hold(shard)  # last: it wakes waiting threads, which may read the counters
            self._release_unwanted(shards)

    def _num_bytes(self, shard: int) -> int:
        return self._share.shard_extent(shard).size + self._share.index_extent(shard).size

    def _fetch(self, unfinished: dict[int, None], fetcher: Fetcher) -> dict[int, Exception]:
        """Fetch shards, finish those that become whole, and return the errors of others."""
        lock = threading.Lock()  # any thread may report an object
        num_missing: dict[int, int] = {}  # objects of each shard that is neither whole nor failed
        whole: list[int] = []
        errors: dict[int, Exception] = {}

        def report(shard: int, error: Exception | None) -> None:
            with lock:
                if error is not None:
                    errors.setdefault(shard, error)
                    num_missing.pop(shard, None)
                elif shard in num_missing:
                    num_missing[shard] -= 1
                    if not num_missing[shard]:
                        del num_missing[shard]
                        whole.append(shard)

        def finish_whole() -> None:
            with lock:
                shards, whole[:] = list(whole), []
            if self._samples is None:
                self._finish(unfinished, shards)
            elif shards and not self._is_abandoned(unfinished):  # their indexes are there
                filled, failed = self._samples.fill(shards, share)
                errors.update(failed)
                self._finish(unfinished, list(filled), filled=filled)

        manifest, share, wanted = self._manifest, self._share, list[Wanted]()
        for shard in unfinished:
            name, index = manifest.names[shard], share.index_extent(shard)
            objects = [(index_name(name), index, manifest.index_checksums[shard])]
            blocks = None if self._samples is None else extent_blocks(index, 0, index.size)
            if self._samples is None:
                objects.insert(0, (name, share.shard_extent(shard), manifest.checksums[shard]))
            try:
                share.reserve_blocks(shard, name=self._locate(name), blocks=blocks)
            except CacheError as exc:
                errors[shard] = exc
                continue
            num_missing[shard] = len(objects)
            wanted += (
                Wanted(object_name, extent, int(checksum), partial(report, shard), self._filling[shard].add)
                for object_name, extent, checksum in objects
            )
        finished_at = time.monotonic()

        def stopped() -> bool:
            nonlocal finished_at
            if whole and self._samples is None and time.monotonic() - finished_at > FINISH_S:
                finish_whole()
                finished_at = time.monotonic()
            return not num_missing or self._is_abandoned(unfinished)

        with self._lock:
            # Idle threads lend their connections where fewer shards are wanted than there are threads.
            connections = max(1, self._num_fetchers // max(1, self._demand.num_missing))
        with self.fetch_time:
            fetcher.fetch(wanted, stopped=stopped, num_connections=connections)
            if self._samples is not None:
                finish_whole()
        finish_whole()
        return {shard: self._naming_samples(shard, error, fetcher) for shard, error in errors.items()}

    def _naming_samples(self, shard: int, error: Exception, fetcher: Fetcher) -> Exception:
        """Name in a shard's error the samples whose bytes have changed, if these are a few."""
        manifest, share, index = self._manifest, self._share, self._share.index_extent(shard)
        name, checksum = index_name(manifest.names[shard]), int(manifest.index_checksums[shard])
        if not isinstance(error, DataError) or self._samples is not None:  # ranges have named theirs
            return error
        try:
            fetcher.fetch([Wanted(name, index, checksum)], stopped=self._stopped.is_set)
        except Exception:  # noqa: BLE001 (the error that is there says more)
            return error
        places = ShardIndex.from_bytes(index.read(), where=name)
        file, first, _ = astuple(share.shard_extent(shard))
        changed = [*places.changed(lambda start, size: Extent(file, first + start, size).checksum_unless())]
        if not 0 < len(changed) < max(2, places.num_samples):
            return error
        return DataError(f"{error}; other bytes than when it was indexed: {shown(changed, are_names=False)}")

    def _is_abandoned(self, unfinished: Collection[int]) -> bool:
        """Whether to stop filling shards: the stager is closed, or an urgent shard has no thread.

        Note [urgent]: in a resumed job all threads may be fetching the epoch's first shards, which were wanted when the
        loader was made. The first batch must not wait for them. An abandoned shard is fetched again when its turn
        comes. So this is for the first batch of a feed only: at every window's edge it would cost a second fetch.
        """
        if self._stopped.is_set():
            return True
        if not self._urgent:  # without the lock: this is called again
            return False
        with self._lock:
            without_thread = self._urgent - self._filling.keys() - self._failed.keys()
            return bool(without_thread) and self._demand.needs.keys().isdisjoint(unfinished)

    def _whole(self, shards: Collection[int]) -> list[int]:
        """Check shards whose bytes are there; returns those that are whole, as far as they were not abandoned."""

        def stopped() -> bool:
            if self._urgent and self._demand.needs.keys().isdisjoint(shards):
                time.sleep(GIVE_WAY_S)  # for each mebibyte: an urgent shard's check wants the processor
            return self._is_abandoned(shards)

        whole: list[int] = []
        for shard in shards:
            for extent, expected in self._parts(shard):
                found = extent.checksum_unless(stopped)
                if found is None:
                    return whole
                if found != expected:
                    level, self._has_warned = logging.INFO if self._has_warned else logging.WARNING, True
                    _log.log(
                        level, "the cache in '%s' held other bytes than those of shard '%s': fetched again",
                        self._share.space.directory, self._locate(self._manifest.names[shard]),
                    )  # fmt: skip
                    break
            else:
                whole.append(shard)
        return whole

    def _parts(self, shard: int) -> Iterator[tuple[Extent, int]]:
        """The extents that a loader reads of a shard, with their checksums; the index is first."""
        index, whole = self._share.index_extent(shard), self._share.shard_extent(shard)
        yield index, int(self._manifest.index_checksums[shard])
        if self._samples is None:
            yield whole, int(self._manifest.checksums[shard])
        else:
            for one in self._samples.ranges(shard, index.read()):
                yield Extent(whole.file, whole.start + one.start, one.size), one.checksum


def _closed() -> ValueError:
    return ValueError("the loader was closed while it waited for shards")
