"""Read segments from the store by range, into memory, while their shards are staged.

The first batches of an epoch name samples of many shards. If few bytes of these shards are wanted, and most of them are
not in the cache, the samples alone come first. Whatever fails here is no error: the shards are on their way.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from dali_pipes.arrays import Int64s
from dali_pipes.formats.shard_index import ComponentRange
from dali_pipes.reader.batch import Rows
from dali_pipes.reader.buffers import Buffers
from dali_pipes.reader.encoded_batch import EncodedBatch, take_batch
from dali_pipes.reader.samples import Samples
from dali_pipes.store.patience import waits_ended_by

RANGED_SHARE = 8
"""Samples are read by range if they have less than this part, 1/8, of the bytes that are missing of their shards. A
range costs a request; above an eighth of the shards, whole shards came sooner from a real AIStore."""
MAX_RANGED_BYTES = 64 << 20
"""The most that a segment takes of memory, and in all the most that a feed reads by range."""

_Batches = list[list[EncodedBatch]]

_log = logging.getLogger(__name__)


class RangedSegment:
    """A segment that a thread of its own reads at once; see `dali_pipes.reader.feed.Segment`.

    The thread is a daemon: a program that ends does not wait for it.
    """

    def __init__(self, read: Callable[[], tuple[Rows, _Batches]]) -> None:
        self._read = read
        self._closed = threading.Event()
        self._batches: _Batches = []
        self.over = threading.Event()
        """Set when all is read, or will not come."""
        self.rows: Rows | None = None
        """The samples; ``None`` until all is read, and if it could not be."""
        try:
            threading.Thread(target=self._work, name="dali-pipes-range", daemon=True).start()
        except RuntimeError:  # the process may not start more threads
            self.over.set()

    def read(self) -> Sequence[EncodedBatch]:
        """Take the next batch."""
        return self._batches.pop(0)

    def close(self) -> None:
        """End the thread's waits, and do not wait for it: it writes to memory of its own. Can be called twice."""
        self._closed.set()

    def _work(self) -> None:
        try:
            with waits_ended_by(self._closed):
                self.rows, self._batches = self._read()
        except Exception:  # noqa: BLE001 (whole shards come instead, or their error)
            _log.debug("a segment could not be read by range", exc_info=True)
        finally:
            self.over.set()


class RangedReader:
    """Opens the segments of one loader that are read by range.

    ``components`` is filled when the graph is known, before the first segment is opened.
    """

    def __init__(
        self,
        samples: Samples,
        *,
        components: Sequence[str],
        read_index: Callable[[int], bytes],
        read_ranges: Callable[[Sequence[ComponentRange]], list[bytes]],
        buffers: Buffers,
    ) -> None:
        self._samples, self._components, self._read_index = samples, components, read_index
        self._read_ranges, self._buffers = read_ranges, buffers

    def open(self, ordinals: Int64s, *, batch_size: int) -> RangedSegment:
        """Start to read these samples. Their number is a multiple of ``batch_size``."""
        return RangedSegment(partial(self._read, ordinals, batch_size))

    def load(self, ordinals: Int64s) -> Rows:
        """Read the indexes of these samples' shards from the store, and look the samples up there."""
        self._samples.load(np.unique(self._samples.shard_of(ordinals)).tolist(), self._read_index)
        return self._samples.rows(ordinals)

    def _read(self, ordinals: Int64s, batch_size: int) -> tuple[Rows, _Batches]:
        rows = self.load(ordinals)
        sizes = np.stack([rows.places(component).size for component in self._components])
        if (num_bytes := int(sizes.sum())) > MAX_RANGED_BYTES:
            raise ValueError(f"{num_bytes} bytes are too many to be read by range")
        batches, places, ranges = [], [], []
        for first in range(0, len(ordinals), batch_size):
            buffer, batch, starts = take_batch(self._buffers, sizes[:, first : first + batch_size])
            batches.append(batch)
            for number, position in np.ndindex(starts.shape):
                if (one := rows.range_of(self._components[number], first + position)) is not None:
                    places.append(buffer[starts[number, position] :][: one.size])
                    ranges.append(one)
        for place, data in zip(places, self._read_ranges(ranges), strict=True):
            place[:] = np.frombuffer(data, np.uint8)
        return rows, batches
