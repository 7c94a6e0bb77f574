"""Collect the columns of a large data set in temporary files, so that its column file is never in memory.

A column grows by 1 to 8 bytes a sample, of which a data set may have a billion.
"""

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from dali_pipes.errors import StoreError
from dali_pipes.formats.column_file import ColumnStream, FileStream, stream_columns
from dali_pipes.formats.sample_columns import (
    LABEL_TYPES,
    SIZE_TYPES,
    ColumnsBuilder,
    SampleColumns,
    columns_header,
    smallest_type,
)

_ROWS_IN_MEMORY = 1 << 20
# A multiple of 8: a column of bits is made of pieces of whole bytes.
_ROWS_AT_A_TIME = 1 << 20


class ColumnsSpool(ColumnsBuilder):
    """A builder that keeps only the last shards' columns in memory, and writes the column file as a stream.

    The temporary files have no name: nothing is left of a process that is killed.

    Args:
        rows_in_memory: Samples whose columns are kept before they go to the temporary files.
    """

    def __init__(self, rows_in_memory: int = _ROWS_IN_MEMORY) -> None:
        super().__init__()
        self._rows_in_memory = rows_in_memory
        self._rows = 0
        self._files = contextlib.ExitStack()
        self._key_bytes, self._key_ends = _Column(np.uint8, self._files), _Column(np.int64, self._files)
        self._labels: _Column | None = None
        self._has: dict[str, _Column] = {}
        self._sizes: dict[str, tuple[_Column, _Column]] = {}

    def __enter__(self) -> "ColumnsSpool":
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def stream(self, *, manifest: str) -> FileStream:
        """The bytes of the column file: those of `SampleColumns.to_bytes` for all shards that were added."""
        self._join_last()
        if not self._rows:
            data = self.finish().to_bytes(manifest=manifest)
            return FileStream(len(data), lambda: iter([memoryview(data)]))
        self._spill()
        rows = self._rows
        columns = {
            "key/bytes": self._key_bytes.stream(self._key_bytes.length, np.uint8),
            "key/ends": self._key_ends.stream(rows, np.int64),
        }
        if self._labels is not None:
            columns["label"] = self._labels.stream(rows, self._labels.smallest(LABEL_TYPES))
        for name, mask in self._has.items():
            if mask.total < rows:
                columns[f"has/{name}"] = mask.bits(rows)
        for name, (height, width) in self._sizes.items():
            columns[f"height/{name}"] = height.stream(rows, height.smallest(SIZE_TYPES))
            columns[f"width/{name}"] = width.stream(rows, width.smallest(SIZE_TYPES))
        header = columns_header(manifest=manifest, components=self._has, has_sizes=bool(self._sizes))
        return stream_columns(columns, header)

    def _append(self, part: SampleColumns) -> None:
        super()._append(part)
        if sum(map(len, self._parts)) >= self._rows_in_memory:
            self._spill()

    def _spill(self) -> None:
        part = self.finish()
        self._restart()
        first = self._rows
        self._key_ends.put(first, part.keys.ends + self._key_bytes.length)
        self._key_bytes.put(self._key_bytes.length, part.keys.data)
        if part.labels is not None:
            self._labels = self._labels or _Column(np.int64, self._files)
            self._labels.put(first, part.labels)
        for name, mask in part.has.items():
            column = self._has.setdefault(name, _Column(np.bool_, self._files))
            column.put(first, np.ones(len(part), np.bool_) if mask is None else mask)
        for name, sizes in part.sizes.items():
            both = self._sizes.setdefault(name, (_Column(np.int32, self._files), _Column(np.int32, self._files)))
            for column, values in zip(both, sizes, strict=True):
                column.put(first, values)
        self._rows += len(part)


class _Column:
    """Values in a temporary file, at their row's place. Rows between them that were not put are 0."""

    def __init__(self, dtype: type[np.generic], files: contextlib.ExitStack) -> None:
        self._dtype, self._files = np.dtype(dtype), files
        self._file: int | None = None
        self.length = 0
        """The row after the last one that was put."""
        self.total = 0
        """The sum of a column of bools."""
        self._least = self._greatest = 0

    def put(self, first: int, values: npt.NDArray[Any]) -> None:
        if not len(values):
            return
        self.length = first + len(values)
        if self._dtype == np.bool_:
            self.total += int(np.count_nonzero(values))
        else:
            self._least, self._greatest = min(self._least, int(values.min())), max(self._greatest, int(values.max()))
        data, place = memoryview(values.astype(self._dtype).data).cast("B"), first * self._dtype.itemsize
        try:
            if self._file is None:
                file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  # `files` closes it
                self._file = self._files.enter_context(file).fileno()
            while data:
                written = os.pwrite(self._file, data, place)
                data, place = data[written:], place + written
        except OSError as exc:
            raise StoreError(
                f"cannot write the columns of {self.length} samples to temporary files: {exc.strerror or exc}; name a "
                "disk with more free space, some 50 bytes a sample, with TMPDIR"
            ) from exc

    def smallest(self, kinds: Iterable[type[np.integer[Any]]]) -> type[np.integer[Any]]:
        return smallest_type(self._least, self._greatest, kinds)

    def stream(self, length: int, dtype: type[np.generic]) -> ColumnStream:
        return ColumnStream(
            np.dtype(dtype), length, lambda: (piece.astype(dtype, copy=False) for piece in self._pieces(length))
        )

    def bits(self, length: int) -> ColumnStream:
        pieces: Callable[[], Iterable[npt.NDArray[Any]]] = lambda: map(np.packbits, self._pieces(length))  # noqa: E731
        return ColumnStream(np.dtype(np.uint8), -(-length // 8), pieces)

    def _pieces(self, length: int) -> Iterator[npt.NDArray[Any]]:
        for first in range(0, length, _ROWS_AT_A_TIME):
            values = np.zeros(min(_ROWS_AT_A_TIME, length - first), self._dtype)
            view, place = memoryview(values.data).cast("B"), first * self._dtype.itemsize
            while self._file is not None and view and (num := os.preadv(self._file, [view], place)):
                view, place = view[num:], place + num
            yield values
