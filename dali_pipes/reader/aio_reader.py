"""Read segments with one system call a batch, in a thread, into memory that is used again."""

import os
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np

from dali_pipes.reader.aio import Aio
from dali_pipes.reader.buffers import ALIGNMENT, Buffers, EncodedBatch
from dali_pipes.reader.segments import Lines

_this_thread = threading.local()


def in_reader() -> bool:
    """Whether this thread reads for a loader: it cannot wait for its own end."""
    return getattr(_this_thread, "reads", False)


# Small batches are read several at a time, up to this many samples: to hand work to a thread and back takes as long as
# to read a few samples.
MIN_SAMPLES = 64
# Reads that a segment has begun and not given: with one alone the thread would wait until its batch is taken.
NUM_AHEAD = 2


class _Read(NamedTuple):
    result: "Future[deque[list[EncodedBatch]]]"
    lines: Lines
    rows: slice
    batch_size: int


class AioReader:
    """The reading thread of a loader, and its buffers; see `dali_pipes.reader.segments.SegmentReader`.

    It owns ``aio``, and closes it.
    """

    def __init__(self, path: str, *, aio: Aio, buffers: Buffers) -> None:
        self._aio, self._buffers = aio, buffers
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            aio.close()
            raise
        self._begun: SimpleQueue[_Read | None] = SimpleQueue()
        # No executor: Python's take no work when the main thread has ended, but a loop in another thread may go on.
        self._thread = threading.Thread(target=self._work, name="dali-pipes-read", daemon=True)
        self._thread.start()

    def open(self, lines: Lines, *, batch_size: int) -> "AioSegment":
        return AioSegment(self, lines, batch_size=batch_size)

    def begin(self, lines: Lines, rows: slice, *, batch_size: int) -> "Future[deque[list[EncodedBatch]]]":
        """Begin to read some rows; the result is their batches, each a list of its components."""
        read = _Read(Future(), lines, rows, batch_size)
        self._begun.put(read)
        return read.result

    def close(self) -> None:
        self._begun.put(None)
        self._thread.join()
        self._aio.close()
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)

    def _work(self) -> None:
        _this_thread.reads = True
        while (read := self._begun.get()) is not None:
            if read.result.set_running_or_notify_cancel():
                try:
                    read.result.set_result(self._read(read.lines, read.rows, read.batch_size))
                except BaseException as exc:  # noqa: BLE001 (raised by the thread that takes the batch)
                    read.result.set_exception(exc)
            del read  # its batches are not to be kept until the next one comes

    def _read(self, lines: Lines, rows: slice, batch_size: int) -> deque[list[EncodedBatch]]:
        sizes = np.concatenate([column[rows] for column in lines.sizes])
        offsets = np.concatenate([column[rows] for column in lines.starts])
        padded = -(-sizes // ALIGNMENT) * ALIGNMENT
        starts = np.cumsum(padded) - padded
        buffer = self._buffers.take(int(padded.sum()))
        there = np.flatnonzero(sizes)
        self._aio.read(
            self._file,
            offsets=offsets[there],
            sizes=sizes[there],
            addresses=buffer.ctypes.data + starts[there],
        )
        # [component, batch, sample]
        shape = (len(lines.sizes), -1, batch_size)
        components = [
            [EncodedBatch(buffer, *columns, is_pinned=self._buffers.is_pinned) for columns in zip(*both, strict=True)]
            for both in zip(starts.reshape(shape), sizes.reshape(shape), strict=True)
        ]
        return deque(map(list, zip(*components, strict=True)))


class AioSegment:
    """Reads ahead while batches are taken; see `dali_pipes.reader.segments.Segment`."""

    def __init__(self, reader: AioReader, lines: Lines, *, batch_size: int) -> None:
        self._reader, self._lines, self._batch_size = reader, lines, batch_size
        self._rows_at_once = -(-MIN_SAMPLES // batch_size) * batch_size
        self._next = 0  # the first row that is not begun
        self._done: deque[list[EncodedBatch]] = deque()
        self._reading: deque[Future[deque[list[EncodedBatch]]]] = deque()
        self._begin()

    def read(self) -> Sequence[EncodedBatch]:
        if not self._done:
            assert self._reading, "a segment has as many batches as steps"
            self._done = self._reading[0].result()
            self._reading.popleft()
            self._begin()
        return self._done.popleft()

    def close(self) -> None:
        self._next = len(self._lines.ordinals)
        self._done.clear()
        while self._reading:
            reading = self._reading.pop()
            if not reading.cancel():
                reading.exception()  # waits

    def _begin(self) -> None:
        while self._next < len(self._lines.ordinals) and len(self._reading) < NUM_AHEAD:
            rows = slice(self._next, min(self._next + self._rows_at_once, len(self._lines.ordinals)))
            self._reading.append(self._reader.begin(self._lines, rows, batch_size=self._batch_size))
            self._next = rows.stop
