"""A cache directory that the processes of a node share: its loaders, the shards that they hold, and those that leave.

Every change is made under the mutex, which is held for micro- to milliseconds. Bytes are fetched and written, and
blocks freed, outside it. The entries of a process that is gone do not count: the kernel released its lock, and the next
process undoes what it was filling or dropping, and ends its holds.

# Note [waiting]: a loader that finds no space is marked ``_NO_SPACE``; when it says that it can only wait, ``_WAITS``.
Any change that might give it space clears the marks of all loaders, so that each must ask again. When all loaders are
marked ``_WAITS``, no space will ever be free.

# Note [verify]: shards of a cache file that is kept may have been changed while nobody used it. The first loader that
joins it forgets which of its shards were checked. From then on, a shard is checked when it is first taken, once for all
loaders; those that want it meanwhile wait, as for one that is being filled. ``Verify`` has the other rules.
"""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from dali_pipes.cache.blocks import OTHER_DIRECTORY
from dali_pipes.cache.eviction import GOES_ON, Victims, is_unfinished
from dali_pipes.cache.files import FIRST_SLOT_BYTE, OpenCacheFile
from dali_pipes.cache.locks import uninterrupted
from dali_pipes.cache.reservations import ReservingCache
from dali_pipes.cache.shared_columns import SHARED_FROM_BYTES, share_columns
from dali_pipes.cache.table import NOBODY, NUM_SLOTS, Bools, Int64s, State, StateTable
from dali_pipes.errors import CacheError
from dali_pipes.formats.manifest import Manifest

# The most that is read of the text about a cache file's origin.
_SOURCE_BYTES = 4096

# Values of ``waiting`` besides `GOES_ON`. Note [waiting].
_NO_SPACE, _WAITS = 1, 2


Verify = Literal["first", "always", "never"]
"""Which ready shards a loader checks. ``"first"``: those that nobody has filled or checked since the first of the
loaders at work joined. ``"always"``: those that it has neither filled nor checked itself. ``"never"``: none. Shards
from before the machine's last start are always checked. Note [verify]."""


class Take(NamedTuple):
    """The wanted shards that a loader got."""

    ready: Int64s
    """Held from now on, whole, and checked as the loader's ``Verify`` says."""
    fill: Int64s
    """Shards that the caller must fill, and end with `NodeCache.finish` or `NodeCache.fail`; held as well."""
    is_there: bool
    """Whether the bytes of ``fill`` are there: then they are checked, and fetched only if they are wrong."""
    blocked: Literal["", "busy", "space"]
    """The reason why the loader did not get the most urgent of the other shards: another loader fills or drops it, or
    it does not fit."""


@dataclass(frozen=True, kw_only=True)
class CacheFileStatus:
    """One cache file, as ``dali-pipes cache ls`` shows it."""

    key: str
    source: str
    """The URL of its shards."""
    num_shards: int
    num_resident: int
    num_held: int
    resident_bytes: int
    file_bytes: int
    """Extents of all shards."""
    pids: tuple[int, ...]
    """The processes that use it."""
    keep: bool


_NOTHING = np.empty(0, np.int64)
_NOTHING.flags.writeable = False


class NodeCache(ReservingCache):
    """A cache directory, as one process uses it: the loaders of the process hold, fill and release shards.

    Args:
        directory: A local directory; checked by `dali_pipes.cache.free_space.check_directory`.

    Raises:
        CacheError: If the cache's own directory belongs to somebody else, or no file can be made there.
    """

    def __init__(self, directory: Path) -> None:
        self._verify: dict[int, Verify] = {}
        # For ``"always"``: the shards that the slot's loader has filled or checked: bool [shards].
        self._checked_by: dict[int, Bools] = {}
        super().__init__(directory)

    @uninterrupted
    def budget(self) -> tuple[int, int | None]:
        """Bytes that all cache files take now, and the most that loaders at work allow; ``None`` without loaders."""
        with self._changing():
            self._sweep()
            return self._used_bytes(), self._least_bytes()

    def open_cache_file(self, slot: int) -> int:
        """Return a descriptor of the slot's cache file; the caller closes it."""
        return os.dup(self._joined[slot].file)

    @uninterrupted
    def share_columns(self, slot: int, manifest: Manifest) -> None:
        """Move a large manifest's columns into memory that all loaders of the slot's cache file share."""
        columns = manifest.shard_columns()
        if sum(column.nbytes for column in columns.values()) >= SHARED_FROM_BYTES:
            with self._changing():
                if (shared := share_columns(self._files, self._key(slot), columns)) is not None:
                    manifest.move(shared)

    @uninterrupted
    def status(self) -> list[CacheFileStatus]:
        found = []
        with self._changing():
            self._sweep()
            for key, opened in self._cache_files.items():
                slots = self._slots_of(key)
                resident = opened.table.resident
                found.append(
                    CacheFileStatus(
                        key=key,
                        source=self._files.read_text(f"{key}.source", max_bytes=_SOURCE_BYTES),
                        num_shards=opened.table.num_shards,
                        num_resident=len(resident),
                        num_held=int(opened.table.held(resident, slots).sum()),
                        resident_bytes=opened.table.resident_bytes,
                        file_bytes=int(opened.table.starts[-1]),
                        pids=tuple(sorted({int(self._slots["pid"][slot]) for slot in slots})),
                        keep=opened.table.keep,
                    )
                )
        return found

    @uninterrupted
    def clear(self) -> tuple[int, int]:
        """Drop all shards that nobody holds, and remove unused cache files, and files that were moved aside.

        Returns:
            Bytes freed, and bytes still held.
        """
        freed = 0
        with self._changing():
            self._sweep()
            for key, opened in list(self._cache_files.items()):
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
            freed += self._files.remove_damaged()
        return freed, held

    @uninterrupted
    def damaged(self) -> dict[str, int]:
        """List the files that were moved aside, because they could not be read, and the bytes that each takes."""
        with self._changing():
            return self._files.damaged()

    @uninterrupted
    def join(
        self,
        key: str,
        *,
        starts: Int64s,
        source: str,
        group: int,
        reserved: int,
        cache_bytes: int,
        keep: bool,
        verify: Verify = "first",
    ) -> int:
        """Take a slot for a loader of one cache file, and reserve bytes.

        Args:
            key: Of the cache file, which is made if it is not there.
            starts: Its extents.
            source: The URL of its shards.
            group: Loaders of one cache file and one ``group`` share a reservation.
            reserved: Bytes that the group must be able to hold at a time. Note [reservations] in
                `dali_pipes.cache.reservations`.
            cache_bytes: The most that all cache files together may take.
            keep: Whether the cache file stays when nobody uses it.
            verify: Which ready shards the loader checks. Note [verify].

        Raises:
            CacheError: If so many bytes cannot be reserved.
        """
        with self._changing():
            self._sweep()
            allowed = min(cache_bytes, self._least_bytes() or cache_bytes)
            self._check_reservation(key, group, reserved, allowed, already=self._reservations().get((key, group), 0))
            free = np.flatnonzero(self._slots["used"] == 0)
            slot = next((int(s) for s in free if self._lock.try_lock(FIRST_SLOT_BYTE + int(s))), None)
            if slot is None:
                raise CacheError(
                    f"'{self.root}' has {NUM_SLOTS} loaders at work, which is the most it takes; {OTHER_DIRECTORY}"
                )
            try:
                opened = self._cache_files.get(key)
                if opened is None or not np.array_equal(opened.table.starts, starts):
                    opened = self._make_cache_file(key, starts, source)
                with opened.table.changing():
                    if not self._slots_of(key):
                        opened.table.checked[:] = 0
                    opened.table.open_row(slot)
            except BaseException:
                self._lock.unlock(FIRST_SLOT_BYTE + slot)
                raise
            if keep:
                opened.table.set_keep()
            opened.num_users += 1
            self._joined[slot], self._verify[slot] = opened, verify
            self._checked_by[slot] = np.zeros(opened.table.num_shards if verify == "always" else 0, np.bool_)
            self._write_row(slot, pid=os.getpid(), reserved=reserved, cache_bytes=cache_bytes, group=group, key=key)
            # Cache files of loaders that ended without closing them are kept until another loader joins.
            for other, left in list(self._cache_files.items()):
                if not left.table.keep and not self._slots_of(other):
                    self._remove_files(other)
        self._trim(slot)
        return slot

    @uninterrupted
    def reserve(self, slot: int, reserved: int) -> None:
        """Change a slot's reservation; if so many bytes cannot be reserved (a `CacheError`), the old one stays."""
        with self._changing():
            self._check_joined(slot)
            self._sweep()
            self._check_reservation(*self._group_of(slot), reserved, self._allowed_bytes())
            row = self._slots[slot]
            group, cache_bytes = int(row["group"]), int(row["cache_bytes"])
            self._write_row(
                slot, pid=os.getpid(), reserved=reserved, cache_bytes=cache_bytes, group=group, key=self._key(slot)
            )

    @uninterrupted
    def leave(self, slot: int) -> None:
        """Give up a slot and its holds; the last loader of a cache file removes it, unless it is to be kept."""
        with self._changing():
            self._sweep()  # a loader that is gone must not keep a cache file
            opened = self._joined.pop(slot)
            opened.num_users -= 1
            key = self._key(slot)
            # A removed cache file lasts no longer than those that have it open. Its table may be a damaged one.
            is_there = self._cache_files.get(key) is opened
            if is_there:
                with opened.table.changing():
                    self._forget(opened, slot)
            self._empty_row(slot)
            self._wake()
            if is_there and not opened.table.keep and not self._slots_of(key):
                self._remove_files(key)
            # Under the mutex: otherwise another thread could join, get this slot, and lose its lock here.
            self._lock.unlock(FIRST_SLOT_BYTE + slot)

    @uninterrupted
    def take(self, slot: int, wanted: Int64s, *, most: int = 1, most_bytes: int = 0) -> Take:
        """Hold the ready shards of ``wanted``, and begin to fill or check the first of those that are not ready.

        Args:
            slot: The caller's.
            wanted: Shards that the slot does not hold yet, the most urgent first. If one does not fit, those after it
                take no space.
            most: The most shards to fill or check together.
            most_bytes: The most that their extents take, if they are several.

        Raises:
            CacheError: If the cache file was removed.
        """
        while True:
            with self._changing():
                taken, victims = self._take(slot, wanted, most, most_bytes)
                if not victims:
                    if len(taken.ready) or len(taken.fill):
                        self._slots["waiting"][slot] = GOES_ON
                    elif taken.blocked == "space":
                        self._slots["waiting"][slot] = max(_NO_SPACE, int(self._slots["waiting"][slot]))
                    return taken
            self._drop(victims)
            if len(taken.ready):
                return taken

    @uninterrupted
    def finish(self, slot: int, shards: Int64s | Sequence[int]) -> None:
        """Mark shards ready, which the slot's loader has filled and checked.

        Raises:
            CacheError: If another loader has one of them by now, or the cache file was removed.
        """
        rows = np.asarray(shards, np.int64)
        with self._changing():
            table = self._check_joined(slot).table
            if not self._has_begun(table, rows, slot).all():
                raise CacheError(_lost(self.root, self._key(slot)))
            with table.changing():
                table.finish(rows)
            if self._verify[slot] == "always":
                self._checked_by[slot][rows] = True
            self._wake()

    @uninterrupted
    def fail(self, slot: int, shards: Int64s | Sequence[int]) -> None:
        """Give up filling ``shards`` and free their blocks; those that were there stay, unchecked."""
        rows = np.asarray(shards, np.int64)
        with self._changing():
            opened = self._joined[slot]
            rows = rows[self._has_begun(opened.table, rows, slot)]  # the others are another loader's by now
            with opened.table.changing():
                opened.table.holds[slot, rows] = 0
                rows = opened.table.end_check(rows)
                opened.table.drop(rows, slot)
            self._wake()
            opened.num_users += 1
        self._drop([(opened, rows)])

    @uninterrupted
    def release(self, slot: int, shards: Int64s | Sequence[int]) -> None:
        """End the slot's holds of ``shards``, which stay until their space is needed."""
        rows = np.asarray(shards, np.int64)
        with self._changing(), (table := self._joined[slot].table).changing():
            table.holds[slot, rows] = 0
            table.used_ns[rows] = time.time_ns()
            self._wake()

    @uninterrupted
    def is_stuck(self, slot: int) -> bool:
        """Whether the slot's loader and all others wait for space that none of them will free. Note [waiting].

        Called for a loader that needs a shard now and found no space.
        """
        with self._changing():
            if self._sweep() or self._slots["waiting"][slot] == GOES_ON:
                return False
            self._slots["waiting"][slot] = _WAITS
            if not (self._slots["waiting"][self._slots["used"] != 0] == _WAITS).all():
                return False
            tables = [opened.table for opened in self._cache_files.values()]
            return not any(is_unfinished(table.state[table.resident]).any() for table in tables)

    def filled_by(self, slot: int, shard: int) -> int | None:
        """The process that fills, checks or drops a shard now, as far as one look can tell; for messages."""
        owner = int(self._joined[slot].table.owner[shard])
        return None if owner == NOBODY else int(self._slots["pid"][owner])

    def _take(self, slot: int, wanted: Int64s, most: int, most_bytes: int) -> tuple[Take, Victims]:
        table = self._check_joined(slot).table
        states = table.state[wanted]
        if is_unfinished(states).any() and self._sweep():
            states = table.state[wanted]
        unfinished = is_unfinished(states)
        if unfinished.all():
            # A waiting loader comes here again and again, so this must stay cheap.
            return Take(_NOTHING, _NOTHING, False, "busy" if len(wanted) else ""), []
        is_ready = (states == State.READY) & self._believed(slot, wanted)
        missing = np.flatnonzero(~is_ready & ~unfinished)
        first = int(missing[0]) if len(missing) else None
        limit, group_slots = self._limit(slot)
        # Bytes that a shard adds to those that the group holds: 0 if a loader of the group holds it already.
        added = np.where(table.held(wanted, group_slots), 0, table.extent_bytes(wanted))
        # Space goes to the most urgent shards first: ready ones, those that others are filling, and the one to fill.
        counted = is_ready | unfinished
        counted[missing[:1]] = True
        fits = (added == 0) | (np.cumsum(np.where(counted, added, 0)) <= limit)
        if not fits[counted].all() and self._sweep():
            # The holds and the reservation of a loader that is gone were counted.
            return self._take(slot, wanted, most, most_bytes)
        ready = wanted[is_ready & fits]
        if len(ready):
            with table.changing():
                table.holds[slot, ready] = 1
        blocked = _why(unfinished, counted & ~fits)
        if first is None or not fits[first]:
            return Take(ready, _NOTHING, False, blocked), []
        is_there = bool(states[first] != State.EMPTY)
        # Small shards are filled together, if they are next in order, and if there is space for all of them.
        fill = missing[:most]
        sizes = table.extent_bytes(wanted[fill])
        alike = (states[fill] != State.EMPTY) == is_there
        spare = limit - int(added[counted].sum()) + int(added[first])
        together = alike & (np.cumsum(sizes) <= most_bytes) & (np.cumsum(added[fill]) <= spare)
        together[0] = True
        num = int(np.argmin(np.append(together, False)))
        while not is_there:
            short = self._used_bytes() + int(sizes[:num].sum()) - self._allowed_bytes()
            if short <= 0:
                break
            victims = self._choose_victims(slot, short)
            if not victims and num > 1:
                num = 1
                continue
            if not victims and self._sweep():
                return self._take(slot, wanted, most, most_bytes)
            # Without victims: others are dropping shards, or hold more than they reserved.
            counted[:first] = False
            return Take(ready, _NOTHING, False, "" if victims else _why(unfinished, counted)), victims
        shards = wanted[fill[:num]]
        with table.changing():
            table.fill(shards, slot)
        return Take(ready, shards, is_there, blocked), []

    def _believed(self, slot: int, shards: Int64s) -> Bools:
        """Mark the shards that the slot's loader reads without a check if they are ready. Note [verify]."""
        if self._verify[slot] == "always":
            return self._checked_by[slot][shards]
        if self._verify[slot] == "never":
            return np.ones(len(shards), np.bool_)
        checked: Bools = self._joined[slot].table.checked[shards] != 0
        return checked

    @staticmethod
    def _has_begun(table: StateTable, shards: Int64s, slot: int) -> Bools:
        """Mark the shards that the slot's loader fills or checks."""
        begun: Bools = np.isin(table.state[shards], [State.FILLING, State.CHECKING]) & (table.owner[shards] == slot)
        return begun

    def _check_joined(self, slot: int) -> OpenCacheFile:
        """Return the slot's cache file if it is still there. Note [removed] in `dali_pipes.cache.files`."""
        opened = self._joined[slot]
        row = self._slots[slot]
        is_mine = row["used"] and row["pid"] == os.getpid()
        if not is_mine or self._cache_files.get(self._key(slot)) is not opened:
            raise CacheError(_lost(self.root, self._key(slot)))
        return opened


def _why(unfinished: Bools, unfit: Bools) -> Literal["", "busy", "space"]:
    """Say why the first unavailable shard is unavailable."""
    if not (unfinished | unfit).any():
        return ""
    return "space" if unfit[int(np.argmax(unfinished | unfit))] else "busy"


def _lost(root: Path, key: str) -> str:
    name = f"{root / key}.image"
    return f"the cache file '{name}' was removed or taken from this loader while it was at work; start it again"
