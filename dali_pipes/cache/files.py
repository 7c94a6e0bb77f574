"""Open, make and remove the files of a cache directory, under the cache's mutex.

::

    DIRECTORY/dali-pipes-UID/       mode 0700: one cache for each user
        lock                        byte 0: the mutex; byte 1 + slot: locked as long as the slot's loader lives
        slots                       the loaders at work: which cache file, how many bytes each has reserved
        KEY.image, KEY.table        one data set's cache file, and the state of its shards
        KEY.source                  the URL of its shards
        KEY.columns                 the manifest's columns, which its loaders share; only if they are large
        NAME.0.damaged              a file that could not be used, moved aside: nothing reads it

# Note [removed]: the code removes a cache file only if no loader has a slot for it, but a user may remove a running
job's files. The open files then exist for that job alone, and the next loader makes another cache file of the same
name. So a loader keeps the table that it joined with, and never marks its shards ready in another one.

# Note [damaged]: a file that cannot be what its name says is moved aside, and a new one is made; files of other data
# sets are not concerned. A loader that still uses the cache file keeps its open files, as in Note [removed]. A slot
# whose row was changed is emptied if its loader is gone. If the loader lives, nobody knows which cache file it uses, so
# it counts as a user of all of them; it writes its row again itself.
"""

import contextlib
import errno
import logging
import mmap
import os
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dali_pipes.cache.blocks import OTHER_DIRECTORY
from dali_pipes.cache.locks import LockFile, Mutex, shielded
from dali_pipes.cache.own_files import DamagedFileError, OwnDirectory
from dali_pipes.cache.table import NUM_SLOTS, Int64s, StateTable, boot_id
from dali_pipes.errors import CacheError

_log = logging.getLogger(__name__)

_SLOT = np.dtype(
    [
        ("used", "u1"),
        ("waiting", "u1"),
        ("pid", "<i4"),
        ("reserved", "<i8"),
        ("cache_bytes", "<i8"),
        ("group", "<u8"),
        ("image", "S32"),
        ("checksum", "<u4"),
    ]
)
# The bytes of a row that change only with `CacheFiles._write_row`: all but ``used`` and ``waiting``.
_ROW = slice(2, _SLOT.itemsize)
UNKNOWN = 2
"""Value of ``used`` for a loader that lives, and whose row was changed. Note [damaged]."""
# The file begins with the version that wrote it; then come the slots.
_SLOTS_START = 64
_SLOTS_MAGIC = b"DALIPIS3"
_MUTEX_BYTE = 0
FIRST_SLOT_BYTE = 1
# The names of a cache file, its table and its source, and of a table that is being made (with a dot before it).
_KEY = re.compile("[0-9a-f]{32}")
_SUFFIXES = {"table", "image", "source", "columns", "partial"}


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
        self._cache_files: dict[str, OpenCacheFile] = {}
        self._gone: list[OpenCacheFile] = []
        self._joined: dict[int, OpenCacheFile] = {}
        self._my_rows: dict[int, bytes] = {}
        """What this cache wrote to its slots, ``used`` and the bytes of `_ROW`."""
        self._slots_file = -1
        self._files = OwnDirectory(self.root)
        try:
            self._lock = self._open_lock()
            try:
                shielded(self._open_slots)
            except BaseException:
                self._lock.close()
                _close(self._slots_file)
                raise
        except BaseException as exc:
            self._files.close()
            if not isinstance(exc, OSError):
                raise
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
        self._files.close()

    def _key(self, slot: int) -> str:
        return bytes(self._slots["image"][slot]).decode(errors="replace")

    def _slots_of(self, key: str) -> list[int]:
        """List the slots of the loaders that use a cache file, or may use it: see Note [damaged]."""
        used = np.flatnonzero(self._slots["used"]).tolist()
        return [slot for slot in used if self._slots["used"][slot] == UNKNOWN or self._key(slot) == key]

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
        self._check_rows()
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
        for key, place in tables.items():
            if key not in self._cache_files:
                try:
                    self._open_cache_file(key, place)
                except OSError as exc:  # no descriptor or no memory is left
                    raise CacheError(f"cannot open '{self.root / key}.table': {exc.strerror}") from exc
        for opened in self._cache_files.values():
            if opened.table.is_dirty:
                opened.table.repair()

    def _list(self) -> tuple[dict[str, tuple[int, int]], dict[str, list[str]]]:
        """List device and inode of each table, and the names of all other files, by key."""
        tables: dict[str, tuple[int, int]] = {}
        others: dict[str, list[str]] = {}
        for name in self._files.names():
            key, _, suffix = name.removeprefix(".").partition(".")
            if suffix not in _SUFFIXES or not _KEY.fullmatch(key):
                continue
            if suffix == "table":
                with contextlib.suppress(FileNotFoundError):  # a user has removed it now
                    found = self._files.stat(name)
                    tables[key] = (found.st_dev, found.st_ino)
            else:
                others.setdefault(key, []).append(name)
        return tables, others

    def _open_cache_file(self, key: str, place: tuple[int, int]) -> None:
        """Open a cache file, or move it aside. Note [damaged]."""
        try:
            table = StateTable(f"{key}.table", directory=self._files.file)
        except DamagedFileError as exc:
            self._set_aside(key, exc)
            return
        file = -1
        try:
            file = self._files.open(f"{key}.image")
            table.check(file_bytes=os.fstat(file).st_size)
            table.greet(boot_id(), file=file)
        except BaseException as exc:
            _close(file)
            table.close()
            if not isinstance(exc, DamagedFileError | FileNotFoundError):
                raise
            self._set_aside(key, exc)
            return
        self._cache_files[key] = OpenCacheFile(table, file, place)

    def _set_aside(self, key: str, cause: DamagedFileError | FileNotFoundError) -> None:
        self._files.set_aside(f"{key}.table", str(cause))
        self._remove_names(key)

    def _check_rows(self) -> None:
        """Write this cache's own rows again if they were changed, and empty or mark others. Note [damaged]."""
        written = np.flatnonzero((self._slots["used"] != 0) | (self._slots["checksum"] != 0)).tolist()
        for slot in {*written, *self._my_rows}:
            row = self._row_bytes(slot)
            if slot in self._my_rows:
                if row[:1] + row[_ROW] != self._my_rows[slot]:
                    self._fill_row(slot, self._my_rows[slot])
            elif row[0] != 1 or _row_checksum(row) != int.from_bytes(row[-4:], "little"):
                if not self._lock.is_locked(FIRST_SLOT_BYTE + slot):
                    self._slots[slot] = np.zeros((), _SLOT)
                elif row[0] != UNKNOWN:
                    self._slots["used"][slot] = UNKNOWN
                    _log.warning("'%s/slots' is damaged: slot %d, of a loader at work", self.root, slot)

    def _write_row(self, slot: int, *, pid: int, reserved: int, cache_bytes: int, group: int, key: str) -> None:
        """Give a slot to a loader, or change its row."""
        row = np.array((1, 0, pid, reserved, cache_bytes, group, key.encode(), 0), _SLOT)
        row["checksum"] = _row_checksum(row.tobytes())
        self._my_rows[slot] = row.tobytes()[:1] + row.tobytes()[_ROW]
        self._fill_row(slot, self._my_rows[slot])

    def _row_bytes(self, slot: int) -> bytes:
        return bytes(self._rows[slot * _SLOT.itemsize : (slot + 1) * _SLOT.itemsize])

    def _fill_row(self, slot: int, row: bytes) -> None:
        """Write all of a row but ``waiting``, and ``used`` last: until then it belongs to no loader."""
        start, stop = slot * _SLOT.itemsize, (slot + 1) * _SLOT.itemsize
        self._rows[start] = 0
        self._rows[start + _ROW.start : stop] = row[1:]
        self._rows[start] = row[0]

    def _empty_row(self, slot: int) -> None:
        self._my_rows.pop(slot, None)
        self._slots["used"][slot] = 0
        self._slots[slot] = np.zeros((), _SLOT)

    def _make_cache_file(self, key: str, starts: Int64s, source: str) -> OpenCacheFile:
        table_name, file_name, partial = f"{key}.table", f"{key}.image", f".{key}.partial"
        if (unfit := self._cache_files.pop(key, None)) is not None:
            self._gone.append(unfit)
        self._remove_names(key)
        self._files.remove(partial)
        file = -1
        try:
            file = self._files.open(file_name, flags=os.O_CREAT | os.O_EXCL)
            os.ftruncate(file, int(starts[-1]))
            described = self._files.open(f"{key}.source", flags=os.O_CREAT | os.O_EXCL)
            try:
                os.write(described, source.encode(errors="replace"))
            finally:
                os.close(described)
            StateTable(partial, starts=starts, directory=self._files.file).close()
            self._files.rename(partial, table_name)  # last: without its table a cache file does not count
            table = StateTable(table_name, directory=self._files.file)
        except BaseException as exc:
            _close(file)
            for name in (partial, table_name, file_name, f"{key}.source"):
                self._files.remove(name)
            if not isinstance(exc, OSError):
                raise
            size = f" of {int(starts[-1])} bytes" if exc.errno == errno.EFBIG else ""
            raise CacheError(
                f"cannot make a cache file{size} in '{self.root}': {exc.strerror}; {OTHER_DIRECTORY}"
            ) from exc
        found = self._files.stat(table_name)
        opened = OpenCacheFile(table, file, (found.st_dev, found.st_ino))
        self._cache_files[key] = opened
        return opened

    def _remove_files(self, key: str) -> None:
        self._gone.append(self._cache_files.pop(key))
        self._remove_names(key)

    def _remove_names(self, key: str) -> None:
        # The table first: while it exists, it must be correct.
        self._remove(*(f"{key}.{suffix}" for suffix in ("table", "image", "source", "columns")), key=key)

    def _remove(self, *names: str, key: str) -> None:
        is_used = bool(self._slots_of(key))
        for name in names:
            if name.endswith(".image") and not is_used:
                # Others may still have it open, to evict from it, so removing its name would not free its blocks.
                with contextlib.suppress(OSError, DamagedFileError):
                    file = self._files.open(name)
                    try:
                        os.ftruncate(file, 0)
                    finally:
                        os.close(file)
            self._files.remove(name)

    def _open_lock(self) -> LockFile:
        try:
            return LockFile("lock", directory=self._files.file)
        except DamagedFileError:
            with self._files.alone():  # another process may have put it right meanwhile
                try:
                    return LockFile("lock", directory=self._files.file)
                except DamagedFileError as exc:
                    self._files.set_aside("lock", str(exc))
                    return LockFile("lock", directory=self._files.file)

    def _open_slots(self) -> None:
        self._mutex = Mutex(self._lock, _MUTEX_BYTE)
        size = _SLOTS_START + NUM_SLOTS * _SLOT.itemsize
        with self._mutex:
            try:
                self._slots_file = self._files.open("slots", flags=os.O_CREAT)
            except DamagedFileError as exc:
                if self._has_loaders():
                    raise CacheError(
                        f"'{self.root}' has loaders at work, and no file of their slots ({exc}); wait until they end, "
                        f"or {OTHER_DIRECTORY}"
                    ) from exc
                self._files.set_aside("slots", str(exc))
                self._slots_file = self._files.open("slots", flags=os.O_CREAT)
            # Reserved: on a full tmpfs, a write to a page that does not exist is a SIGBUS.
            os.posix_fallocate(self._slots_file, 0, size)
            if os.pread(self._slots_file, len(_SLOTS_MAGIC), 0) != _SLOTS_MAGIC:
                if self._has_loaders():
                    raise CacheError(
                        f"'{self.root}' is in use by loaders of another version of dali-pipes; wait until they end, or "
                        f"{OTHER_DIRECTORY}"
                    )
                os.pwrite(self._slots_file, bytes(size - _SLOTS_START), _SLOTS_START)
                os.pwrite(self._slots_file, _SLOTS_MAGIC, 0)
            mapped = mmap.mmap(self._slots_file, size)
            self._slots: Any = np.frombuffer(mapped, _SLOT, NUM_SLOTS, offset=_SLOTS_START)
            self._rows = memoryview(mapped)[_SLOTS_START:]

    def _has_loaders(self) -> bool:
        return any(self._lock.is_locked(FIRST_SLOT_BYTE + slot) for slot in range(NUM_SLOTS))


def cache_root(directory: Path) -> Path:
    """Return the path of the cache's own directory: each user has one, which nobody else can read."""
    return directory / f"dali-pipes-{os.geteuid()}"


def _row_checksum(row: bytes) -> int:
    return zlib.crc32(row[_ROW][:-4])


def _close(file: int) -> None:
    if file >= 0:
        os.close(file)
