"""Count what one loader does, so cheaply that it always counts: a few additions a batch.

Every number has one writer at a time, and any thread may read it: a reader never sees a number go backwards.
"""

import logging
import threading
import time

from dali_pipes.metrics import tracing

_log = logging.getLogger(__name__)

LONG_WAIT_S = 10.0
"""A wait that takes so long is worth a line in the log: the longest step of a healthy job is far shorter."""
# A wait that takes so long becomes a span.
_SPAN_S = 1.0


class Wait:
    """Seconds for which one stage was waited for, also while a wait goes on; a context of one thread at a time.

    ``advice`` is logged, once, when a wait has taken `LONG_WAIT_S`; ``None``: somebody else logs it.
    """

    __slots__ = ("_advice", "_stage", "_state", "_told_s")

    def __init__(self, stage: str, *, advice: str | None = None) -> None:
        self._stage, self._advice = stage, advice
        # One value, so that a reader in another thread sees both: seconds of the waits that are over, and when this one
        # began.
        self._state: tuple[float, float | None] = (0.0, None)
        self._told_s = 0.0

    def seconds(self) -> float:
        """Seconds so far."""
        total, since = self._state
        # A wait that ends between these lines has taken less than they say: then the number stands still for a moment.
        self._told_s = max(self._told_s, total if since is None else total + time.perf_counter() - since)
        return self._told_s

    def __enter__(self) -> None:
        total, since = self._state
        now = time.perf_counter()
        self._state = (total if since is None else total + now - since, now)

    def __exit__(self, *_: object) -> None:
        total, since = self._state
        took = 0.0 if since is None else time.perf_counter() - since
        self._state = (total + took, None)
        if took >= _SPAN_S:
            self._report(took)

    def _report(self, took: float) -> None:
        tracing.report("wait", seconds=took, stage=self._stage)
        if took >= LONG_WAIT_S and self._advice is not None:
            _log.warning("a batch waited %.0f s: %s", took, self._advice)
            self._advice = None


class Counts:
    """What one loader has done since it was made."""

    def __init__(self) -> None:
        self.samples: int = 0
        """Samples in delivered batches that count: see `Loader.num_valid`."""
        self.batches: int = 0
        """Delivered batches."""
        self.read_bytes: int = 0
        """Encoded bytes of the batches that were read from the cache file."""
        self.shard_wait: Wait = Wait("shards")
        """For shards that were not resident. The stager logs long waits: it knows the shards."""
        self.read_wait: Wait = Wait(
            "read",
            advice="its encoded bytes were resident, and reading them from the cache file took so long; is the disk of "
            "the cache directory busy? `dali-pipes doctor` names it, and Cache(directory=) another one",
        )
        """For the thread that reads encoded bytes."""
        self.decode_wait: Wait = Wait(
            "decode",
            advice="DALI had its bytes, and decoding took so long; `dali-pipes profile` says which stage is slow, and "
            "whether other processes take the cores",
        )
        """For DALI."""
        self.in_loader: Wait = Wait("loader")
        """For the loader as a whole: the other waits, and its own work."""
        self.store_retries: int = 0
        self._lock = threading.Lock()

    def add_retry(self) -> None:
        """Count a request to the store that is sent again. Any thread may call this."""
        with self._lock:
            self.store_retries += 1
