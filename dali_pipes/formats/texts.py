"""Hold many short texts as two columns: all UTF-8 bytes in one array, and the end offset of each text.

A million names take 30 MB in this form and 80 MB as Python strings, and are read from a file without a loop. A text is
decoded at each access.
"""

import operator
from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np

from dali_pipes.arrays import Int64s, UInt8s
from dali_pipes.errors import DataError, printable

# Texts decoded or checked at a time: some 100 KB of names.
_ROWS_AT_A_TIME = 4096


class Texts(Sequence[str]):
    """A sequence of texts over the two columns, equal to any sequence of the same texts.

    Args:
        data: uint8, the texts' UTF-8 bytes, one after the other.
        ends: int64 [N], where each text ends in ``data``.

    Both are used without a copy and without a check; call `check` for columns from a file.

    >>> names = Texts(*pack_texts(["a-0.tar", "", "b-0.tar"]))
    >>> names[-1], list(names[:2]), names == ["a-0.tar", "", "b-0.tar"]
    ('b-0.tar', ['a-0.tar', ''], True)
    """

    __slots__ = ("data", "ends")
    __hash__ = None  # type: ignore[assignment]  # it would have to decode all texts

    def __init__(self, data: UInt8s, ends: Int64s) -> None:
        self.data = data
        self.ends = ends

    def __len__(self) -> int:
        return len(self.ends)

    @overload
    def __getitem__(self, row: int) -> str: ...
    @overload
    def __getitem__(self, row: slice) -> "Texts": ...
    def __getitem__(self, row: int | slice) -> "str | Texts":
        if isinstance(row, slice):
            start, stop, step = row.indices(len(self))
            if step != 1:
                return self.take(np.fromiter(range(start, stop, step), np.int64))
            first = self._start(start)
            ends = self.ends[start : max(start, stop)]
            return Texts(self.data[first : int(ends[-1]) if len(ends) else first], ends - first)
        row = operator.index(row)
        if row < 0:
            row += len(self)
        if not 0 <= row < len(self):
            raise IndexError(f"row must be in [0, {len(self)}), got {row}")
        return self.data[self._start(row) : int(self.ends[row])].tobytes().decode()

    def __iter__(self) -> Iterator[str]:
        for start in range(0, len(self), _ROWS_AT_A_TIME):
            first = self._start(start)
            ends = (self.ends[start : start + _ROWS_AT_A_TIME] - first).tolist()
            run = self.data[first : first + ends[-1]].tobytes()
            begin = 0
            for end in ends:
                yield run[begin:end].decode()
                begin = end

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Texts):
            return np.array_equal(self.ends, other.ends) and np.array_equal(self.data, other.data)
        if isinstance(other, str | bytes) or not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(map(operator.eq, self, other))

    def __repr__(self) -> str:
        more = ", ..." if len(self) > 3 else ""
        return f"<{len(self)} texts: {', '.join(map(repr, self[:3]))}{more}>"

    def take(self, rows: Int64s) -> "Texts":
        """The texts at these rows, in the order given."""
        starts, stops = np.append(0, self.ends)[rows], self.ends[rows]
        first = np.ones(len(rows), np.bool_)  # of a run of neighbours, which are copied together
        first[1:] = np.diff(rows) != 1
        places = zip(starts[first].tolist(), stops[np.roll(first, -1)].tolist(), strict=True)
        data = np.concatenate([np.empty(0, np.uint8), *(self.data[start:stop] for start, stop in places)])
        return Texts(data, np.cumsum(stops - starts, dtype=np.int64))

    def all_start_with(self, prefix: str) -> bool:
        """Whether every text starts with ``prefix``.

        >>> [Texts(*pack_texts(["ab", "abc"])).all_start_with(prefix) for prefix in ("", "ab", "abc")]
        [True, True, False]
        """
        wanted, lengths = prefix.encode(), np.diff(self.ends, prepend=0)
        if (lengths < len(wanted)).any():
            return False
        starts = self.ends - lengths
        return all(bool((self.data[starts + place] == byte).all()) for place, byte in enumerate(wanted))

    def have(self, character: str) -> bool:
        """Whether an ASCII character is in any text."""
        return bool((self.data == ord(character)).any())

    def check(self) -> None:
        """Check that the columns fit together; for columns from a file.

        Raises:
            ValueError: If ends do not rise, the last end is not the number of bytes, or a text is not UTF-8.
        """
        # Compared, not subtracted: the difference of two numbers from a file may overflow.
        is_falling = len(self) > 0 and (self.ends[0] < 0 or bool((self.ends[1:] < self.ends[:-1]).any()))
        if is_falling or self._start(len(self)) != len(self.data):
            raise ValueError(f"ends must rise from 0 to {len(self.data)}, the number of bytes")
        lengths = np.diff(self.ends, prepend=0)
        # All of them are UTF-8 if the run is, and no text starts within a character (with a byte 10xxxxxx).
        firsts = (self.ends - lengths)[lengths > 0]
        within = (self.data[firsts] & 0xC0) == 0x80
        if within.any():
            raise ValueError(f"the text that starts at byte {firsts[within][0]} is not UTF-8")
        for start in range(0, len(self), _ROWS_AT_A_TIME):
            stop = min(start + _ROWS_AT_A_TIME, len(self))
            self.data[self._start(start) : self._start(stop)].tobytes().decode()

    def _start(self, row: int) -> int:
        return int(self.ends[row - 1]) if row else 0


def pack_texts(texts: Sequence[str]) -> tuple[UInt8s, Int64s]:
    """Texts as one run of UTF-8 bytes and their end offsets.

    Raises:
        DataError: If a text cannot be written as UTF-8, such as a file's name in another encoding.

    >>> data, ends = pack_texts(["ab", "", "c"])
    >>> bytes(data), ends.tolist()
    (b'abc', [2, 2, 3])
    """
    if isinstance(texts, Texts):
        return texts.data, texts.ends
    try:
        run = "".join(texts).encode()
        lengths = (len(text) if text.isascii() else len(text.encode()) for text in texts)
        ends = np.cumsum(np.fromiter(lengths, np.int64, len(texts)), dtype=np.int64)
    except UnicodeEncodeError as exc:
        bad = next(text for text in texts if any("\ud800" <= character <= "\udfff" for character in text))
        raise DataError(f"name '{printable(bad)}' is not UTF-8; rename it") from exc
    return np.frombuffer(run, np.uint8), ends


def join_texts(parts: Sequence[Texts]) -> Texts:
    """These texts, one run after the other; at least one run."""
    starts = np.cumsum([0, *(len(part.data) for part in parts)])
    ends = [part.ends + start for part, start in zip(parts, starts[:-1], strict=True)]
    return Texts(np.concatenate([part.data for part in parts]), np.concatenate(ends))


# With NUL before and after each name, one of these pairs stands where a part of a name is empty, "." or "..".
_ODD_PAIRS = (b"\0\0", b"\0/", b"\0.", b"//", b"/.", b"/\0")


def object_name_problem(names: Texts) -> str | None:
    """Describe the first name that must not become part of a path; ``None`` if all names are safe.

    This is the rule of `dali_pipes.store.shard_names.check_object_name`, for a million names in a fraction of a second.
    Also, a name must not be empty or end with a slash: it is the name of an object, not a prefix.
    """
    run = b"\0" + np.insert(names.data, names.ends, 0).tobytes()
    if (names.data != 0).all() and not any(pair in run for pair in _ODD_PAIRS):
        return None
    bad = (name for name in names if "\0" in name or not {"", ".", ".."}.isdisjoint(name.split("/")))
    first = next(bad, None)
    return None if first is None else f"a name must hold no NUL and no part that is empty, '.' or '..', got {first!a}"
