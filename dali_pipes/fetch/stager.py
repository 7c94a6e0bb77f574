"""Stage shards: bring objects of a store into checked extents of the cache file, several at a time, in plan order.

`dali_pipes.fetch.staging_requests.Demand` lists the wanted shards: those that open segments *need*, and those of the
windows *ahead*. Wanted shards are held, so that they stay in the cache. Needed shards come before shards ahead, for
threads and for space.
"""

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial

from dali_pipes.cache.share import CacheShare, Take
from dali_pipes.errors import CacheError, printable
from dali_pipes.fetch.fetcher import NUM_FETCHERS, Fetcher, Wanted
from dali_pipes.fetch.staging_requests import StagingRequests
from dali_pipes.formats.manifest import Manifest
from dali_pipes.formats.names import index_name
from dali_pipes.metrics.counts import ThreadsStage, report_span


class ComingShards:
    """Shards that are being fetched. A shard is whole when each of its objects is. Any thread may report one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._missing: dict[int, set[str]] = {}
        self.whole: list[int] = []
        """Shards that became whole since `take_whole`."""
        self.errors: dict[int, Exception] = {}
        """The first error of each shard that failed."""

    def add(self, shard: int, objects: Sequence[Wanted]) -> list[Wanted]:
        """Add a shard; returns its objects, which will report here."""
        self._missing[shard] = {one.name for one in objects}
        return [one._replace(report=partial(self.report, shard, one.name)) for one in objects]

    @property
    def is_over(self) -> bool:
        """Whether every shard is whole or has failed."""
        return not self._missing

    def take_whole(self) -> list[int]:
        """Return ``whole``, and empty it."""
        with self._lock:
            whole, self.whole = self.whole, []
        return whole

    def report(self, shard: int, name: str, error: Exception | None) -> None:
        """Count an object as there, or its shard as failed."""
        with self._lock:
            if error is not None:
                self.errors.setdefault(shard, error)
                self._missing.pop(shard, None)
            elif shard in self._missing:
                self._missing[shard].discard(name)
                if not self._missing[shard]:
                    del self._missing[shard]
                    self.whole.append(shard)


_log = logging.getLogger(__name__)

# How often to ask the cache again for shards that another process fills, or for space that another must free first.
POLL_S = 0.005
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


def in_fetcher() -> bool:
    """Whether this is a thread of a `Stager`: the garbage collector may finalize the thread's owner there."""
    return threading.current_thread().name == _THREAD_NAME


@dataclass(eq=False)
class _Filling:
    """A shard that a thread fills or checks."""

    since: float = field(default_factory=time.monotonic)
    received_bytes: int = 0

    def add(self, num_bytes: int) -> None:
        self.received_bytes += num_bytes


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
        # The lock guards everything below.
        self._threads: list[threading.Thread] = []
        self._filling: dict[int, _Filling] = {}
        self._asking = False
        self._num_asked = NUM_ASKED
        self._no_space_since: float | None = None
        self._logged_at = 0.0
        self._has_warned = False
        self.fetched_bytes: int = 0
        """Bytes of shards that this loader brought into the cache file so far, indexes included."""
        self.num_fetched: int = 0
        """The number of these shards."""
        self.stage_time: ThreadsStage = ThreadsStage("stage")
        """The threads' work for shards: fetching, free space, checks, the table."""
        self.fetch_time: ThreadsStage = ThreadsStage("fetch")
        """The part in which they bring bytes from the store."""

    @property
    def num_threads(self) -> int:
        """The number of threads so far: a new one is started only if more shards are missing than there are threads."""
        return len(self._threads)

    def close(self) -> None:
        """Stop fetching and end the threads. Can be called twice."""
        self._stopped.set()
        if sys.is_finalizing():
            return  # daemon threads do not end while the interpreter ends: a join would wait for ever
        interrupt: BaseException | None = None
        # The garbage collector may have called this in one of the threads.
        threads = [thread for thread in self._threads if thread is not threading.current_thread()]
        is_told = False
        while not is_told or any(thread.is_alive() for thread in threads):
            try:
                self._close_waiters()
                is_told = True
                for thread in threads:
                    if thread.is_alive():
                        thread.join()
            except BaseException as exc:  # noqa: BLE001 (raised below)
                # Raised only after the threads have ended: they write to the descriptor of the cache file, whose
                # number another file can get once it is closed. They check several times a second whether to stop.
                interrupt = exc
        if interrupt is not None:
            raise interrupt

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
                num_bytes = self._share.shard_extent(shard).size + self._share.index_extent(shard).size
                return (
                    f"{text}{filling.received_bytes / 2**20:.1f} of {num_bytes / 2**20:.1f} MiB came in "
                    f"{time.monotonic() - filling.since:.0f} s; look at the store, the network and the cache's disk; "
                    "if they can do more, Cache(fetchers=) fetches more shards at a time"
                )
            if pid is not None:
                return f"{text}process {pid} of this node is bringing it: look at its log"
            return f"{text}all threads are busy with other shards: Cache(fetchers=) makes more"

    def _ask_for(self, num_asked: int) -> None:
        """Ask the cache once for this many shards: resident ones must be held before other loaders evict them."""
        self._num_asked = max(self._num_asked, num_asked)
        # An interrupt may have come before a thread began.
        self._threads = [thread for thread in self._threads if thread.ident is not None or thread.is_alive()]
        while len(self._threads) < min(self._num_fetchers, self._num_wanted()):
            thread = threading.Thread(target=self._work, name=_THREAD_NAME, daemon=True)
            self._threads.append(thread)  # first: `close` must know it, whatever interrupts the start
            try:
                thread.start()
            except RuntimeError:
                self._threads.remove(thread)
                if not self._threads:
                    raise
                break  # the process may not start more threads; the existing ones do the work
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
            with self._lock:
                self._threads.remove(threading.current_thread())
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
                if self._asking or not (wanted := self._missing()):
                    self._changed.wait()
                    continue
                self._asking = True
                try:
                    # Begin no other shard while one is urgent: a thread that fills another shard would learn too late
                    # that another process has staged the urgent one.
                    urgent = [shard for shard in wanted if shard in self._urgent]
                    taken = self._ask(urgent or wanted)
                    fill = taken.fill.tolist()
                    self._take_over(taken)
                    if fill:
                        return fill, taken.is_there
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
        # Idle threads take their part.
        most = min(NUM_TOGETHER, -(-self._num_wanted() // self._num_fetchers))
        self._changed.release()
        try:
            return self._share.take(wanted, most=max(1, most), most_bytes=TOGETHER_BYTES)
        finally:
            self._changed.acquire()

    def _take_over(self, taken: Take) -> None:
        ready = taken.ready.tolist()
        for shard in ready:
            self._hold(shard)
        self._filling.update((shard, _Filling()) for shard in taken.fill.tolist())
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

    def _fill(self, shards: Sequence[int], fetcher: Fetcher, *, is_there: bool) -> None:
        started = time.perf_counter()
        left = dict.fromkeys(shards)  # the shards that are not finished
        errors: dict[int, Exception] = {}
        try:
            with self.stage_time:
                if is_there:
                    self._finish(left, self._whole(left), are_new=False)
                if left and not self._is_abandoned(left):
                    errors = self._fetch(left, fetcher)
        except Exception as exc:  # noqa: BLE001 (raised in the callers that need the shards)
            errors = dict.fromkeys(left, exc)
        try:
            if left:
                self._share.fail(list(left))
        finally:
            with self._lock:
                for shard in left:
                    self._filling.pop(shard, None)
                for shard in left:
                    if shard in errors:
                        self._fail([shard], errors[shard])
                self._release_unwanted(left)
        report_span(
            "stage",
            seconds=time.perf_counter() - started,
            error=next(iter(errors.values()), None),
            first_shard=self._locate(self._manifest.names[shards[0]]),
            num_shards=len(shards),
            bytes=int(self._share.extent_bytes[list(shards)].sum()),
        )

    def _finish(self, left: dict[int, None], shards: Sequence[int], *, are_new: bool = True) -> None:
        """Mark shards ready that are whole, and take them from ``left``."""
        if not shards:
            return
        self._share.finish(shards, are_new=are_new)
        with self._lock:
            for shard in shards:
                del left[shard]
                self._filling.pop(shard, None)
                self._hold(shard)
                if are_new:
                    self.fetched_bytes += self._share.shard_extent(shard).size + self._share.index_extent(shard).size
                    self.num_fetched += 1
            self._release_unwanted(shards)

    def _fetch(self, left: dict[int, None], fetcher: Fetcher) -> dict[int, Exception]:
        """Fetch the shards ``left``, finish those that become whole, and return the errors of others."""
        coming = ComingShards()
        wanted: list[Wanted] = []
        for shard in left:
            name = self._manifest.names[shard]
            objects = [
                Wanted(name, self._share.shard_extent(shard), int(self._manifest.checksums[shard])),
                Wanted(index_name(name), self._share.index_extent(shard), int(self._manifest.index_checksums[shard])),
            ]
            wanted += [one._replace(received=self._filling[shard].add) for one in coming.add(shard, objects)]
            try:
                self._share.reserve_blocks(shard, name=self._locate(name))
            except CacheError as exc:
                coming.report(shard, name, exc)
                del wanted[-len(objects) :]
        finished_at = time.monotonic()

        def stopped() -> bool:
            nonlocal finished_at
            if coming.whole and time.monotonic() - finished_at > FINISH_S:
                self._finish(left, coming.take_whole())
                finished_at = time.monotonic()
            return coming.is_over or self._is_abandoned(left)

        with self._lock:
            # Idle threads lend their connections where fewer shards are wanted than there are threads.
            connections = max(1, self._num_fetchers // max(1, self._num_wanted()))
        with self.fetch_time:
            fetcher.fetch(wanted, stopped=stopped, num_connections=connections)
        self._finish(left, coming.take_whole())
        return coming.errors

    def _is_abandoned(self, left: Collection[int]) -> bool:
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
            return bool(without_thread) and self._demand.needs.keys().isdisjoint(left)

    def _whole(self, shards: Collection[int]) -> list[int]:
        """Check shards whose bytes are there; returns those that are whole, as far as they were not abandoned."""

        def stopped() -> bool:
            if self._urgent and self._demand.needs.keys().isdisjoint(shards):
                time.sleep(GIVE_WAY_S)  # for each mebibyte: an urgent shard's check wants the processor
            return self._is_abandoned(shards)

        whole: list[int] = []
        for shard in shards:
            manifest, share = self._manifest, self._share
            for extent, expected in (
                (share.shard_extent(shard), manifest.checksums[shard]),
                (share.index_extent(shard), manifest.index_checksums[shard]),
            ):
                found = extent.checksum_unless(stopped)
                if found is None:
                    return whole
                if found != int(expected):
                    self._warn_of_change(shard)
                    break
            else:
                whole.append(shard)
        return whole

    def _warn_of_change(self, shard: int) -> None:
        name, directory = self._locate(self._manifest.names[shard]), self._share.space.directory
        level, self._has_warned = logging.INFO if self._has_warned else logging.WARNING, True
        _log.log(level, "the cache in '%s' held other bytes than those of shard '%s': fetched again", directory, name)
