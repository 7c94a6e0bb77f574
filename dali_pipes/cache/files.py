"""Open, make and remove the files of a cache directory, under the cache's mutex.

::

    DIRECTORY/dali-pipes-UID/       mode 0700: one cache for each user
        lock                        byte 0: the mutex; byte 1 + slot: locked as long as the slot's loader lives
        slots                       the loaders at work: which cache file, how many bytes each has reserved
        KEY.image, KEY.table        one data set's cache file, and the state of its shards
        KEY.source                  the URL of its shards

# Note [removed]: the code removes a cache file only if no loader has a slot for it, but a user may remove a running
job's files. The open files then exist for that job alone, and the next loader makes another cache file of the same
name. So a loader keeps the table that it joined with, and never marks its shards ready in another one.
"""

import contextlib
import errno
import mmap
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dali_pipes.cache.blocks import OTHER_DIRECTORY
from dali_pipes.cache.locks import LockFile, Mutex, shielded
from dali_pipes.cache.table import NUM_SLOTS, Int64s, StateTable, boot_id
from dali_pipes.errors import CacheError

_SLOT = np.dtype(
    [
        ("used", "u1"),
        ("waiting", "u1"),
        ("pid", "<i4"),
        ("reserved", "<i8"),
        ("cache_bytes", "<i8"),
        ("group", "<u8"),
        ("image", "S32"),
    ]
)
# The file begins with the version that wrote it; then come the slots.
_SLOTS_START = 64
_SLOTS_MAGIC = b"DALIPIS2"
_MUTEX_BYTE = 0
FIRST_SLOT_BYTE = 1


@dataclass
class OpenCacheFile:
    table: StateTable
    file: int
    place: tuple[int, int]
    """Device and inode of the table: another file may have its name by now."""
    num_users: int = 0
    """This cache's slots in it, and its threads that free blocks there: it stays open for them. The mutex guards it."""

    def close(self) -> None:
        self.table.close()
        _close(self.file)
        self.file = -1


class CacheFiles:
    """The part of a `dali_pipes.cache.cache.NodeCache` that opens, makes and removes files."""

    def __init__(self, directory: Path) -> None:
        self.root = cache_root(directory)
        self._make_root()
        self._cache_files: dict[str, OpenCacheFile] = {}
        self._gone: list[OpenCacheFile] = []
        self._joined: dict[int, OpenCacheFile] = {}
        self._unreadable: set[str] = set()
        self._slots_file = -1
        try:
            self._lock = LockFile(self.root / "lock")
            try:
                shielded(self._open_slots)
            except BaseException:
                self._lock.close()
                _close(self._slots_file)
                raise
        except OSError as exc:
            raise CacheError(f"cannot use '{self.root}': {exc.strerror}; {OTHER_DIRECTORY}") from exc

    def close(self) -> None:
        """Close all files. Can be called twice."""
        for opened in (*self._cache_files.values(), *self._gone):
            opened.close()
        self._cache_files.clear()
        self._gone.clear()
        self._lock.close()
        _close(self._slots_file)
        self._slots_file = -1

    def _key(self, slot: int) -> str:
        return bytes(self._slots["image"][slot]).decode()

    def _slots_of(self, key: str) -> list[int]:
        used = np.flatnonzero(self._slots["used"])
        return [int(slot) for slot in used if self._key(int(slot)) == key]

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Take the mutex, and open all cache files that exist now."""
        if self._lock.file < 0:
            raise CacheError(f"'{self.root}' is closed")
        with self._mutex:
            self._look()
            yield

    def _look(self) -> None:
        """Open new cache files, forget removed ones, and repair tables whose change was interrupted."""
        tables, others = self._list()
        for key in others.keys() - tables.keys():
            # A process ended while it made or removed a cache file: no other process has the mutex.
            self._remove(*others[key], key=key)
        for key, opened in list(self._cache_files.items()):
            if tables.get(key) != opened.place:
                self._gone.append(self._cache_files.pop(key))
        for opened in self._gone:
            if not opened.num_users:
                opened.close()
        self._gone = [opened for opened in self._gone if opened.num_users]
        self._unreadable &= tables.keys()
        for key, place in tables.items():
            if key not in self._cache_files:
                try:
                    self._cache_files[key] = self._open_cache_file(key, place)
                    self._unreadable.discard(key)
                except (CacheError, FileNotFoundError):
                    self._unreadable.add(key)
        for opened in self._cache_files.values():
            if opened.table.is_dirty:
                opened.table.repair()

    def _list(self) -> tuple[dict[str, tuple[int, int]], dict[str, list[Path]]]:
        """List device and inode of each table, and all other files, by key."""
        tables: dict[str, tuple[int, int]] = {}
        others: dict[str, list[Path]] = {}
        # The directory may have been removed: Note [removed].
        with contextlib.suppress(FileNotFoundError), os.scandir(self.root) as entries:
            for entry in entries:
                key, dot, suffix = entry.name.lstrip(".").rpartition(".")
                if suffix == "table":
                    found = entry.stat(follow_symlinks=False)
                    tables[key] = (found.st_dev, found.st_ino)
                elif dot and suffix in ("image", "source", "partial"):
                    others.setdefault(key, []).append(Path(entry.path))
        return tables, others

    def _open_cache_file(self, key: str, place: tuple[int, int]) -> OpenCacheFile:
        file = os.open(self.root / f"{key}.image", os.O_RDWR | os.O_CLOEXEC)
        try:
            table = StateTable(self.root / f"{key}.table")
            table.greet(boot_id(), file=file)
        except BaseException:
            _close(file)
            raise
        return OpenCacheFile(table, file, place)

    def _make_cache_file(self, key: str, starts: Int64s, source: str) -> OpenCacheFile:
        table_path, file_path = self.root / f"{key}.table", self.root / f"{key}.image"
        partial = self.root / f".{key}.partial"
        if (unfit := self._cache_files.pop(key, None)) is not None:
            self._gone.append(unfit)
        self._remove_names(key)
        partial.unlink(missing_ok=True)
        file = -1
        try:
            file = os.open(file_path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            os.ftruncate(file, int(starts[-1]))
            (self.root / f"{key}.source").write_text(source)
            StateTable(partial, starts=starts).close()
            partial.rename(table_path)  # last: without its table a cache file does not count
            table = StateTable(table_path)
        except BaseException as exc:
            _close(file)
            for path in (partial, table_path, file_path, self.root / f"{key}.source"):
                path.unlink(missing_ok=True)
            if not isinstance(exc, OSError):
                raise
            size = f" of {int(starts[-1])} bytes" if exc.errno == errno.EFBIG else ""
            raise CacheError(
                f"cannot make a cache file{size} in '{self.root}': {exc.strerror}; {OTHER_DIRECTORY}"
            ) from exc
        found = table_path.stat()
        opened = OpenCacheFile(table, file, (found.st_dev, found.st_ino))
        self._cache_files[key] = opened
        return opened

    def _remove_files(self, key: str) -> None:
        self._gone.append(self._cache_files.pop(key))
        self._remove_names(key)

    def _remove_names(self, key: str) -> None:
        # The table first: while it exists, it must be correct.
        self._remove(*(self.root / f"{key}.{suffix}" for suffix in ("table", "image", "source")), key=key)

    def _remove(self, *paths: Path, key: str) -> None:
        is_used = bool(self._slots_of(key))
        for path in paths:
            if path.suffix == ".image" and not is_used:
                # Others may still have it open, to evict from it, so removing its name would not free its blocks.
                with contextlib.suppress(OSError):
                    os.truncate(path, 0)
            path.unlink(missing_ok=True)

    def _make_root(self) -> None:
        try:
            self.root.mkdir(mode=0o700)
        except FileExistsError:
            pass  # checked below
        except OSError as exc:
            raise CacheError(f"cannot make '{self.root}': {exc.strerror}; {OTHER_DIRECTORY}") from exc
        found = self.root.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            raise CacheError(f"'{self.root}' is not this user's own directory; remove it, or {OTHER_DIRECTORY}")
        if stat.S_IMODE(found.st_mode) & 0o077:
            self.root.chmod(0o700)

    def _open_slots(self) -> None:
        self._mutex = Mutex(self._lock, _MUTEX_BYTE)
        size = _SLOTS_START + NUM_SLOTS * _SLOT.itemsize
        self._slots_file = os.open(self.root / "slots", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with self._mutex:
            # Reserved: on a full tmpfs, a write to a page that does not exist is a SIGBUS.
            os.posix_fallocate(self._slots_file, 0, size)
            if os.pread(self._slots_file, len(_SLOTS_MAGIC), 0) != _SLOTS_MAGIC:
                if any(self._lock.is_locked(FIRST_SLOT_BYTE + slot) for slot in range(NUM_SLOTS)):
                    raise CacheError(
                        f"'{self.root}' is in use by loaders of another version of dali-pipes; wait until they end, or "
                        f"{OTHER_DIRECTORY}"
                    )
                os.pwrite(self._slots_file, bytes(size - _SLOTS_START), _SLOTS_START)
                os.pwrite(self._slots_file, _SLOTS_MAGIC, 0)
            self._slots: Any = np.frombuffer(mmap.mmap(self._slots_file, size), _SLOT, offset=_SLOTS_START)


def cache_root(directory: Path) -> Path:
    """Return the path of the cache's own directory: each user has one, which nobody else can read."""
    return directory / f"dali-pipes-{os.geteuid()}"


def _close(file: int) -> None:
    if file >= 0:
        os.close(file)
