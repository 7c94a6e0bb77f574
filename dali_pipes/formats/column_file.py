"""Read and write the files that describe a data set: safetensors files of typed columns with a JSON header.

Any language reads them without parsing. Texts (shard names, keys) are one run of UTF-8 bytes and the column of their
end offsets. `dali_pipes.formats.manifest`, `dali_pipes.formats.shard_index` and `dali_pipes.formats.sample_columns` say
what the columns of each kind hold. Each of them checks all that it reads before it returns an object.
"""

import contextlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dali_pipes.errors import DataError, printable
from dali_pipes.formats.names import read_json
from dali_pipes.formats.texts import Texts

KEY_TYPES: dict[str, type[np.generic]] = {"key/bytes": np.uint8, "key/ends": np.int64}
"""The types of the columns of samples' keys."""

ReadRange = Callable[[int, int], bytes | memoryview]
"""``read(start, size)``: bytes of a file; fewer if it ends before."""

# The first read of a column file: its header takes some 10 KB, and a small data set needs no second read.
_HEAD_BYTES, _MAX_HEADER_BYTES = 1 << 18, 1 << 26
# In safetensors' order, smallest first.
_TYPES = {"U8": "u1", "I8": "<i1", "I16": "<i2", "U16": "<u2", "I32": "<i4", "I64": "<i8", "U64": "<u8"}
_NAMES = {np.dtype(kind): name for name, kind in _TYPES.items()}
_RANKS = {dtype: rank for rank, dtype in enumerate(_NAMES)}
_HALVES = re.compile("[\ud800-\udfff]")


class ColumnStream(NamedTuple):
    """A column that is made in pieces, because all of it would take too much memory."""

    dtype: np.dtype[Any]
    length: int
    pieces: Callable[[], Iterable[npt.NDArray[Any]]]
    """Each call makes the pieces anew."""


class FileStream(NamedTuple):
    """The bytes of a file, made in pieces."""

    num_bytes: int
    chunks: Callable[[], Iterator[memoryview]]
    """Each call makes the bytes anew."""


def save_columns(columns: Mapping[str, npt.NDArray[Any]], header: Mapping[str, Any]) -> bytes:
    """The bytes of a file; the same columns and header always give the same bytes."""
    streams = {
        name: ColumnStream(column.dtype, len(column), lambda column=column: [column])  # type: ignore[misc]
        for name, column in columns.items()
    }
    return b"".join(stream_columns(streams, header).chunks())


def stream_columns(columns: Mapping[str, ColumnStream], header: Mapping[str, Any]) -> FileStream:
    """The file of `save_columns`, for columns that are made in pieces."""
    # safetensors' own order: large types first, so that each column is aligned, then by name.
    names = sorted(columns, key=lambda name: (-_RANKS[columns[name].dtype], name.encode()))
    entries: dict[str, Any] = {"__metadata__": {"header": json.dumps(header)}}
    stop = 0
    for name in names:
        dtype, length, _ = columns[name]
        start, stop = stop, stop + length * dtype.itemsize
        entries[name] = {"dtype": _NAMES[dtype], "shape": [length], "data_offsets": [start, stop]}
    head = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)

    def chunks() -> Iterator[memoryview]:
        yield memoryview(len(head).to_bytes(8, "little") + head)
        for name in names:
            for piece in columns[name].pieces():
                yield memoryview(np.ascontiguousarray(piece).data).cast("B")

    return FileStream(8 + len(head) + stop, chunks)


class _Place(NamedTuple):
    dtype: np.dtype[Any]
    length: int
    start: int
    """The column's first byte in the file."""


class ColumnFile:
    """One file, whose header was read; its columns are read, and checked, when they are asked for.

    Args:
        read: Reads a range of the file's bytes.
        where: The file's name, for errors.
        kind: What the file must be, as its header says.
        version: The version that it must have.

    Raises:
        DataError: If it is not of this kind and version.
    """

    def __init__(self, read: ReadRange, *, where: str, kind: str, version: int) -> None:
        self._read, self._where, self._kind = read, where, kind
        expected = f"'{where}': expected a {kind}, version {version}"
        try:
            head = bytes(read(0, _HEAD_BYTES))
            self._whole = head if len(head) < _HEAD_BYTES else None
            start = 8 + int.from_bytes(head[:8], "little")
            if not 8 < start <= _MAX_HEADER_BYTES:
                raise ValueError(f"a header of {start - 8} bytes")
            self._header = head[:start] if start <= len(head) else bytes(self._bytes(0, start))
            if len(self._header) < start:
                raise ValueError(f"a header of {len(self._header) - 8} bytes, expected {start - 8}")
            entries = read_json(self._header[8:])
            header = read_json(entries.pop("__metadata__")["header"])
            self._places = {name: _place(entry, start) for name, entry in entries.items()}
            found = f"a {header.get('kind')}, version {header.get('version')}"
        except (AttributeError, ValueError, KeyError, TypeError) as exc:
            raise DataError(f"{expected}, found something else ({exc}); rebuild it: dali-pipes prep index URL") from exc
        if (header.get("kind"), header.get("version")) != (kind, version):
            raise DataError(f"{expected}, found {printable(found)}; rebuild it: dali-pipes prep index URL")
        self.header: dict[str, Any] = header

    @classmethod
    def of_bytes(cls, data: bytes, *, where: str, kind: str, version: int) -> "ColumnFile":
        """A file whose bytes are in memory; its columns are views of them."""
        view = memoryview(data)
        return cls(lambda start, size: view[start : start + size], where=where, kind=kind, version=version)

    @contextlib.contextmanager
    def checking(self) -> Iterator[None]:
        """Within this context, each error that impossible values cause becomes a `DataError` that names the file."""
        try:
            yield
        except (AttributeError, KeyError, TypeError, ValueError) as exc:
            raise DataError(
                f"'{self._where}' is a damaged {self._kind}: {printable(str(exc))}; "
                "rebuild it: dali-pipes prep index URL"
            ) from exc

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def names(self, start: str) -> list[str]:
        """The rests of the columns' names that start so, sorted: safetensors returns columns in any order."""
        return sorted(name.removeprefix(start) for name in self._places if name.startswith(start))

    def declare(self, columns: Mapping[str, tuple[Iterable[Any], int]]) -> None:
        """Check that the file has these columns, each of one of the types and of the length, and no others.

        The bytes of texts, ``NAME/bytes``, may have any length.

        Raises:
            ValueError: If it has not.
        """
        if wrong := self._places.keys() ^ columns.keys():
            lacks = "lacks" if min(wrong) in columns else "has also"
            raise ValueError(f"it {lacks} a column '{min(wrong)}'")
        for name, (dtypes, length) in columns.items():
            place = self._places[name]
            is_right = place.length == length or name.endswith("/bytes")
            if not is_right or place.dtype not in map(np.dtype, dtypes):
                raise ValueError(f"column '{name}' has {place.length} values of {place.dtype}, expected {length}")

    def length(self, name: str) -> int:
        """The number of a column's values."""
        return self._places[name].length

    def dtype(self, name: str) -> np.dtype[Any]:
        return self._places[name].dtype

    def column(self, name: str) -> npt.NDArray[Any]:
        """A whole column; see `rows`."""
        return self.rows(name, 0, self.length(name))

    def rows(self, name: str, start: int, stop: int) -> npt.NDArray[Any]:
        """Some values of a column; raises `ValueError` if the file is too short."""
        dtype, _, first = self._places[name]
        size = (stop - start) * dtype.itemsize
        data = self._bytes(first + start * dtype.itemsize, size)
        if len(data) != size:
            raise ValueError(f"rows {start} to {stop} of column '{name}' have {len(data)} bytes, expected {size}")
        return np.frombuffer(data, dtype)

    def texts(self, name: str, start: int = 0, stop: int | None = None) -> Texts:
        """Some texts, of the columns ``NAME/bytes`` and ``NAME/ends``; raises `ValueError` if they are none."""
        num_texts, num_bytes = self.length(f"{name}/ends"), self.length(f"{name}/bytes")
        stop = num_texts if stop is None else stop
        ends = self.rows(f"{name}/ends", max(start - 1, 0), stop)
        ends = ends if start else np.append(np.int64(0), ends)
        first, last = int(ends[0]), int(ends[-1])
        if not 0 <= first <= last <= num_bytes or (stop == num_texts and last != num_bytes):
            raise ValueError(f"the ends of '{name}' do not rise to {num_bytes}")
        texts = Texts(self.rows(f"{name}/bytes", first, last), ends[1:] - first)
        texts.check()
        return texts

    def check_unchanged(self) -> None:
        """Refuse a file that was replaced by one of other columns since it was opened."""
        if self._whole is None and bytes(self._read(0, len(self._header))) != self._header:
            raise ValueError("it was replaced while it was read")

    def _bytes(self, start: int, size: int) -> bytes | memoryview:
        return self._read(start, size) if self._whole is None else self._whole[start : start + size]


def _place(entry: Mapping[str, Any], data_start: int) -> _Place:
    dtype, (length,) = np.dtype(_TYPES[entry["dtype"]]), entry["shape"]
    start, stop = entry["data_offsets"]
    if not (is_count(length) and is_count(start) and stop - start == length * dtype.itemsize):
        raise ValueError(f"a column at bytes {start} to {stop}")
    return _Place(dtype, length, data_start + start)


# The shapes of JSON values


def fits(value: object, shape: Any) -> bool:
    """Whether a value of JSON has a shape.

    A shape is a function that judges the value; ``[shape]``, a list; a tuple, a list with a shape for each place;
    ``{"name": shape}``, a table of exactly these names; ``{function: shape}``, a table of any names that fit.

    >>> fits({"a": [1, 2]}, {str.isalpha: [is_count]}), fits({"a": [1, -2]}, {"a": [is_count]})
    (True, False)
    """
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            return False
        if all(isinstance(name, str) for name in shape):
            return value.keys() == shape.keys() and all(fits(value[name], shape[name]) for name in shape)
        ((name_shape, entry),) = shape.items()
        return all(name_shape(name) and fits(part, entry) for name, part in value.items())
    if isinstance(shape, list):
        return isinstance(value, list) and all(fits(part, shape[0]) for part in value)
    if isinstance(shape, tuple):
        return isinstance(value, list) and len(value) == len(shape) and all(map(fits, value, shape))
    return bool(shape(value))


def is_int64(value: object) -> bool:
    """Whether a value is a whole number of 64 bits (and not a bool)."""
    return type(value) is int and -(2**63) <= value < 2**63


def is_count(value: object) -> bool:
    """Whether a value is a whole number that is not negative."""
    return type(value) is int and 0 <= value < 2**63


def is_text(value: object) -> bool:
    """Whether a value is a text without halves of characters, which JSON's escapes can name and UTF-8 cannot hold."""
    return isinstance(value, str) and not _HALVES.search(value)


COUNTS = {is_text: is_count}
"""The shape of a table of counts by name."""
