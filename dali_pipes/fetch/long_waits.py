"""Say why a batch waits long for its shards: once, in one line that a person can act on.

Two other lines say more, and then there is none from here: that a cluster is away (`dali_pipes.store.patience`), and
that the cache has no space (`dali_pipes.fetch.stager`).
"""

import logging
import time
from collections.abc import Callable, Sequence

from dali_pipes.metrics.counts import LONG_WAIT_S
from dali_pipes.store.patience import is_outage_told

_log = logging.getLogger(__name__)

# A store that is always slow is told of as often as a cluster that is away.
TOLD_EACH_S = 60.0


class LongWaits:
    """Watches the waits of one feed. ``progress`` says how far shards have come: see `Stager.progress`."""

    def __init__(self, progress: Callable[[Sequence[int]], str]) -> None:
        self._progress = progress
        self._told_at = float("-inf")

    def watch(self, shards: Sequence[int]) -> Callable[[int], None]:
        """Begin to watch a wait for these shards; returns a function to be called several times a second."""
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
