"""Hold the listing of a million objects as columns, and look for names in it.

Workers that pack do not import this: numpy costs a process a tenth of a second.
"""

import itertools
import operator
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import overload

import numpy as np

from dali_pipes.arrays import Int64s
from dali_pipes.errors import StoreError
from dali_pipes.formats.texts import Texts, join_texts, pack_texts
from dali_pipes.store.shard_names import ObjectEntry

# Pages have up to 10,000 names, those of clouds 1,000: so 10 million objects at least can be listed.
MAX_PAGES = 10_000
MAX_LISTED_CHARS = 1 << 30
MAX_LISTING_S = 6 * 3600.0
# Entries that are held as Python objects while a listing is collected.
_COLLECTED = 4096
_NOT_LISTED = -1


class Entries(Sequence[ObjectEntry]):
    """A listing as columns: some 80 bytes an object, where an `ObjectEntry` takes 300. Equal to any sequence of them.

    ``checksums`` are empty for ``None``. ``numbers``: int64 [N, 3], bytes and ``written_ns``, -1 for ``None``.
    """

    __slots__ = ("_checksums", "_numbers", "names")

    def __init__(self, names: Texts, checksums: Texts, numbers: Int64s) -> None:
        self.names, self._checksums, self._numbers = names, checksums, numbers

    @classmethod
    def of(cls, rows: Sequence[ObjectEntry]) -> "Entries":
        """These rows, in their order."""
        numbers = [(row.size, *(row.written_ns or (-1, -1))) for row in rows]
        return cls(
            Texts(*pack_texts([row.name for row in rows])),
            Texts(*pack_texts([row.checksum or "" for row in rows])),
            np.array(numbers, np.int64).reshape(-1, 3),
        )

    @classmethod
    def joined(cls, parts: "Sequence[Entries]") -> "Entries":
        """The rows of these parts, one after the other; at least one part."""
        return cls(
            join_texts([part.names for part in parts]),
            join_texts([part._checksums for part in parts]),
            np.concatenate([part._numbers for part in parts]),
        )

    def take(self, rows: Int64s) -> "Entries":
        """The rows of these numbers, in the order given."""
        return Entries(self.names.take(rows), self._checksums.take(rows), self._numbers[rows])

    def __len__(self) -> int:
        return len(self.names)

    @overload
    def __getitem__(self, row: int) -> ObjectEntry: ...
    @overload
    def __getitem__(self, row: slice) -> "Entries": ...
    def __getitem__(self, row: int | slice) -> "ObjectEntry | Entries":
        if isinstance(row, slice):
            return Entries(self.names[row], self._checksums[row], self._numbers[row])
        return _entry(self.names[row], self._checksums[row], self._numbers[row].tolist())

    def __iter__(self) -> Iterator[ObjectEntry]:
        for start in range(0, len(self), _COLLECTED):
            part = self[start : start + _COLLECTED]
            yield from map(_entry, part.names, part._checksums, part._numbers.tolist())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Entries):
            sizes, other_sizes = self._numbers[:, 0], other._numbers[:, 0]
            is_same = self.names == other.names and self._checksums == other._checksums
            return is_same and np.array_equal(sizes, other_sizes)
        if isinstance(other, str | bytes) or not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(map(operator.eq, self, other))

    __hash__ = None  # type: ignore[assignment]  # nobody needs it

    def __repr__(self) -> str:
        return f"<{len(self)} entries: {self.names!r}>"


def _entry(name: str, checksum: str, numbers: list[int]) -> ObjectEntry:
    size, since, until = numbers
    written_ns = None if since < 0 else (since, until)
    return ObjectEntry(name=name, size=size, checksum=checksum or None, written_ns=written_ns)


class EntriesBuilder:
    """Collects a listing, page by page; a `StoreError` if it has no end. ``where`` is its URL, for messages."""

    def __init__(self, where: str = "") -> None:
        self._where, self._num_chars, self._num_pages, self._until = where, 0, 0, time.monotonic() + MAX_LISTING_S
        self._parts = [Entries.of([])]
        self._last: str | None = None
        self._is_sorted = True

    def extend(self, entries: Iterable[ObjectEntry]) -> None:
        """Add a page of entries, in any order."""
        entries = iter(entries)
        self._num_pages += 1
        while rows := list(itertools.islice(entries, _COLLECTED)):
            names = [row.name for row in rows]
            self._num_chars += sum(map(len, names))
            before = [] if self._last is None else [self._last]
            self._is_sorted = self._is_sorted and all(a < b for a, b in itertools.pairwise(before + names))
            self._last = names[-1]
            try:
                self._parts.append(Entries.of(rows))
            except OverflowError:
                row = max(rows, key=lambda row: max(row.size, *(row.written_ns or (0, 0))))
                raise StoreError(
                    f"'{self._where}': expected sizes and times of 64 bits in the listing, found '{row.name}' with "
                    f"{row.size} bytes, written at {row.written_ns} ns"
                ) from None
        if self._num_pages > MAX_PAGES or self._num_chars > MAX_LISTED_CHARS or time.monotonic() > self._until:
            raise StoreError(
                f"'{self._where}': its listing has more than {MAX_PAGES} pages, names of more than {MAX_LISTED_CHARS} "
                f"characters, or takes more than {MAX_LISTING_S:g} s; name fewer objects by a longer prefix"
            )

    def finish(self) -> Entries:
        """The entries, sorted by name, each name once: the last entry that was added for it."""
        listed = Entries.joined(self._parts)
        if self._is_sorted:
            return listed
        rows_of = {name: row for row, name in enumerate(listed.names)}
        return listed.take(np.array([rows_of[name] for name in sorted(rows_of)], np.int64))


class Found(Sequence[ObjectEntry | None]):
    """The entries of some objects in a listing, ``None`` for those that are not listed.

    ``rows``: int64 [N], the row of each object in ``listed``; negative if it is not listed.
    """

    __slots__ = ("_listed", "rows")

    def __init__(self, listed: Sequence[ObjectEntry], rows: Int64s) -> None:
        self._listed, self.rows = listed, rows

    @classmethod
    def among(cls, listed: Sequence[ObjectEntry], names: Sequence[str]) -> "Found":
        """Look for these names, in any order, each as often as it occurs."""
        known = listed.names if isinstance(listed, Entries) else [entry.name for entry in listed]
        return cls(listed, rows_among(known, names))

    @classmethod
    def of(cls, entries: Sequence[ObjectEntry | None]) -> "Found":
        """These entries, from no listing."""
        is_there = np.array([entry is not None for entry in entries], np.bool_)
        rows = np.where(is_there, np.cumsum(is_there, dtype=np.int64) - 1, _NOT_LISTED)
        return cls([entry for entry in entries if entry is not None], rows)

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, row: int) -> ObjectEntry | None: ...
    @overload
    def __getitem__(self, row: slice) -> "Found": ...
    def __getitem__(self, row: int | slice) -> "ObjectEntry | Found | None":
        if isinstance(row, slice):
            return Found(self._listed, self.rows[row])
        found = int(self.rows[row])
        return None if found < 0 else self._listed[found]

    def lacking(self, names: Sequence[str]) -> list[str]:
        """Those of the names that were looked for and are not listed."""
        return [names[row] for row in np.flatnonzero(self.rows < 0).tolist()]


def rows_among(known: Sequence[str], names: Sequence[str]) -> Int64s:
    """The row of each of ``names`` in ``known``; -1 if it is not there. Sorted names take little memory.

    >>> rows_among(["a", "c", "d"], ["a", "b", "d"]).tolist(), rows_among(["a", "c"], ["c", "a", "a"]).tolist()
    ([0, -1, 2], [1, 0, 0])
    """
    if not (_is_sorted(known) and _is_sorted(names)):
        rows_of = {name: row for row, name in enumerate(known)}
        return np.fromiter((rows_of.get(name, _NOT_LISTED) for name in names), np.int64, len(names))
    rows = np.full(len(names), _NOT_LISTED, np.int64)
    walk = enumerate(known)
    row, found = next(walk, (len(known), None))
    for place, name in enumerate(names):
        while found is not None and found < name:
            row, found = next(walk, (len(known), None))
        if found == name:
            rows[place] = row
    return rows


def _is_sorted(names: Sequence[str]) -> bool:
    return all(itertools.starmap(operator.le, itertools.pairwise(names)))
