"""Read by offsets what is inside a gzip file, on disk or in a bucket, and in the cells of a Parquet file."""

import bisect
import contextlib
import functools
import gzip
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from dali_pipes.errors import DataError, PipesError, StoreError

if TYPE_CHECKING:
    from dali_pipes.store.http.objects import ObjectFile


class ReadStream:
    """A file that is read by offsets, as a stream from its first byte on; a context manager."""

    def __init__(self, file: "ObjectFile | UnpackedFile") -> None:
        self._file, self._position = file, 0

    def read(self, size: int) -> bytes:
        buffer = bytearray(size)
        num = self._file.read_into(memoryview(buffer), offset=self._position)
        self._position += num
        return bytes(memoryview(buffer)[:num])

    def seek(self, offset: int) -> int:
        self._position = offset
        return offset

    def __enter__(self) -> "ReadStream":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


@dataclass(unsafe_hash=True)
class UnpackedFile:
    """The content of a gzip file. Two objects for the same file are equal; it pickles without open files.

    It should be read forward: to reach later bytes, it unpacks all bytes in between; for earlier ones it starts again.
    """

    file: "Path | ObjectFile"
    _stream: gzip.GzipFile | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def url(self) -> str:
        return str(self.file) if isinstance(self.file, Path) else self.file.url

    def __reduce__(self) -> "tuple[type[UnpackedFile], tuple[Path | ObjectFile]]":
        return UnpackedFile, (self.file,)

    def read_into(self, view: memoryview, *, offset: int) -> int:
        """Read into the view and return the number of bytes, at least one; 0 at the end of the content."""
        try:
            if self._stream is None:
                packed = None if isinstance(self.file, Path) else cast("BinaryIO", ReadStream(self.file))
                self._stream = gzip.GzipFile(self.file if isinstance(self.file, Path) else None, "rb", fileobj=packed)
            return self._stream.readinto(view) if self._stream.seek(offset) == offset else 0
        except (gzip.BadGzipFile, EOFError, zlib.error) as exc:
            self.close()
            raise DataError(f"'{self.url}' is not a complete gzip file: {exc}; pack it anew") from exc
        except OSError as exc:
            self.close()
            raise StoreError(f"cannot read '{self.url}': {exc.strerror or exc}") from exc

    def close(self) -> None:
        """Can be called twice; reading opens it anew."""
        if self._stream is not None:
            self._stream.close()
        self._stream = None
        if not isinstance(self.file, Path):
            self.file.close()


# Parquet

_ROWS, _BATCH_BYTES = 1024, 128 << 20
"""Rows that are unpacked at a time; fewer, if one value may be so long that they would take more than these bytes."""
_UNPACKED_BYTES, _UNPACKED_SHARE = 64 << 20, 200
"""A file may unpack to this size, and beyond it to this multiple of its own: a million equal labels are a few bytes."""

_VALUE_BYTES = 50
"""What a Python object takes, without its content."""


class Parquet:
    """An open Parquet file, of which no more is read than its size allows: a few bytes may stand for gigabytes."""

    def __init__(self, file: Any, path: Path) -> None:
        self.file, self._path = file, path
        self._left = _UNPACKED_BYTES + _UNPACKED_SHARE * path.stat().st_size

    def read(self, column: str, group: int | None = None) -> Iterator[Any]:
        """The arrays of a column, of one row group or of all.

        Raises:
            DataError: If what was read of the file is larger than a file of its size may hold.
        """
        for number in range(self.file.num_row_groups) if group is None else [group]:
            # No value is longer than its group. Equal values are stored once, so rows may be longer in all. Sizes of
            # columns are not asked for: if they are broken, pyarrow ends the process.
            longest = max(1, self.file.metadata.row_group(number).total_byte_size)
            self._take(0, at_least=longest)
            rows = min(_ROWS, max(1, _BATCH_BYTES // longest))
            for batch in self.file.iter_batches(rows, row_groups=[number], columns=[column]):
                array = batch.column(0)
                if hasattr(array, "dictionary_decode"):
                    array = array.dictionary_decode()
                self._take(array.nbytes + _VALUE_BYTES * _num_values(array))
                yield array

    def _take(self, num_bytes: int, *, at_least: int = 0) -> None:
        self._left -= num_bytes
        if self._left < at_least:
            raise DataError(
                f"'{self._path}' unpacks to more than {_UNPACKED_BYTES >> 20} MiB and {_UNPACKED_SHARE} times its "
                "size: no data set needs that; write the file anew"
            )

    def values(self, column: str, group: int | None = None) -> list[Any]:
        """The values of a column, of one row group or of all."""
        return [value for array in self.read(column, group) for value in array.to_pylist()]


def _num_values(array: Any) -> int:
    """How many Python objects an array becomes: rows, elements of lists, fields of structs."""
    if not array.type.num_fields:
        return len(array)
    inner = array.flatten()
    return len(array) + sum(map(_num_values, inner if isinstance(inner, list) else [inner]))


@dataclass(frozen=True)
class ParquetCells:
    """The bytes of some columns of a row group, cell after cell, column after column; it pickles without them.

    The row group that was read last stays in memory, in each process.
    """

    path: Path
    group: int
    columns: tuple[str, ...]

    @property
    def url(self) -> str:
        return str(self.path)

    def read_into(self, view: memoryview, *, offset: int) -> int:
        """Read into the view, at most to the end of a cell, and return the number of bytes."""
        starts, buffers = _read_group(self.path, self.group, self.columns)
        row = bisect.bisect_right(starts, offset) - 1
        part = buffers[row][offset - starts[row] :][: len(view)]
        view[: len(part)] = part
        return len(part)

    def close(self) -> None:
        """The next row group takes the memory of this one."""


# One row group: as a rule the next range is in the same one.
@functools.lru_cache(maxsize=1)
def _read_group(path: Path, group: int, columns: tuple[str, ...]) -> tuple[list[int], list[memoryview]]:
    """The offset and the bytes of each cell that is not empty."""
    starts: list[int] = []
    buffers: list[memoryview] = []
    offset = 0
    with parquet_file(path) as parquet:
        for _, data, _ in read_cells(parquet, group, columns):
            if data:
                starts.append(offset)
                buffers.append(data)
                offset += len(data)
    return starts, buffers


def read_cells(
    parquet: Parquet, group: int, columns: Sequence[str]
) -> Iterator[tuple[str, memoryview | None, str | None]]:
    """Each cell of some columns of a row group: the column, its bytes, and its path.

    A column is of bytes, or of Hugging Face's structs of bytes and path; either may be missing.
    """
    import pyarrow  # type: ignore[import-untyped,unused-ignore]  # an extra, without types

    for column in columns:
        for chunk in parquet.read(column, group):
            is_struct = pyarrow.types.is_struct(chunk.type)
            names = [field.name for field in chunk.type] if is_struct else []
            # `flatten` regards the structs that are null as a whole.
            fields = dict(zip(names, chunk.flatten(), strict=True)) if is_struct else {"bytes": chunk}
            paths = fields["path"].to_pylist() if "path" in fields else [None] * len(chunk)
            for cell, path in zip(fields["bytes"], paths, strict=True):
                data = memoryview(cell.as_buffer()).cast("B") if cell.is_valid else None
                yield column, data, path


@contextlib.contextmanager
def parquet_file(path: Path) -> Iterator[Parquet]:
    """An open Parquet file; what pyarrow raises in the context becomes `DataError`."""
    try:
        import pyarrow
        import pyarrow.parquet  # type: ignore[import-untyped,unused-ignore]
    except ImportError as exc:
        raise PipesError(f"'{path}': Parquet needs pyarrow; install it: pip install 'dali-pipes[parquet]'") from exc
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            yield Parquet(file, path)
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as exc:  # texts not in UTF-8, dates of no year
        raise DataError(f"'{path}' cannot be read as Parquet: {' '.join(str(exc).split())}") from exc
