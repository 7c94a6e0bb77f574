"""Read segments with one system call a batch, in a thread, into memory that is used again.

The call is Linux's asynchronous I/O (``io_submit``). For a file that is read through the page cache, as ours is, the
kernel does the reads inside the call, one after the other. So nothing is asynchronous here. What counts is that the
calling thread does not hold Python's GIL meanwhile: `os.preadv` takes one place of a file per call, and after each call
the thread waits for the GIL, up to 5 ms if another thread computes.

The structures and numbers are those of ``linux/aio_abi.h`` and of the kernel's tables of system calls.
"""

import contextlib
import ctypes
import errno
import logging
import os
import platform
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np

from dali_pipes.arrays import Int64s
from dali_pipes.reader.buffers import Buffers
from dali_pipes.reader.encoded_batch import EncodedBatch, take_batch
from dali_pipes.reader.feed import Lines, SegmentReader
from dali_pipes.reader.webdataset import WebdatasetReader

# Batches that a segment reads ahead. With one, the reading thread would wait until the loop takes that batch.
NUM_AHEAD = 2
# Reads in one call. The kernel limits the sum over the machine's contexts: /proc/sys/fs/aio-max-nr, 65,536 by default.
MAX_READS = 256

_PREAD = 0  # IOCB_CMD_PREAD
_IOCB = np.dtype(
    [
        *(("data", "<u8"), ("key", "<u4"), ("rw_flags", "<u4"), ("opcode", "<u2"), ("priority", "<i2")),
        *(("file", "<u4"), ("address", "<u8"), ("size", "<u8"), ("offset", "<i8"), ("reserved", "<u8")),
        *(("flags", "<u4"), ("event_file", "<u4")),
    ]
)
_EVENT = np.dtype([("data", "<u8"), ("iocb", "<u8"), ("result", "<i8"), ("result2", "<i8")])
# io_setup, io_destroy, io_submit, io_getevents
_CALLS = {"x86_64": (206, 207, 209, 208), "aarch64": (0, 1, 2, 4)}

_log = logging.getLogger(__name__)


class Aio:
    """A context for reads of one thread at a time.

    Raises:
        OSError: If the kernel, or the container's filter of system calls, does not allow it.
    """

    def __init__(self) -> None:
        calls = _CALLS.get(platform.machine())
        if calls is None:
            raise OSError(errno.ENOSYS, f"no asynchronous I/O is known for {platform.system()} on {platform.machine()}")
        self._setup, self._destroy, self._submit, self._get_events = calls
        self._syscall = ctypes.CDLL(None, use_errno=True).syscall
        self._syscall.restype = ctypes.c_long
        context = ctypes.c_ulong(0)
        self._call(self._setup, MAX_READS, ctypes.addressof(context))
        self._context: int | None = context.value
        self._pid = os.getpid()
        self._iocbs = np.zeros(MAX_READS, _IOCB)
        self._iocbs["opcode"] = _PREAD
        self._iocbs["data"] = np.arange(MAX_READS)
        # The kernel takes a list of pointers.
        self._pointers = self._iocbs.ctypes.data + _IOCB.itemsize * np.arange(MAX_READS, dtype=np.uint64)
        self._events = np.zeros(MAX_READS, _EVENT)
        # A sandbox may allow a context, and no reads: so a byte is read.
        with contextlib.ExitStack() as undone:
            undone.callback(self.close)
            file = os.memfd_create("dali-pipes-aio", os.MFD_CLOEXEC)
            with os.fdopen(file, "wb", 0) as stream:
                stream.write(b"x")
                size, byte = np.ones(1, np.int64), np.zeros(1, np.uint8)
                self.read(file, offsets=0 * size, sizes=size, addresses=byte.ctypes.data * size)
            if byte[0] != ord("x"):
                raise OSError(errno.ENOSYS, "asynchronous I/O gives other bytes than the file has")
            undone.pop_all()

    def read(self, file: int, *, offsets: Int64s, sizes: Int64s, addresses: Int64s) -> None:
        """Read ``sizes`` bytes at ``offsets`` of an open file to ``addresses`` in memory; all are int64 [N]."""
        for first in range(0, len(sizes), MAX_READS):
            part = slice(first, first + MAX_READS)
            self._read(file, offsets[part], sizes[part], addresses[part])

    def _read(self, file: int, offsets: Int64s, sizes: Int64s, addresses: Int64s) -> None:
        num = len(sizes)
        iocbs = self._iocbs[:num]
        iocbs["file"], iocbs["offset"], iocbs["size"], iocbs["address"] = file, offsets, sizes, addresses
        results = np.zeros(num, np.int64)
        submitted = finished = 0
        while finished < num:
            if submitted < num:
                pointers = self._pointers.ctypes.data + 8 * submitted
                try:
                    submitted += self._call(self._submit, self._context, num - submitted, pointers)
                except BlockingIOError:  # the kernel has no place for the reads now
                    num = submitted  # the others are read below, one after the other
            if submitted == finished:
                continue
            found = self._call(
                self._get_events, self._context, submitted - finished, MAX_READS, self._events.ctypes.data, 0
            )
            events = self._events[:found]
            results[events["data"].astype(np.int64)] = events["result"]
            finished += found
        for position in np.flatnonzero(results != sizes).tolist():
            result, offset, size = (int(column[position]) for column in (results, offsets, sizes))
            if result < 0 and result != -errno.EAGAIN:
                raise OSError(-result, os.strerror(-result))
            _read_rest(file, offset, size, int(addresses[position]), max(0, result))

    def close(self) -> None:
        """Free the context. Can be called twice; a forked child has no context to free."""
        context, self._context = self._context, None
        if context is not None and os.getpid() == self._pid:
            self._call(self._destroy, context)

    def _call(self, number: int, *arguments: int | None) -> int:
        while True:
            result = int(self._syscall(ctypes.c_long(number), *(ctypes.c_ulong(value or 0) for value in arguments)))
            if result >= 0:
                return result
            if (code := ctypes.get_errno()) != errno.EINTR:
                raise OSError(code, os.strerror(code))


def _read_rest(file: int, offset: int, size: int, address: int, done: int) -> None:
    """Finish a read that returned fewer bytes: the kernel gives at most 2 GiB at a time, and none if it was refused."""
    memory = memoryview((ctypes.c_char * size).from_address(address)).cast("B")
    while done < size:
        num = os.preadv(file, [memory[done:]], offset + done)
        if not num:
            raise OSError(errno.EIO, f"the file ends at byte {offset + done}, expected {size} bytes from {offset}")
        done += num


class _Read(NamedTuple):
    result: "Future[list[EncodedBatch]]"
    lines: Lines
    rows: slice


class AioReader:
    """The reading thread of a loader, and its buffers; see `dali_pipes.reader.feed.SegmentReader`.

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

    def begin(self, lines: Lines, rows: slice) -> "Future[list[EncodedBatch]]":
        """Start to read the rows of a batch; the result holds its components."""
        read = _Read(Future(), lines, rows)
        self._begun.put(read)
        return read.result

    def close(self) -> None:
        self._begun.put(None)
        self._thread.join()

    def _work(self) -> None:
        try:
            while (read := self._begun.get()) is not None:
                if read.result.set_running_or_notify_cancel():
                    try:
                        read.result.set_result(self._read(read.lines, read.rows))
                    except BaseException as exc:  # noqa: BLE001 (raised by the thread that takes the batch)
                        read.result.set_exception(exc)
                del read  # its batch is not to be kept until the next one comes
        finally:
            self._aio.close()  # here: Ctrl-C may end the wait for this thread
            os.close(self._file)

    def _read(self, lines: Lines, rows: slice) -> list[EncodedBatch]:
        sizes, offsets = (np.stack([column[rows] for column in columns]) for columns in (lines.sizes, lines.starts))
        buffer, batch, starts = take_batch(self._buffers, sizes)
        has_bytes = sizes > 0
        addresses = buffer.ctypes.data + starts[has_bytes]
        self._aio.read(self._file, offsets=offsets[has_bytes], sizes=sizes[has_bytes], addresses=addresses)
        return batch


class AioSegment:
    """Reads ahead while batches are taken; see `dali_pipes.reader.feed.Segment`."""

    def __init__(self, reader: AioReader, lines: Lines, *, batch_size: int) -> None:
        self._reader, self._lines = reader, lines
        self._rows = iter([slice(at, at + batch_size) for at in range(0, len(lines.ordinals), batch_size)])
        self._reading: deque[Future[list[EncodedBatch]]] = deque()
        for _ in range(NUM_AHEAD):
            self._begin()

    def read(self) -> Sequence[EncodedBatch]:
        batch = self._reading[0].result()
        self._reading.popleft()
        self._begin()
        return batch

    def close(self) -> None:
        self._rows = iter([])
        while self._reading:
            reading = self._reading.pop()
            if not reading.cancel():
                reading.exception()  # waits

    def _begin(self) -> None:
        if (rows := next(self._rows, None)) is not None:
            self._reading.append(self._reader.begin(self._lines, rows))


def open_reader(path: str, *, kind: str = "auto", buffers: Buffers | None = None) -> SegmentReader:
    """Open a reader of the cache file at ``path``; ``kind="auto"`` is the first of the two that the system allows.

    ``"aio"`` puts encoded bytes into ``buffers``; ``None``: into ordinary memory.

    Raises:
        OSError: If ``kind`` is ``"aio"`` and the system does not allow it.
    """
    if kind != "webdataset":
        try:
            aio = Aio()
        except OSError as exc:
            if kind == "aio":
                raise
            _log.warning(
                "the system does not allow asynchronous I/O of Linux (%s): DALI's reader is used, which takes more CPU "
                "time; dali-pipes doctor says what to allow",
                exc.strerror,
            )
        else:
            return AioReader(path, aio=aio, buffers=buffers or Buffers())
    return WebdatasetReader(path)
