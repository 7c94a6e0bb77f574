"""Give each shard a fixed place in the cache file; reserve, write, read and free such a place."""

import ctypes
import errno
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from dali_pipes.arrays import Int64s
from dali_pipes.errors import CacheError

OTHER_DIRECTORY = "pass another cache=dali_pipes.Cache(directory=...) (--cache)"
"""Advice in the errors about a directory that cannot hold a cache."""

EXTENT_ALIGNMENT = 4096
"""Page and block size: an extent's blocks can be reserved and freed without touching its neighbours."""

BLOCK_BYTES = 256 << 10
"""Bytes to copy or to hash at a time: they are still in the processor's cache."""
_ASK_BYTES = 1 << 20

# linux/falloc.h
_KEEP_SIZE = 0x01
_PUNCH_HOLE = 0x02

_libc = ctypes.CDLL(None, use_errno=True)
# The os module only has posix_fallocate: it cannot free blocks, and if the file system cannot reserve, the C library
# writes zeros, block by block.
_fallocate = _libc.fallocate
_fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong]


def extent_starts(*object_bytes: Int64s | Sequence[int], alignment: int = EXTENT_ALIGNMENT) -> Int64s:
    """Compute where each shard's extent starts, and, last, where the cache file ends: int64 [shards + 1].

    Args:
        object_bytes: For each object in a shard's extent, in their order there, its bytes: int64 [shards].
        alignment: Of the extents; the objects in them are aligned to `EXTENT_ALIGNMENT`.

    >>> extent_starts([1, 4096, 5000]).tolist()
    [0, 4096, 8192, 16384]
    >>> extent_starts([1, 4096], [10, 10]).tolist()
    [0, 8192, 16384]
    >>> extent_starts([1, 4096], [10, 10], alignment=16384).tolist()
    [0, 16384, 32768]
    """
    aligned = sum(-(-np.asarray(sizes, np.int64) // EXTENT_ALIGNMENT) * EXTENT_ALIGNMENT for sizes in object_bytes)
    extents = -(-np.asarray(aligned, np.int64) // alignment) * alignment
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(extents, dtype=np.int64)])


@dataclass(frozen=True)
class Extent:
    """Bytes ``[start, start + size)`` of an open file: the place of one object."""

    file: int
    """Descriptor, open for reading and writing."""
    start: int
    size: int

    def write(self, data: bytes | memoryview, position: int) -> None:
        """Write ``data`` at ``position`` bytes from the extent's start.

        Raises:
            CacheError: If the disk is full or broken.
        """
        assert 0 <= position <= position + len(data) <= self.size, "an object never leaves its extent"
        view = memoryview(data)
        while view:
            try:
                written = os.pwrite(self.file, view, self.start + position)
            except OSError as exc:
                hint = f"; free some space there, or {OTHER_DIRECTORY}" if exc.errno == errno.ENOSPC else ""
                raise CacheError(f"cannot write to the cache file: {exc.strerror}{hint}") from exc
            view, position = view[written:], position + written

    def read(self, position: int = 0, size: int | None = None) -> bytes:
        """Read ``size`` bytes from ``position`` on (``None``: all); fewer only past the end of the file or extent.

        Raises:
            CacheError: If the disk is broken.
        """
        rest = max(0, self.size - position)
        buffer = bytearray(rest if size is None else min(rest, size))
        return bytes(buffer[: self.read_into(memoryview(buffer), position)])

    def read_into(self, view: memoryview, position: int) -> int:
        """Fill ``view`` from ``position`` on; returns the number of bytes, fewer only at the end of the file.

        A buffer that is used again costs half of what `read` costs: the kernel need not clear new pages for each block.

        Raises:
            CacheError: If the disk is broken.
        """
        assert 0 <= position <= position + len(view) <= self.size, "an object never leaves its extent"
        num_read = 0  # some file systems give less than was asked for
        while num_read < len(view):
            try:
                num = os.preadv(self.file, [view[num_read:]], self.start + position + num_read)
            except OSError as exc:
                raise CacheError(f"cannot read from the cache file: {exc.strerror}") from exc
            if not num:
                break
            num_read += num
        return num_read

    def checksum_unless(self, stopped: Callable[[], bool] = lambda: False) -> int | None:
        """XXH64 of the bytes that are there; ``None`` if ``stopped()`` becomes true, which is asked once a mebibyte."""
        state, block = xxhash.xxh64(), memoryview(bytearray(min(BLOCK_BYTES, self.size)))
        for position in range(0, self.size, BLOCK_BYTES):
            if position % _ASK_BYTES == 0 and stopped():
                return None
            num = self.read_into(block[: self.size - position], position)
            state.update(block[:num])
        return int(state.intdigest())


def reserve(file: int, start: int, size: int) -> None:
    """Allocate the blocks of ``[start, start + size)``: writing there cannot run out of space afterwards.

    Raises:
        OSError: ``ENOSPC`` if there is no space, ``EOPNOTSUPP`` if the file system cannot do it.
    """
    _call(file, 0, start, size)


def punch(file: int, start: int, size: int) -> None:
    """Free the blocks of ``[start, start + size)``, which then reads as zeros; nothing else moves."""
    _call(file, _PUNCH_HOLE | _KEEP_SIZE, start, size)


def can_punch(directory: Path) -> bool:
    """Test on a file without a name whether blocks of files in ``directory`` can be freed."""
    try:
        with tempfile.TemporaryFile(dir=directory) as stream:
            file = stream.fileno()
            os.pwrite(file, b"\1" * 8192, 0)
            punch(file, 0, 4096)
            return os.pread(file, 4096, 0) == bytes(4096)
    except OSError as exc:
        if exc.errno == errno.EOPNOTSUPP:
            return False
        raise CacheError(f"cannot make a cache file in '{directory}': {exc.strerror}; {OTHER_DIRECTORY}") from exc


def _call(file: int, mode: int, start: int, size: int) -> None:
    while size and _fallocate(file, mode, start, size) != 0:
        number = ctypes.get_errno()
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))
