"""A directory of images that the processes of a node share: who is there, what is whose, what must go to make room.

Every change is made under the mutex, held for micro- to milliseconds; bytes are fetched, written and punched outside.
Nothing in these files must be believed of a process that is gone: its lock went with it, and whoever comes next sweeps
up what it was filling or dropping, and what it held.

# Note [waiting]: a loader that is told that there is no room is marked ``_TOLD``; when it says that it can do nothing
but wait, ``_WAITS``. Any change that might give it room takes the marks from all, so each must ask again; when all
wait, no more will come.

# Note [promises]: each loader reserves what it must be able to hold at a time, two windows, or fails to start. Loaders
of the same order of the same shards (the ranks of a job) share one promise, since they hold the same shards. No group
of loaders holds more than its promise, unless what is promised to all others would still fit: so every loader can
always have what it was promised, by evicting what nobody holds. Where loaders were told different ``cache_bytes``, the
least of those at work counts for all.
"""

import functools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Concatenate, Literal, NamedTuple, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt

from dali_pipes.cache.blocks import punch
from dali_pipes.cache.files import FIRST_SLOT_BYTE, CacheFiles, OpenCacheFile
from dali_pipes.cache.locks import shielded
from dali_pipes.cache.table import NUM_SLOTS, State, StateTable
from dali_pipes.errors import CacheError

__all__ = ["CacheFileStatus", "NodeCache", "Take"]

# What ``waiting`` says. Note [waiting].
_GOES_ON, _TOLD, _WAITS = 0, 1, 2

Int64s = npt.NDArray[np.int64]
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class Take(NamedTuple):
    """What of the wanted shards could be had at once."""

    ready: Int64s
    """Held from now on, whole and checked."""
    fill: int | None
    """To be filled by the caller, who ends it with `NodeCache.finish` or `NodeCache.fail`; held as well."""
    is_there: bool
    """Whether the bytes of ``fill`` are there already, from before a start of the machine, and only want checking."""
    blocked: Literal["", "busy", "room"]
    """Why the most urgent of what could not be had could not: others fill or drop it, or it would not fit."""


@dataclass(frozen=True, kw_only=True)
class CacheFileStatus:
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


def _whole(
    method: Callable[Concatenate["NodeCache", Arguments], Result],
) -> Callable[Concatenate["NodeCache", Arguments], Result]:
    """A method that changes the cache: not cut short by a signal. Note [signals] in `dali_pipes.cache.locks`."""

    def wrapped(self: "NodeCache", /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        return shielded(lambda: method(self, *args, **kwargs))

    functools.update_wrapper(wrapped, method)
    return wrapped


class NodeCache(CacheFiles):
    """One process's view of a cache directory: who holds, fills and drops what in it.

    Args:
        directory: A local directory; checked by `dali_pipes.cache.free_space.check_directory`.

    Raises:
        CacheError: If the cache's own directory belongs to somebody else, or no file can be made there.
    """

    @_whole
    def budget(self) -> tuple[int, int | None]:
        """What all images take now, and what they may take as the loaders at work were told; ``None`` without any."""
        with self._changing():
            self._sweep()
            return self._used_bytes(), self._least_bytes()

    def open_cache_file(self, slot: int) -> int:
        """A descriptor of the slot's image, the caller's to close."""
        return os.dup(self._joined[slot].file)

    @_whole
    def status(self) -> list[CacheFileStatus]:
        """All images of the cache."""
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
                        image_bytes=int(opened.table.starts[-1]),
                        pids=tuple(sorted({int(self._slots["pid"][slot]) for slot in slots})),
                        keep=opened.table.keep,
                    )
                )
        return found

    @_whole
    def clear(self) -> tuple[int, int]:
        """Drop all that nobody holds, and the files of images that nobody uses: bytes given back, bytes still held."""
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

    @_whole
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
            allowed = min(cache_bytes, self._least_bytes() or cache_bytes)
            if max(mine, reserved) + others > allowed:
                raise CacheError(_no_promise(self.root, reserved, others, self._others(key, group), allowed))
            free = np.flatnonzero(self._slots["used"] == 0)
            slot = next((int(s) for s in free if self._lock.try_lock(FIRST_SLOT_BYTE + int(s))), None)
            if slot is None:
                raise CacheError(
                    f"'{self.root}' has {NUM_SLOTS} loaders at work, which is the most it takes; pass another "
                    "cache_dir= (--cache)"
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
            # ``used`` last: until then the row is nobody's.
            self._slots[slot] = (0, _GOES_ON, os.getpid(), reserved, cache_bytes, group, key.encode())
            self._slots["used"][slot] = 1
            # Left by loaders that did not come to close theirs: for them to find again, but for nobody else.
            for other, left in list(self._cache_files.items()):
                if not left.table.keep and not self._slots_of(other):
                    self._remove_files(other)
        self._trim(slot)
        return slot

    @_whole
    def reserve(self, slot: int, reserved: int) -> None:
        """Change what is promised to a slot's group.

        Raises:
            CacheError: If that much cannot be promised; the old promise stands.
        """
        with self._changing():
            self._check_joined(slot)
            key, group = self._key(slot), int(self._slots["group"][slot])
            self._sweep()
            others = sum(bytes_ for which, bytes_ in self._promised().items() if which != (key, group))
            if reserved + others > (allowed := self._allowed_bytes()):
                raise CacheError(_no_promise(self.root, reserved, others, self._others(key, group), allowed))
            self._slots["reserved"][slot] = reserved

    @_whole
    def leave(self, slot: int) -> None:
        """Give a slot up, and with it all that it holds; an image that is not to be kept goes with its last loader."""
        with self._changing():
            self._sweep()  # those that are gone keep no image
            opened = self._joined.pop(slot)
            opened.num_users -= 1
            # Those of an image that was removed as well: others may have joined it before it was.
            with opened.table.changing():
                self._forget(opened, slot)
            key = self._key(slot)
            self._slots["used"][slot] = 0
            self._wake()
            if self._cache_files.get(key) is opened and not opened.table.keep and not self._slots_of(key):
                self._remove_files(key)
            # Under the mutex: another thread that joins could otherwise be given the slot, and then lose its lock.
            self._lock.unlock(FIRST_SLOT_BYTE + slot)

    @_whole
    def take(self, slot: int, wanted: Int64s) -> Take:
        """Hold what is ready of ``wanted``, and begin to fill the first shard of it that is not there.

        Args:
            slot: The caller's.
            wanted: Shards that the slot does not hold yet, the most urgent first; none is passed over for room.

        Raises:
            CacheError: If the image was removed.
        """
        while True:
            with self._changing():
                taken, victims = self._take(slot, wanted)
                if not victims:
                    if len(taken.ready) or taken.fill is not None:
                        self._slots["waiting"][slot] = _GOES_ON
                    elif taken.blocked == "room":
                        self._slots["waiting"][slot] = max(_TOLD, int(self._slots["waiting"][slot]))
                    return taken
            self._drop(victims)
            if len(taken.ready):
                return taken

    @_whole
    def finish(self, slot: int, shard: int) -> None:
        """The slot's loader has filled ``shard``, and checked it.

        Raises:
            CacheError: If the image was removed.
        """
        with self._changing():
            table = self._check_joined(slot).table
            if table.state[shard] != State.FILLING or table.owner[shard] != slot:
                raise CacheError(_lost(self.root, self._key(slot)))
            with table.changing():
                table.finish(shard)
            self._wake()

    @_whole
    def fail(self, slot: int, shard: int) -> None:
        """The slot's loader gives up filling ``shard``: what was written is punched."""
        with self._changing():
            opened = self._joined[slot]
            if opened.table.state[shard] != State.FILLING or opened.table.owner[shard] != slot:
                return  # not its own any more, and no longer its to punch
            with opened.table.changing():
                opened.table.drop([shard], slot)
                opened.table.holds[slot, shard] = 0
            opened.num_users += 1
        self._drop([(opened, np.array([shard]))])

    @_whole
    def release(self, slot: int, shards: Int64s | Sequence[int]) -> None:
        """The slot's loader needs ``shards`` no more; they stay until room is wanted."""
        rows = np.asarray(shards, np.int64)
        with self._changing(), (table := self._joined[slot].table).changing():
            table.holds[slot, rows] = 0
            table.used_ns[rows] = time.time_ns()
            self._wake()

    @_whole
    def is_stuck(self, slot: int) -> bool:
        """Whether the slot's loader and all others wait for room that none of them will give up. Note [waiting].

        To be asked by one that wants a shard now and was told that there is no room.
        """
        with self._changing():
            if self._sweep() or self._slots["waiting"][slot] == _GOES_ON:
                return False
            self._slots["waiting"][slot] = _WAITS
            if not (self._slots["waiting"][self._slots["used"] == 1] == _WAITS).all():
                return False
            tables = [opened.table for opened in self._cache_files.values()]
            return not any(
                np.isin(table.state[table.resident], [State.FILLING, State.DROPPING]).any() for table in tables
            )

    def _take(self, slot: int, wanted: Int64s) -> tuple[Take, list[tuple[OpenCacheFile, Int64s]]]:
        table = self._check_joined(slot).table
        nothing = np.empty(0, np.int64)
        states = table.state[wanted]
        unfinished = (states == State.FILLING) | (states == State.DROPPING)
        if unfinished.any() and self._sweep():
            states = table.state[wanted]
            unfinished = (states == State.FILLING) | (states == State.DROPPING)
        if unfinished.all():
            # Asked again and again: no more work than it takes.
            return Take(nothing, None, False, "busy" if len(wanted) else ""), []
        is_ready = states == State.READY
        missing = np.flatnonzero(~is_ready & ~unfinished)
        first = int(missing[0]) if len(missing) else None
        limit, group_slots = self._limit(slot)
        # What a shard adds to what the group holds: nothing if one of the group holds it already.
        added = np.where(table.held(wanted, group_slots), 0, table.extent_bytes(wanted))
        # Room goes to the more urgent ones first: those that others are about to have ready count, and the one to fill.
        counted = is_ready | unfinished
        counted[missing[:1]] = True
        fits = (added == 0) | (np.cumsum(np.where(counted, added, 0)) <= limit)
        if not fits[counted].all() and self._sweep():
            # Somebody who was gone still seemed to hold, and what was promised to him to count.
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
            # Without victims: others drop, or hold beyond what was promised to them.
            counted[:first] = False
            return Take(ready, None, False, "" if victims else _why(unfinished, counted)), victims
        with table.changing():
            table.fill(shard, slot)
        return Take(ready, shard, is_there, blocked), []

    def _limit(self, slot: int) -> tuple[int, list[int]]:
        """Bytes that the slot's group may hold beyond what it holds now, and the group's slots. Note [promises]."""
        mine = (self._key(slot), int(self._slots["group"][slot]))
        promised, spare = self._promised(), self._allowed_bytes()
        my_bytes, my_slots = 0, [slot]
        for which, reserved in promised.items():
            slots = [s for s in self._slots_of(which[0]) if int(self._slots["group"][s]) == which[1]]
            table = self._cache_files[which[0]].table
            resident = table.resident
            held = int(table.extent_bytes(resident[table.held(resident, slots)]).sum())
            if which == mine:
                my_bytes, my_slots = held, slots
            else:
                spare -= max(reserved, held)
        return max(promised.get(mine, 0), spare) - my_bytes, my_slots

    def _trim(self, slot: int) -> None:
        """Bring what an earlier job was allowed down to what this one is, as far as nobody holds it."""
        with self._changing():
            short = self._used_bytes() - self._allowed_bytes()
            if short <= 0:
                return
            victims = self._choose_victims(slot, short, enough=False)
        self._drop(victims)

    def _drop(self, victims: Sequence[tuple[OpenCacheFile, Int64s]]) -> None:
        """Punch shards that were marked for it; not under the mutex, which others wait for."""
        try:
            for opened, shards in victims:
                self._punch(opened, shards)
        except OSError as exc:
            # They stay marked, and count, until the slot is given up.
            raise CacheError(f"cannot punch holes into the image in '{self.root}': {exc.strerror}") from exc
        finally:
            with self._changing():
                for opened, _ in victims:
                    opened.num_users -= 1
        with self._changing():
            for opened, shards in victims:
                with opened.table.changing():
                    opened.table.remove(shards)
            self._wake()

    def _choose_victims(self, slot: int, num_bytes: int, *, enough: bool = True) -> list[tuple[OpenCacheFile, Int64s]]:
        """What goes to make room, marked as being dropped by the slot: the longest unused of what nobody holds.

        Nothing where that would not be ``enough``. For `_drop`.
        """
        keys, shards, used, sizes = [], [], [], []
        for key, opened in self._cache_files.items():
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
        if count > len(order) and enough:
            return []
        victims: dict[str, list[int]] = {}
        for row in order[:count].tolist():
            victims.setdefault(keys[row], []).append(int(joined[row]))
        found = [(self._cache_files[key], np.array(rows, np.int64)) for key, rows in victims.items()]
        for opened, dropped in found:
            with opened.table.changing():
                opened.table.drop(dropped, slot)
            opened.num_users += 1
        return found

    @staticmethod
    def _evictable(table: StateTable, slots: Sequence[int]) -> Int64s:
        resident = table.resident
        states = table.state[resident]
        idle = resident[(states == State.READY) | (states == State.UNCHECKED)]
        free: Int64s = idle[~table.held(idle, slots)]
        return free

    def _sweep(self) -> bool:
        """Clear up after loaders that are gone: whether there were any."""
        gone = [
            int(slot)
            for slot in np.flatnonzero(self._slots["used"])
            if not self._is_mine(int(slot)) and not self._lock.is_locked(FIRST_SLOT_BYTE + int(slot))
        ]
        for slot in gone:
            opened = self._cache_files.get(self._key(slot))
            if opened is not None:
                with opened.table.changing():
                    self._forget(opened, slot)
            self._slots["used"][slot] = 0
            self._wake()
        used = self._slots["used"]
        abandoned = False
        for opened in self._cache_files.values():
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
                self._wake()
        return bool(gone) or abandoned

    def _forget(self, opened: OpenCacheFile, slot: int) -> None:
        """Undo what a slot's loader left: half-filled shards are punched, holds are given up."""
        table = opened.table
        resident = table.resident
        held = resident[table.holds[slot, resident] != 0]
        table.used_ns[held] = time.time_ns()
        table.holds[slot, held] = 0
        states = table.state[resident]
        unfinished = (states == State.FILLING) | (states == State.DROPPING)
        self._drop_now(opened, resident[unfinished & (table.owner[resident] == slot)])

    def _drop_now(self, opened: OpenCacheFile, shards: Int64s) -> None:
        opened.table.state[shards] = State.DROPPING
        self._punch(opened, shards)
        opened.table.remove(shards)

    @staticmethod
    def _punch(opened: OpenCacheFile, shards: Int64s) -> None:
        starts = opened.table.starts
        for shard in shards.tolist():
            punch(opened.file, int(starts[shard]), int(starts[shard + 1] - starts[shard]))

    def _promised(self) -> dict[tuple[str, int], int]:
        """Bytes promised to each group of loaders."""
        promised: dict[tuple[str, int], int] = {}
        for slot in np.flatnonzero(self._slots["used"]).tolist():
            which = (self._key(slot), int(self._slots["group"][slot]))
            if which[0] in self._cache_files:
                promised[which] = max(promised.get(which, 0), int(self._slots["reserved"][slot]))
        return promised

    def _others(self, key: str, group: int) -> list[int]:
        """The processes of all groups but one."""
        used = np.flatnonzero(self._slots["used"]).tolist()
        others = [slot for slot in used if (self._key(slot), int(self._slots["group"][slot])) != (key, group)]
        return sorted({int(self._slots["pid"][slot]) for slot in others})

    def _used_bytes(self) -> int:
        return sum(opened.table.resident_bytes for opened in self._cache_files.values())

    def _check_joined(self, slot: int) -> OpenCacheFile:
        """The slot's image, if its name is still its own. Note [removed] in `dali_pipes.cache.files`."""
        opened = self._joined[slot]
        row = self._slots[slot]
        is_mine = row["used"] and row["pid"] == os.getpid()
        if not is_mine or self._cache_files.get(self._key(slot)) is not opened:
            raise CacheError(_lost(self.root, self._key(slot)))
        return opened

    def _wake(self) -> None:
        """Whoever waits for room is to ask again. Note [waiting]."""
        self._slots["waiting"] = _GOES_ON

    def _least_bytes(self) -> int | None:
        told = self._slots["cache_bytes"][self._slots["used"] == 1]
        return int(told.min()) if len(told) else None

    def _allowed_bytes(self) -> int:
        """What all images may take, asked for one that is at work."""
        least = self._least_bytes()
        assert least is not None, "the caller has a slot"
        return least


def _no_promise(root: Path, reserved: int, others: int, pids: Sequence[int], cache_bytes: int) -> str:
    used = ""
    if others:
        used = f", and {others} are promised to other loaders (process {', '.join(map(str, pids))})"
    return (
        f"the cache in '{root.parent}' may take {cache_bytes} bytes; this loader must be able to hold {reserved} at a "
        f"time{used}; pass cache_bytes={reserved + others} or more (--cache-bytes), or a smaller shuffle_window="
    )


def _why(unfinished: npt.NDArray[np.bool_], unfit: npt.NDArray[np.bool_]) -> Literal["", "busy", "room"]:
    """What keeps the first shard that cannot be had."""
    if not (unfinished | unfit).any():
        return ""
    return "room" if unfit[int(np.argmax(unfinished | unfit))] else "busy"


def _lost(root: Path, key: str) -> str:
    return f"the image '{root / key}.image' was removed or taken from this loader while it was at work; start it again"
