"""A cache directory that the processes of a node share: its loaders, the shards that they hold, and those that leave.

Every change is made under the mutex, which is held for micro- to milliseconds. Bytes are fetched and written, and
blocks freed, outside it. The entries of a process that is gone do not count: the kernel released its lock, and the next
process undoes what it was filling or dropping, and ends its holds.

# Note [waiting]: a loader that finds no space is marked ``_NO_SPACE``; when it says that it can only wait, ``_WAITS``.
Any change that might give it space clears the marks of all loaders, so that each must ask again. When all loaders are
marked ``_WAITS``, no space will ever be free.

# Note [reservations]: each loader reserves what it must be able to hold at a time, two windows, or fails to start.
Loaders of the same order of the same shards (the ranks of a job) share one reservation, since they hold the same
shards; they are a *group*. No group holds more than its reservation, unless the reservations of all others would still
fit. So every loader can always get what it reserved, by evicting shards that nobody holds. If the loaders at work name
different ``cache_bytes``, the smallest one counts for all.
"""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from dali_pipes.cache.blocks import OTHER_DIRECTORY
from dali_pipes.cache.eviction import GOES_ON, EvictingCache, Victims, is_unfinished
from dali_pipes.cache.files import FIRST_SLOT_BYTE, OpenCacheFile
from dali_pipes.cache.locks import uninterrupted
from dali_pipes.cache.table import NUM_SLOTS, Bools, Int64s, State
from dali_pipes.errors import CacheError

# Values of ``waiting`` besides `GOES_ON`. Note [waiting].
_NO_SPACE, _WAITS = 1, 2


class Take(NamedTuple):
    """The wanted shards that a loader got."""

    ready: Int64s
    """Held from now on, whole and checked."""
    fill: int | None
    """A shard that the caller must fill, and end with `NodeCache.finish` or `NodeCache.fail`; held as well."""
    is_there: bool
    """Whether the bytes of ``fill`` are there, from before the machine's last start, and only need checking."""
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


class NodeCache(EvictingCache):
    """A cache directory, as one process uses it: the loaders of the process hold, fill and release shards.

    Args:
        directory: A local directory; checked by `dali_pipes.cache.free_space.check_directory`.

    Raises:
        CacheError: If the cache's own directory belongs to somebody else, or no file can be made there.
    """

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
    def status(self) -> list[CacheFileStatus]:
        found = []
        with self._changing():
            self._sweep()
            for key, opened in self._cache_files.items():
                slots = self._slots_of(key)
                resident = opened.table.resident
                source = self.root / f"{key}.source"
                found.append(
                    CacheFileStatus(
                        key=key,
                        source=source.read_text() if source.is_file() else "",
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
        """Drop all shards that nobody holds, and remove unused cache files: bytes freed, bytes still held."""
        freed = 0
        with self._changing():
            self._sweep()
            for key in self._unreadable:
                if not self._slots_of(key):
                    self._remove_names(key)
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
        return freed, held

    @uninterrupted
    def join(
        self, key: str, *, starts: Int64s, source: str, group: int, reserved: int, cache_bytes: int, keep: bool
    ) -> int:
        """Take a slot for a loader of one cache file, and reserve bytes. Note [reservations].

        Args:
            key: Of the cache file, which is made if it is not there.
            starts: Its extents.
            source: The URL of its shards.
            group: Loaders of one cache file and one ``group`` share a reservation.
            reserved: Bytes that the group must be able to hold at a time.
            cache_bytes: The most that all cache files together may take.
            keep: Whether the cache file stays when nobody uses it.

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
                    opened.table.open_row(slot)
            except BaseException:
                self._lock.unlock(FIRST_SLOT_BYTE + slot)
                raise
            if keep:
                opened.table.set_keep()
            opened.num_users += 1
            self._joined[slot] = opened
            # ``used`` last: until then the row belongs to no loader.
            self._slots[slot] = (0, GOES_ON, os.getpid(), reserved, cache_bytes, group, key.encode())
            self._slots["used"][slot] = 1
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
            self._slots["reserved"][slot] = reserved

    @uninterrupted
    def leave(self, slot: int) -> None:
        """Give up a slot and its holds; the last loader of a cache file removes it, unless it is to be kept."""
        with self._changing():
            self._sweep()  # a loader that is gone must not keep a cache file
            opened = self._joined.pop(slot)
            opened.num_users -= 1
            # Also if the cache file was removed: others may have joined it before.
            with opened.table.changing():
                self._forget(opened, slot)
            key = self._key(slot)
            self._slots["used"][slot] = 0
            self._wake()
            if self._cache_files.get(key) is opened and not opened.table.keep and not self._slots_of(key):
                self._remove_files(key)
            # Under the mutex: otherwise another thread could join, get this slot, and lose its lock here.
            self._lock.unlock(FIRST_SLOT_BYTE + slot)

    @uninterrupted
    def take(self, slot: int, wanted: Int64s) -> Take:
        """Hold the ready shards of ``wanted``, and begin to fill the first one that is not there.

        Args:
            slot: The caller's.
            wanted: Shards that the slot does not hold yet, the most urgent first. If one does not fit, those after it
                take no space.

        Raises:
            CacheError: If the cache file was removed.
        """
        while True:
            with self._changing():
                taken, victims = self._take(slot, wanted)
                if not victims:
                    if len(taken.ready) or taken.fill is not None:
                        self._slots["waiting"][slot] = GOES_ON
                    elif taken.blocked == "space":
                        self._slots["waiting"][slot] = max(_NO_SPACE, int(self._slots["waiting"][slot]))
                    return taken
            self._drop(victims)
            if len(taken.ready):
                return taken

    @uninterrupted
    def finish(self, slot: int, shard: int) -> None:
        """Mark a shard ready, which the slot's loader has filled and checked."""
        with self._changing():
            table = self._check_joined(slot).table
            if table.state[shard] != State.FILLING or table.owner[shard] != slot:
                raise CacheError(_lost(self.root, self._key(slot)))
            with table.changing():
                table.finish(shard)
            self._wake()

    @uninterrupted
    def fail(self, slot: int, shard: int) -> None:
        """Give up filling ``shard`` and free its blocks."""
        with self._changing():
            opened = self._joined[slot]
            if opened.table.state[shard] != State.FILLING or opened.table.owner[shard] != slot:
                return  # another loader's by now
            with opened.table.changing():
                opened.table.drop([shard], slot)
                opened.table.holds[slot, shard] = 0
            opened.num_users += 1
        self._drop([(opened, np.array([shard]))])

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
            if not (self._slots["waiting"][self._slots["used"] == 1] == _WAITS).all():
                return False
            tables = [opened.table for opened in self._cache_files.values()]
            return not any(is_unfinished(table.state[table.resident]).any() for table in tables)

    def _take(self, slot: int, wanted: Int64s) -> tuple[Take, Victims]:
        table = self._check_joined(slot).table
        nothing = np.empty(0, np.int64)
        states = table.state[wanted]
        if is_unfinished(states).any() and self._sweep():
            states = table.state[wanted]
        unfinished = is_unfinished(states)
        if unfinished.all():
            # A waiting loader comes here again and again, so this must stay cheap.
            return Take(nothing, None, False, "busy" if len(wanted) else ""), []
        is_ready = states == State.READY
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
            return self._take(slot, wanted)
        ready = wanted[is_ready & fits]
        if len(ready):
            with table.changing():
                table.holds[slot, ready] = 1
        blocked = _why(unfinished, counted & ~fits)
        if first is None or not fits[first]:
            return Take(ready, None, False, blocked), []
        shard, is_there = int(wanted[first]), bool(states[first] == State.UNCHECKED)
        extent = 0 if is_there else int(table.extent_bytes([shard])[0])
        short = self._used_bytes() + extent - self._allowed_bytes()
        if short > 0:
            victims = self._choose_victims(slot, short)
            if not victims and self._sweep():
                return self._take(slot, wanted)
            # Without victims: others are dropping shards, or hold more than they reserved.
            counted[:first] = False
            return Take(ready, None, False, "" if victims else _why(unfinished, counted)), victims
        with table.changing():
            table.fill(shard, slot)
        return Take(ready, shard, is_there, blocked), []

    def _limit(self, slot: int) -> tuple[int, list[int]]:
        """Compute the bytes that the slot's group may hold in addition now, and its slots. Note [reservations]."""
        mine = self._group_of(slot)
        reservations, spare = self._reservations(), self._allowed_bytes()
        my_bytes, my_slots = 0, [slot]
        for which, reserved in reservations.items():
            slots = [s for s in self._slots_of(which[0]) if self._group_of(s) == which]
            table = self._cache_files[which[0]].table
            resident = table.resident
            held = int(table.extent_bytes(resident[table.held(resident, slots)]).sum())
            if which == mine:
                my_bytes, my_slots = held, slots
            else:
                spare -= max(reserved, held)
        return max(reservations.get(mine, 0), spare) - my_bytes, my_slots

    def _trim(self, slot: int) -> None:
        """Drop unheld shards that exceed the bytes allowed now: an earlier job may have been allowed more."""
        with self._changing():
            short = self._used_bytes() - self._allowed_bytes()
            if short <= 0:
                return
            victims = self._choose_victims(slot, short, enough=False)
        self._drop(victims)

    def _group_of(self, slot: int) -> tuple[str, int]:
        return self._key(slot), int(self._slots["group"][slot])

    def _reservations(self) -> dict[tuple[str, int], int]:
        reservations: dict[tuple[str, int], int] = {}
        for slot in np.flatnonzero(self._slots["used"]).tolist():
            which = self._group_of(slot)
            if which[0] in self._cache_files:
                reservations[which] = max(reservations.get(which, 0), int(self._slots["reserved"][slot]))
        return reservations

    def _check_reservation(self, key: str, group: int, reserved: int, allowed: int, *, already: int = 0) -> None:
        """Refuse a reservation, or the one that the group has ``already``, if it does not fit beside all others."""
        others = sum(num for which, num in self._reservations().items() if which != (key, group))
        if max(reserved, already) + others <= allowed:
            return
        used = ""
        if others:
            used_slots = np.flatnonzero(self._slots["used"]).tolist()
            slots = [slot for slot in used_slots if self._group_of(slot) != (key, group)]
            pids = ", ".join(map(str, sorted({int(self._slots["pid"][slot]) for slot in slots})))
            used = f", and {others} are reserved for other loaders (process {pids})"
        raise CacheError(
            f"the cache in '{self.root.parent}' may take {allowed} bytes; this loader must be able to hold {reserved} "
            f"at a time{used}; pass cache=dali_pipes.Cache(max_bytes={reserved + others}) or more (--cache-bytes), or "
            "a smaller shuffle=dali_pipes.Shuffle(window_bytes=...)"
        )

    def _check_joined(self, slot: int) -> OpenCacheFile:
        """Return the slot's cache file if it is still there. Note [removed] in `dali_pipes.cache.files`."""
        opened = self._joined[slot]
        row = self._slots[slot]
        is_mine = row["used"] and row["pid"] == os.getpid()
        if not is_mine or self._cache_files.get(self._key(slot)) is not opened:
            raise CacheError(_lost(self.root, self._key(slot)))
        return opened

    def _least_bytes(self) -> int | None:
        limits = self._slots["cache_bytes"][self._slots["used"] == 1]
        return int(limits.min()) if len(limits) else None

    def _allowed_bytes(self) -> int:
        least = self._least_bytes()
        assert least is not None, "the caller has a slot"
        return least


def _why(unfinished: Bools, unfit: Bools) -> Literal["", "busy", "space"]:
    """Say why the first unavailable shard is unavailable."""
    if not (unfinished | unfit).any():
        return ""
    return "space" if unfit[int(np.argmax(unfinished | unfit))] else "busy"


def _lost(root: Path, key: str) -> str:
    name = f"{root / key}.image"
    return f"the cache file '{name}' was removed or taken from this loader while it was at work; start it again"
