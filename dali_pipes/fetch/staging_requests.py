"""The callers' side of a stager: which shards they want, and how they wait for them.

# Note [interrupts]: Ctrl-C can come after any call in the main thread. The lock that the threads share is free then,
because its ``with`` statement is C code. But the call may be half done, so whoever goes on after an interrupt calls
`StagingRequests.give_up` first, which ends everything. Shards are released in the cache before they count as released.
"""

import itertools
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from dali_pipes.cache.share import CacheShare
from dali_pipes.metrics.counts import LONG_WAIT_S
from dali_pipes.store.patience import is_outage_told

_log = logging.getLogger(__name__)

# A store that is always slow is told of as often as a cluster that is away.
TOLD_EACH_S = 60.0


class Demand:
    """The shards that a loader needs, wants ahead, and holds.

    A shard is *needed* while a segment that names it is open or about to be opened. It is wanted *ahead* while its
    window is the current one or one of the next ones. It can be both. Not thread-safe.

    ``extent_bytes``: int64 [shards], the bytes that each shard takes of the cache.
    """

    def __init__(self, extent_bytes: npt.NDArray[np.int64]) -> None:
        self._bytes = extent_bytes
        self.needs: Counter[int] = Counter()
        """Needed shard -> by how many segments."""
        self.ahead: dict[int, int] = {}
        """Shard wanted ahead -> by how many windows, in the order in which they are read."""
        self.held: set[int] = set()
        # The shards of both kinds that are not held, in order: searching all wanted shards each time would cost time
        # that grows with the square of a window.
        self.needed_missing: dict[int, None] = {}
        self.ahead_missing: dict[int, None] = {}
        self.ahead_bytes = self.held_bytes = self.needed_missing_bytes = 0

    def bytes_of(self, shards: Iterable[int]) -> int:
        """Sum the bytes that these shards take of the cache."""
        return sum(int(self._bytes[shard]) for shard in shards)

    def not_held(self, shards: Iterable[int]) -> set[int]:
        return {shard for shard in shards if shard not in self.held}

    def is_wanted(self, shard: int) -> bool:
        return shard in self.ahead or shard in self.needs

    def want_ahead(self, shards: Sequence[int]) -> None:
        """Want the shards of another window ahead."""
        for shard in shards:
            if shard not in self.ahead:
                self.ahead_bytes += int(self._bytes[shard])
                if shard not in self.held:
                    self.ahead_missing[shard] = None
            self.ahead[shard] = self.ahead.get(shard, 0) + 1

    def unwant_ahead(self, shards: Sequence[int]) -> None:
        """End `want_ahead` for a window that is over."""
        for shard in shards:
            if shard not in self.ahead:
                continue  # everything was given up already
            self.ahead[shard] -= 1
            if not self.ahead[shard]:
                del self.ahead[shard]
                self.ahead_bytes -= int(self._bytes[shard])
                self.ahead_missing.pop(shard, None)

    def need(self, shards: Sequence[int]) -> None:
        """Need the shards of another segment."""
        self.needs.update(shards)
        for shard in shards:
            if shard not in self.held and shard not in self.needed_missing:
                self.needed_missing[shard] = None
                self.needed_missing_bytes += int(self._bytes[shard])

    def end_need(self, shards: Sequence[int]) -> None:
        """End `need` for a segment that is over."""
        for shard in shards:
            if (left := self.needs.pop(shard, 1) - 1) > 0:
                self.needs[shard] = left
            else:
                self._remove_needed_missing(shard)

    def clear(self) -> list[int]:
        """End all wants; returns the shards that were wanted or held. A change may have been interrupted before."""
        known = {*self.needs, *self.ahead, *self.held}
        for shards in (self.needs, self.ahead, self.needed_missing, self.ahead_missing):
            shards.clear()
        self.ahead_bytes = self.needed_missing_bytes = 0
        self.held_bytes = self.bytes_of(self.held)
        return list(known)

    def hold(self, shard: int) -> bool:
        """Count a shard as held; ``False`` if it was held already."""
        if shard in self.held:
            return False
        self.held.add(shard)
        self.held_bytes += int(self._bytes[shard])
        self.ahead_missing.pop(shard, None)
        self._remove_needed_missing(shard)
        return True

    def release(self, shards: Collection[int]) -> None:
        """Count held shards as not held."""
        self.held.difference_update(shards)
        self.held_bytes -= self.bytes_of(shards)

    def release_ahead(self) -> list[int]:
        """Count the held shards that are not needed as not held; returns them."""
        released = [shard for shard in self.held if shard not in self.needs]
        if released:
            self.release(released)
            self.ahead_missing = {shard: None for shard in self.ahead if shard not in self.held}
        return released

    def missing(
        self, *, filling: Collection[int], failed: Collection[int], most: int, max_bytes: int, only_needed: bool
    ) -> list[int]:
        """List the ``most`` shards to be filled next, the needed ones first.

        ``max_bytes`` limits what the loader may hold, shards ahead included. With ``only_needed``, shards ahead are
        listed only if no needed one is missing.
        """
        free = (shard for shard in self.needed_missing if shard not in filling and shard not in failed)
        missing = list(itertools.islice(free, most))
        if only_needed and missing:
            return missing
        coming_bytes = self.bytes_of(shard for shard in filling if shard not in self.needed_missing)
        left = max_bytes - self.held_bytes - self.needed_missing_bytes - coming_bytes
        for shard in self.ahead_missing:
            if len(missing) >= most:
                break
            if shard in filling or shard in self.needed_missing or shard in failed:
                continue
            left -= int(self._bytes[shard])
            if left < 0:
                break
            missing.append(shard)
        return missing

    def _remove_needed_missing(self, shard: int) -> None:
        if shard in self.needed_missing:
            del self.needed_missing[shard]
            self.needed_missing_bytes -= int(self._bytes[shard])


# How often the number of missing bytes is reported to a waiting caller.
SHOW_S = 0.2


@dataclass(eq=False, kw_only=True)
class Waiter:
    """A call that waits for shards to be resident."""

    missing: set[int]
    num_bytes: int
    """Bytes of the missing shards."""
    only_fitting: bool
    refused: set[int] = field(default_factory=set)
    """Shards that do not fit."""
    error: Exception | None = None
    over: threading.Lock = field(default_factory=threading.Lock)
    """Locked until no shard is missing, or an error ends the call."""


class StagingRequests(ABC):
    """The callers' side of a `dali_pipes.fetch.stager.Stager`, whose threads fill the shards."""

    def __init__(self, share: CacheShare) -> None:
        self._share = share
        self._stopped = threading.Event()
        self._lock = threading.RLock()  # guards everything below
        self._changed = threading.Condition(self._lock)
        self._demand = Demand(share.extent_bytes)
        self._urgent: set[int] = set()  # a caller waits for these now. Note [urgent] in `dali_pipes.fetch.stager`
        # The error of each failed shard; ``None`` once a caller got it. The next call that needs the shard tries again.
        self._failed: dict[int, Exception | None] = {}
        self._waiters: set[Waiter] = set()

    @abstractmethod
    def _ask_for(self, num_asked: int) -> None:
        """Make the threads ask the cache once for this many shards."""

    @property
    def is_short(self) -> bool:
        """Whether less is wanted ahead than may be held, so that another window can be asked for."""
        return self._demand.ahead_bytes < self._share.reserved

    @property
    def held_bytes(self) -> int:
        """Bytes of the cache file that the loader holds."""
        return self._demand.held_bytes

    def stage(self, shards: Sequence[int]) -> None:
        """Want these ahead, in this order, after those that are wanted already; `unstage` ends it."""
        with self._lock:
            self._demand.want_ahead(shards)
            self._ask_for(len(self._demand.needed_missing) + len(self._demand.ahead_missing))

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
            urgent: If no thread is free for these, make threads abandon shards that are not needed.
                Note [urgent] in `dali_pipes.fetch.stager`.
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

    def _need(
        self, shards: Sequence[int], waiting: Callable[[int], None], *, only_fitting: bool, urgent: bool
    ) -> set[int]:
        waiter = self._begin_wait(shards, only_fitting=only_fitting, urgent=urgent)
        try:
            while not waiter.over.acquire(timeout=SHOW_S):
                waiting(waiter.num_bytes)
            if waiter.error is not None:
                raise waiter.error
            waiting(0)
        except BaseException:
            self._cancel_wait(waiter, shards)
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
            elif (failed := next((s for s in self._failed if s in missing), None)) is not None:
                self._end_with_error(waiter, failed)
            else:
                self._waiters.add(waiter)
                self._ask_for(len(self._demand.needed_missing))
            return waiter

    def _cancel_wait(self, waiter: Waiter, shards: Sequence[int]) -> None:
        with self._lock:
            self._waiters.discard(waiter)
            self.done([shard for shard in shards if shard not in waiter.refused])

    def _release_unwanted(self, shards: Iterable[int]) -> None:
        unwanted = [shard for shard in shards if not self._demand.is_wanted(shard)]
        for shard in unwanted:
            self._failed.pop(shard, None)  # no caller got the error: the next one that wants the shard tries again
        if not self._stopped.is_set() and (held := {shard for shard in unwanted if shard in self._demand.held}):
            self._release(list(held))
            self._demand.release(held)

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

    def _refuse(self, waiter: Waiter, shards: Iterable[int]) -> None:
        """Make a caller continue without these."""
        refused = waiter.missing.intersection(shards)
        waiter.refused |= refused
        self.done(list(refused))
        self._shorten(waiter, refused)

    def _shorten(self, waiter: Waiter, shards: set[int]) -> None:
        waiter.missing -= shards
        waiter.num_bytes -= self._demand.bytes_of(shards)
        if not waiter.missing:
            self._end(waiter, None)

    def _fail(self, shards: Iterable[int], error: Exception) -> None:
        self._failed.update((shard, error) for shard in shards)
        for waiter in list(self._waiters):
            if (failed := next((s for s in self._failed if s in waiter.missing), None)) is not None:
                self._end_with_error(waiter, failed)

    def _end_with_error(self, waiter: Waiter, shard: int) -> None:
        error = self._failed[shard]
        # A caller that continues after one error must not get others from before it.
        self._failed = dict.fromkeys(self._failed)
        self._end(waiter, error)

    def _end(self, waiter: Waiter, error: Exception | None) -> None:
        waiter.error = error
        if waiter.over.locked():  # not if Ctrl-C came after it, in the main thread, and the waiter ends once more
            waiter.over.release()
        self._waiters.discard(waiter)  # last: a waiter that is forgotten before it ends waits for ever


def _closed() -> ValueError:
    return ValueError("the loader was closed while it waited for shards")


class LongWaits:
    """Says why a batch of one feed waits long for its shards: once, in one line that a person can act on.

    Nothing is said if another line says it: that a cluster is away (`dali_pipes.store.patience`), or that the cache has
    no space (`dali_pipes.fetch.stager`). ``progress`` says how far shards have come: see `Stager.progress`.
    """

    def __init__(self, progress: Callable[[Sequence[int]], str]) -> None:
        self._progress = progress
        self._told_at = float("-inf")

    def watch(self, shards: Sequence[int]) -> Callable[[int], None]:
        """Start to watch a wait for these shards; return a function for the waiting thread to call again and again."""
        started = since = time.monotonic()
        is_told = False

        def look(_: int) -> None:
            nonlocal since, is_told
            now = time.monotonic()
            if is_told or now - since < LONG_WAIT_S or now - self._told_at < TOLD_EACH_S:
                return
            if is_outage_told():
                since = now
            elif found := self._progress(shards):
                is_told, self._told_at = True, now
                _log.warning("a batch has waited %.0f s for its shards: %s", now - started, found)

        return look
