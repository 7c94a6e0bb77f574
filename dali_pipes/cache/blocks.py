"""Blocks of a file: reserved before anything is written there, given back as a hole, read ahead."""

import ctypes
import errno
import os
import tempfile
from pathlib import Path

from dali_pipes.errors import CacheError

__all__ = ["can_punch", "punch", "read_ahead", "reserve"]

# linux/falloc.h
_KEEP_SIZE = 0x01
_PUNCH_HOLE = 0x02

_libc = ctypes.CDLL(None, use_errno=True)
# The os module has posix_fallocate alone: it cannot punch, and the C library lets it write zeros, block by block, where
# the file system cannot reserve.
_fallocate = _libc.fallocate
_fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong]


def reserve(file: int, start: int, size: int) -> None:
    """Allocate the blocks of ``[start, start + size)``: writing there cannot run out of room afterwards.

    Raises:
        OSError: ``ENOSPC`` where there is no space, ``EOPNOTSUPP`` where the file system cannot do it.
    """
    _call(file, 0, start, size)


def punch(file: int, start: int, size: int) -> None:
    """Give the blocks of ``[start, start + size)`` back; it reads as zeros from then on, and nothing else moves.

    Raises:
        OSError: ``EOPNOTSUPP`` where the file system cannot do it.
    """
    _call(file, _PUNCH_HOLE | _KEEP_SIZE, start, size)


def can_punch(directory: Path) -> bool:
    """Whether files in ``directory`` can have holes punched: tried on one without a name.

    Raises:
        CacheError: If no file can be made there.
    """
    try:
        with tempfile.TemporaryFile(dir=directory) as stream:
            file = stream.fileno()
            os.pwrite(file, b"\1" * 8192, 0)
            punch(file, 0, 4096)
            return os.pread(file, 4096, 0) == bytes(4096)
    except OSError as exc:
        if exc.errno == errno.EOPNOTSUPP:
            return False
        raise CacheError(
            f"cannot make an image in '{directory}': {exc.strerror}; pass another cache_dir= (--cache)"
        ) from exc


def read_ahead(file: int, start: int, size: int) -> None:
    """Ask the kernel to have these bytes in memory soon; returns at once."""
    os.posix_fadvise(file, start, size, os.POSIX_FADV_WILLNEED)


def _call(file: int, mode: int, start: int, size: int) -> None:
    while size and _fallocate(file, mode, start, size) != 0:
        number = ctypes.get_errno()
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))
