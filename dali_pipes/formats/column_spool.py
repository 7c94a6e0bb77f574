"""Collect the columns of a data set's samples, and write its column file, which may be larger than memory.

A column grows by 1 to 8 bytes a sample, of which a data set may have a billion.
"""

import contextlib
import tempfile
from collections.abc import Callable, Iterable, Iterator
from io import BufferedRandom
from typing import Any

import numpy as np
import numpy.typing as npt

from dali_pipes.errors import DataError, StoreError, shown
from dali_pipes.formats.column_file import ColumnStream, FileStream, stream_columns
from dali_pipes.formats.sample_columns import (
    LABEL_TYPES,
    MAX_COMPONENTS,
    SIZE_TYPES,
    SampleColumns,
    columns_header,
    join_columns,
    smallest_type,
)
from dali_pipes.formats.shard_index import ShardIndex
from dali_pipes.formats.texts import Texts, pack_texts

# Shards whose columns are joined before all of them are, and their samples.
_SHARDS_JOINED, _ROWS_JOINED = 256, 1 << 17
ROWS_IN_MEMORY = 1 << 20
"""Samples of a large data set whose columns a builder keeps in memory."""
# A multiple of 8: a column of bits is made of pieces of whole bytes.
_ROWS_AT_A_TIME = 1 << 20


class ColumnsBuilder:
    """Collects the columns of shards, in the manifest's order, without a Python object per sample.

    It is a context manager if it may keep columns in temporary files. These have no name: nothing is left of a process
    that is killed.

    Args:
        rows_in_memory: Samples whose columns are kept before they go to the temporary files; ``None``: all.
    """

    def __init__(self, rows_in_memory: int | None = None) -> None:
        self._rows_in_memory = rows_in_memory
        self._rows = 0
        self._files = contextlib.ExitStack()
        self._key_bytes, self._key_ends = _Column(np.uint8, self._files), _Column(np.int64, self._files)
        self._labels: _Column | None = None
        self._has: dict[str, _Column] = {}
        self._sizes: dict[str, tuple[_Column, _Column]] = {}

        self._parts: list[SampleColumns] = []
        self._last: list[SampleColumns] = []
        self._last_rows = 0
        self._restart()
        self._components: set[str] = set()

    def __enter__(self) -> "ColumnsBuilder":
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def add(self, index: ShardIndex) -> None:
        """Add the columns of the next shard."""
        masks = {name: offsets >= 0 for name, offsets in index.offsets.items()}
        # Masks without a gap are not kept: they would take a byte for each sample and component.
        has = {name: None if mask.all() else mask for name, mask in masks.items()}
        sizes = {name: photo.upright_size for name, photo in index.photos.items()}
        self._admit(has, shard=index.shard)
        self._last.append(SampleColumns(keys=Texts(*pack_texts(index.keys)), labels=index.labels, has=has, sizes=sizes))
        self._last_rows += index.num_samples
        if len(self._last) == _SHARDS_JOINED or self._last_rows >= _ROWS_JOINED:
            self._join_last()

    def add_columns(self, columns: SampleColumns, *, shard: str) -> None:
        """Add the columns of the next shards; ``shard`` is the name of the first, for errors."""
        self._join_last()
        self._admit(columns.has, shard=shard)
        self._append(columns)

    def finish(self) -> SampleColumns:
        """The columns of all shards that were added, or those that are in no temporary file yet."""
        self._join_last()
        return join_columns(self._parts)

    def stream(self, *, manifest: str) -> FileStream:
        """The bytes of the column file: those of `SampleColumns.to_bytes` for all shards that were added."""
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
        header = columns_header(manifest=manifest, components=self._has)
        return stream_columns(columns, header)

    def _admit(self, components: Iterable[str], *, shard: str) -> None:
        self._components.update(components)
        if len(self._components) > MAX_COMPONENTS:
            raise DataError(
                f"shard '{shard}': the samples up to here have {len(self._components)} components, expected at most "
                f"{MAX_COMPONENTS}, such as {shown(sorted(self._components))}; a component is what follows the first "
                "dot of a file's name: if dates or numbers stand there, name the files otherwise and pack again"
            )

    def _join_last(self) -> None:
        """Join the columns of small shards, whose arrays take more memory than their values."""
        if self._last:
            joined = join_columns(self._last)
            self._last, self._last_rows = [], 0
            self._append(joined)

    def _append(self, part: SampleColumns) -> None:
        self._parts.append(part)
        if self._rows_in_memory is not None and sum(map(len, self._parts)) >= self._rows_in_memory:
            self._spill()

    def _restart(self) -> None:
        # The first part is empty, because there may be no shard.
        self._parts = [SampleColumns(keys=Texts(*pack_texts(())), labels=None, has={})]

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
        self._file: BufferedRandom | None = None
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
        try:
            if self._file is None:
                self._file = self._files.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 (this closes it)
            self._file.seek(first * self._dtype.itemsize)
            self._file.write(values.astype(self._dtype).data)
            self._file.flush()
        except OSError as exc:
            if self._file is not None:
                self._file.raw.close()  # else it would be written once more when it is closed
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
            if self._file is not None:
                self._file.seek(first * self._dtype.itemsize)
                self._file.readinto(values.data)
            yield values
