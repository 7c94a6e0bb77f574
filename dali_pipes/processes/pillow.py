"""Decode photos by Pillow in processes that may die, for formats that must not reach DALI's decoders.

A broken JPEG 2000 or TIFF can end the process that decodes it. So these formats are decoded in processes of their own.
The pixels come back as a PNM file, which DALI's decoders take in the place of the photo: the graph stays as it is.
"""

import contextlib
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Self

import numpy as np
import numpy.typing as npt

from dali_pipes.errors import printable
from dali_pipes.formats.orientation import UPRIGHT, upright_size
from dali_pipes.formats.photo_header import PhotoHeader, read_photo_header
from dali_pipes.processes.pillow_worker import ANSWER, REQUEST
from dali_pipes.processes.programs import own_program

TIMEOUT_S = 60.0
"""A photo that takes longer is bad: Pillow decodes some 50 million pixels of JPEG 2000 in that time."""

_READ_BYTES = 1 << 20
# For each pixel of the largest photo Pillow may have 4 bytes in its buffers some times over; and Pillow itself.
_BYTES_PER_PIXEL = 32
_BASE_BYTES = 2 << 30
# Names of Pillow's readers that differ from ours.
_READERS = {"APNG": "PNG"}
_CHARS = 120
_END_S = 5.0

UInt8s = npt.NDArray[np.uint8]


class Undecodable(Exception):  # noqa: N818 (it describes the photo)
    """A photo that cannot be decoded. The text follows the photo's name: ``cannot be decoded ...``."""


class PillowProcess:
    """One process, started with its first photo and again after a photo that ended it. Used by one thread at a time.

    ``max_pixels`` is the size of the largest photo; the process may have memory in proportion to it.
    """

    def __init__(self, *, max_pixels: int) -> None:
        self._max_answer = 3 * max_pixels + _READ_BYTES
        self._memory_bytes = _BASE_BYTES + _BYTES_PER_PIXEL * max_pixels
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = os.getpid()

    def decode(self, data: bytes | memoryview, header: PhotoHeader, orientation: int = UPRIGHT) -> UInt8s:
        """Return the pixels of a photo with this header as a PNM file of 8 bits, gray or RGB: uint8 [bytes].

        They are turned upright by ``orientation``, as `dali_pipes.formats.orientation` describes it.

        Raises:
            Undecodable: If Pillow cannot decode it, dies of it, takes more than `TIMEOUT_S`, or finds another size.
        """
        try:
            is_decoded, content = self._ask(data, _READERS.get(header.format, header.format), orientation)
        except EOFError as exc:
            raise Undecodable(f"cannot be decoded: {exc}") from exc
        if not is_decoded:
            text = printable(bytes(content).decode("utf-8", "replace"), max_chars=_CHARS)
            raise Undecodable(f"cannot be decoded by Pillow: {text}")
        found = read_photo_header(memoryview(content))
        height, width = upright_size(header.height, header.width, orientation)
        if (found.height, found.width) != (height, width):
            raise Undecodable(f"holds {found.height} x {found.width} pixels, its header says {height} x {width}")
        return np.frombuffer(content, np.uint8)

    def close(self) -> None:
        """End the process. Can be called twice. In a process that was forked from the owner it does nothing."""
        process, self._process = self._process, None
        if process is None or os.getpid() != self._owner:
            return
        process.kill()  # it holds nothing that must be saved
        process.wait()
        _close_streams(process)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, data: bytes | memoryview, reader: str, orientation: int) -> tuple[bool, bytearray]:
        """Return the worker's answer; `EOFError` says why there is none, and the next photo gets a new process."""
        process = self._running()
        assert process.stdin is not None
        try:
            process.stdin.write(REQUEST.pack(reader.encode(), orientation, len(data)))
            process.stdin.write(data)
            process.stdin.flush()
            deadline = time.monotonic() + TIMEOUT_S
            is_decoded, num_bytes = ANSWER.unpack(_read(process, ANSWER.size, deadline))
            if num_bytes > self._max_answer:
                raise EOFError  # only a process that a photo has taken over answers so
            return is_decoded, _read(process, num_bytes, deadline)
        except (BrokenPipeError, EOFError) as exc:
            self._process = None
            raise EOFError(_end(process, is_late=isinstance(exc, _TimeoutError))) from exc
        except BaseException:
            self.close()  # by Ctrl-C: the answer to this request must not be taken for that to the next
            raise

    def _running(self) -> "subprocess.Popen[bytes]":
        if self._process is None:
            # Tokens and certificates stay here: the process works on strangers' data.
            kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH") if name in os.environ}
            self._process = subprocess.Popen(  # noqa: S603  # our own interpreter and arguments
                own_program("dali_pipes.processes.pillow_worker", str(self._memory_bytes)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # libtiff and others print a line for each odd tag
                env=kept,
                start_new_session=True,  # Ctrl-C reaches only the owner
            )
        return self._process


class PillowProcesses:
    """Decodes the photos of a batch in up to ``num`` processes, which are started when they are needed."""

    def __init__(self, num: int, *, max_pixels: int) -> None:
        self._num, self._max_pixels = num, max_pixels
        self._threads: ThreadPoolExecutor | None = None
        self._own = threading.local()
        self._processes: list[PillowProcess] = []

    def decode(self, photos: Sequence[tuple[memoryview, PhotoHeader, int]]) -> list[UInt8s | str]:
        """Return the PNM file of each photo, as `PillowProcess.decode` does, or the reason why it is bad.

        A photo comes with its header and its orientation.
        """
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._num, thread_name_prefix="dali-pipes-pillow")
        return list(self._threads.map(self._decode, photos))

    def close(self) -> None:
        """End threads and processes. Can be called twice."""
        threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown(cancel_futures=True)
        while self._processes:
            self._processes.pop().close()
        self._own = threading.local()

    def _decode(self, photo: tuple[memoryview, PhotoHeader, int]) -> UInt8s | str:
        if not hasattr(self._own, "process"):
            self._own.process = PillowProcess(max_pixels=self._max_pixels)
            self._processes.append(self._own.process)
        try:
            pixels: UInt8s = self._own.process.decode(*photo)
        except Undecodable as exc:
            return str(exc)
        return pixels


class _TimeoutError(EOFError):
    """No answer in time."""


def _read(process: "subprocess.Popen[bytes]", num_bytes: int, deadline: float) -> bytearray:
    assert process.stdout is not None
    found, file = bytearray(), process.stdout.fileno()
    poll = select.poll()
    poll.register(file, select.POLLIN)
    while len(found) < num_bytes:
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise _TimeoutError
        piece = os.read(file, min(_READ_BYTES, num_bytes - len(found)))
        if not piece:
            raise EOFError
        found += piece
    return found


def _end(process: "subprocess.Popen[bytes]", *, is_late: bool) -> str:
    """End a process that does not answer, and say why it does not."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(0.0 if is_late else _END_S)  # it may be about to end, by a signal that the user should know
    process.kill()
    status = process.wait()
    _close_streams(process)
    if is_late:
        return f"Pillow takes longer than {TIMEOUT_S:g} s"
    return f"Pillow's process ended by {signal.Signals(-status).name if status < 0 else f'exit status {status}'}"


def _close_streams(process: "subprocess.Popen[bytes]") -> None:
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):  # bytes that the process did not take
                stream.close()
