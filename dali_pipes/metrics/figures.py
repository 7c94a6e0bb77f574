"""The figures of a loader: what they are called, what they mean, how they are read; and the loaders of this process.

A figure is a counter, which only grows, or a gauge. Any thread may read figures, also those of a closed loader.
"""

import os
import threading
import weakref
from collections.abc import Set
from typing import TYPE_CHECKING, NamedTuple

from dali_pipes.errors import printable

if TYPE_CHECKING:
    from dali_pipes.epoch import LoaderParts

Labels = tuple[tuple[str, str], ...]
"""Names and values, sorted by name."""


class Figure(NamedTuple):
    """The name of a figure, its text for people, and its kind."""

    name: str
    help: str
    is_counter: bool

    @property
    def metric(self) -> str:
        """The name that Prometheus knows."""
        return f"dali_pipes_{self.name}{'_total' if self.is_counter else ''}"


_COUNTERS = {
    "samples": "Samples delivered to this rank's loop.",
    "batches": "Batches delivered to this rank's loop.",
    "loader_seconds": "Seconds that the loop spent in the loader: waits for shards, reading and decoding, and its own "
    "work.",
    "shard_wait_seconds": "Seconds that batches waited for shards on their way from the store.",
    "read_wait_seconds": "Seconds that batches waited for encoded bytes from the cache file.",
    "decode_wait_seconds": "Seconds that batches waited for DALI. On a GPU the rest of the wait is in the step's "
    "stream.",
    "fetched_bytes": "Bytes of shards and their indexes that this loader brought from the store into the cache file. "
    "First batches that come by range are not counted.",
    "fetched_shards": "Shards that this loader brought.",
    "read_bytes": "Encoded bytes read from the cache file for batches.",
    "store_retries": "Requests to the store that failed and were sent again.",
    "bad_samples": "Bad samples of this rank, each counted once.",
    "substituted_samples": "Places in delivered batches at which another sample replaced a bad one.",
}
_GAUGES = {
    "epoch": "The epoch that is iterated now or next; the first is 0.",
    "position_samples": "Samples of the epoch delivered so far, on all ranks.",
    "epoch_samples": "Samples of the epoch, on all ranks.",
    "batches_ahead": "Batches that DALI has decoded or is decoding.",
    "cache_resident_bytes": "Bytes that the cache file of the data set takes now: all loaders of the node share it.",
    "cache_held_bytes": "Bytes of shards in the cache file that this loader holds.",
    "cache_reserved_bytes": "Bytes that this loader may always hold.",
    "cache_limit_bytes": "The most that all cache files of the directory may take.",
}
FIGURES = tuple(Figure(name, help, name in _COUNTERS) for name, help in (_COUNTERS | _GAUGES).items())
"""All figures, in the order of `Loader.stats`."""


def read_figures(loader: "LoaderParts") -> dict[str, float]:
    """Read all figures of a loader, by name."""
    counts, stager, share, epoch = loader.counts, loader.stager, loader.share, loader.epochs.current
    return {
        "samples": counts.samples,
        "batches": counts.batches,
        "loader_seconds": counts.in_loader_s(),
        "shard_wait_seconds": counts.shard_wait.seconds(),
        "read_wait_seconds": counts.read_wait.seconds(),
        "decode_wait_seconds": counts.decode_wait.seconds(),
        "fetched_bytes": stager.fetched_bytes,
        "fetched_shards": stager.num_fetched,
        "read_bytes": counts.read_bytes,
        "store_retries": counts.store_retries,
        "bad_samples": len(loader.seen.seen),
        "substituted_samples": counts.substituted,
        "epoch": epoch.number,
        "position_samples": epoch.position,
        "epoch_samples": epoch.num_samples,
        "batches_ahead": len(loader.decode.scheduled),
        "cache_resident_bytes": share.taken_bytes,
        "cache_held_bytes": stager.held_bytes,
        "cache_reserved_bytes": share.reserved,
        "cache_limit_bytes": share.cache_bytes,
    }


def labels_of(loader: "LoaderParts") -> Labels:
    """The labels by which the loader's figures are told from those of others."""
    labels = {
        "data_set": printable(loader.source),
        "loader": printable(loader.counts.name or str(loader.counts.number)),
        "rank": str(loader.batching.process.rank),
    }
    return tuple(labels.items())


class ProcessLoaders:
    """The loaders of this process, and the counters of those that are closed.

    A job may open a loader for every validation. Their counters go on under the same labels, and a closed loader's are
    kept, so a counter never goes backwards.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all loaders: in a forked child they are those of the parent."""
        self._lock = threading.RLock()  # a loader that the garbage collector finds leaves in any thread, at any time
        self._open: weakref.WeakSet[LoaderParts] = weakref.WeakSet()
        self._closed: dict[Labels, dict[str, float]] = {}

    def join(self, loader: "LoaderParts") -> None:
        """Add a loader, and give it a number: the lowest that no open loader has."""
        with self._lock:
            taken = {known.counts.number for known in self._open}
            loader.counts.number = next(number for number in range(len(taken) + 1) if number not in taken)
            self._open.add(loader)

    def leave(self, loader: "LoaderParts") -> None:
        """Remove a loader that is being closed, and keep its counters."""
        with self._lock:
            self._open.discard(loader)
            _add(self._closed.setdefault(labels_of(loader), {}), loader, names=_COUNTERS.keys())

    def read(self) -> dict[Labels, dict[str, float]]:
        """Read the figures of all loaders by their labels: counters summed, and the gauges of one open loader."""
        with self._lock:
            found = {labels: dict(figures) for labels, figures in list(self._closed.items())}
            for loader in sorted(self._open, key=lambda known: known.counts.number):
                _add(found.setdefault(labels_of(loader), {}), loader, names=_COUNTERS.keys() | _GAUGES)
            return found


def _add(figures: dict[str, float], loader: "LoaderParts", *, names: Set[str]) -> None:
    for name, figure in read_figures(loader).items():
        if name in names:
            figures[name] = figure + (figures.get(name, 0) if name in _COUNTERS else 0)


LOADERS = ProcessLoaders()
"""Those of this process."""

os.register_at_fork(after_in_child=LOADERS.clear)
