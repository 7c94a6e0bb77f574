"""Free blocks in a cache: choose the shards that leave it, and clear up after loaders that are gone."""

import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dali_pipes.cache.blocks import punch
from dali_pipes.cache.files import FIRST_SLOT_BYTE, CacheFiles, OpenCacheFile
from dali_pipes.cache.table import Bools, Int64s, State, StateTable
from dali_pipes.errors import CacheError

GOES_ON = 0
"""Value of a slot's ``waiting``: its loader does not wait. Note [waiting] in `dali_pipes.cache.cache`."""

Victims = Sequence[tuple[OpenCacheFile, Int64s]]
"""Shards that are marked ``DROPPING``, by cache file."""


def is_unfinished(states: npt.NDArray[np.uint8]) -> Bools:
    """Mark the shards that are being filled, checked or dropped."""
    unfinished: Bools = (states == State.FILLING) | (states == State.DROPPING) | (states == State.CHECKING)
    return unfinished


class EvictingCache(CacheFiles):
    """The part of a `dali_pipes.cache.cache.NodeCache` that frees blocks."""

    def _drop(self, victims: Victims) -> None:
        """Free the blocks of these shards, outside the mutex, since others wait for it."""
        try:
            for opened, shards in victims:
                self._punch(opened, shards)
        except OSError as exc:
            # The shards stay marked, and count as used space, until the loader leaves.
            raise CacheError(f"cannot free blocks of the cache file in '{self.root}': {exc.strerror}") from exc
        finally:
            with self._changing():
                for opened, _ in victims:
                    opened.num_users -= 1
        with self._changing():
            for opened, shards in victims:
                with opened.table.changing():
                    opened.table.remove(shards)
            self._wake()

    def _choose_victims(self, slot: int, num_bytes: int, *, enough: bool = True) -> Victims:
        """Mark shards that nobody holds, the longest unused first, as being dropped by the slot; for `_drop`.

        If all of them together would not be ``enough``, mark none.
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
        idle = resident[~is_unfinished(states)]
        free: Int64s = idle[~table.held(idle, slots)]
        return free

    def _sweep(self) -> bool:
        """Clear up after loaders that are gone; returns whether there were any."""
        gone = []
        for slot in np.flatnonzero(self._slots["used"]).tolist():
            byte = FIRST_SLOT_BYTE + slot
            if byte not in self._lock.held and not self._lock.is_locked(byte):
                gone.append(slot)
        for slot in gone:
            opened = self._cache_files.get(self._key(slot))
            if opened is not None:
                with opened.table.changing():
                    self._forget(opened, slot)
            self._empty_row(slot)
            self._wake()
        used = self._slots["used"]
        abandoned = False
        for opened in self._cache_files.values():
            table = opened.table
            resident = table.resident
            unfinished = resident[is_unfinished(table.state[resident])]
            # The loader that dropped these, of another cache file, is gone; or the machine was restarted meanwhile.
            owners = table.owner[unfinished]
            left = unfinished[(owners < 0) | (used[np.maximum(owners, 0)] == 0)]
            if len(left):
                abandoned = True
                with table.changing():
                    self._drop_now(opened, left)
                self._wake()
        return bool(gone) or abandoned

    def _forget(self, opened: OpenCacheFile, slot: int) -> None:
        """Undo what a slot's loader left: end its holds, and free the blocks of its unfinished shards."""
        table = opened.table
        resident = table.resident
        held = resident[table.holds[slot, resident] != 0]
        table.used_ns[held] = time.time_ns()
        table.holds[slot, held] = 0
        is_left = is_unfinished(table.state[resident]) & (table.owner[resident] == slot)
        self._drop_now(opened, resident[is_left])

    def _drop_now(self, opened: OpenCacheFile, shards: Int64s) -> None:
        """Free the blocks of these shards, except those that were being checked: other loaders may hold them."""
        shards = opened.table.end_check(shards)
        opened.table.state[shards] = State.DROPPING
        self._punch(opened, shards)
        opened.table.remove(shards)

    @staticmethod
    def _punch(opened: OpenCacheFile, shards: Int64s) -> None:
        starts = opened.table.starts
        for shard in shards.tolist():
            punch(opened.file, int(starts[shard]), int(starts[shard + 1] - starts[shard]))

    def _used_bytes(self) -> int:
        return sum(opened.table.resident_bytes for opened in self._cache_files.values())

    def _wake(self) -> None:
        """Make all loaders that wait for space ask again."""
        self._slots["waiting"] = GOES_ON
