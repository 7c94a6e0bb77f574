"""Hold the data set's shards in one sparse file: shard i owns a fixed extent, so a sample's address never changes.

Filling an extent: its blocks are reserved first (so that a full disk is an error here and never a SIGBUS in a reader),
the bytes are written, then size and checksum are held against the manifest. Only then may an index name the shard.
"""

import errno
import io
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import xxhash

from dali_pipes.errors import CacheError, DataError

__all__ = ["EXTENT_ALIGNMENT", "Image", "check_room", "choose_cache_dir", "extent_starts"]

EXTENT_ALIGNMENT = 4096
"""Page and block size: an extent can be reserved, and later punched, without touching its neighbours."""

COPY_BYTES = 1 << 20
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 (files there get no name)
# copy_file_range answers one of these where it cannot serve this pair of files; reading and writing does.
_NO_COPY = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF, errno.EPERM}
_CHANGED = "it was cut off or replaced since: put it back, or index the shards anew: dali-pipes prep index URL"

Int64s = npt.NDArray[np.int64]


def extent_starts(shard_bytes: Int64s) -> Int64s:
    """Where each shard's extent starts, and, last, where the image ends: int64 [shards + 1].

    >>> extent_starts(np.array([1, 4096, 5000])).tolist()
    [0, 4096, 8192, 16384]
    """
    aligned = -(-np.asarray(shard_bytes, np.int64) // EXTENT_ALIGNMENT) * EXTENT_ALIGNMENT
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(aligned)])


def choose_cache_dir(num_bytes: int) -> Path:
    """Shared memory where ``num_bytes`` take at most half of what is free there and of free memory, else a disk.

    Raises:
        CacheError: If neither has room.
    """
    memory = min(_free_bytes(SHARED_MEMORY), _available_memory()) // 2
    if num_bytes <= memory:
        return SHARED_MEMORY
    disk = Path(tempfile.gettempdir())
    free = _free_bytes(disk)
    if num_bytes <= free:
        return disk
    raise CacheError(
        f"the shards take {num_bytes} bytes; free are {memory} in '{SHARED_MEMORY}' (half is left to others) and "
        f"{free} in '{disk}'; pass cache_dir= with room for them"
    )


def check_room(cache_dir: Path, num_bytes: int) -> None:
    """Refuse a directory without room.

    Raises:
        CacheError: If it is not there, or ``num_bytes`` are not free in it.
    """
    if not cache_dir.is_dir():
        raise CacheError(f"cache_dir '{cache_dir}' is no directory; pass one with room for {num_bytes} bytes")
    free = _free_bytes(cache_dir)
    if num_bytes > free:
        raise CacheError(f"the shards take {num_bytes} bytes, '{cache_dir}' has {free} free; pass another cache_dir=")


class Image:
    """The sparse file, private to this process: it has no name, so nothing is left of it when the process is gone.

    Args:
        shard_bytes: int64 [shards], from the manifest.
        cache_dir: A local directory that can hold all of them.

    Raises:
        CacheError: If no file can be made there.
    """

    def __init__(self, shard_bytes: Int64s, *, cache_dir: Path) -> None:
        self.cache_dir = cache_dir
        self.starts = extent_starts(shard_bytes)
        self._shard_bytes = np.asarray(shard_bytes, np.int64)
        try:
            self._file = tempfile.TemporaryFile(dir=cache_dir, buffering=0)  # noqa: SIM115 (close() closes it)
            os.ftruncate(self._file.fileno(), int(self.starts[-1]))
        except OSError as exc:
            raise CacheError(f"cannot make an image in '{cache_dir}': {exc.strerror}; pass another cache_dir=") from exc

    @property
    def path(self) -> str:
        """A path that opens the image, in this process only."""
        return f"/proc/self/fd/{self._file.fileno()}"

    def fill(self, shard: int, stream: BinaryIO, *, checksum: int, name: str, stopped: Callable[[], bool]) -> bool:
        """Copy a shard into its extent and check it.

        Args:
            shard: Its number in the manifest.
            stream: Its bytes; a local file is copied by the kernel, by reference where the file system can.
            checksum: XXH64, from the manifest.
            name: Its URL, for errors.
            stopped: Asked between blocks; ``True`` gives up.

        Returns:
            Whether the shard is whole; ``False`` only if ``stopped``.

        Raises:
            CacheError: If there is no room.
            DataError: If size or checksum are not the manifest's.
        """
        start, expected = int(self.starts[shard]), int(self._shard_bytes[shard])
        self._reserve(shard, name)
        copied = self._copy_by_kernel(stream, start, expected)
        if copied is None:
            copied = self._copy_by_hand(stream, start, expected, stopped)
        if stopped():
            return False
        if copied < expected or stream.read(1):
            found = f"{copied}" if copied < expected else f"more than {expected}"
            raise DataError(f"shard '{name}' has {found} bytes, the manifest says {expected}; {_CHANGED}")
        state, position = xxhash.xxh64(), start
        while position < start + expected:
            block = os.pread(self._file.fileno(), min(COPY_BYTES, start + expected - position), position)
            state.update(block)
            position += len(block)
        if state.intdigest() != checksum:
            raise DataError(
                f"shard '{name}' has the xxhash2 {state.hexdigest()}, the manifest says {checksum:016x}; {_CHANGED}"
            )
        return True

    def close(self) -> None:
        """Give the blocks back once no reader has the image open. Can be called twice."""
        self._file.close()

    def _reserve(self, shard: int, name: str) -> None:
        start, stop = int(self.starts[shard]), int(self.starts[shard + 1])
        if start == stop:
            return
        try:
            os.posix_fallocate(self._file.fileno(), start, stop - start)
        except OSError as exc:
            free = _free_bytes(self.cache_dir)
            raise CacheError(
                f"no room for shard '{name}' in '{self.cache_dir}': {stop - start} bytes needed, {free} free "
                f"({exc.strerror}); pass cache_dir= with room for {int(self.starts[-1])} bytes"
            ) from exc

    def _copy_by_kernel(self, stream: BinaryIO, start: int, num_bytes: int) -> int | None:
        """Bytes copied, fewer only where the file is shorter; ``None`` where the kernel cannot do it."""
        if not isinstance(stream, io.BufferedReader):
            return None
        copied = 0
        while copied < num_bytes:
            try:
                step = os.copy_file_range(
                    stream.fileno(), self._file.fileno(), num_bytes - copied, copied, start + copied
                )
            except OSError as exc:
                if exc.errno in _NO_COPY and copied == 0:
                    return None
                raise CacheError(f"cannot copy '{stream.name}' into '{self.cache_dir}': {exc.strerror}") from exc
            if step == 0:
                break
            copied += step
        stream.seek(copied)
        return copied

    def _copy_by_hand(self, stream: BinaryIO, start: int, num_bytes: int, stopped: Callable[[], bool]) -> int:
        """Bytes copied, fewer only where the stream is shorter or ``stopped``."""
        copied = 0
        while copied < num_bytes and not stopped():
            block = stream.read(min(COPY_BYTES, num_bytes - copied))
            if not block:
                break
            written = 0
            while written < len(block):
                written += os.pwrite(self._file.fileno(), block[written:], start + copied + written)
            copied += len(block)
        return copied


def _free_bytes(directory: Path) -> int:
    try:
        stat = os.statvfs(directory)
    except OSError:
        return 0
    return stat.f_bavail * stat.f_frsize


def _available_memory() -> int:
    """Bytes that can be had without swapping, as the kernel reckons."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), 0)
