"""Decode photos by Pillow in a process that may die, for formats of which a broken photo can end the process."""

import atexit
import contextlib
import functools
import math
import os
import select
import signal
import subprocess
import threading
import time
from typing import Self

import numpy as np
import numpy.typing as npt

from dali_pipes.errors import printable
from dali_pipes.formats.orientation import UPRIGHT, upright_size
from dali_pipes.formats.photo_header import PhotoHeader, read_photo_header
from dali_pipes.processes.programs import own_program
from prep.photos.apart_worker import ANSWER, REQUEST

TIMEOUT_S = 60.0
"""A photo that takes longer is bad: Pillow decodes some 50 million pixels of JPEG 2000 in that time."""

_READ_BYTES = 1 << 20
# For each pixel of the largest photo Pillow may have 4 bytes in its buffers some times over; and Pillow itself.
_BYTES_PER_PIXEL = 32
_BASE_BYTES = 2 << 30
# Pillow's readers that have other names than our formats.
_READERS = {"APNG": "PNG"}
_CHARS = 120
_END_S = 5.0

UInt8s = npt.NDArray[np.uint8]
_lock = threading.Lock()


def decode_apart(data: bytes, header: PhotoHeader, orientation: int, *, max_pixels: int) -> UInt8s:
    """Decode a photo, or the first picture of an animation, as `PillowProcess.decode` does."""
    with _lock:
        return _process(max_pixels, os.getpid()).decode(data, header, orientation)


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

    def decode(self, data: bytes, header: PhotoHeader, orientation: int = UPRIGHT) -> UInt8s:
        """Return the pixels of a photo with this header, 8 bits, gray or RGB: uint8 [height, width] or [..., 3].

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
        height, width = (int(side) for side in upright_size(header.height, header.width, orientation))
        # Pillow turns a TIFF upright itself.
        if header.format == "TIFF" and (found.height, found.width) == (width, height):
            height, width = width, height
        if (found.height, found.width) != (height, width):
            raise Undecodable(f"holds {found.height} x {found.width} pixels, its header says {height} x {width}")
        shape = (height, width) if content[1] == ord("5") else (height, width, 3)
        return np.frombuffer(content, np.uint8)[-math.prod(shape) :].reshape(shape)

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

    def _ask(self, data: bytes, reader: str, orientation: int) -> tuple[bool, bytearray]:
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
                own_program("prep.photos.apart_worker", str(self._memory_bytes)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # libtiff and others print a line for each odd tag
                env=kept,
                start_new_session=True,  # Ctrl-C reaches only the owner
            )
        return self._process


@functools.cache
def _process(max_pixels: int, owner: int) -> PillowProcess:  # a forked worker starts its own
    process = PillowProcess(max_pixels=max_pixels)
    atexit.register(process.close)
    return process


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
