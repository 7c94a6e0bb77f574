"""Copy local shards into the cache file: inside the kernel if it can, by reference if the file system can."""

import errno
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from dali_pipes.cache.extents import READ_BYTES, Extent
from dali_pipes.errors import CacheError, DataError, StoreError
from dali_pipes.fetch.fetcher import Fetcher, Wanted
from dali_pipes.formats.checksum import checksum as checksum_of

# Errors of copy_file_range for a pair of files that it cannot copy; reading and writing can.
_NO_COPY = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF, errno.EPERM}
# Bytes to copy in one call, which cannot be interrupted.
_COPY_BYTES = 64 << 20
_CHANGED = "it was cut off or replaced since: put it back, or index the shards anew: dali-pipes prep index URL"


class LocalFetcher:
    """A `dali_pipes.fetch.fetcher.Fetcher` of a directory's files."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def fetch(self, wanted: Sequence[Wanted], *, stopped: Callable[[], bool], num_connections: int = 1) -> bool:
        """Copy files into their extents, one after the other, and check them.

        Raises:
            CacheError: If the bytes cannot be written.
            DataError: If size or checksum are not the manifest's.
            StoreError: If a file cannot be read.
        """
        return all(self._copy(*one, stopped) for one in wanted)

    def _copy(self, name: str, extent: Extent, checksum: int, stopped: Callable[[], bool]) -> bool:
        where = str(self._directory / name)
        try:
            source = os.open(where, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as exc:
            raise StoreError(f"cannot read '{where}': {exc.strerror}") from exc
        try:
            found = os.fstat(source).st_size
            if found != extent.size:
                raise DataError(f"shard '{where}' has {found} bytes, the manifest says {extent.size}; {_CHANGED}")
            copied = self._copy_by_kernel(source, extent, where, stopped)
            if not self._copy_by_hand(source, extent, copied, where, stopped):
                return False
        finally:
            os.close(source)
        if (taken := extent.checksum()) != checksum:
            raise DataError(
                f"shard '{where}' has the xxhash2 {taken:016x}, the manifest says {checksum:016x}; {_CHANGED}"
            )
        return True

    def close(self) -> None:
        """Nothing is kept open."""

    @staticmethod
    def _copy_by_kernel(source: int, extent: Extent, where: str, stopped: Callable[[], bool]) -> int:
        """Bytes copied: all, fewer if ``stopped``, none if the kernel cannot copy between the two file systems."""
        copied = 0
        while copied < extent.size and not stopped():
            size = min(_COPY_BYTES, extent.size - copied)
            try:
                step = os.copy_file_range(source, extent.file, size, copied, extent.start + copied)
            except OSError as exc:
                if exc.errno in _NO_COPY and copied == 0:
                    return 0
                raise CacheError(f"cannot copy '{where}' into the cache file: {exc.strerror}") from exc
            if step == 0:
                break
            copied += step
        return copied

    @staticmethod
    def _copy_by_hand(source: int, extent: Extent, copied: int, where: str, stopped: Callable[[], bool]) -> bool:
        """Copy the rest; ``False`` if ``stopped``."""
        while copied < extent.size:
            if stopped():
                return False
            try:
                block = os.pread(source, min(READ_BYTES, extent.size - copied), copied)
            except OSError as exc:
                raise StoreError(f"cannot read '{where}': {exc.strerror}") from exc
            if not block:
                raise DataError(f"shard '{where}' has {copied} bytes, the manifest says {extent.size}; {_CHANGED}")
            extent.write(block, copied)
            copied += len(block)
        return True


class WithIndexes:
    """A fetcher that takes shard indexes from memory, for shards that were indexed on the fly.

    Args:
        shards: Fetches everything else.
        indexes: Name of an index object -> its bytes.
    """

    def __init__(self, shards: Fetcher, indexes: Mapping[str, bytes]) -> None:
        self._shards, self._indexes = shards, indexes

    def fetch(self, wanted: Sequence[Wanted], *, stopped: Callable[[], bool], num_connections: int = 1) -> bool:
        """See `dali_pipes.fetch.fetcher.Fetcher`."""
        stored = []
        for one in wanted:
            data = self._indexes.get(one.name)
            if data is None:
                stored.append(one)
                continue
            assert len(data) == one.extent.size
            assert checksum_of(data) == one.checksum
            one.extent.write(data, 0)
        return self._shards.fetch(stored, stopped=stopped, num_connections=num_connections)

    def close(self) -> None:
        """Close the fetcher of the shards."""
        self._shards.close()
