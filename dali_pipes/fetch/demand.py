"""What a loader wants of a stager: its shards in a table, a call that waits for some, and a line about long waits."""

import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

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
        self.ahead_bytes = self.held_bytes = 0

    def bytes_of(self, shards: Iterable[int]) -> int:
        """Sum the bytes that these shards take of the cache."""
        return sum(int(self._bytes[shard]) for shard in shards)

    @property
    def num_missing(self) -> int:
        """How many shards there are for threads to fill: needed, or ahead, if those are more."""
        return max(len(self.needed_missing), len(self.ahead_missing))

    def not_held(self, shards: Iterable[int]) -> set[int]:
        return {shard for shard in shards if shard not in self.held}

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
        self.needed_missing.update((shard, None) for shard in shards if shard not in self.held)

    def end_need(self, shards: Sequence[int]) -> None:
        """End `need` for a segment that is over."""
        for shard in shards:
            if (rest := self.needs.pop(shard, 1) - 1) > 0:
                self.needs[shard] = rest
            else:
                self.needed_missing.pop(shard, None)

    def clear(self) -> list[int]:
        """End all wants; returns the shards that were wanted or held. A change may have been interrupted before."""
        known = {*self.needs, *self.ahead, *self.held}
        for shards in (self.needs, self.ahead, self.needed_missing, self.ahead_missing):
            shards.clear()
        self.ahead_bytes, self.held_bytes = 0, self.bytes_of(self.held)
        return list(known)

    def hold(self, shard: int) -> bool:
        """Count a shard as held; ``False`` if it was held already."""
        if shard in self.held:
            return False
        self.held.add(shard)
        self.held_bytes += int(self._bytes[shard])
        self.ahead_missing.pop(shard, None)
        self.needed_missing.pop(shard, None)
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

    def next_missing(
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
        coming = itertools.chain(self.needed_missing, (s for s in filling if s not in self.needed_missing))
        left_bytes = max_bytes - self.held_bytes - self.bytes_of(coming)
        for shard in self.ahead_missing:
            if len(missing) >= most:
                break
            if shard in filling or shard in self.needed_missing or shard in failed:
                continue
            left_bytes -= int(self._bytes[shard])
            if left_bytes < 0:
                break
            missing.append(shard)
        return missing


@dataclass(eq=False, kw_only=True)
class Waiter:
    """A call that waits for shards to be resident."""

    missing: set[int]
    num_bytes: int
    only_fitting: bool
    refused: set[int] = field(default_factory=set)
    """Shards that do not fit."""
    error: Exception | None = None
    over: threading.Lock = field(default_factory=threading.Lock)
    """Locked until no shard is missing, or an error ends the call."""


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
