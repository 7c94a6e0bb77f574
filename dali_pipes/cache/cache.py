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
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Concatenate, Literal, ParamSpec, TypeVar

import numpy as np

from dali_pipes.arrays import Int64s
from dali_pipes.cache.files import CacheFiles, OpenCacheFile
from dali_pipes.errors import CacheError

Cache = TypeVar("Cache", bound="NodeCache")
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

# The most that is read of the text about a cache file's origin.
_SOURCE_BYTES = 4096

Verify = Literal["first", "always", "never"]
"""Which ready shards a loader checks. ``"first"``: those that nobody has filled or checked since the first of the
loaders at work joined. ``"always"``: those that it has neither filled nor checked itself. ``"never"``: none. Shards
from before the machine's last start are always checked. Note [verify] in
`dali_pipes.cache.share`."""

Victims = Sequence[tuple[OpenCacheFile, Int64s]]
"""Shards that are marked ``DROPPING``, by cache file."""


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


def exclusive(
    method: Callable[Concatenate[Cache, Arguments], Result],
) -> Callable[Concatenate[Cache, Arguments], Result]:
    """Decorate a method of a `NodeCache`: it runs under the cache's mutex."""

    @functools.wraps(method)
    def wrapped(self: Cache, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        return self._files.run(lambda: method(self, *args, **kwargs))

    return wrapped


class NodeCache:
    """A cache directory, as one process uses it; `dali_pipes.cache.share.CacheShare` is that of a loader.

    Args:
        directory: A local directory; checked by `dali_pipes.cache.placement.check_directory`.

    Raises:
        CacheError: If the cache's own directory belongs to somebody else, or no file can be made there.
    """

    def __init__(self, directory: Path) -> None:
        self._files = CacheFiles(directory)
        self._slots = self._files.slots

    def close(self) -> None:
        """Close all files. Can be called twice."""
        self._files.close()

    @exclusive
    def budget(self) -> tuple[int, int | None]:
        """Bytes that all cache files take now, and the most that loaders at work allow; ``None`` without loaders."""
        self._files.sweep()
        return self._files.used_bytes(), self._slots.least_bytes()

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
