"""Stage shards: objects of a store to checked extents of the image, several in flight, in the order of the plan.

A shard is wanted for one of two reasons. *Needed*: a segment that names it is open, or waits to be opened. *Ahead*: its
window is the current one or comes next. What is wanted is held, so that it stays; what is needed goes before what is
ahead, for threads and for room.

# Note [cut short]: Ctrl-C can come between any two instructions of the main thread. So what it changes here is changed
by a thread of `shielded`, whole or not at all, and it waits at a lock of its own, never at the one that the threads
share. Whoever was cut short may still not know what it wanted: `Stager.give_up` ends all of it.
"""

import contextlib
import itertools
import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from dali_pipes import profiling as stages
from dali_pipes.cache.cache import Take
from dali_pipes.cache.extents import Extent
from dali_pipes.cache.locks import shielded
from dali_pipes.cache.share import CacheShare
from dali_pipes.errors import CacheError
from dali_pipes.formats.manifest import Manifest
from dali_pipes.formats.names import index_name

__all__ = ["Fetcher", "Stager", "Wanted", "in_fetcher"]

_log = logging.getLogger(__name__)

# Shards in flight. Enough to hide a store's latency; each costs one connection and one thread that mostly waits.
NUM_FETCHERS = 8
# How often the cache is asked again for what another process fills, or for room that another must give up first.
POLL_S = 0.005
# How often somebody who waits is told how far it is.
SHOW_S = 0.2
# Shards that the cache is asked for at a time, once it was asked for all: what one shard costs must not grow with the
# window.
NUM_ASKED = 256
# A cache without room for this long is full, to whoever takes only what fits: room can be on its way, being punched.
FULL_AFTER_S = 0.5
# A wait for room this long is told: who holds it may be stopped, in a debugger for instance.
TELL_AFTER_S = 30.0


class Wanted(NamedTuple):
    """An object, and where it is to lie."""

    name: str
    """In its store."""
    extent: Extent
    """Its size is the object's."""
    checksum: int
    """XXH64, from the manifest."""


class Fetcher(Protocol):
    """Brings objects of one store into extents; belongs to one thread."""

    def fetch(self, wanted: Sequence[Wanted], *, stopped: Callable[[], bool], num_connections: int = 1) -> bool:
        """Whether the objects, a shard and its index, lie in their extents, whole and checked.

        Args:
            wanted: In the order in which to begin; a fetcher that waits for answers waits for all of them together.
            stopped: Asked at least every 100 ms; ``True`` gives up, and then, and only then, the answer is ``False``.
            num_connections: For each of them; how many it takes is the fetcher's to say.
        """

    def close(self) -> None:
        """Close its connections. Can be called twice."""


_THREAD_NAME = "dali-pipes-fetch"


def in_fetcher() -> bool:
    """Whether this is a thread of a `Stager`: what is collected there may be what the thread belongs to."""
    return threading.current_thread().name == _THREAD_NAME


@dataclass(eq=False, kw_only=True)
class _Wait:
    """Somebody waits for shards to be resident."""

    missing: set[int]
    num_bytes: int
    """Of what is missing."""
    only_fitting: bool
    refused: set[int] = field(default_factory=set)
    """For which there was no room."""
    error: Exception | None = None
    over: threading.Lock = field(default_factory=threading.Lock)
    """Locked until nothing is missing, or something went wrong."""


class Stager:
    """Fills the image in the background; owns its threads.

    The threads are daemons: a program that ends does not wait for shards that nobody will read.

    Args:
        image: Where shards go.
        manifest: What they are, numbered as in ``share``.
        open_fetcher: Called in each thread for a fetcher of its own.
        locate: The URL of an object, for errors.
        num_fetchers: Threads.
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
        self._bytes = share.extent_bytes
        self._changed = threading.Condition()
        # All below is guarded by the condition's lock.
        self._needs: Counter[int] = Counter()
        self._ahead: dict[int, int] = {}  # shard -> how many windows have it, in the order in which they are read
        self._ahead_bytes = 0
        self._held: set[int] = set()
        self._held_bytes = 0
        # What of the needed, and of what is ahead, is not held, each in order. Kept, since to look through all that is
        # wanted for each shard would cost the square of a window.
        self._lacking: dict[int, None] = {}
        self._lacking_bytes = 0
        self._coming: dict[int, None] = {}
        self._filling: set[int] = set()
        # What is waited for now, and of what is being filled that which is left off for it. Note [urgent].
        self._urgent: set[int] = set()
        self._yielding: set[int] = set()
        self._elsewhere: set[int] = set()  # of the urgent, those that another process is at
        # What went wrong, until it was told to whoever needs the shard; it is then tried again when it is needed again.
        self._failed: dict[int, Exception | None] = {}
        self._waits: set[_Wait] = set()
        self._asking = False
        self._num_asked = NUM_ASKED
        self._no_room_since: float | None = None
        self._told_at = 0.0
        self._threads: list[threading.Thread] = []
        self._stopped = threading.Event()
        self.fetched_bytes = 0
        """Bytes of shards that this loader brought into the image so far, indexes included."""

    @property
    def is_short(self) -> bool:
        """Whether less is wanted ahead than may be held: another window can be asked for."""
        return self._ahead_bytes < self._share.reserved

    def stage(self, shards: Sequence[int]) -> None:
        """Want these ahead, in this order, after those that are wanted already; `unstage` ends it."""
        shielded(lambda: self._stage(shards))

    def unstage(self, shards: Sequence[int]) -> None:
        """Want these ahead no more; they are released unless they are needed."""
        shielded(lambda: self._unstage(shards))

    def need(
        self, shards: Sequence[int], *, urgent: bool = False, waiting: Callable[[int], None] = lambda _: None
    ) -> None:
        """Return when all of these are resident; they stay until `done`. They are fetched before all others.

        Args:
            shards: What the caller is about to read.
            urgent: Have threads leave off what is not needed, if none is free for these. Note [urgent].
            waiting: Called now and then meanwhile, with the bytes that are still missing.

        Raises:
            CacheError, DataError, StoreError: What went wrong with one of them; none is needed then, and the next call
                tries again.
            ValueError: If it is closed, or meanwhile was.
        """
        self._need(shards, waiting, only_fitting=False, urgent=urgent)

    def need_fitting(self, shards: Sequence[int], *, waiting: Callable[[int], None] = lambda _: None) -> list[int]:
        """As `need`, for as many of these as there is room for, the first ones first: those that are resident now."""
        refused = self._need(shards, waiting, only_fitting=True, urgent=False)
        return [shard for shard in shards if shard not in refused]

    def need_resident(self, shards: Sequence[int]) -> bool:
        """As `need`, if all of these are resident already; else ``False``, and nothing is needed."""
        return shielded(lambda: self._need_resident(shards))

    def done(self, shards: Sequence[int]) -> None:
        """The reader that named these is gone."""
        shielded(lambda: self._done(shards))

    def give_up(self) -> None:
        """Want nothing any more, whoever wanted what. Note [cut short]."""
        shielded(self._give_up)

    def is_ahead(self, shard: int) -> bool:
        """Whether it is staged."""
        return shard in self._ahead

    def num_missing(self, shards: Iterable[int]) -> tuple[int, int]:
        """How many of these are not resident, and their bytes."""
        missing = [shard for shard in shards if shard not in self._held]
        return len(missing), int(self._bytes[missing].sum()) if missing else 0

    def close(self) -> None:
        """Stop fetching and end the threads. Can be called twice."""
        self._stopped.set()
        if sys.is_finalizing():
            return  # daemons are stopped where they stand when the interpreter ends: a join would wait for ever
        shielded(self._wake_all)
        interrupt: BaseException | None = None
        for thread in list(self._threads):
            # The garbage collector may have called this in one of them.
            while thread is not threading.current_thread() and thread.is_alive():
                try:
                    thread.join()
                except BaseException as exc:  # noqa: BLE001 (raised below)
                    # Not before they have ended: they write to the image's descriptor, and once the image is closed its
                    # number can be another file's. They look several times a second whether they are to stop.
                    interrupt = exc
        if interrupt is not None:
            raise interrupt

    def _stage(self, shards: Sequence[int]) -> None:
        with self._changed:
            for shard in shards:
                if shard not in self._ahead:
                    self._ahead_bytes += int(self._bytes[shard])
                    if shard not in self._held:
                        self._coming[shard] = None
                self._ahead[shard] = self._ahead.get(shard, 0) + 1
            self._look_for_all(len(self._lacking) + len(self._coming))

    def _unstage(self, shards: Sequence[int]) -> None:
        with self._changed:
            for shard in shards:
                if shard not in self._ahead:
                    continue  # given up already
                self._ahead[shard] -= 1
                if not self._ahead[shard]:
                    del self._ahead[shard]
                    self._ahead_bytes -= int(self._bytes[shard])
                    self._coming.pop(shard, None)
            self._release_unwanted(shards)

    def _need(
        self, shards: Sequence[int], waiting: Callable[[int], None], *, only_fitting: bool, urgent: bool
    ) -> set[int]:
        wait = shielded(lambda: self._begin_wait(shards, only_fitting=only_fitting, urgent=urgent))
        try:
            while not wait.over.acquire(timeout=SHOW_S):
                waiting(wait.num_bytes)
            if wait.error is not None:
                raise wait.error
            waiting(0)
        except BaseException:
            shielded(lambda: self._end_wait(wait, shards))
            raise
        finally:
            wait.error = None  # it holds this frame, which would hold it
        return wait.refused

    def _begin_wait(self, shards: Sequence[int], *, only_fitting: bool, urgent: bool) -> _Wait:
        with self._changed:
            missing = {shard for shard in shards if shard not in self._held}
            wait = _Wait(missing=missing, num_bytes=self._sum_bytes(missing), only_fitting=only_fitting)
            wait.over.acquire()
            self._needs.update(shards)
            if urgent:
                self._urgent |= missing
            for shard in shards:
                if shard in missing and shard not in self._lacking:
                    self._lacking[shard] = None
                    self._lacking_bytes += int(self._bytes[shard])
                if self._failed.get(shard, ...) is None:
                    del self._failed[shard]
            if self._stopped.is_set():
                self._end(wait, _closed())
            elif not missing:
                wait.over.release()
            elif (known := next((s for s in self._failed if s in missing), None)) is not None:
                self._tell(wait, known)
            else:
                self._waits.add(wait)
                self._look_for_all(len(self._lacking))
            return wait

    def _end_wait(self, wait: _Wait, shards: Sequence[int]) -> None:
        with self._changed:
            self._waits.discard(wait)
            self._done([shard for shard in shards if shard not in wait.refused])

    def _need_resident(self, shards: Sequence[int]) -> bool:
        with self._changed:
            if not self._held.issuperset(shards):
                return False
            self._needs.update(shards)
            return True

    def _done(self, shards: Sequence[int]) -> None:
        with self._changed:
            for shard in shards:
                if (left := self._needs.pop(shard, 1) - 1) > 0:
                    self._needs[shard] = left
                elif shard in self._lacking:
                    del self._lacking[shard]
                    self._lacking_bytes -= int(self._bytes[shard])
            self._urgent.difference_update(shards)
            self._release_unwanted(shards)

    def _give_up(self) -> None:
        with self._changed:
            wanted = [*self._needs, *self._ahead]
            for wait in list(self._waits):
                self._end(wait, _closed())
            self._needs.clear()
            self._ahead.clear()
            self._lacking.clear()
            self._urgent.clear()
            self._coming.clear()
            self._ahead_bytes = self._lacking_bytes = 0
            self._release_unwanted(wanted)

    def _look_for_all(self, num_asked: int) -> None:
        """Ask the cache once for this many: what of them is resident must be held before others have it evicted."""
        self._num_asked = max(self._num_asked, num_asked)
        while len(self._threads) < min(self._num_fetchers, max(len(self._lacking), len(self._coming))):
            thread = threading.Thread(target=self._work, name=_THREAD_NAME, daemon=True)
            try:
                thread.start()
            except RuntimeError:
                if not self._threads:
                    raise
                break  # the process may have no more threads; those that are there do it
            self._threads.append(thread)
        self._changed.notify_all()

    def _wake_all(self) -> None:
        with self._changed:
            for wait in list(self._waits):
                self._end(wait, _closed())
            self._changed.notify_all()

    def _sum_bytes(self, shards: Iterable[int]) -> int:
        return sum(int(self._bytes[shard]) for shard in shards)

    def _release_unwanted(self, shards: Iterable[int]) -> None:
        unwanted = [shard for shard in shards if shard not in self._ahead and shard not in self._needs]
        for shard in unwanted:
            self._failed.pop(shard, None)  # told to nobody: whoever wants it next finds out anew
        self._release([shard for shard in unwanted if shard in self._held])

    def _release(self, shards: Sequence[int]) -> None:
        if not shards or self._stopped.is_set():
            return
        released = list(dict.fromkeys(shards))
        self._held.difference_update(released)
        self._held_bytes -= self._sum_bytes(released)
        self._share.release(released)
        self._changed.notify_all()

    def _work(self) -> None:
        is_open = False
        try:
            with contextlib.closing(self._open_fetcher()) as fetcher:
                is_open = True
                while (taken := self._next()) is not None:
                    self._fill(taken[0], fetcher, is_there=taken[1])
        except Exception as exc:  # noqa: BLE001 (no fetcher, or a broken cache: told to whoever waits)
            with self._changed:
                self._threads.remove(threading.current_thread())
                if is_open or not self._threads:
                    self._fail([s for s in (*self._lacking, *self._coming) if s not in self._filling], exc)
                self._changed.notify_all()
            _log.debug("a thread that fetches ended", exc_info=True)

    def _next(self) -> tuple[int, bool] | None:
        """The next shard for this thread to fill, and whether it wants checking only; ``None`` at the end.

        One thread at a time asks the cache; what others have filled meanwhile is held on the way.
        """
        with self._changed:
            while not self._stopped.is_set():
                if self._asking or not (wanted := self._missing()):
                    self._changed.wait()
                    continue
                self._asking = True
                try:
                    # While something is urgent nothing else is begun: whoever begins it would learn late that another
                    # process has brought what is waited for.
                    urgent = [shard for shard in wanted if shard in self._urgent]
                    taken = self._ask(urgent or wanted)
                    is_elsewhere = taken.fill is None and taken.blocked == "busy"
                    self._elsewhere = set(urgent).difference(taken.ready.tolist()) if is_elsewhere else set()
                    self._take_over(taken)
                    if taken.fill is not None:
                        return taken.fill, taken.is_there
                    if not len(taken.ready) and taken.blocked == "busy":
                        self._num_asked = max(self._num_asked, 2 * len(wanted))  # others are at all of these
                    if taken.blocked:
                        self._changed.wait(POLL_S)
                finally:
                    self._asking = False
                    self._changed.notify()
            return None

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
        self._release_unwanted(ready)  # they may be wanted no more: asking took a moment
        if taken.blocked == "room":
            self._make_room()
        else:
            self._no_room_since = None

    def _missing(self) -> list[int]:
        """What is wanted and neither held nor under way, the most urgent first; of what is ahead as much as may be
        held, and of all of it no more than the cache is to be asked for.
        """
        free = (s for s in self._lacking if s not in self._filling and s not in self._failed)
        missing = list(itertools.islice(free, self._num_asked))
        if self._no_room_since is not None and missing:
            return missing  # what is ahead must not take the room for which this waits
        under_way = self._sum_bytes(shard for shard in self._filling if shard not in self._lacking)
        left = self._share.reserved - self._held_bytes - self._lacking_bytes - under_way
        for shard in self._coming:
            if len(missing) >= self._num_asked:
                break
            if shard in self._filling or shard in self._lacking or shard in self._failed:
                continue
            left -= int(self._bytes[shard])
            if left < 0:
                break
            missing.append(shard)
        return missing

    def _make_room(self) -> None:
        """What is needed does not fit: give up what is only ahead; where that is not enough, wait for others."""
        missing = [shard for shard in self._lacking if shard not in self._filling]
        if not missing:
            self._no_room_since = None
            return
        ahead = [shard for shard in self._held if shard not in self._needs]
        if ahead:
            self._release(ahead)
            self._coming = {shard: None for shard in self._ahead if shard not in self._held}
        now = time.monotonic()
        if self._no_room_since is None:
            self._no_room_since = self._told_at = now
        is_stuck = not ahead and not self._filling and self._share.is_stuck()
        only_fitting = [wait for wait in self._waits if wait.only_fitting]
        if only_fitting and not self._filling and (is_stuck or now - self._no_room_since > FULL_AFTER_S):
            for wait in only_fitting:
                self._refuse(wait, missing)
        elif is_stuck:
            name = self._locate(self._manifest.names[missing[0]])
            error = CacheError(
                f"no room for shard '{name}', and none of the loaders that share the cache in "
                f"'{self._share.space.directory}' will give any up: they wait for each other; pass "
                f"cache_bytes={2 * self._share.cache_bytes} or more (--cache-bytes), or start them at the same place"
            )
            self._fail(missing[:1], error)
        elif now - self._told_at > TELL_AFTER_S:
            self._told_at = now
            _log.warning(
                "waiting for room in '%s' for %d shards: other loaders hold it",
                self._share.space.directory,
                len(missing),
            )

    def _refuse(self, wait: _Wait, shards: Iterable[int]) -> None:
        """Have a wait go on without these."""
        refused = wait.missing.intersection(shards)
        wait.missing -= refused
        wait.refused |= refused
        wait.num_bytes -= self._sum_bytes(refused)
        self._done(list(refused))
        if not wait.missing:
            self._end(wait, None)

    def _hold(self, shard: int) -> None:
        if shard in self._held:
            return
        num_bytes = int(self._bytes[shard])
        self._held.add(shard)
        self._held_bytes += num_bytes
        self._failed.pop(shard, None)
        self._coming.pop(shard, None)
        self._urgent.discard(shard)
        if shard in self._lacking:
            del self._lacking[shard]
            self._lacking_bytes -= num_bytes
        for wait in [wait for wait in self._waits if shard in wait.missing]:
            wait.missing.discard(shard)
            wait.num_bytes -= num_bytes
            if not wait.missing:
                self._end(wait, None)

    def _fail(self, shards: Iterable[int], error: Exception) -> None:
        self._failed.update((shard, error) for shard in shards)
        for wait in list(self._waits):
            if (failed := next((s for s in self._failed if s in wait.missing), None)) is not None:
                self._tell(wait, failed)

    def _tell(self, wait: _Wait, shard: int) -> None:
        error = self._failed[shard]
        # One that is told of an error and goes on is not to be told of what else went wrong before that.
        self._failed = dict.fromkeys(self._failed)
        self._end(wait, error)

    def _end(self, wait: _Wait, error: Exception | None) -> None:
        wait.error = error
        self._waits.discard(wait)
        wait.over.release()

    def _fill(self, shard: int, fetcher: Fetcher, *, is_there: bool) -> None:
        error: Exception | None = None
        try:
            with stages.busy("stage"):
                whole = (is_there and self._is_whole(shard)) or self._fetch(shard, fetcher)
                if whole:
                    self._share.finish(shard)
        except Exception as exc:  # noqa: BLE001 (handed to whoever needs the shard)
            whole, error = False, exc
        try:
            if not whole:
                self._share.fail(shard)
        finally:
            with self._changed:
                self._filling.discard(shard)
                self._yielding.discard(shard)
                if whole:
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
            num_wanted = max(len(self._lacking), len(self._coming))
            connections = max(1, self._num_fetchers // max(1, num_wanted))
        with stages.busy("fetch"):
            is_whole = fetcher.fetch(wanted, stopped=lambda: self._is_left_off(shard), num_connections=connections)
        if is_whole:
            with self._changed:
                self.fetched_bytes += sum(one.extent.size for one in wanted)
        return is_whole

    def _is_left_off(self, shard: int) -> bool:
        """Whether to stop fetching it: because all is over, or because it can wait and an urgent one has no thread.

        Note [urgent]: where a job is resumed all threads may be at what its epoch starts with, which was wanted when
        the loader was made. The first batch must not wait for these. What is left off is fetched anew when its turn
        comes, so this is for a feed's first batch only: at every window's edge it would cost as much again.
        """
        if self._stopped.is_set() or shard in self._yielding:
            return True
        if not self._urgent or shard in self._needs:  # no lock: it is asked again
            return False
        with self._changed:
            waiting = self._urgent - self._filling - self._elsewhere - self._failed.keys()
            if shard in self._needs or len(waiting) <= len(self._yielding):
                return False
            self._yielding.add(shard)
            return True

    def _is_whole(self, shard: int) -> bool:
        """Whether bytes from before a start of the machine are what they should be."""
        found = self._share.shard_extent(shard).checksum(), self._share.index_extent(shard).checksum()
        return found == (int(self._manifest.checksums[shard]), int(self._manifest.index_checksums[shard]))


def _closed() -> ValueError:
    return ValueError("what was waited for is wanted no more: this loader was closed meanwhile")
