"""Share the bytes of a cache among the loaders at work: what each has reserved, and what each may hold now.

# Note [reservations]: each loader reserves what it must be able to hold at a time, two windows, or fails to start.
Loaders of the same order of the same shards (the ranks of a job) share one reservation, since they hold the same
shards; they are a *group*. No group holds more than its reservation, unless the reservations of all others would still
fit. So every loader can always get what it reserved, by evicting shards that nobody holds. If the loaders at work name
different ``cache_bytes``, the smallest one counts for all.
"""

import numpy as np

from dali_pipes.cache.eviction import EvictingCache
from dali_pipes.cache.free_space import FreeSpace
from dali_pipes.errors import CacheError


class ReservingCache(EvictingCache):
    """The part of a `dali_pipes.cache.cache.NodeCache` that counts reservations."""

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
        for slot in np.flatnonzero(self._slots["used"] == 1).tolist():
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
            used_slots = np.flatnonzero(self._slots["used"] == 1).tolist()
            slots = [slot for slot in used_slots if self._group_of(slot) != (key, group)]
            pids = ", ".join(map(str, sorted({int(self._slots["pid"][slot]) for slot in slots})))
            used = f", and {others} are reserved for other loaders (process {pids})"
        least = FreeSpace.of(self.root.parent).cache_bytes_for(reserved + others)
        raise CacheError(
            f"the cache in '{self.root.parent}' may take {allowed} bytes; this loader must be able to hold {reserved} "
            f"at a time{used}; pass cache=dali_pipes.Cache(max_bytes={least}) or more (--cache-bytes), or "
            "a smaller shuffle=dali_pipes.Shuffle(window_bytes=...)"
        )

    def _least_bytes(self) -> int | None:
        limits = self._slots["cache_bytes"][self._slots["used"] == 1]
        return int(limits.min()) if len(limits) else None

    def _allowed_bytes(self) -> int:
        least = self._least_bytes()
        assert least is not None, "the caller has a slot"
        return least
