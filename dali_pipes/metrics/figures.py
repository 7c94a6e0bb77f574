"""The figures of a loader: what they are called, what they mean, how they are read; and the loaders of this process.

A figure is a counter, which only grows, or a gauge. Any thread may read figures, also those of a closed loader.
"""

import os
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

from dali_pipes.errors import printable

if TYPE_CHECKING:
    from dali_pipes.epoch import LoaderParts

Labels = tuple[tuple[str, str], ...]
"""Names and values, sorted by name."""


class HasStats(Protocol):
    """A loader, or one of its faces."""

    def stats(self) -> dict[str, float]: ...


class Figure(NamedTuple):
    """One number of a loader."""

    name: str
    help: str
    read: "Callable[[LoaderParts], float]"
    is_counter: bool = True

    @property
    def metric(self) -> str:
        """The name that Prometheus knows."""
        return f"dali_pipes_{self.name}{'_total' if self.is_counter else ''}"


FIGURES = (
    Figure("samples", "Samples delivered to this rank's loop.", lambda it: it.counts.samples),
    Figure("batches", "Batches delivered to this rank's loop.", lambda it: it.counts.batches),
    Figure(
        "loader_seconds",
        "Seconds that the loop spent in the loader: waits for shards, reading and decoding, and its own work.",
        lambda it: it.counts.in_loader_s(),
    ),
    Figure(
        "shard_wait_seconds",
        "Seconds that batches waited for shards on their way from the store.",
        lambda it: it.counts.shard_wait.seconds(),
    ),
    Figure(
        "read_wait_seconds",
        "Seconds that batches waited for encoded bytes from the cache file.",
        lambda it: it.counts.read_wait.seconds(),
    ),
    Figure(
        "decode_wait_seconds",
        "Seconds that batches waited for DALI. On a GPU the rest of the wait is in the step's stream.",
        lambda it: it.counts.decode_wait.seconds(),
    ),
    Figure(
        "fetched_bytes",
        "Bytes of shards and their indexes that this loader brought from the store into the cache file.",
        lambda it: it.stager.fetched_bytes,
    ),
    Figure("fetched_shards", "Shards that this loader brought.", lambda it: it.stager.num_fetched),
    Figure("read_bytes", "Encoded bytes read from the cache file for batches.", lambda it: it.counts.read_bytes),
    Figure(
        "store_retries",
        "Requests to the store that failed and were sent again.",
        lambda it: it.counts.store_retries,
    ),
    Figure("bad_samples", "Bad samples of this rank, each counted once.", lambda it: len(it.seen.seen)),
    Figure(
        "substituted_samples",
        "Places in delivered batches at which another sample replaced a bad one.",
        lambda it: it.counts.substituted,
    ),
    Figure(
        "epoch", "The epoch that is iterated now or next; the first is 0.", lambda it: it.epochs.current.number, False
    ),
    Figure(
        "position_samples",
        "Samples of the epoch delivered so far, on all ranks.",
        lambda it: it.epochs.current.position,
        False,
    ),
    Figure("epoch_samples", "Samples of the epoch, on all ranks.", lambda it: it.epochs.current.num_samples, False),
    Figure(
        "batches_ahead", "Batches that DALI has decoded or is decoding.", lambda it: len(it.decode.scheduled), False
    ),
    Figure(
        "cache_resident_bytes",
        "Bytes that the cache file of the data set takes now: all loaders of the node share it.",
        lambda it: it.share.taken_bytes,
        False,
    ),
    Figure(
        "cache_held_bytes",
        "Bytes of shards in the cache file that this loader holds.",
        lambda it: it.stager.held_bytes,
        False,
    ),
    Figure("cache_reserved_bytes", "Bytes that this loader may always hold.", lambda it: it.share.reserved, False),
    Figure(
        "cache_limit_bytes",
        "The most that all cache files of the directory may take.",
        lambda it: it.share.cache_bytes,
        False,
    ),
)
"""All figures, in the order of `Loader.stats`."""


def read_figures(loader: "LoaderParts") -> dict[str, float]:
    """Read all figures of a loader, by name."""
    return {figure.name: figure.read(loader) for figure in FIGURES}


def logged_figures(loader: HasStats) -> dict[str, float]:
    """The figures as trainers log them beside their own: ``loader/samples`` and so on."""
    return {f"loader/{name}": figure for name, figure in loader.stats().items()}


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
            _add(self._closed.setdefault(labels_of(loader), {}), loader, gauges=False)

    def read(self) -> dict[Labels, dict[str, float]]:
        """Read the figures of all loaders by their labels: counters summed, and the gauges of one open loader."""
        with self._lock:
            found = {labels: dict(figures) for labels, figures in list(self._closed.items())}
            for loader in sorted(self._open, key=lambda known: known.counts.number):
                _add(found.setdefault(labels_of(loader), {}), loader, gauges=True)
            return found


def _add(figures: dict[str, float], loader: "LoaderParts", *, gauges: bool) -> None:
    for figure in FIGURES:
        if figure.is_counter:
            figures[figure.name] = figures.get(figure.name, 0) + figure.read(loader)
        elif gauges:
            figures[figure.name] = figure.read(loader)


LOADERS = ProcessLoaders()
"""Those of this process."""

os.register_at_fork(after_in_child=LOADERS.clear)
