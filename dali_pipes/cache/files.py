"""The files of a cache directory, under the cache's mutex: the loaders at work, and the cache files of their shards.

::

    DIRECTORY/dali-pipes-UID/       mode 0700: one cache for each user
        lock                        byte 0: the mutex; byte 1 + slot: locked as long as the slot's loader lives
        slots                       the loaders at work: which cache file, how many bytes each has reserved
        KEY.image, KEY.table        one data set's cache file, and the state of its shards
        KEY.source                  the URL of its shards

# Note [removed]: the code removes a cache file only if no loader has a slot for it, but a user may remove a running
job's files. The open files then exist for that job alone, and the next loader makes another cache file of the same
name. So a loader keeps the table that it joined with, and never marks its shards ready in another one.

# Note [damaged]: if the table of a cache file does not fit the file's name, the file is damaged: it is removed, and a
new one is made. Cache files of other data sets stay. A loader that still uses the cache file keeps its open files, as
in Note [removed].
"""

import contextlib
import errno
import logging
import mmap
import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from dali_pipes.arrays import Int64s
from dali_pipes.cache.directory import DamagedFileError, LockFile, Mutex, OwnDirectory
from dali_pipes.cache.extents import OTHER_DIRECTORY, punch
from dali_pipes.cache.table import NUM_SLOTS, State, StateTable, boot_id, is_unfinished
from dali_pipes.errors import CacheError

Result = TypeVar("Result")

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
    ]
)
# The file begins with the version that wrote it; then come the slots.
_SLOTS_START = 64
_SLOTS_MAGIC = b"DALIPIS5"
_SLOTS_BYTES = _SLOTS_START + NUM_SLOTS * _SLOT.itemsize
_MUTEX_BYTE = 0
FIRST_SLOT_BYTE = 1
# The names of a cache file, its table and its source, and of a table that is being made (with a dot before it).
_KEY = re.compile("[0-9a-f]{32}")
_SUFFIXES = ("table", "image", "source")

GOES_ON = 0
"""Value of a slot's ``waiting``: its loader does not wait. Note [waiting] in `dali_pipes.cache.share`."""


class Slots:
    """The loaders at work in a cache directory: one row each of a mapped file."""

    def __init__(self, file: int) -> None:
        self.rows: Any = np.frombuffer(mmap.mmap(file, _SLOTS_BYTES), _SLOT, NUM_SLOTS, offset=_SLOTS_START)

    def used(self) -> list[int]:
        rows: list[int] = np.flatnonzero(self.rows["used"]).tolist()
        return rows

    def of(self, key: str) -> list[int]:
        """List the slots of the loaders that use a cache file."""
        return [slot for slot in self.used() if self.key(slot) == key]

    def key(self, slot: int) -> str:
        return bytes(self.rows["image"][slot]).decode(errors="replace")

    def group(self, slot: int) -> tuple[str, int]:
        """The key of the slot's cache file, and the number of its loader's group there."""
        return self.key(slot), int(self.rows["group"][slot])

    def pids(self, slots: Sequence[int]) -> list[int]:
        return sorted({int(self.rows["pid"][slot]) for slot in slots})

    def write(self, slot: int, *, reserved: int, cache_bytes: int, group: int, key: str) -> None:
        """Give a slot to a loader of this process, or change its row."""
        self.rows[slot] = (1, GOES_ON, os.getpid(), reserved, cache_bytes, group, key.encode())

    def empty(self, slot: int) -> None:
        self.rows[slot] = np.zeros((), _SLOT)

    def least_bytes(self) -> int | None:
        """The smallest ``cache_bytes`` of the loaders at work; ``None`` without loaders."""
        limits = self.rows["cache_bytes"][self.used()]
        return int(limits.min()) if len(limits) else None

    def wake(self) -> None:
        """Make all loaders that wait for space ask again."""
        self.rows["waiting"] = GOES_ON


class OpenCacheFile:
    """A cache file and its table; both are closed with the last reference: a thread may still free blocks in them."""

    def __init__(self, table: StateTable, file: int, place: tuple[int, int]) -> None:
        self.table, self.file = table, file
        self.place = place
        """Device and inode of the table: another file may have its name by now."""

    def unheld(self, slots: Sequence[int]) -> Int64s:
        """List the shards that can be dropped: none of ``slots`` holds them, and nobody fills, checks or drops them."""
        resident = self.table.resident
        idle = resident[~is_unfinished(self.table.state[resident])]
        return idle[~self.table.held(idle, slots)]

    def drop(self, shards: Int64s) -> None:
        """Free the blocks of these shards, except those that were being checked: other loaders may hold them."""
        shards = self.table.end_check(shards)
        self.table.state[shards] = State.DROPPING
        self.punch(shards)
        self.table.remove(shards)

    def punch(self, shards: Int64s) -> None:
        starts = self.table.starts
        for shard in shards.tolist():
            punch(self.file, int(starts[shard]), int(starts[shard + 1] - starts[shard]))

    def forget(self, slot: int) -> None:
        """Undo an ended loader's changes: end its holds, and free the blocks of its unfinished shards."""
        table = self.table
        resident = table.resident
        held = resident[table.holds[slot, resident] != 0]
        table.used_ns[held] = time.time_ns()
        table.holds[slot, held] = 0
        self.drop(resident[is_unfinished(table.state[resident]) & (table.owner[resident] == slot)])

    def close(self) -> None:
        """Close both. Can be called twice."""
        self.table.close()
        file, self.file = self.file, -1
        if file >= 0:
            os.close(file)

    def __del__(self) -> None:
        self.close()


class CacheFiles:
    """The open files of one process in a cache directory. All but `close` is called inside `run`.

    Raises:
        CacheError: If the cache's own directory belongs to somebody else, or no file can be made there.
    """

    def __init__(self, directory: Path) -> None:
        self.root = cache_root(directory)
        self.own = OwnDirectory(self.root)
        self.opened: dict[str, OpenCacheFile] = {}
        """All cache files there, by key."""
        try:
            self.lock = LockFile("lock", directory=self.own.file)
            self._mutex = Mutex(self.lock, _MUTEX_BYTE)
            try:
                self.slots = self._mutex.run(self._open_slots)
            except BaseException:
                self.lock.close()
                raise
        except BaseException as exc:
            self.own.close()
            if not isinstance(exc, OSError):
                raise
            raise CacheError(f"cannot use '{self.root}': {exc.strerror}; {OTHER_DIRECTORY}") from exc

    def close(self) -> None:
        """Close all files. Can be called twice."""
        for opened in self.opened.values():
            opened.close()
        self.opened.clear()
        self.lock.close()
        self.own.close()

    def run(self, change: Callable[[], Result]) -> Result:
        """Call a function under the mutex, with all cache files open that exist now."""
        if self.lock.file < 0:
            raise CacheError(f"'{self.root}' is closed")

        def run() -> Result:
            self._look()
            return change()

        return self._mutex.run(run)

    def used_bytes(self) -> int:
        return sum(opened.table.resident_bytes for opened in self.opened.values())

    def sweep(self) -> bool:
        """Clear up after loaders that are gone; returns whether there were any."""
        slots = self.slots
        is_locked = self.lock.is_locked
        in_use = [slot for slot in slots.used() if FIRST_SLOT_BYTE + slot not in self.lock.held]
        ended = [slot for slot in in_use if not is_locked(FIRST_SLOT_BYTE + slot)]
        for slot in ended:
            opened = self.opened.get(slots.key(slot))
            if opened is not None:
                with opened.table.changing():
                    opened.forget(slot)
            slots.empty(slot)
            slots.wake()
        has_swept = bool(ended)
        for opened in self.opened.values():
            table = opened.table
            resident = table.resident
            unfinished = resident[is_unfinished(table.state[resident])]
            # The loader that dropped these, of another cache file, is gone; or the machine was restarted meanwhile.
            owners = table.owner[unfinished]
            abandoned = unfinished[(owners < 0) | (slots.rows["used"][np.maximum(owners, 0)] == 0)]
            if len(abandoned):
                has_swept = True
                with table.changing():
                    opened.drop(abandoned)
                slots.wake()
        return has_swept

    def make(self, key: str, starts: Int64s, sizes: Int64s, source: str) -> OpenCacheFile:
        """Make a cache file. It replaces another one of this key. For ``starts`` and ``sizes`` see `StateTable`."""
        table_name, file_name, partial = f"{key}.table", f"{key}.image", f".{key}.partial"
        self.remove(key)
        self.own.remove(partial)
        file = -1
        try:
            file = self.own.open(file_name, flags=os.O_CREAT | os.O_EXCL)
            os.ftruncate(file, int(starts[-1]))
            described = self.own.open(f"{key}.source", flags=os.O_CREAT | os.O_EXCL)
            try:
                os.write(described, source.encode(errors="replace"))
            finally:
                os.close(described)
            StateTable(partial, starts=starts, sizes=sizes, directory=self.own.file).close()
            # Last: without its table a cache file does not count.
            os.rename(partial, table_name, src_dir_fd=self.own.file, dst_dir_fd=self.own.file)
            table = StateTable(table_name, directory=self.own.file)
        except BaseException as exc:
            if file >= 0:
                os.close(file)
            for name in (partial, table_name, file_name, f"{key}.source"):
                self.own.remove(name)
            if not isinstance(exc, OSError):
                raise
            size = f" of {int(starts[-1])} bytes" if exc.errno == errno.EFBIG else ""
            raise CacheError(
                f"cannot make a cache file{size} in '{self.root}': {exc.strerror}; {OTHER_DIRECTORY}"
            ) from exc
        found = self.own.stat(table_name)
        self.opened[key] = OpenCacheFile(table, file, (found.st_dev, found.st_ino))
        return self.opened[key]

    def remove(self, key: str) -> None:
        """Remove a cache file; loaders that have joined it keep it open."""
        self.opened.pop(key, None)
        # The table first: while it exists, it must be correct.
        self._remove_names([f"{key}.{suffix}" for suffix in _SUFFIXES], key=key)

    def remove_unused(self) -> None:
        """Remove the cache files that nobody uses, unless they are to be kept and hold something."""
        for key, opened in list(self.opened.items()):
            if not (opened.table.keep and opened.table.resident_bytes) and not self.slots.of(key):
                self.remove(key)

    def _look(self) -> None:
        """Open new cache files, forget removed ones, and repair tables whose change was interrupted."""
        tables, others = self._list()
        for key in others.keys() - tables.keys():
            # A process ended while it made or removed a cache file: no other process has the mutex.
            self._remove_names(others[key], key=key)
        for key, opened in list(self.opened.items()):
            if tables.get(key) != opened.place:
                del self.opened[key]
        for key, place in tables.items():
            if key not in self.opened:
                try:
                    self._open(key, place)
                except OSError as exc:  # no descriptor or no memory is left
                    raise CacheError(f"cannot open '{self.root / key}.table': {exc.strerror}") from exc
        for opened in self.opened.values():
            if opened.table.is_dirty:
                opened.table.repair()

    def _list(self) -> tuple[dict[str, tuple[int, int]], dict[str, list[str]]]:
        """List device and inode of each table, and the names of all other files, by key."""
        tables: dict[str, tuple[int, int]] = {}
        others: dict[str, list[str]] = {}
        for name in os.listdir(self.own.file):  # noqa: PTH208 (of a descriptor)
            key, _, suffix = name.removeprefix(".").partition(".")
            if suffix not in (*_SUFFIXES, "partial") or not _KEY.fullmatch(key):
                continue
            if suffix == "table":
                with contextlib.suppress(FileNotFoundError):  # a user has removed it now
                    found = self.own.stat(name)
                    tables[key] = (found.st_dev, found.st_ino)
            else:
                others.setdefault(key, []).append(name)
        return tables, others

    def _open(self, key: str, place: tuple[int, int]) -> None:
        """Open a cache file; if it is damaged, remove it, see Note [damaged]."""
        table, file = None, -1
        try:
            table = StateTable(f"{key}.table", directory=self.own.file)
            file = self.own.open(f"{key}.image")
            table.check(file_bytes=os.fstat(file).st_size)
            table.greet(boot_id(), file=file)
        except BaseException as exc:
            if file >= 0:
                os.close(file)
            if table is not None:
                table.close()
            if not isinstance(exc, DamagedFileError | FileNotFoundError):
                raise
            path = self.root / f"{key}.table"
            _log.warning("the cache's file '%s' is damaged (%s): a new one is made", path, exc)
            self.remove(key)
            return
        self.opened[key] = OpenCacheFile(table, file, place)

    def _remove_names(self, names: Sequence[str], *, key: str) -> None:
        is_used = bool(self.slots.of(key))
        for name in names:
            if name.endswith(".image") and not is_used:
                # Others may still have it open, to evict from it, so removing its name would not free its blocks.
                with contextlib.suppress(OSError, DamagedFileError):
                    file = self.own.open(name)
                    try:
                        os.ftruncate(file, 0)
                    finally:
                        os.close(file)
            self.own.remove(name)

    def _open_slots(self) -> Slots:
        has_loaders = any(self.lock.is_locked(FIRST_SLOT_BYTE + slot) for slot in range(NUM_SLOTS))
        file = self.own.open("slots", flags=os.O_CREAT)
        try:
            # Reserved: on a full tmpfs, a write to a page that does not exist is a SIGBUS.
            os.posix_fallocate(file, 0, _SLOTS_BYTES)
            if os.pread(file, len(_SLOTS_MAGIC), 0) != _SLOTS_MAGIC:
                if has_loaders:
                    raise CacheError(
                        f"'{self.root}' is in use by loaders of another version of dali-pipes, or '{self.root}/slots' "
                        f"is damaged; wait until they end, or {OTHER_DIRECTORY}"
                    )
                os.pwrite(file, bytes(_SLOTS_BYTES - _SLOTS_START), _SLOTS_START)
                os.pwrite(file, _SLOTS_MAGIC, 0)
            return Slots(file)
        finally:
            os.close(file)  # it stays mapped


def cache_root(directory: Path) -> Path:
    """Return the path of the cache's own directory: each user has one, which nobody else can read."""
    return directory / f"dali-pipes-{os.geteuid()}"
