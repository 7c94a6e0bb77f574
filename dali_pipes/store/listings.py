"""Hold the listing of a million objects as columns, and look for names in it.

Only `dali_pipes.store.entries` is imported by workers that pack: numpy costs a process a tenth of a second.
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
from dali_pipes.store.entries import ObjectEntry

# Pages have up to 10,000 names, those of clouds 1,000: so 10 million objects at least can be listed.
MAX_PAGES = 10_000
MAX_LISTED_CHARS = 1 << 30
MAX_LISTING_S = 6 * 3600.0
# Entries that are held as Python objects while a listing is collected.
_COLLECTED = 4096
_NOT_LISTED = -1


class Entries(Sequence[ObjectEntry]):
    """A listing as columns: some 80 bytes an object, where an `ObjectEntry` takes 300. Equal to any sequence of them.

    Args:
        names: Of the objects.
        sizes: int64 [N], bytes.
        checksums: Of the objects; empty for ``None``.
        written_ns: int64 [N, 2]; -1 for ``None``.
    """

    __slots__ = ("_checksums", "_sizes", "_written_ns", "names")

    def __init__(self, names: Texts, sizes: Int64s, checksums: Texts, written_ns: Int64s) -> None:
        self.names, self._sizes, self._checksums, self._written_ns = names, sizes, checksums, written_ns

    @classmethod
    def of(cls, rows: Sequence[ObjectEntry]) -> "Entries":
        """These rows, in their order."""
        written_ns = [(-1, -1) if row.written_ns is None else row.written_ns for row in rows]
        return cls(
            Texts(*pack_texts([row.name for row in rows])),
            np.array([row.size for row in rows], np.int64),
            Texts(*pack_texts([row.checksum or "" for row in rows])),
            np.array(written_ns, np.int64).reshape(-1, 2),
        )

    @classmethod
    def joined(cls, parts: "Sequence[Entries]") -> "Entries":
        """The rows of these parts, one after the other; at least one part."""
        return cls(
            join_texts([part.names for part in parts]),
            np.concatenate([part._sizes for part in parts]),
            join_texts([part._checksums for part in parts]),
            np.concatenate([part._written_ns for part in parts]),
        )

    def take(self, rows: Int64s) -> "Entries":
        """The rows of these numbers, in the order given."""
        return Entries(self.names.take(rows), self._sizes[rows], self._checksums.take(rows), self._written_ns[rows])

    def __len__(self) -> int:
        return len(self.names)

    @overload
    def __getitem__(self, row: int) -> ObjectEntry: ...
    @overload
    def __getitem__(self, row: slice) -> "Entries": ...
    def __getitem__(self, row: int | slice) -> "ObjectEntry | Entries":
        if isinstance(row, slice):
            return Entries(self.names[row], self._sizes[row], self._checksums[row], self._written_ns[row])
        return _entry(self.names[row], int(self._sizes[row]), self._checksums[row], *self._written_ns[row].tolist())

    def __iter__(self) -> Iterator[ObjectEntry]:
        for start in range(0, len(self), _COLLECTED):
            part = self[start : start + _COLLECTED]
            written = part._written_ns.tolist()
            for name, size, checksum, times in zip(
                part.names, part._sizes.tolist(), part._checksums, written, strict=True
            ):
                yield _entry(name, size, checksum, *times)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, str | bytes) or not isinstance(other, Sequence):
            return NotImplemented
        if not isinstance(other, Entries):
            return len(self) == len(other) and all(map(operator.eq, self, other))
        return (
            self.names == other.names
            and np.array_equal(self._sizes, other._sizes)
            and self._checksums == other._checksums
        )

    __hash__ = None  # type: ignore[assignment]  # nobody needs it

    def __repr__(self) -> str:
        return f"<{len(self)} entries: {self.names!r}>"


class EntriesBuilder:
    """Collects a listing, page by page; a `StoreError` if it has no end. ``where`` is its URL, for messages."""

    def __init__(self, where: str = "") -> None:
        self._where, self._num_chars, self._num_pages, self._until = where, 0, 0, time.monotonic() + MAX_LISTING_S
        self._parts = [Entries.of([])]
        self._last: str | None = None
        self._is_sorted = True

    def extend(self, entries: Iterable[ObjectEntry]) -> None:
        """Add entries, in any order."""
        entries = iter(entries)
        self._num_pages += 1
        if self._num_pages > MAX_PAGES or time.monotonic() > self._until:
            raise self._endless()
        while rows := list(itertools.islice(entries, _COLLECTED)):
            names = [row.name for row in rows]
            self._num_chars += sum(map(len, names))
            if self._num_chars > MAX_LISTED_CHARS:
                raise self._endless()
            before = names[:0] if self._last is None else [self._last]
            self._is_sorted = self._is_sorted and all(a < b for a, b in itertools.pairwise(before + names))
            self._last = names[-1]
            self._parts.append(Entries.of(rows))

    def _endless(self) -> StoreError:
        return StoreError(
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

    Args:
        listed: The listing, sorted by name.
        rows: int64 [N], the row of each object in it; negative if it is not listed.
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
        return cls(
            [entry for entry in entries if entry is not None],
            np.where(is_there, np.cumsum(is_there, dtype=np.int64) - 1, _NOT_LISTED),
        )

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
    rows, last = np.full(len(names), _NOT_LISTED, np.int64), ""
    beyond = (len(known), None)
    walk = enumerate(known)
    row, found = next(walk, beyond)
    for place, name in enumerate(names):
        if name < last:
            return _rows_by_table(known, names)
        last = name
        while found is not None and found < name:
            row, found = next(walk, beyond)
        if found == name:
            rows[place] = row
    # In names that are not sorted, such as those of a manifest, the walk may have passed by some.
    if (rows < 0).any() and not all(itertools.starmap(operator.le, itertools.pairwise(known))):
        return _rows_by_table(known, names)
    return rows


def _rows_by_table(known: Sequence[str], names: Sequence[str]) -> Int64s:
    rows_of = {name: row for row, name in enumerate(known)}
    return np.fromiter((rows_of.get(name, _NOT_LISTED) for name in names), np.int64, len(names))


def _entry(name: str, size: int, checksum: str, since: int, until: int) -> ObjectEntry:
    return ObjectEntry(
        name=name, size=size, checksum=checksum or None, written_ns=None if since < 0 else (since, until)
    )
