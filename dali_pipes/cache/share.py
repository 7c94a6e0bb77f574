"""One loader's share of a cache file: the shards that it holds there, and where they lie.

The cache file is sparse. Each shard owns a fixed extent in it, so a sample's address never changes. The extent has the
shard and, from the next multiple of `EXTENT_ALIGNMENT` on, its shard index: both are staged and evicted together. A
share numbers shards as the loader's own manifest does, which may be a part of the cache file's manifest.

# Note [waiting]: a loader that finds no space is marked ``_NO_SPACE``; when it says that it can only wait, ``_WAITS``.
Any change that might give it space clears the marks of all loaders, so that each must ask again. When all loaders are
marked ``_WAITS``, no space will ever be free.

# Note [verify]: shards of a cache file that is kept may have been changed while nobody used it. The first loader that
joins it forgets which of its shards were checked. From then on, a shard is checked when it is first taken, once for all
loaders; those that want it meanwhile wait, as for one that is being filled. ``Verify`` has the other rules.
"""

import hashlib
import os
import time
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from dali_pipes.arrays import Bools, Int64s
from dali_pipes.cache.cache import NodeCache, Verify, Victims, exclusive
from dali_pipes.cache.extents import EXTENT_ALIGNMENT, OTHER_DIRECTORY, Extent, reserve
from dali_pipes.cache.files import FIRST_SLOT_BYTE, GOES_ON, OpenCacheFile
from dali_pipes.cache.placement import FreeSpace, Placement
from dali_pipes.cache.table import NOBODY, NUM_SLOTS, State, is_unfinished
from dali_pipes.errors import CacheError
from dali_pipes.formats.manifest import Manifest

# Values of ``waiting`` besides `GOES_ON`. Note [waiting].
_NO_SPACE, _WAITS = 1, 2


class Take(NamedTuple):
    """The wanted shards that a loader got."""

    ready: Int64s
    """Held from now on, whole, and checked as the loader's ``Verify`` says."""
    fill: Int64s
    """Shards that the caller must fill, and end with `CacheShare.finish` or `CacheShare.fail`; held as well."""
    is_there: bool
    """Whether the bytes of ``fill`` are there: then they are checked, and fetched only if they are wrong."""
    blocked: Literal["", "busy", "space"]
    """The reason why the loader did not get the most urgent of the other shards: another loader fills or drops it, or
    it does not fit."""


_NOTHING = np.empty(0, np.int64)
_NOTHING.flags.writeable = False


def cache_file_key(manifest: Manifest, *, alignment: int = EXTENT_ALIGNMENT) -> str:
    """Compute the key of a manifest's cache file: 32 hexadecimal digits of the SHA-256 of everything in it.

    Another size or checksum of any shard or index gives another cache file, so new bytes never mix with old ones.
    Neither do stored shards and the same shards transformed by an ETL: the manifest's digest covers the ETL's name.
    """
    state = hashlib.sha256(f"{manifest.shards_digest} {alignment}".encode())
    for column in (manifest.index_bytes, manifest.index_checksums):
        state.update(np.ascontiguousarray(column).tobytes())
    return state.hexdigest()[:32]


class CacheShare(NodeCache):
    """One loader's share of a cache file: shards that it holds stay until it releases them or is closed.

    The share takes one of the cache's *slots*, and is closed by `close`; a share that is not closed ends with its
    process.

    Args:
        placement: The place and size of the cache, see `dali_pipes.cache.placement.place`.
        key: Of the cache file, which is made if it is not there: see `cache_file_key`.
        starts: Its extents, from `dali_pipes.cache.extents.extent_starts`. Their alignment must not be smaller than the
            file system's: extents would then share blocks, and take more of them than are counted.
        sizes: Bytes that each shard takes of its extent, as far as that is known; see `StateTable.sizes`.
        rows: The row in ``starts`` of each of the loader's shards: int64 [shards].
        shard_bytes: Of each of the loader's shards: int64 [shards].
        index_bytes: Of their indexes, likewise.
        source: The URL of the shards.
        group: Loaders of one cache file and one ``group`` share a reservation.
        reserved: Bytes that the group must be able to hold at a time. Note [reservations] in `dali_pipes.cache.cache`.
        verify: Which ready shards the loader checks. Note [verify].

    Raises:
        CacheError: If ``reserved`` bytes do not fit, or no cache file can be made there.
    """

    def __init__(
        self,
        placement: Placement,
        *,
        key: str,
        starts: Int64s,
        sizes: Int64s,
        rows: Int64s,
        shard_bytes: Int64s,
        index_bytes: Int64s,
        source: str,
        group: int,
        reserved: int,
        verify: Verify = "first",
    ) -> None:
        self.space, self.cache_bytes, self.reserved = placement.space, placement.cache_bytes, reserved
        self._file, self._rows, self._verify = -1, rows, verify
        # The loader's shard of each row, to translate the table's rows; -1 for rows that the loader does not have.
        self._shard_of_row = np.full(len(starts) - 1, -1, np.int64)
        self._shard_of_row[rows] = np.arange(len(rows))
        self.starts = starts[rows]
        """Where each shard starts in the cache file: int64 [shards]."""
        self.extent_bytes = sizes[rows]
        """Bytes that each shard takes of the cache, with its index: int64 [shards]."""
        self._shard_bytes, self._index_bytes = shard_bytes, index_bytes
        # For ``verify="always"``: the rows that the loader has filled or checked.
        self._checked = np.zeros(len(starts) - 1, np.bool_)
        super().__init__(self.space.directory)
        try:
            self._slot, self._opened = self._join(key, starts, sizes, source, group, reserved, keep=placement.keep)
            self._file = os.dup(self._opened.file)
        except BaseException:
            super().close()
            raise

    @exclusive
    def _join(
        self, key: str, starts: Int64s, sizes: Int64s, source: str, group: int, reserved: int, *, keep: bool
    ) -> tuple[int, OpenCacheFile]:
        """Take a slot, and reserve bytes; returns the slot and the cache file."""
        files, slots, cache_bytes = self._files, self._slots, self.cache_bytes
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
                opened = files.make(key, starts, sizes, source)
            with opened.table.changing():
                if not slots.of(key):
                    opened.table.checked[:] = 0
                opened.table.open_row(slot)
        except BaseException:
            files.lock.unlock(FIRST_SLOT_BYTE + slot)
            raise
        if keep:
            opened.table.set_keep()
        slots.write(slot, reserved=reserved, cache_bytes=cache_bytes, group=group, key=key)
        files.remove_unused()  # of loaders that ended without closing them
        surplus_bytes = files.used_bytes() - self._allowed_bytes()
        if surplus_bytes > 0:  # an earlier job was allowed more bytes
            for other, dropped in self._choose_victims(slot, surplus_bytes, enough=False):
                with other.table.changing():
                    other.drop(dropped)
            slots.wake()
        return slot, opened

    def close(self) -> None:
        """Release all shards. Can be called twice; readers that have the cache file open can still read it."""
        file, self._file = self._file, -1
        if file < 0:
            return
        os.close(file)
        try:
            self._leave()
        finally:
            super().close()
            self._opened.close()

    @exclusive
    def _leave(self) -> None:
        """Give up the slot and its holds; the last loader of a cache file removes it, unless it is to be kept."""
        self._files.sweep()  # a loader that is gone must not keep a cache file
        opened = self._opened
        # A removed cache file lasts no longer than those that have it open. Its table may be a damaged one.
        if self._files.opened.get(self._slots.key(self._slot)) is opened:
            with opened.table.changing():
                opened.forget(self._slot)
        self._slots.empty(self._slot)
        self._slots.wake()
        self._files.remove_unused()
        # Under the mutex: otherwise another thread could join, get this self._slot, and lose its lock here.
        self._files.lock.unlock(FIRST_SLOT_BYTE + self._slot)

    @property
    def path(self) -> str:
        """A path that opens the cache file, in this process only."""
        return f"/proc/self/fd/{self._file}"

    @property
    def taken_bytes(self) -> int:
        """Bytes that the blocks of the whole cache file occupy now, on disk or in memory; 0 if the share is closed."""
        try:
            return os.fstat(self._file).st_blocks * 512
        except OSError:
            return 0

    def shard_extent(self, shard: int) -> Extent:
        return Extent(self._file, int(self.starts[shard]), int(self._shard_bytes[shard]))

    def index_extent(self, shard: int) -> Extent:
        aligned = -(-int(self._shard_bytes[shard]) // EXTENT_ALIGNMENT) * EXTENT_ALIGNMENT
        return Extent(self._file, int(self.starts[shard]) + aligned, int(self._index_bytes[shard]))

    # Taking and filling

    def take(self, wanted: Sequence[int], *, most: int = 1, most_bytes: int = 0) -> Take:
        """Hold the ready shards of ``wanted``, and begin to fill or check the first of those that are not ready.

        Args:
            wanted: Shards that the loader does not hold yet, the most urgent first. If one does not fit, those after it
                take no space.
            most: The most shards to fill or check together.
            most_bytes: The most that their extents take, if they are several.

        Raises:
            CacheError: If the cache file was removed.
        """
        rows = self._rows_of(wanted)
        while True:
            taken, victims = self._take_or_evict(rows, most, most_bytes)
            if victims:
                self._drop(victims)
            if not victims or len(taken.ready):
                return taken._replace(ready=self._shard_of_row[taken.ready], fill=self._shard_of_row[taken.fill])

    def not_there(self, shards: Sequence[int]) -> Int64s:
        """List the shards of these whose bytes are not in the cache file now, as far as one look can tell."""
        chosen = np.asarray(shards, np.int64)
        states = self._opened.table.state[self._rows_of(shards)]
        return chosen[~np.isin(states, [State.READY, State.UNCHECKED, State.CHECKING])]

    def reserve_blocks(self, shard: int, *, name: str, blocks: Int64s | None = None) -> None:
        """Allocate the extent's blocks before anything is written there; ``blocks``: only these, by number in the file.

        Raises:
            CacheError: If files outside the cache have taken the space.
        """
        first, num = int(self.starts[shard]), int(self.extent_bytes[shard])
        runs = [(first, num)]
        if blocks is not None:
            parts = np.split(blocks, np.flatnonzero(np.diff(blocks) != 1) + 1)
            runs = [(int(part[0]) * EXTENT_ALIGNMENT, len(part) * EXTENT_ALIGNMENT) for part in parts]
        try:
            for start, size in runs:
                reserve(self._file, start, size)
        except OSError as exc:
            raise CacheError(
                f"no space for shard '{name}' in '{self.space.directory}': {self.extent_bytes[shard]} bytes needed, "
                f"{FreeSpace.of(self.space.directory).free} free ({exc.strerror}); lower "
                "cache=dali_pipes.Cache(max_bytes=...) (--cache-bytes), or free some space there"
            ) from exc

    def finish(self, shards: Sequence[int], *, are_new: bool = True, sizes: Sequence[int] | None = None) -> None:
        """Let all loaders read these shards and their indexes, which are whole and checked.

        ``are_new`` is ``False`` if nothing was written, so that nothing has to reach the disk before. ``sizes`` are the
        bytes that the shards take, if that is known now.

        Raises:
            CacheError: If another loader has one of them by now, or the cache file was removed.
        """
        if are_new and not self.space.is_memory:
            try:
                os.fdatasync(self._file)
            except OSError as exc:
                raise CacheError(f"the disk of '{self.space.directory}' failed: {exc.strerror}") from exc
        self._finish(self._rows_of(shards), None if sizes is None else np.array(sizes, np.int64))

    @exclusive
    def _finish(self, rows: Int64s, sizes: Int64s | None) -> None:
        table = self._check_joined().table
        if not self._has_begun(rows).all():
            raise self._removed()
        if sizes is not None:
            self._reserve_for(int(np.maximum(sizes - table.sizes[rows], 0).sum()))
        with table.changing():
            table.finish(rows, sizes)
        self._checked[rows] = True
        self._slots.wake()

    def _reserve_for(self, more: int) -> None:
        """Reserve more bytes if the group holds more than it has reserved once shards are larger than was estimated."""
        key, group = self._slots.group(self._slot)
        held = self._held_by(key, group)[0] + more
        if more and held > self._reservations()[key, group]:
            self._check_reservation((key, group), held, self._allowed_bytes())
            self._slots.write(self._slot, reserved=held, cache_bytes=self.cache_bytes, group=group, key=key)
            self.reserved = held

    def fail(self, shards: Sequence[int]) -> None:
        """Give up filling ``shards`` and free their blocks; those that were there stay, unchecked."""
        self._drop(self._give_up(self._rows_of(shards)))

    @exclusive
    def _give_up(self, rows: Int64s) -> Victims:
        table = self._opened.table
        rows = rows[self._has_begun(rows)]  # the others are another loader's by now
        with table.changing():
            table.holds[self._slot, rows] = 0
            rows = table.end_check(rows)
            table.drop(rows, self._slot)
        self._slots.wake()
        return [(self._opened, rows)]

    @exclusive
    def release(self, shards: Sequence[int]) -> None:
        """End the holds of ``shards``, which stay until their space is needed.

        Call it when the last reader that names them is closed: readers prefetch.
        """
        rows = self._rows_of(shards)
        with (table := self._opened.table).changing():
            table.holds[self._slot, rows] = 0
            table.used_ns[rows] = time.time_ns()
        self._slots.wake()

    @exclusive
    def is_stuck(self) -> bool:
        """Whether this loader and all others wait for space that none of them will free. Note [waiting].

        Called for a loader that needs a shard now and found no space.
        """
        waiting = self._slots.rows["waiting"]
        if self._files.sweep() or waiting[self._slot] == GOES_ON:
            return False
        waiting[self._slot] = _WAITS
        if not (waiting[self._slots.used()] == _WAITS).all():
            return False
        tables = [opened.table for opened in self._files.opened.values()]
        return not any(is_unfinished(table.state[table.resident]).any() for table in tables)

    def filled_by(self, shard: int) -> int | None:
        """The process that fills, checks or drops a shard now, as far as one look can tell; for messages."""
        owner = int(self._opened.table.owner[self._rows[shard]])
        return None if owner == NOBODY else int(self._slots.rows["pid"][owner])

    @exclusive
    def reserve_more(self, reserved: int) -> None:
        """Reserve more bytes than before; if they cannot be reserved (a `CacheError`), nothing changes."""
        self._check_joined()
        self._files.sweep()
        key, group = self._slots.group(self._slot)
        self._check_reservation((key, group), reserved, self._allowed_bytes())
        self._slots.write(self._slot, reserved=reserved, cache_bytes=self.cache_bytes, group=group, key=key)
        self.reserved = reserved

    def read_ahead(self, starts: Int64s, sizes: Int64s) -> None:
        """Make the kernel read these bytes of the cache file from its disk soon; return at once."""
        if self.space.is_memory:
            return
        for start, size in zip(starts.tolist(), sizes.tolist(), strict=True):
            if size:  # 0 would stand for the rest of the file
                os.posix_fadvise(self._file, start, size, os.POSIX_FADV_WILLNEED)

    def _rows_of(self, shards: Sequence[int]) -> Int64s:
        return self._rows[np.asarray(shards, np.int64)]

    @exclusive
    def _take_or_evict(self, wanted: Int64s, most: int, most_bytes: int) -> tuple[Take, Victims]:
        taken, victims = self._take(wanted, most, most_bytes)
        waiting = self._slots.rows["waiting"]
        if not victims and (len(taken.ready) or len(taken.fill)):
            waiting[self._slot] = GOES_ON
        elif not victims and taken.blocked == "space":
            waiting[self._slot] = max(_NO_SPACE, int(waiting[self._slot]))
        return taken, victims

    def _take(self, wanted: Int64s, most: int, most_bytes: int) -> tuple[Take, Victims]:
        table = self._check_joined().table
        states = table.state[wanted]
        if is_unfinished(states).any() and self._files.sweep():
            states = table.state[wanted]
        unfinished = is_unfinished(states)
        if unfinished.all():
            # A waiting loader comes here again and again, so this must stay cheap.
            return Take(_NOTHING, _NOTHING, False, "busy" if len(wanted) else ""), []
        is_ready = (states == State.READY) & self._believed(wanted)
        missing = np.flatnonzero(~is_ready & ~unfinished)
        first = int(missing[0]) if len(missing) else None
        limit, group_slots = self._limit()
        # Bytes that a shard adds to those that the group holds: 0 if a loader of the group holds it already.
        added = np.where(table.held(wanted, group_slots), 0, table.extent_bytes(wanted))
        # Space goes to the most urgent shards first: ready ones, those that others are filling, and the one to fill.
        counted = is_ready | unfinished
        counted[missing[:1]] = True
        fits = (added == 0) | (np.cumsum(np.where(counted, added, 0)) <= limit)
        if not fits[counted].all() and self._files.sweep():
            # The holds and the reservation of a loader that is gone were counted.
            return self._take(wanted, most, most_bytes)
        ready = wanted[is_ready & fits]
        if len(ready):
            with table.changing():
                table.holds[self._slot, ready] = 1
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
            victims = self._choose_victims(self._slot, short)
            if not victims and num > 1:
                num = 1
                continue
            if not victims and self._files.sweep():
                return self._take(wanted, most, most_bytes)
            # Without victims: others are dropping shards, or hold more than they reserved.
            counted[:first] = False
            return Take(ready, _NOTHING, False, "" if victims else _why(unfinished, counted)), victims
        shards = wanted[fill[:num]]
        with table.changing():
            table.fill(shards, self._slot)
        return Take(ready, shards, is_there, blocked), []

    def _believed(self, shards: Int64s) -> Bools:
        """Mark the shards that the loader reads without a check if they are ready. Note [verify]."""
        if self._verify == "always":
            return self._checked[shards]
        if self._verify == "never":
            return np.ones(len(shards), np.bool_)
        checked: Bools = self._opened.table.checked[shards] != 0
        return checked

    def _has_begun(self, rows: Int64s) -> Bools:
        """Mark the shards that the loader fills or checks."""
        table = self._opened.table
        begun: Bools = np.isin(table.state[rows], [State.FILLING, State.CHECKING]) & (table.owner[rows] == self._slot)
        return begun

    def _check_joined(self) -> OpenCacheFile:
        """Return the cache file if it is still there. Note [removed] in `dali_pipes.cache.files`."""
        opened, row = self._opened, self._slots.rows[self._slot]
        is_mine = row["used"] and row["pid"] == os.getpid()
        if not is_mine or self._files.opened.get(self._slots.key(self._slot)) is not opened:
            raise self._removed()
        return opened

    def _removed(self) -> CacheError:
        name = f"{self._files.root / self._slots.key(self._slot)}.image"
        return CacheError(
            f"the cache file '{name}' was removed or taken from this loader while it was at work; start it again"
        )

    def _limit(self) -> tuple[int, list[int]]:
        """Compute the bytes that the loader's group may hold in addition now, and its slots. Note [reservations]."""
        group = self._slots.group(self._slot)
        reservations, spare = self._reservations(), self._allowed_bytes()
        group_bytes, group_slots = 0, [self._slot]
        for other, reserved in reservations.items():
            held, slots = self._held_by(*other)
            if other == group:
                group_bytes, group_slots = held, slots
            else:
                spare -= max(reserved, held)
        return max(reservations.get(group, 0), spare) - group_bytes, group_slots

    def _held_by(self, key: str, group: int) -> tuple[int, list[int]]:
        """The bytes that a group holds, and its slots."""
        slots = [slot for slot in self._slots.of(key) if self._slots.group(slot) == (key, group)]
        table = self._files.opened[key].table
        resident = table.resident
        return int(table.extent_bytes(resident[table.held(resident, slots)]).sum()), slots


def _why(unfinished: Bools, unfit: Bools) -> Literal["", "busy", "space"]:
    """Say why the first unavailable shard is unavailable."""
    if not (unfinished | unfit).any():
        return ""
    return "space" if unfit[int(np.argmax(unfinished | unfit))] else "busy"
