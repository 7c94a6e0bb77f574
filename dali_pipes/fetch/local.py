"""Copy local shards into the cache file: by reference if the file system can, and check the bytes on their way."""

import errno
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import xxhash

from dali_pipes.cache.extents import BLOCK_BYTES, Extent
from dali_pipes.errors import CacheError, DataError, StoreError
from dali_pipes.fetch.fetcher import Wanted

# Errors of copy_file_range for a pair of files that it cannot copy; reading and writing still works.
_NO_COPY = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF, errno.EPERM}
# Bytes to copy in one call, which cannot be interrupted.
_COPY_BYTES = 64 << 20
_CHANGED = "it was cut off or replaced since: put it back, or index the shards anew: dali-pipes prep index URL --anew"


class LocalFetcher:
    """A `dali_pipes.fetch.fetcher.Fetcher` of a directory's files."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._block = memoryview(bytearray(BLOCK_BYTES))

    def fetch(self, wanted: Sequence[Wanted], *, stopped: Callable[[], bool], num_connections: int = 1) -> bool:
        """Copy files into their extents, one after the other, and check them."""
        return all(one.reported(partial(self._copy, one, stopped)) for one in wanted)

    def close(self) -> None:
        """Do nothing: no file stays open."""

    def _copy(self, one: Wanted, stopped: Callable[[], bool]) -> bool:
        extent, checksum = one.extent, one.checksum
        where = str(self._directory / one.name)
        try:
            source = os.open(where, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as exc:
            raise StoreError(f"cannot read '{where}': {exc.strerror}") from exc
        try:
            found = os.fstat(source).st_size
            if found != extent.size:
                raise DataError(f"shard '{where}' has {found} bytes, the manifest says {extent.size}; {_CHANGED}")
            taken = self._copy_bytes(source, one, where, stopped)
        finally:
            os.close(source)
        if taken is None:
            return False
        if taken != checksum:
            raise DataError(
                f"shard '{where}' has the xxhash2 {taken:016x}, the manifest says {checksum:016x}; {_CHANGED}"
            )
        return True

    def _copy_bytes(self, source: int, one: Wanted, where: str, stopped: Callable[[], bool]) -> int | None:
        """Copy a file and return the XXH64 of its bytes; ``None`` if ``stopped``."""
        extent = one.extent
        num_there = _copy_in_kernel(source, extent, where, stopped)
        state, position = xxhash.xxh64(), 0
        while position < extent.size:
            if stopped():
                return None
            if position < num_there:
                num = extent.read_into(self._block[: num_there - position], position)
                state.update(self._block[:num])
            else:
                try:
                    num = os.preadv(source, [self._block[: extent.size - position]], position)
                except OSError as exc:
                    raise StoreError(f"cannot read '{where}': {exc.strerror}") from exc
                state.update(self._block[:num])
                extent.write(self._block[:num], position)
            if not num:
                raise DataError(f"shard '{where}' has {position} bytes, the manifest says {extent.size}; {_CHANGED}")
            position += num
            one.received(num)
        return int(state.intdigest())


def _copy_in_kernel(source: int, extent: Extent, where: str, stopped: Callable[[], bool]) -> int:
    """Copy as many bytes as the kernel can by itself, and return their number: 0 between most pairs of file systems."""
    copied = 0
    while copied < extent.size and not stopped():
        size = min(_COPY_BYTES, extent.size - copied)
        try:
            step = os.copy_file_range(source, extent.file, size, copied, extent.start + copied)
        except OSError as exc:
            if exc.errno not in _NO_COPY or copied:
                raise CacheError(f"cannot copy '{where}' into the cache file: {exc.strerror}") from exc
            break
        if not step:
            break
        copied += step
    return copied
