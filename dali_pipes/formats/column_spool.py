"""Collect the columns of a data set's samples, and write its column file, which may be larger than memory.

A column grows by 1 to 8 bytes a sample, of which a data set may have a billion.
"""

import os
import tempfile
from collections.abc import Iterable, Iterator
from typing import IO

import numpy as np

from dali_pipes.errors import DataError, StoreError, shown
from dali_pipes.formats.column_file import FileStream
from dali_pipes.formats.sample_columns import (
    MAX_COMPONENTS,
    ColumnRanges,
    ColumnsPart,
    SampleColumns,
    join_columns,
    stream_parts,
)
from dali_pipes.formats.shard_index import ShardIndex
from dali_pipes.formats.texts import Texts, pack_texts

# Shards whose columns are joined before all of them are, and their samples.
_SHARDS_JOINED, _ROWS_JOINED = 256, 1 << 17
ROWS_IN_MEMORY = 1 << 20
"""Samples of a large data set whose columns a builder keeps in memory."""


class ColumnsBuilder:
    """Collects the columns of shards, in the manifest's order, without a Python object per sample.

    It is a context manager if it may keep columns in a temporary file: column files, one after the other. That file has
    no name: nothing is left of a process that is killed.

    Args:
        rows_in_memory: Samples whose columns are kept before they go to the temporary file; ``None``: all.
    """

    def __init__(self, rows_in_memory: int | None = None) -> None:
        self._rows_in_memory = rows_in_memory
        self._components: set[str] = set()
        # The first part is empty, because there may be no shard.
        self._parts = [SampleColumns(keys=Texts(*pack_texts(())), labels=None, has={})]
        # Small shards, whose arrays take more memory than their values: these are joined soon.
        self._last: list[SampleColumns] = []
        self._file: IO[bytes] | None = None
        self._spooled: list[ColumnRanges] = []
        self._num_rows = self._num_bytes = 0

    def __enter__(self) -> "ColumnsBuilder":
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, index: ShardIndex) -> None:
        """Add the columns of the next shard."""
        masks = {name: offsets >= 0 for name, offsets in index.offsets.items()}
        # Masks without a gap are not kept: they would take a byte for each sample and component.
        has = {name: None if mask.all() else mask for name, mask in masks.items()}
        sizes = {name: photo.upright_size for name, photo in index.photos.items()}
        self._admit(has, shard=index.shard)
        self._last.append(SampleColumns(keys=Texts(*pack_texts(index.keys)), labels=index.labels, has=has, sizes=sizes))
        if len(self._last) == _SHARDS_JOINED or sum(map(len, self._last)) >= _ROWS_JOINED:
            self._append()

    def add_columns(self, columns: SampleColumns, *, shard: str) -> None:
        """Add the columns of the next shards; ``shard`` is the name of the first, for errors."""
        self._append()
        self._admit(columns.has, shard=shard)
        self._last = [columns]
        self._append()

    def finish(self) -> SampleColumns:
        """The columns of all shards that were added, or those that are not in the temporary file yet."""
        return join_columns([*self._parts, *self._last])

    def stream(self, *, manifest: str) -> FileStream:
        """The bytes of the column file: those of `SampleColumns.to_bytes` for all shards that were added."""
        self._spill()

        def parts() -> Iterator[ColumnsPart]:
            for file in self._spooled:
                yield ColumnsPart(file, 0, int(file.samples[0]), None, files=self._spooled)

        return stream_parts(parts, manifest=manifest)

    def _admit(self, components: Iterable[str], *, shard: str) -> None:
        self._components.update(components)
        if len(self._components) > MAX_COMPONENTS:
            raise DataError(
                f"shard '{shard}': the samples up to here have {len(self._components)} components, expected at most "
                f"{MAX_COMPONENTS}, such as {shown(sorted(self._components))}; a component is what follows the first "
                "dot of a file's name: if dates or numbers stand there, name the files otherwise and pack again"
            )

    def _append(self) -> None:
        if self._last:
            self._parts.append(join_columns(self._last))
            self._last = []
        if self._rows_in_memory is not None and sum(map(len, self._parts)) >= self._rows_in_memory:
            self._spill()

    def _spill(self) -> None:
        """Move the columns to the temporary file."""
        part = self.finish()
        self._parts, self._last = self._parts[:1], []
        self._num_rows += len(part)
        written = stream_parts(lambda: [part], manifest="")
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 (`__exit__` closes it)
            for chunk in written.chunks():
                while chunk:
                    chunk = chunk[self._file.write(chunk) :]
        except OSError as exc:
            raise StoreError(
                f"cannot write the columns of {self._num_rows} samples to a temporary file: {exc.strerror or exc}; "
                "name a disk with more free space, some 50 bytes a sample, with TMPDIR"
            ) from exc
        self._spooled.append(_stored_part(self._file.fileno(), self._num_bytes, written.num_bytes, num_rows=len(part)))
        self._num_bytes += written.num_bytes


def _stored_part(file: int, first: int, num_bytes: int, *, num_rows: int) -> ColumnRanges:
    """One of the column files in the temporary file."""

    def read(start: int, size: int) -> bytes:
        return os.pread(file, min(size, num_bytes - start), first + start)

    return ColumnRanges(read, samples=np.array([num_rows]), manifest="", where="columns")
