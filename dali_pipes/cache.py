"""A directory of images that the processes of a node share: who is there, what is whose, what must go to make room.

::

    DIRECTORY/dali-pipes-UID/       mode 0700: one cache a user
        lock                        byte 0: the mutex; byte 1 + slot: locked as long as the slot's loader lives
        slots                       who is there: which image, how many bytes are promised to it
        KEY.image, KEY.table        one data set's bytes, and the state of its shards

Every change is made under the mutex, held for micro- to milliseconds; bytes are fetched, written and punched outside it.
Nothing in these files must be believed of a process that is gone: its lock went with it, and whoever comes next sweeps
up what it was filling or dropping, and what it held.

# Note [promises]: each loader reserves what it must be able to hold at a time, two windows, or fails to start. Loaders
of the same order of the same shards (the ranks of a job) share one promise, since they hold the same shards. No group of
loaders holds more than its promise, unless what is promised to all others would still fit: so every loader can always
have what it was promised, by evicting what nobody holds.
"""

import contextlib
import errno
import mmap
import os
import stat
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from dali_pipes.errors import CacheError
from dali_pipes.holes import punch
from dali_pipes.locks import LockFile, Mutex
from dali_pipes.table import NUM_SLOTS, State, StateTable, boot_id

__all__ = ["Cache", "ImageStatus", "Take", "cache_root"]

_SLOT = np.dtype(
    [
        ("used", "u1"),
        ("waiting", "u1"),
        ("pid", "<i4"),
        ("reserved", "<i8"),
        ("group", "<u8"),
        ("image", "S32"),
    ]
)
MUTEX_BYTE = 0
FIRST_SLOT_BYTE = 1

Int64s = npt.NDArray[np.int64]


class Take(NamedTuple):
    """What of the wanted shards could be had at once."""

    ready: Int64s
    """Held from now on, whole and checked."""
    fill: int | None
    """To be filled by the caller, who ends it with `Cache.finish` or `Cache.fail`; held as well."""
    is_there: bool
    """Whether the bytes of ``fill`` are there already, from before a start of the machine, and only want checking."""
    blocked: Literal["", "busy", "room"]
    """Why nothing more could be had: others fill or drop what is wanted, or it would not fit."""


@dataclass(frozen=True, kw_only=True)
class ImageStatus:
    """One image of a cache, as ``dali-pipes cache ls`` shows it."""

    key: str
    source: str
    """The URL of its shards."""
    num_shards: int
    num_resident: int
    num_held: int
    resident_bytes: int
    image_bytes: int
    """Extents of all shards."""
    pids: tuple[int, ...]
    """The processes that use it."""
    keep: bool


@dataclass
class _Opened:
    table: StateTable
    file: int
    inode: int


class Cache:
    """One process's view of a cache directory.

    Args:
        directory: A local directory; checked by `dali_pipes.room.check_directory`.

    Raises:
        CacheError: If the cache's own directory belongs to somebody else, or no file can be made there.
    """

    def __init__(self, directory: Path) -> None:
        self.root = cache_root(directory)
        self._make_root()
        self._images: dict[str, _Opened] = {}
        self._gone: list[_Opened] = []
        try:
            self._open_lock()
        except OSError as exc:
            raise CacheError(f"cannot use '{self.root}': {exc.strerror}; pass another cache_dir= (--cache)") from exc

    def close(self) -> None:
        """Close all files. Can be called twice."""
        for opened in (*self._images.values(), *self._gone):
            opened.table.close()
            _close(opened.file)
        self._images.clear()
        self._gone.clear()
        self._lock.close()
        _close(self._slots_file)
        self._slots_file = -1

    @property
    def resident_bytes(self) -> int:
        """What all images take now."""
        with self._changing():
            return self._used_bytes()

    def image_path(self, key: str) -> Path:
        """An image's file."""
        return self.root / f"{key}.image"

    def status(self) -> list[ImageStatus]:
        """All images of the cache."""
        found = []
        with self._changing():
            self._sweep()
            for key, opened in self._images.items():
                slots = self._slots_of(key)
                resident = opened.table.resident
                source = self.root / f"{key}.source"
                found.append(
                    ImageStatus(
                        key=key,
                        source=source.read_text() if source.is_file() else "",
                        num_shards=opened.table.num_shards,
                        num_resident=len(resident),
                        num_held=int(opened.table.held(resident, slots).sum()),
                        resident_bytes=opened.table.resident_bytes,
                        image_bytes=int(opened.table.starts[-1]),
                        pids=tuple(sorted({int(self._slots["pid"][slot]) for slot in slots})),
                        keep=opened.table.keep,
                    )
                )
        return found

    def clear(self) -> tuple[int, int]:
        """Drop all that nobody holds, and the files of images that nobody uses: bytes given back, bytes still held."""
        freed = 0
        with self._changing():
            self._sweep()
            for key, opened in list(self._images.items()):
                slots = self._slots_of(key)
                if not slots:
                    freed += opened.table.resident_bytes
                    self._remove_files(key)
                    continue
                victims = self._evictable(opened.table, slots)
                freed += int(opened.table.extent_bytes(victims).sum())
                with opened.table.changing():
                    self._drop_now(opened, victims)
            held = self._used_bytes()
        return freed, held

    def join(
        self, key: str, *, starts: Int64s, source: str, group: int, reserved: int, cache_bytes: int, keep: bool
    ) -> int:
        """Take a slot for a loader of one image, and the promise of ``reserved`` bytes. See Note [promises].

        Args:
            key: Which image; made if it is not there.
            starts: Its extents.
            source: The URL of its shards.
            group: Loaders of one image and one ``group`` share a promise.
            reserved: Bytes that the group must be able to hold at a time.
            cache_bytes: What all images of the cache may take.
            keep: Whether the image stays when nobody uses it.

        Returns:
            The slot.

        Raises:
            CacheError: If the promise cannot be given.
        """
        with self._changing():
            self._sweep()
            promised = self._promised()
            mine = promised.pop((key, group), 0)
            others = sum(promised.values())
            if max(mine, reserved) + others > cache_bytes:
                raise CacheError(_no_promise(self.root, reserved, others, self._others(key, group), cache_bytes))
            free = np.flatnonzero(self._slots["used"] == 0)
            slot = next((int(s) for s in free if self._lock.try_lock(FIRST_SLOT_BYTE + int(s))), None)
            if slot is None:
                raise CacheError(f"'{self.root}' has {NUM_SLOTS} loaders at work, which is the most it takes")
            opened = self._images.get(key) or self._make_image(key, starts, source)
            with opened.table.changing():
                opened.table.open_row(slot)
            if keep:
                opened.table.set_keep()
            self._slots[slot] = (1, 0, os.getpid(), reserved, group, key.encode())
        return slot

    def reserve(self, slot: int, reserved: int, *, cache_bytes: int) -> None:
        """Change what is promised to a slot's group.

        Raises:
            CacheError: If that much cannot be promised; the old promise stands.
        """
        with self._changing():
            key, group = self._key(slot), int(self._slots["group"][slot])
            self._sweep()
            others = sum(bytes_ for which, bytes_ in self._promised().items() if which != (key, group))
            if reserved + others > cache_bytes:
                raise CacheError(_no_promise(self.root, reserved, others, self._others(key, group), cache_bytes))
            self._slots["reserved"][slot] = reserved

    def leave(self, slot: int) -> None:
        """Give a slot up, and with it all that it holds; an image that is not to be kept goes with its last loader."""
        with self._changing():
            key = self._key(slot)
            opened = self._images.get(key)
            if opened is not None:
                with opened.table.changing():
                    self._forget(opened, slot)
            self._slots["used"][slot] = 0
            if opened is not None and not opened.table.keep and not self._slots_of(key):
                self._remove_files(key)
        self._lock.unlock(FIRST_SLOT_BYTE + slot)

    def take(self, slot: int, wanted: Int64s, *, cache_bytes: int) -> Take:
        """Hold what is ready of ``wanted``, and begin to fill the first shard of it that is not there.

        Args:
            slot: The caller's.
            wanted: Shards that the slot does not hold yet, the most urgent first; none is passed over for room.
            cache_bytes: What all images of the cache may take.
        """
        while True:
            with self._changing():
                taken, victims = self._take(slot, wanted, cache_bytes)
                if not victims:
                    if len(taken.ready) or taken.fill is not None:
                        self._slots["waiting"][slot] = 0
                    return taken
            for opened, shards in victims:
                self._punch(opened, shards)
            with self._changing():
                for opened, shards in victims:
                    with opened.table.changing():
                        opened.table.remove(shards)
            if len(taken.ready):
                return taken

    def finish(self, slot: int, shard: int) -> None:
        """The slot's loader has filled ``shard``, and checked it."""
        with self._changing(), (table := self._table(slot)).changing():
            table.finish(shard)

    def fail(self, slot: int, shard: int) -> None:
        """The slot's loader gives up filling ``shard``: what was written is punched."""
        with self._changing():
            opened = self._images[self._key(slot)]
            with opened.table.changing():
                opened.table.drop([shard], slot)
                opened.table.holds[slot, shard] = 0
        self._punch(opened, np.array([shard]))
        with self._changing(), opened.table.changing():
            opened.table.remove([shard])

    def release(self, slot: int, shards: Sequence[int]) -> None:
        """The slot's loader needs ``shards`` no more; they stay until room is wanted."""
        rows = np.asarray(shards, np.int64)
        with self._changing(), (table := self._table(slot)).changing():
            table.holds[slot, rows] = 0
            table.used_ns[rows] = time.time_ns()

    def is_stuck(self, slot: int) -> bool:
        """Whether the slot's loader and all others wait for room that none of them will give up.

        To be asked by one that wants a shard now and was told that there is no room.
        """
        with self._changing():
            self._sweep()
            self._slots["waiting"][slot] = 1
            if not self._slots["waiting"][self._slots["used"] == 1].all():
                return False
            tables = [opened.table for opened in self._images.values()]
            return not any(
                np.isin(table.state[table.resident], [State.FILLING, State.DROPPING]).any() for table in tables
            )

    def _take(self, slot: int, wanted: Int64s, cache_bytes: int) -> tuple[Take, list[tuple[_Opened, Int64s]]]:
        table = self._table(slot)
        states = table.state[wanted]
        unfinished = (states == State.FILLING) | (states == State.DROPPING)
        if unfinished.any() and self._sweep():
            states = table.state[wanted]
            unfinished = (states == State.FILLING) | (states == State.DROPPING)
        limit, group_slots = self._limit(slot, cache_bytes)
        # What a shard adds to what the group holds: nothing if one of the group holds it already.
        added = np.where(table.held(wanted, group_slots), 0, table.extent_bytes(wanted))
        is_ready = states == State.READY
        fits = np.cumsum(np.where(is_ready, added, 0)) <= limit
        ready = wanted[is_ready & fits]
        blocked: Literal["", "busy", "room"] = "busy" if unfinished.any() else ""
        if len(ready):
            with table.changing():
                table.holds[slot, ready] = 1
        if (is_ready & ~fits).any():
            return Take(ready, None, False, "room"), []
        missing = np.flatnonzero((states == State.EMPTY) | (states == State.UNCHECKED))
        if not len(missing):
            return Take(ready, None, False, blocked), []
        first = int(missing[0])
        shard, is_there = int(wanted[first]), bool(states[first] == State.UNCHECKED)
        extent = int(table.extent_bytes([shard])[0])
        if int(added[is_ready].sum()) + int(added[first]) > limit:
            # Somebody who is gone may still seem to hold, and what is promised to him to count.
            return (self._take(slot, wanted, cache_bytes)) if self._sweep() else (Take(ready, None, False, "room"), [])
        short = self._used_bytes() + (0 if is_there else extent) - cache_bytes
        if short > 0:
            victims = self._choose_victims(slot, short)
            return Take(ready, None, False, "" if victims else "room"), victims
        with table.changing():
            table.fill(shard, slot)
        return Take(ready, shard, is_there, blocked), []

    def _limit(self, slot: int, cache_bytes: int) -> tuple[int, list[int]]:
        """Bytes that the slot's group may hold beyond what it holds now, and the group's slots. Note [promises]."""
        mine = (self._key(slot), int(self._slots["group"][slot]))
        promised, spare = self._promised(), cache_bytes
        my_bytes, my_slots = 0, [slot]
        for which, reserved in promised.items():
            slots = [s for s in self._slots_of(which[0]) if int(self._slots["group"][s]) == which[1]]
            table = self._images[which[0]].table
            resident = table.resident
            held = int(table.extent_bytes(resident[table.held(resident, slots)]).sum())
            if which == mine:
                my_bytes, my_slots = held, slots
            else:
                spare -= max(reserved, held)
        return max(promised.get(mine, 0), spare) - my_bytes, my_slots

    def _choose_victims(self, slot: int, num_bytes: int) -> list[tuple[_Opened, Int64s]]:
        """What goes to make room, marked as being dropped by the slot: the longest unused of what nobody holds.

        Nothing where that would not be enough.
        """
        keys, shards, used, sizes = [], [], [], []
        for key, opened in self._images.items():
            free = self._evictable(opened.table, self._slots_of(key))
            keys += [key] * len(free)
            shards.append(free)
            used.append(opened.table.used_ns[free])
            sizes.append(opened.table.extent_bytes(free))
        if not keys:
            return []
        joined, total = np.concatenate(shards), np.concatenate(sizes)
        order = np.argsort(np.concatenate(used), kind="stable")
        freed = np.cumsum(total[order])
        count = int(np.searchsorted(freed, num_bytes)) + 1
        if count > len(order):
            return []
        victims: dict[str, list[int]] = {}
        for row in order[:count].tolist():
            victims.setdefault(keys[row], []).append(int(joined[row]))
        found = [(self._images[key], np.array(rows, np.int64)) for key, rows in victims.items()]
        for opened, dropped in found:
            with opened.table.changing():
                opened.table.drop(dropped, slot)
        return found

    @staticmethod
    def _evictable(table: StateTable, slots: Sequence[int]) -> Int64s:
        resident = table.resident
        states = table.state[resident]
        idle = resident[(states == State.READY) | (states == State.UNCHECKED)]
        return idle[~table.held(idle, slots)]

    def _sweep(self) -> bool:
        """Clear up after loaders that are gone: whether there were any."""
        gone = [
            int(slot)
            for slot in np.flatnonzero(self._slots["used"])
            if not self._is_mine(int(slot)) and not self._lock.is_locked(FIRST_SLOT_BYTE + int(slot))
        ]
        for slot in gone:
            opened = self._images.get(self._key(slot))
            if opened is not None:
                with opened.table.changing():
                    self._forget(opened, slot)
            self._slots["used"][slot] = 0
        used = self._slots["used"]
        abandoned = False
        for opened in self._images.values():
            table = opened.table
            resident = table.resident
            states = table.state[resident]
            unfinished = resident[(states == State.FILLING) | (states == State.DROPPING)]
            # Dropped for a loader of another image that is gone, or unfinished when the machine was started anew.
            owners = table.owner[unfinished]
            left = unfinished[(owners < 0) | (used[np.maximum(owners, 0)] == 0)]
            if len(left):
                abandoned = True
                with table.changing():
                    self._drop_now(opened, left)
        return bool(gone) or abandoned

    def _forget(self, opened: _Opened, slot: int) -> None:
        """Undo what a slot's loader left: half-filled shards are punched, holds are given up."""
        table = opened.table
        resident = table.resident
        held = resident[table.holds[slot, resident] != 0]
        table.used_ns[held] = time.time_ns()
        table.holds[slot, held] = 0
        states = table.state[resident]
        unfinished = (states == State.FILLING) | (states == State.DROPPING)
        self._drop_now(opened, resident[unfinished & (table.owner[resident] == slot)])

    def _drop_now(self, opened: _Opened, shards: Int64s) -> None:
        opened.table.state[shards] = State.DROPPING
        self._punch(opened, shards)
        opened.table.remove(shards)

    @staticmethod
    def _punch(opened: _Opened, shards: Int64s) -> None:
        starts = opened.table.starts
        for shard in shards.tolist():
            punch(opened.file, int(starts[shard]), int(starts[shard + 1] - starts[shard]))

    def _promised(self) -> dict[tuple[str, int], int]:
        """Bytes promised to each group of loaders."""
        promised: dict[tuple[str, int], int] = {}
        for slot in np.flatnonzero(self._slots["used"]).tolist():
            which = (self._key(slot), int(self._slots["group"][slot]))
            if which[0] in self._images:
                promised[which] = max(promised.get(which, 0), int(self._slots["reserved"][slot]))
        return promised

    def _others(self, key: str, group: int) -> list[int]:
        """The processes of all groups but one."""
        used = np.flatnonzero(self._slots["used"]).tolist()
        others = [slot for slot in used if (self._key(slot), int(self._slots["group"][slot])) != (key, group)]
        return sorted({int(self._slots["pid"][slot]) for slot in others})

    def _used_bytes(self) -> int:
        return sum(opened.table.resident_bytes for opened in self._images.values())

    def _key(self, slot: int) -> str:
        return bytes(self._slots["image"][slot]).decode()

    def _table(self, slot: int) -> StateTable:
        return self._images[self._key(slot)].table

    def _slots_of(self, key: str) -> list[int]:
        used = np.flatnonzero(self._slots["used"])
        return [int(slot) for slot in used if self._key(int(slot)) == key]

    def _is_mine(self, slot: int) -> bool:
        return FIRST_SLOT_BYTE + slot in self._lock.held

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Under the mutex, with all images open that are there now."""
        if self._lock.file < 0:
            raise CacheError(f"'{self.root}' is closed")
        with self._mutex:
            self._look()
            yield

    def _look(self) -> None:
        """Open the images that were made since, and forget those that are gone."""
        found = {
            name.removesuffix(".table"): entry.inode()
            for entry in os.scandir(self.root)
            if (name := entry.name).endswith(".table") and not name.startswith(".")
        }
        for key, opened in list(self._images.items()):
            if found.get(key) != opened.inode:
                # Its files stay open: another thread may be about to punch there.
                self._gone.append(self._images.pop(key))
        for key, inode in found.items():
            if key not in self._images:
                with contextlib.suppress(CacheError, FileNotFoundError):
                    self._images[key] = self._open_image(key, inode)

    def _open_image(self, key: str, inode: int) -> _Opened:
        file = os.open(self.image_path(key), os.O_RDWR | os.O_CLOEXEC)
        try:
            table = StateTable(self.root / f"{key}.table")
        except BaseException:
            _close(file)
            raise
        table.greet(boot_id())
        return _Opened(table, file, inode)

    def _make_image(self, key: str, starts: Int64s, source: str) -> _Opened:
        table_path, image_path = self.root / f"{key}.table", self.image_path(key)
        partial = self.root / f".{key}.partial"
        partial.unlink(missing_ok=True)
        image_path.unlink(missing_ok=True)
        try:
            file = os.open(image_path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            os.ftruncate(file, int(starts[-1]))
            (self.root / f"{key}.source").write_text(source)
            StateTable(partial, starts=starts).close()
            partial.rename(table_path)  # last: an image is there when its table is
        except OSError as exc:
            size = f" of {int(starts[-1])} bytes" if exc.errno == errno.EFBIG else ""
            raise CacheError(f"cannot make an image{size} in '{self.root}': {exc.strerror}; pass another cache_dir= (--cache)") from exc
        opened = _Opened(StateTable(table_path), file, table_path.stat().st_ino)
        self._images[key] = opened
        return opened

    def _remove_files(self, key: str) -> None:
        opened = self._images.pop(key)
        # Others may have it open still, to evict from: its blocks must go all the same.
        os.ftruncate(opened.file, 0)
        for suffix in ("table", "image", "source"):
            (self.root / f"{key}.{suffix}").unlink(missing_ok=True)
        self._gone.append(opened)

    def _make_root(self) -> None:
        with contextlib.suppress(FileExistsError):
            try:
                self.root.mkdir(mode=0o700)
            except FileExistsError:
                raise
            except OSError as exc:
                raise CacheError(f"cannot make '{self.root}': {exc.strerror}; pass another cache_dir= (--cache)") from exc
        found = self.root.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            raise CacheError(f"'{self.root}' is not this user's own directory; remove it, or pass another cache_dir= (--cache)")
        if stat.S_IMODE(found.st_mode) & 0o077:
            self.root.chmod(0o700)

    def _open_lock(self) -> None:
        self._lock = LockFile(self.root / "lock")
        self._mutex = Mutex(self._lock, MUTEX_BYTE)
        size = NUM_SLOTS * _SLOT.itemsize
        self._slots_file = os.open(self.root / "slots", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with self._mutex:
            if os.fstat(self._slots_file).st_size < size:
                os.posix_fallocate(self._slots_file, 0, size)
        self._slots: Any = np.frombuffer(mmap.mmap(self._slots_file, size), _SLOT)


def cache_root(directory: Path) -> Path:
    """The cache's own directory: one a user, since a cache is nobody else's to read."""
    return directory / f"dali-pipes-{os.geteuid()}"


def _no_promise(root: Path, reserved: int, others: int, pids: Sequence[int], cache_bytes: int) -> str:
    used = ""
    if others:
        used = f", and {others} are promised to other loaders (process {', '.join(map(str, pids))})"
    return (
        f"the cache in '{root.parent}' may take {cache_bytes} bytes; this loader must be able to hold {reserved} at a "
        f"time{used}; pass cache_bytes={reserved + others} or more (--cache-bytes), or a smaller shuffle_window="
    )


def _close(file: int) -> None:
    if file >= 0:
        os.close(file)
