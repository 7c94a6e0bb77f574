"""A cache directory that the processes of a node share: its loaders, the shards that they hold, and those that leave.

Every change is made under the mutex, which is held for micro- to milliseconds. Bytes are fetched and written, and
blocks freed, outside it. The entries of a process that is gone do not count: the kernel released its lock, and the next
process undoes what it was filling or dropping, and ends its holds. A change that Ctrl-C interrupts is repaired as one
that SIGKILL ended.

# Note [reservations]: each loader reserves what it must be able to hold at a time, two windows, or fails to start.
Loaders of the same order of the same shards (the ranks of a job) share one reservation, since they hold the same
shards; they are a *group*. No group holds more than its reservation, unless the reservations of all others would still
fit. So every loader can always get what it reserved, by evicting shards that nobody holds. If the loaders at work name
different ``cache_bytes``, the smallest one counts for all.

# Note [waiting]: a loader that finds no space is marked ``_NO_SPACE``; when it says that it can only wait, ``_WAITS``.
Any change that might give it space clears the marks of all loaders, so that each must ask again. When all loaders are
marked ``_WAITS``, no space will ever be free.

# Note [verify]: shards of a cache file that is kept may have been changed while nobody used it. The first loader that
joins it forgets which of its shards were checked. From then on, a shard is checked when it is first taken, once for all
loaders; those that want it meanwhile wait, as for one that is being filled. ``Verify`` has the other rules.
"""

import functools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Concatenate, Literal, NamedTuple, ParamSpec, TypeVar

import numpy as np

from dali_pipes.arrays import Bools, Int64s
from dali_pipes.cache.extents import OTHER_DIRECTORY
from dali_pipes.cache.files import FIRST_SLOT_BYTE, GOES_ON, CacheFiles, OpenCacheFile
from dali_pipes.cache.table import NOBODY, NUM_SLOTS, State, StateTable, is_unfinished
from dali_pipes.errors import CacheError

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

# The most that is read of the text about a cache file's origin.
_SOURCE_BYTES = 4096

# Values of ``waiting`` besides `GOES_ON`. Note [waiting].
_NO_SPACE, _WAITS = 1, 2

Victims = Sequence[tuple[OpenCacheFile, Int64s]]
"""Shards that are marked ``DROPPING``, by cache file."""

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


def exclusive(
    method: Callable[Concatenate["NodeCache", Arguments], Result],
) -> Callable[Concatenate["NodeCache", Arguments], Result]:
    """Decorate a method of `NodeCache`: it runs under the cache's mutex."""

    @functools.wraps(method)
    def wrapped(self: "NodeCache", /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        return self._files.run(lambda: method(self, *args, **kwargs))

    return wrapped


class NodeCache:
    """A cache directory, as one process uses it: the loaders of the process hold, fill and release shards.

    Args:
        directory: A local directory; checked by `dali_pipes.cache.placement.check_directory`.

    Raises:
        CacheError: If the cache's own directory belongs to somebody else, or no file can be made there.
    """

    def __init__(self, directory: Path) -> None:
        self._files = CacheFiles(directory)
        self._slots = self._files.slots
        self._joined: dict[int, OpenCacheFile] = {}
        self._verify: dict[int, Verify] = {}
        # For ``"always"``: the shards that the slot's loader has filled or checked: bool [shards].
        self._checked_by: dict[int, Bools] = {}

    def close(self) -> None:
        """Close all files, which ends the slots of this process. Can be called twice."""
        self._files.close()
        for opened in self._joined.values():
            opened.close()

    @exclusive
    def budget(self) -> tuple[int, int | None]:
        """Bytes that all cache files take now, and the most that loaders at work allow; ``None`` without loaders."""
        self._files.sweep()
        return self._files.used_bytes(), self._slots.least_bytes()

    def open_cache_file(self, slot: int) -> int:
        """Return a descriptor of the slot's cache file; the caller closes it."""
        return os.dup(self._joined[slot].file)

    @exclusive
    def status(self) -> list[CacheFileStatus]:
        self._files.sweep()
        found = []
        for key, opened in self._files.opened.items():
            slots = self._slots.of(key)
            resident = opened.table.resident
            found.append(
                CacheFileStatus(
                    key=key,
                    source=self._files.own.read_text(f"{key}.source", max_bytes=_SOURCE_BYTES),
                    num_shards=opened.table.num_shards,
                    num_resident=len(resident),
                    num_held=int(opened.table.held(resident, slots).sum()),
                    resident_bytes=opened.table.resident_bytes,
                    file_bytes=int(opened.table.starts[-1]),
                    pids=tuple(self._slots.pids(slots)),
                    keep=opened.table.keep,
                )
            )
        return found

    @exclusive
    def clear(self) -> tuple[int, int]:
        """Drop all shards that nobody holds, and remove unused cache files.

        Returns:
            Bytes freed, and bytes still held.
        """
        self._files.sweep()
        before = self._files.used_bytes()
        for key, opened in list(self._files.opened.items()):
            if slots := self._slots.of(key):
                with opened.table.changing():
                    opened.drop(opened.unheld(slots))
            else:
                self._files.remove(key)
        held = self._files.used_bytes()
        return before - held, held

    @exclusive
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
            reserved: Bytes that the group must be able to hold at a time. Note [reservations].
            cache_bytes: The most that all cache files together may take.
            keep: Whether the cache file stays when nobody uses it.
            verify: Which ready shards the loader checks. Note [verify].

        Raises:
            CacheError: If so many bytes cannot be reserved.
        """
        files, slots = self._files, self._slots
        files.sweep()
        allowed = min(cache_bytes, slots.least_bytes() or cache_bytes)
        self._check_reservation((key, group), max(reserved, self._reservations().get((key, group), 0)), allowed)
        free = np.flatnonzero(slots.rows["used"] == 0).tolist()
        slot = next((slot for slot in free if files.lock.try_lock(FIRST_SLOT_BYTE + slot)), None)
        if slot is None:
            raise CacheError(
                f"'{files.root}' has {NUM_SLOTS} loaders at work, which is the most it takes; {OTHER_DIRECTORY}"
            )
        try:
            opened = files.opened.get(key)
            if opened is None or not np.array_equal(opened.table.starts, starts):
                opened = files.make(key, starts, source)
            with opened.table.changing():
                if not slots.of(key):
                    opened.table.checked[:] = 0
                opened.table.open_row(slot)
        except BaseException:
            files.lock.unlock(FIRST_SLOT_BYTE + slot)
            raise
        if keep:
            opened.table.set_keep()
        self._joined[slot], self._verify[slot] = opened, verify
        self._checked_by[slot] = np.zeros(opened.table.num_shards if verify == "always" else 0, np.bool_)
        slots.write(slot, reserved=reserved, cache_bytes=cache_bytes, group=group, key=key)
        files.remove_unused()  # of loaders that ended without closing them
        self._drop_surplus(slot)
        return slot

    def _drop_surplus(self, slot: int) -> None:
        """Drop shards that nobody holds, if an earlier job was allowed more bytes."""
        surplus_bytes = self._files.used_bytes() - self._allowed_bytes()
        if surplus_bytes > 0:
            for opened, shards in self._choose_victims(slot, surplus_bytes, enough=False):
                with opened.table.changing():
                    opened.drop(shards)
            self._slots.wake()

    @exclusive
    def reserve(self, slot: int, reserved: int) -> None:
        """Change a slot's reservation; if so many bytes cannot be reserved (a `CacheError`), the old one stays."""
        self._check_joined(slot)
        self._files.sweep()
        (key, group), cache_bytes = self._slots.group(slot), int(self._slots.rows["cache_bytes"][slot])
        self._check_reservation((key, group), reserved, self._allowed_bytes())
        self._slots.write(slot, reserved=reserved, cache_bytes=cache_bytes, group=group, key=key)

    @exclusive
    def leave(self, slot: int) -> None:
        """Give up a slot and its holds; the last loader of a cache file removes it, unless it is to be kept."""
        self._files.sweep()  # a loader that is gone must not keep a cache file
        opened = self._joined[slot]
        # A removed cache file lasts no longer than those that have it open. Its table may be a damaged one.
        if self._files.opened.get(self._slots.key(slot)) is opened:
            with opened.table.changing():
                opened.forget(slot)
        self._slots.empty(slot)
        self._slots.wake()
        self._files.remove_unused()
        # Under the mutex: otherwise another thread could join, get this slot, and lose its lock here.
        self._files.lock.unlock(FIRST_SLOT_BYTE + slot)

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
            taken, victims = self._take_or_evict(slot, wanted, most, most_bytes)
            if not victims:
                return taken
            self._drop(victims)
            if len(taken.ready):
                return taken

    @exclusive
    def finish(self, slot: int, shards: Int64s | Sequence[int]) -> None:
        """Mark shards ready, which the slot's loader has filled and checked.

        Raises:
            CacheError: If another loader has one of them by now, or the cache file was removed.
        """
        rows = np.asarray(shards, np.int64)
        table = self._check_joined(slot).table
        if not self._has_begun(table, rows, slot).all():
            raise self._removed(slot)
        with table.changing():
            table.finish(rows)
        if self._verify[slot] == "always":
            self._checked_by[slot][rows] = True
        self._slots.wake()

    def fail(self, slot: int, shards: Int64s | Sequence[int]) -> None:
        """Give up filling ``shards`` and free their blocks; those that were there stay, unchecked."""
        self._drop(self._give_up(slot, np.asarray(shards, np.int64)))

    @exclusive
    def _give_up(self, slot: int, rows: Int64s) -> Victims:
        opened = self._joined[slot]
        rows = rows[self._has_begun(opened.table, rows, slot)]  # the others are another loader's by now
        with opened.table.changing():
            opened.table.holds[slot, rows] = 0
            rows = opened.table.end_check(rows)
            opened.table.drop(rows, slot)
        self._slots.wake()
        return [(opened, rows)]

    @exclusive
    def release(self, slot: int, shards: Int64s | Sequence[int]) -> None:
        """End the slot's holds of ``shards``, which stay until their space is needed."""
        rows = np.asarray(shards, np.int64)
        with (table := self._joined[slot].table).changing():
            table.holds[slot, rows] = 0
            table.used_ns[rows] = time.time_ns()
        self._slots.wake()

    @exclusive
    def is_stuck(self, slot: int) -> bool:
        """Whether the slot's loader and all others wait for space that none of them will free. Note [waiting].

        Called for a loader that needs a shard now and found no space.
        """
        waiting = self._slots.rows["waiting"]
        if self._files.sweep() or waiting[slot] == GOES_ON:
            return False
        waiting[slot] = _WAITS
        if not (waiting[self._slots.used()] == _WAITS).all():
            return False
        tables = [opened.table for opened in self._files.opened.values()]
        return not any(is_unfinished(table.state[table.resident]).any() for table in tables)

    def filled_by(self, slot: int, shard: int) -> int | None:
        """The process that fills, checks or drops a shard now, as far as one look can tell; for messages."""
        owner = int(self._joined[slot].table.owner[shard])
        return None if owner == NOBODY else int(self._slots.rows["pid"][owner])

    @exclusive
    def _take_or_evict(self, slot: int, wanted: Int64s, most: int, most_bytes: int) -> tuple[Take, Victims]:
        taken, victims = self._take(slot, wanted, most, most_bytes)
        waiting = self._slots.rows["waiting"]
        if not victims and (len(taken.ready) or len(taken.fill)):
            waiting[slot] = GOES_ON
        elif not victims and taken.blocked == "space":
            waiting[slot] = max(_NO_SPACE, int(waiting[slot]))
        return taken, victims

    def _take(self, slot: int, wanted: Int64s, most: int, most_bytes: int) -> tuple[Take, Victims]:
        table = self._check_joined(slot).table
        states = table.state[wanted]
        if is_unfinished(states).any() and self._files.sweep():
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
        if not fits[counted].all() and self._files.sweep():
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
            short = self._files.used_bytes() + int(sizes[:num].sum()) - self._allowed_bytes()
            if short <= 0:
                break
            victims = self._choose_victims(slot, short)
            if not victims and num > 1:
                num = 1
                continue
            if not victims and self._files.sweep():
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
        opened, row = self._joined[slot], self._slots.rows[slot]
        is_mine = row["used"] and row["pid"] == os.getpid()
        if not is_mine or self._files.opened.get(self._slots.key(slot)) is not opened:
            raise self._removed(slot)
        return opened

    def _removed(self, slot: int) -> CacheError:
        name = f"{self._files.root / self._slots.key(slot)}.image"
        return CacheError(
            f"the cache file '{name}' was removed or taken from this loader while it was at work; start it again"
        )

    # Eviction

    def _choose_victims(self, slot: int, num_bytes: int, *, enough: bool = True) -> Victims:
        """Mark shards that nobody holds, the longest unused first, as being dropped by the slot; for `_drop`.

        If all of them together would not be ``enough``, mark none.
        """
        opened = list(self._files.opened.items())
        unheld = [cache_file.unheld(self._slots.of(key)) for key, cache_file in opened]
        tables = [cache_file.table for _, cache_file in opened]
        if not opened:
            return []
        shards, of_file = np.concatenate(unheld), np.repeat(np.arange(len(opened)), [len(found) for found in unheld])
        used_ns = np.concatenate([table.used_ns[found] for table, found in zip(tables, unheld, strict=True)])
        sizes = np.concatenate([table.extent_bytes(found) for table, found in zip(tables, unheld, strict=True)])
        oldest_first = np.argsort(used_ns, kind="stable")
        count = int(np.searchsorted(np.cumsum(sizes[oldest_first]), num_bytes)) + 1
        if count > len(shards) and enough:
            return []
        chosen = oldest_first[:count]
        victims = []
        for number in np.unique(of_file[chosen]).tolist():
            cache_file, dropped = opened[number][1], shards[chosen[of_file[chosen] == number]]
            with cache_file.table.changing():
                cache_file.table.drop(dropped, slot)
            victims.append((cache_file, dropped))
        return victims

    def _drop(self, victims: Victims) -> None:
        """Free the blocks of these shards, outside the mutex, since others wait for it."""
        try:
            for opened, shards in victims:
                opened.punch(shards)
        except OSError as exc:
            # The shards stay marked, and count as used space, until the loader leaves.
            raise CacheError(f"cannot free blocks of the cache file in '{self._files.root}': {exc.strerror}") from exc
        if victims:
            self._end_drop(victims)

    @exclusive
    def _end_drop(self, victims: Victims) -> None:
        for opened, shards in victims:
            with opened.table.changing():
                opened.table.remove(shards)
        self._slots.wake()

    # Reservations

    def _limit(self, slot: int) -> tuple[int, list[int]]:
        """Compute the bytes that the slot's group may hold in addition now, and its slots. Note [reservations]."""
        group = self._slots.group(slot)
        reservations, spare = self._reservations(), self._allowed_bytes()
        group_bytes, group_slots = 0, [slot]
        for other, reserved in reservations.items():
            slots = [member for member in self._slots.of(other[0]) if self._slots.group(member) == other]
            table = self._files.opened[other[0]].table
            resident = table.resident
            held = int(table.extent_bytes(resident[table.held(resident, slots)]).sum())
            if other == group:
                group_bytes, group_slots = held, slots
            else:
                spare -= max(reserved, held)
        return max(reservations.get(group, 0), spare) - group_bytes, group_slots

    def _reservations(self) -> dict[tuple[str, int], int]:
        """Bytes that each group at work has reserved."""
        reservations: dict[tuple[str, int], int] = {}
        for slot in self._slots.used():
            group = self._slots.group(slot)
            if group[0] in self._files.opened:
                reservations[group] = max(reservations.get(group, 0), int(self._slots.rows["reserved"][slot]))
        return reservations

    def _check_reservation(self, group: tuple[str, int], reserved: int, allowed: int) -> None:
        """Refuse a group's reservation if it does not fit beside all others."""
        others = sum(num_bytes for other, num_bytes in self._reservations().items() if other != group)
        if reserved + others <= allowed:
            return
        used = ""
        if others:
            pids = self._slots.pids([slot for slot in self._slots.used() if self._slots.group(slot) != group])
            used = f", and {others} are reserved for other loaders (process {', '.join(map(str, pids))})"
        directory = self._files.root.parent
        raise CacheError(
            f"the cache in '{directory}' may take {allowed} bytes; this loader must be able to hold {reserved} "
            f"at a time{used}; pass cache=dali_pipes.Cache(max_bytes={reserved + others}) or more (--cache-bytes), or "
            "a smaller shuffle=dali_pipes.Shuffle(window_bytes=...)"
        )

    def _allowed_bytes(self) -> int:
        least = self._slots.least_bytes()
        assert least is not None, "the caller has a slot"
        return least


def _why(unfinished: Bools, unfit: Bools) -> Literal["", "busy", "space"]:
    """Say why the first unavailable shard is unavailable."""
    if not (unfinished | unfit).any():
        return ""
    return "space" if unfit[int(np.argmax(unfinished | unfit))] else "busy"
