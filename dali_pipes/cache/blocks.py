"""Reserve the blocks of a file before anything is written there, and free them again."""

import ctypes
import errno
import os
import tempfile
from pathlib import Path

from dali_pipes.errors import CacheError

OTHER_DIRECTORY = "pass another cache=dali_pipes.Cache(directory=...) (--cache)"
"""Advice in the errors about a directory that cannot hold a cache."""

# linux/falloc.h
_KEEP_SIZE = 0x01
_PUNCH_HOLE = 0x02

_libc = ctypes.CDLL(None, use_errno=True)
# The os module only has posix_fallocate: it cannot free blocks, and if the file system cannot reserve, the C library
# writes zeros, block by block.
_fallocate = _libc.fallocate
_fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong]


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
