"""Keep objects as the files of a directory, and copy shards from there into the cache file.

A copy is by reference if the file system can do that. The bytes are checked on their way.
"""

import builtins
import contextlib
import errno
import itertools
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import xxhash

from dali_pipes.cache.extents import BLOCK_BYTES
from dali_pipes.errors import CacheError, DataError, StoreError
from dali_pipes.fetch.fetcher import Wanted
from dali_pipes.formats.names import path_in_folder
from dali_pipes.store.base import Store
from dali_pipes.store.http.wire import Stopped, StoppedError
from dali_pipes.store.shard_names import ObjectEntry

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

    def fetch(self, wanted: Sequence[Wanted], *, stopped: Stopped, num_connections: int = 1) -> bool:
        """Copy files into their extents, one after the other, and check them."""
        try:
            for one in wanted:
                one.reported(partial(self._copy, one, stopped))
        except StoppedError:
            return False
        return True

    def close(self) -> None:
        """Do nothing: no file stays open."""

    def _copy(self, one: Wanted, stopped: Stopped) -> None:
        where = self._directory / path_in_folder(one.name)
        try:
            with where.open("rb", buffering=0) as source:
                found = os.fstat(source.fileno()).st_size
                if found == one.extent.size:
                    found, digest = self._copy_bytes(source.fileno(), one, stopped)
        except OSError as exc:
            raise StoreError(f"cannot read '{where}': {exc.strerror}") from exc
        if found != one.extent.size:
            raise DataError(f"shard '{where}' has {found} bytes, the manifest says {one.extent.size}; {_CHANGED}")
        if digest != one.checksum:
            raise DataError(
                f"shard '{where}' has the xxhash2 {digest:016x}, the manifest says {one.checksum:016x}; {_CHANGED}"
            )

    def _copy_bytes(self, source: int, one: Wanted, stopped: Stopped) -> tuple[int, int]:
        """Copy a file and return the number and the XXH64 of its bytes."""
        extent = one.extent
        num_there = _copy_in_kernel(source, one, stopped)
        state, position = xxhash.xxh64(), 0
        while position < extent.size:
            if stopped():
                raise StoppedError
            if position < num_there:
                num = extent.read_into(self._block[: num_there - position], position)
            else:
                num = os.preadv(source, [self._block[: extent.size - position]], position)
                extent.write(self._block[:num], position)
            if not num:
                break
            state.update(self._block[:num])
            position += num
            one.received(num)
        return position, state.intdigest()


def _copy_in_kernel(source: int, one: Wanted, stopped: Stopped) -> int:
    """Copy as many bytes as the kernel can by itself, and return their number: 0 between most pairs of file systems."""
    copied, extent = 0, one.extent
    while copied < extent.size and not stopped():
        size = min(_COPY_BYTES, extent.size - copied)
        try:
            step = os.copy_file_range(source, extent.file, size, copied, extent.start + copied)
        except OSError as exc:
            if exc.errno not in _NO_COPY or copied:
                raise CacheError(f"cannot copy '{one.name}' into the cache file: {exc.strerror}") from exc
            break
        if not step:
            break
        copied += step
    return copied


# Errors of file systems that have no files without names.
_NO_UNNAMED = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT)

if TYPE_CHECKING:
    from dali_pipes.formats.shard_index import ComponentRange
    from dali_pipes.store.listings import Found
    from dali_pipes.store.ranges import Way


class LocalStore(Store):
    """A directory of files. Each is written without a name, or with a hidden one, and named at the end."""

    directory: Path

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @property
    def url(self) -> str:
        return str(self.directory)

    def locate(self, name: str) -> str:
        return str(self._path(name))

    def identity(self, name: str) -> str:
        return str(self._path(name).resolve())

    def _path(self, name: str) -> Path:
        return self.directory / path_in_folder(name)

    def exists(self) -> bool:
        return self.directory.is_dir()

    def create(self) -> None:
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise StoreError(f"cannot make '{self.url}': {exc.strerror or exc}") from exc

    def list(self, prefix: str) -> list[ObjectEntry]:
        # Another writer may delete a file while this runs: such a file has no size, and is not listed.
        entries = (_entry(name, self._path(name)) for name in self.list_names(prefix))
        return [entry for entry in entries if entry is not None]

    def list_names(self, prefix: str) -> builtins.list[str]:
        """The sorted names of files and folders that start with ``prefix``. They lie in one folder."""
        path = path_in_folder(prefix)
        folder = self.directory / path.rpartition("/")[0]
        if not folder.is_dir():
            return []
        beginning = f"{prefix.rpartition('/')[0]}/" if "/" in prefix else ""
        # Not `Path.iterdir`: a million paths take more memory than their names.
        names = [beginning + name for name in os.listdir(folder) if not name.startswith(".")]  # noqa: PTH208
        return sorted(name for name in names if name.startswith(prefix))

    def find_all(self, names: Sequence[str]) -> "Found":
        from dali_pipes.store.listings import Found

        found = super().find_all(names)
        if (found.rows < 0).any():  # the names may lie in several folders, and one listing covers only one of them
            entries = zip(names, found, strict=True)
            return Found.of([entry or _entry(name, self._path(name)) for name, entry in entries])
        return found

    def read(self, name: str) -> bytes:
        with self.open(name) as stream:
            return stream.read()

    def find(self, name: str) -> bytes | None:
        try:
            return self._path(name).read_bytes()
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            return None
        except OSError as exc:
            raise self._error("read", name, exc) from exc

    def read_range(self, name: str, *, start: int, size: int) -> bytes:
        with self.open(name) as stream:
            stream.seek(start)
            return stream.read(size)

    def range_ways(self) -> "Sequence[Way]":
        return [self._read_places]

    def _read_places(self, ranges: "Sequence[ComponentRange]") -> builtins.list[bytes]:
        """Read the places in the order of the files, each file opened once."""
        found = [b""] * len(ranges)
        in_order = sorted(range(len(ranges)), key=lambda at: ranges[at][:2])
        for shard, places in itertools.groupby(in_order, key=lambda at: ranges[at].shard):
            try:
                file = os.open(f"{self.directory}/{path_in_folder(shard)}", os.O_RDONLY | os.O_CLOEXEC)
                try:
                    for at in places:
                        found[at] = os.pread(file, ranges[at].size, ranges[at].start)
                finally:
                    os.close(file)
            except OSError as exc:
                raise self._error("read", shard, exc) from exc
        return found

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[BinaryIO]:
        try:
            stream = self._path(name).open("rb")
        except OSError as exc:
            raise self._error("read", name, exc) from exc
        with stream:
            yield stream

    def _error(self, verb: str, name: str, exc: OSError) -> StoreError:
        return StoreError(f"cannot {verb} '{self.locate(name)}': {exc.strerror or exc}")

    def write(self, name: str, data: bytes) -> None:
        with self.replacing(name) as stream:
            stream.write(data)

    def write_new(self, name: str, data: bytes, *, by: str) -> bool:
        """See `Store.write_new`; a hard link gives the file its name, which the system refuses if the name is taken."""
        try:
            with unnamed_file(self._path(name), is_new=True) as (stream, publish):
                stream.write(data)
                stream.flush()
                try:
                    publish()
                except FileExistsError:
                    if not self._path(name).is_file():  # a folder, or a link to nothing
                        raise
                    return False
        except OSError as exc:
            raise self._error("write", name, exc) from exc
        return True

    def upload(self, name: str, path: Path) -> None:
        with path.open("rb") as source, self.replacing(name) as stream:
            shutil.copyfileobj(source, stream, 1 << 20)

    def file(self, name: str, *, size: int) -> Path:
        return self._path(name)

    def open_fetcher(self) -> LocalFetcher:
        return LocalFetcher(self.directory)

    def write_stream(self, name: str, chunks: Callable[[], Iterable[memoryview]], *, num_bytes: int) -> None:
        with self.replacing(name) as stream:
            for chunk in chunks():
                stream.write(chunk)
        assert self.size(name) == num_bytes, "the stream's length was announced"

    @contextlib.contextmanager
    def replacing(self, name: str) -> Iterator[BinaryIO]:
        """A stream that creates or replaces an object: it is there whole or not at all."""
        target = self._path(name)
        try:
            with unnamed_file(target) as (stream, publish):
                yield stream
                stream.flush()
                publish()
        except OSError as exc:
            raise self._error("write", name, exc) from exc

    def size(self, name: str) -> int | None:
        entry = _entry(name, self._path(name))
        return None if entry is None else entry.size

    def delete(self, name: str) -> None:
        self._path(name).unlink(missing_ok=True)


def _entry(name: str, path: Path) -> ObjectEntry | None:
    """The entry of a file; ``None`` if there is none, or another writer deletes it just now."""
    with contextlib.suppress(FileNotFoundError):
        if path.is_file():
            found = path.stat()
            # A copy may keep the older time of its source. The other one is the system's own. A link to older bytes may
            # be new.
            times = (found.st_mtime_ns, found.st_ctime_ns, path.lstat().st_ctime_ns)
            return ObjectEntry(name=name, size=found.st_size, checksum=None, written_ns=(min(times), max(times)))
    return None


@contextlib.contextmanager
def unnamed_file(path: Path, *, is_new: bool = False) -> Iterator[tuple[BinaryIO, Callable[[], None]]]:
    """A file without a name, and a function that gives it its name: nothing is left of a process that is killed.

    With ``is_new``, the function raises `FileExistsError` if the name is taken.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # The name is chosen before the file is made: a worker may be ended at any point in between.
    partial = path.parent / f".partial-{os.urandom(8).hex()}"
    is_named = False
    try:
        try:
            descriptor = os.open(path.parent, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        except OSError as exc:
            if exc.errno not in _NO_UNNAMED:
                raise
            descriptor = os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
            is_named = True
        with os.fdopen(descriptor, "wb") as stream:

            def publish() -> None:
                os.fchmod(descriptor, 0o644)
                # Without src_dir_fd, which has no effect on an absolute path, Python calls link(), which does not
                # follow links. A link cannot replace a file, so a file that may do so gets a free name first.
                if not is_named:
                    name = path if is_new else partial
                    os.link(f"/proc/self/fd/{descriptor}", name, src_dir_fd=descriptor, follow_symlinks=True)
                elif is_new:
                    path.hardlink_to(partial)
                if not is_new:
                    partial.rename(path)

            yield stream, publish
    finally:
        partial.unlink(missing_ok=True)
