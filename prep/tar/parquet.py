"""Read the cells of a Parquet file that hold the bytes of files, by their offsets."""

import bisect
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple


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
        """The file's path."""
        return str(self.path)

    def read_into(self, view: memoryview, *, offset: int) -> int:
        """Read into the view, at most to the end of a cell, and return the number of bytes."""
        cells = _read_group(self.path, self.group, self.columns)
        row = bisect.bisect_right(cells.starts, offset) - 1
        cell = cells.buffers[row]
        at = offset - cells.starts[row]
        num = max(0, min(len(view), len(cell) - at))
        view[:num] = cell[at : at + num]
        return num

    def close(self) -> None:
        """The next row group takes the memory of this one."""


class _Cells(NamedTuple):
    starts: list[int]
    """The offset of each cell that is not empty."""
    buffers: list[memoryview]


def read_cells(file: Any, group: int, columns: Sequence[str]) -> Iterator[tuple[str, memoryview | None, str | None]]:
    """Each cell of some columns of a row group of a ``ParquetFile``: the column, its bytes, and its path.

    A column is of bytes, or of Hugging Face's structs of bytes and path; either may be missing.
    """
    import pyarrow  # type: ignore[import-untyped,unused-ignore]  # an extra, without types

    read = file.read_row_group(group, columns=list(columns))
    for column in columns:
        for chunk in read.column(column).chunks:
            is_struct = pyarrow.types.is_struct(chunk.type)
            names = [field.name for field in chunk.type] if is_struct else []
            # `flatten` regards the structs that are null as a whole.
            fields = dict(zip(names, chunk.flatten(), strict=True)) if is_struct else {"bytes": chunk}
            paths = fields["path"].to_pylist() if "path" in fields else [None] * len(chunk)
            for cell, path in zip(fields["bytes"], paths, strict=True):
                data = memoryview(cell.as_buffer()).cast("B") if cell.is_valid else None
                yield column, data, path


# One row group: as a rule the next range is in the same one.
@functools.lru_cache(maxsize=1)
def _read_group(path: Path, group: int, columns: tuple[str, ...]) -> _Cells:
    from prep.sources.table_files import parquet_file

    starts: list[int] = []
    buffers: list[memoryview] = []
    offset = 0
    with parquet_file(path) as file:
        for _, data, _ in read_cells(file, group, columns):
            if data:
                starts.append(offset)
                buffers.append(data)
                offset += len(data)
    return _Cells(starts, buffers)
