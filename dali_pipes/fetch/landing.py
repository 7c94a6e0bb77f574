"""Write the body of an answer into an extent, and hash it on the way."""

import os

from dali_pipes.cache.extents import Extent
from dali_pipes.errors import CacheError
from dali_pipes.fetch.event_loop import NOW, Task
from dali_pipes.fetch.http1 import AnswerBody, Pipe
from dali_pipes.fetch.parts import ObjectPart
from dali_pipes.store.checksums import Checksum

BLOCK_BYTES = 256 << 10  # hashed while it is still in the processor's cache


class BodyWriter:
    """Writes bodies into extents: through a pipe inside the kernel where it can, else through a buffer. Owns pipes."""

    def __init__(self) -> None:
        self._idle_pipes: list[Pipe] = []
        self._can_splice = True
        # Shared by all tasks: none of them waits between filling it and writing it.
        self._block = memoryview(bytearray(BLOCK_BYTES))

    def close(self) -> None:
        """Close all pipes. Can be called twice."""
        while self._idle_pipes:
            self._idle_pipes.pop().close()

    def write_next(self, body: AnswerBody, extent: Extent, part: ObjectPart) -> Task[int]:
        """Write the bytes that came for a part; returns their number, 0 at the end of the body.

        Raises:
            CacheError: If they cannot be written.
        """
        if self._can_splice and body.can_splice:
            return (yield from self._splice(body, extent, part))
        num = yield from body.receive(self._block[: part.stop - part.position])
        extent.write(self._block[:num], part.position)
        _update(part.hashes, self._block[:num])
        return num

    def _splice(self, body: AnswerBody, extent: Extent, part: ObjectPart) -> Task[int]:
        """Move bytes through a pipe into the file, and hash them there while they are in the page cache."""
        pipe = self._idle_pipes.pop() if self._idle_pipes else Pipe()
        try:
            num = yield from body.splice(pipe)
            self._empty(pipe, extent, part.position, num)
        except CacheError:
            pipe.close()  # some bytes are left in it
            raise
        except BaseException:
            self._idle_pipes.append(pipe)
            raise
        self._idle_pipes.append(pipe)
        if part.hashes:
            stop = part.position + num
            for position in range(part.position, stop, BLOCK_BYTES):
                _update(part.hashes, extent.read(position, min(BLOCK_BYTES, stop - position)))
        return num

    def _empty(self, pipe: Pipe, extent: Extent, position: int, num: int) -> None:
        stop = position + num
        try:
            while position < stop:
                position += os.splice(pipe.source, extent.file, stop - position, offset_dst=extent.start + position)
        except OSError:
            # Through a buffer: works where the file system has no splice, and says what is wrong with the disk.
            while position < stop:
                block = os.read(pipe.source, stop - position)
                extent.write(block, position)
                position += len(block)
            self._can_splice = False


def hash_extent(extent: Extent, hashes: list[Checksum]) -> Task[None]:
    """Hash what was read in ranges."""
    for position in range(0, extent.size, BLOCK_BYTES):
        _update(hashes, extent.read(position, BLOCK_BYTES))
        yield NOW


def _update(hashes: list[Checksum], data: bytes | memoryview) -> None:
    for state in hashes:
        state.update(data)
