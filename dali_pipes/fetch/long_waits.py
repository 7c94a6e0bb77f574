"""Say why a batch waits long for its shards: once, in one line that a person can act on.

Two other lines say more, and then there is none from here: that a cluster is away (`dali_pipes.store.patience`), and
that the cache has no space (`dali_pipes.fetch.stager`).
"""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from dali_pipes.errors import printable
from dali_pipes.metrics.counts import LONG_WAIT_S, Counts
from dali_pipes.store.patience import is_outage_told

_log = logging.getLogger(__name__)

# A store that is always slow is told of as often as a cluster that is away.
TOLD_EACH_S = 60.0


class Progress(NamedTuple):
    """How far shards have come.

    The fields after ``missing_bytes`` are about one missing shard: that on which a thread has worked longest, or the
    first.
    """

    num_shards: int
    num_missing: int
    missing_bytes: int
    url: str
    state: Literal["fetched", "checked", "elsewhere", "queued", "no space"]
    """``elsewhere``: another process fetches, checks or frees it."""
    since_s: float = 0.0
    """Seconds for which a thread has fetched or checked it."""
    received_bytes: int = 0
    """Bytes that came meanwhile, also those that came again."""
    shard_bytes: int = 0
    pid: int = 0
    """The other process."""
    num_fetched: int = 0
    """Other shards that are being fetched or checked."""

    def reason(self) -> str:
        """Say what happens to the missing shard, and what to look at.

        >>> Progress(2, 1, 1 << 20, "ais://b/x.tar", "elsewhere", pid=7).reason()
        "process 7 of this node is bringing 'ais://b/x.tar': look at its log"
        """
        name = f"'{printable(self.url)}'"
        match self.state:
            case "elsewhere":
                return f"process {self.pid} of this node is bringing {name}: look at its log"
            case "checked":
                return (
                    f"{name} was in the cache, and its checksum has been taken for {self.since_s:.0f} s: is the disk "
                    "of the cache directory busy?"
                )
            case "fetched":
                came = (
                    f"{name} has been fetched for {self.since_s:.0f} s, and {_mib(self.received_bytes)} of "
                    f"{_mib(self.shard_bytes)} have come"
                )
                if not self.received_bytes:
                    return f"{came}: look at the store, and at the network between"
                speed = _mib(int(self.received_bytes / max(self.since_s, 0.001)))
                return (
                    f"{came}, {speed}/s: if the network can do more, Cache(fetchers=) fetches more shards at a time; "
                    "else more must be staged ahead: Cache(max_bytes=), Shuffle(window_bytes=)"
                )
            case _:
                return (
                    f"no thread is free for {name}, because {self.num_fetched} other shards are being fetched or "
                    "checked: Cache(fetchers=) makes more threads"
                )


class LongWaits:
    """Watches the waits of one feed."""

    def __init__(self, counts: Counts, progress: Callable[[Sequence[int]], Progress]) -> None:
        self._counts, self._progress = counts, progress
        self._told_at: float | None = None

    def watch(self, shards: Sequence[int]) -> Callable[[int], None]:
        """Begin to watch a wait for these shards; returns a function to be called several times a second."""
        started = since = time.monotonic()
        num_retries = self._counts.store_retries
        is_told = False

        def look(_: int) -> None:
            nonlocal since, is_told
            now = time.monotonic()
            if is_told or now - since < LONG_WAIT_S or (self._told_at or 0) > now - TOLD_EACH_S:
                return
            if is_outage_told():
                since = now
                return
            found = self._progress(shards)
            if not found.num_missing or found.state == "no space":
                return
            is_told, self._told_at = True, now
            retries = self._counts.store_retries - num_retries
            _log.warning(
                "a batch has waited %.0f s, %d of its %d shards are missing (%s): %s%s",
                now - started,
                found.num_missing,
                found.num_shards,
                _mib(found.missing_bytes),
                found.reason(),
                f"; {retries} requests were sent again meanwhile" if retries else "",
            )

        return look


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"
