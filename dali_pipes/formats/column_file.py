"""Read and write the files that describe a data set: safetensors files of typed columns with a JSON header.

Any language reads them without parsing. Texts (shard names, keys) are one run of UTF-8 bytes and the column of their
end offsets. `dali_pipes.formats.manifest`, `dali_pipes.formats.shard_index` and `dali_pipes.formats.sample_columns` say
what the columns of each kind hold. Each of them checks the whole file before it returns an object.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from dali_pipes.errors import DataError
from dali_pipes.formats.names import read_json
from dali_pipes.formats.texts import Texts

ReadRange = Callable[[int, int], bytes]
"""``read(start, size)``: bytes of a file; fewer if it ends before."""

# The first read of a column file: its header takes some 10 KB, and a small data set needs no second read.
_HEAD_BYTES, _MAX_HEADER_BYTES = 1 << 18, 1 << 22
# In safetensors' order, smallest first.
_TYPES = {"U8": "u1", "I8": "<i1", "I16": "<i2", "U16": "<u2", "I32": "<i4", "I64": "<i8", "U64": "<u8"}
_NAMES = {np.dtype(kind): name for name, kind in _TYPES.items()}
_RANKS = {dtype: rank for rank, dtype in enumerate(_NAMES)}


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


class FileHead(NamedTuple):
    """The beginning of a file."""

    data: bytes
    header: bytes
    is_whole: bool
    """Whether the file has no more bytes."""


@dataclass(frozen=True, kw_only=True)
class ColumnFile:
    """Columns and header of one file; each is checked when it is taken."""

    where: str
    kind: str
    columns: dict[str, npt.NDArray[Any]]
    """The columns that were not taken yet."""
    header: dict[str, Any]

    @classmethod
    def open(cls, data: bytes, *, where: str, kind: str, version: int) -> "ColumnFile":
        """Read a file of this version; ``where`` names it.

        Raises:
            DataError: If it is not of this kind and version.
        """
        read: ReadRange = lambda start, size: data[start : start + size]  # noqa: E731
        file, starts, _ = cls.open_header(read, where=where, kind=kind, version=version, max_bytes=len(data))
        if (num_bytes := max([0, *(start + file.columns[name].nbytes for name, start in starts.items())])) > len(data):
            raise file.refused(f"{num_bytes} bytes", f"{len(data)}")
        for name, start in starts.items():
            column = file.columns[name]
            file.columns[name] = np.frombuffer(data, column.dtype, len(column), start)
        return file

    @classmethod
    def open_header(
        cls, read: ReadRange, *, where: str, kind: str, version: int, max_bytes: int = _MAX_HEADER_BYTES
    ) -> "tuple[ColumnFile, dict[str, int], FileHead]":
        """Read the header alone of such a file: the columns have type and length, but all values are 0.

        ``read(start, size)`` gives the file's bytes ``[start, start + size)``. Also returns the byte at which each
        column starts, and the bytes that were read.

        Raises:
            DataError: If it is not of this kind and version.
        """
        expected = f"'{where}': expected a {kind}, version {version}"
        try:
            head = read(0, _HEAD_BYTES)
            is_whole = len(head) < _HEAD_BYTES
            data_start = 8 + int.from_bytes(head[:8], "little")
            if not 8 < data_start <= max_bytes:
                raise ValueError(f"a header of {data_start - 8} bytes")
            if data_start > len(head):
                head += read(len(head), data_start - len(head))
            entries = read_json(head[8:data_start])
            header = read_json(entries.pop("__metadata__")["header"])
            columns: dict[str, npt.NDArray[Any]] = {}
            starts: dict[str, int] = {}
            for name, entry in entries.items():
                dtype, (length,) = np.dtype(_TYPES[entry["dtype"]]), entry["shape"]
                start, stop = entry["data_offsets"]
                if not (is_count(length) and is_count(start) and stop - start == length * dtype.itemsize):
                    raise ValueError(f"column '{name}' at bytes {start} to {stop}")
                # One value, seen ``length`` times: it takes no memory.
                columns[name], starts[name] = np.broadcast_to(np.zeros((), dtype), (length,)), data_start + start
        except (AttributeError, ValueError, KeyError, TypeError) as exc:
            raise DataError(f"{expected}, found something else ({exc}); rebuild it: dali-pipes prep index URL") from exc
        if not isinstance(header, dict) or header.get("kind") != kind or header.get("version") != version:
            found = f"a {header.get('kind')}, version {header.get('version')}" if isinstance(header, dict) else "none"
            raise DataError(f"{expected}, found {found}; rebuild it: dali-pipes prep index URL")
        file = cls(where=where, kind=kind, columns=columns, header=header)
        return file, starts, FileHead(head, head[:data_start], is_whole)

    def refused(self, expected: str, found: str) -> DataError:
        """The error for a file with invalid values."""
        return DataError(
            f"'{self.where}' is a broken {self.kind}: expected {expected}, found {found}; "
            "rebuild it: dali-pipes prep index URL"
        )

    def column(self, name: str, dtype: type[np.generic], length: int | None = None) -> npt.NDArray[Any]:
        """Take a column of this dtype and length; it must be there."""
        column = self.columns.pop(name, None)
        expected = f"column '{name}' of {'' if length is None else f'{length} '}{np.dtype(dtype)}"
        if column is None:
            raise self.refused(expected, "none")
        if column.dtype != dtype or column.ndim != 1 or (length is not None and len(column) != length):
            raise self.refused(expected, f"{column.dtype} of shape {list(column.shape)}")
        return column

    def texts(self, name: str) -> Texts:
        """Take the two columns of texts."""
        texts = Texts(self.column(f"{name}/bytes", np.uint8), self.column(f"{name}/ends", np.int64))
        try:
            texts.check()
        except ValueError as exc:
            raise self.refused(f"columns '{name}/bytes' and '{name}/ends' that hold texts", str(exc)) from exc
        return texts

    def expect_no_more(self) -> None:
        """Refuse a file with columns that were not taken."""
        if self.columns:
            raise self.refused("no other columns", ", ".join(f"'{name}'" for name in sorted(self.columns)[:3]))

    def entry(self, name: str, expected: str, is_valid: Callable[[Any], bool]) -> Any:
        """An entry of the header that ``is_valid`` accepts; ``expected`` describes such an entry for the error."""
        value = self.header.get(name)
        if not is_valid(value):
            raise self.refused(f"'{name}' to be {expected}", f"{value!r:.40}")
        return value

    def text(self, name: str) -> str:
        """A text in the header."""
        return cast("str", self.entry(name, "a text", lambda value: isinstance(value, str)))


def is_int64(value: object) -> bool:
    """Whether a value of a JSON header is a whole number of 64 bits (and not a bool)."""
    return type(value) is int and -(2**63) <= value < 2**63


def is_count(value: object) -> bool:
    """Whether a value of a JSON header is a whole number that is not negative."""
    return is_int64(value) and cast("int", value) >= 0


def are_counts(value: object) -> bool:
    """Whether a value of a JSON header is a table of counts by name."""
    return isinstance(value, dict) and all(map(is_count, value.values()))
