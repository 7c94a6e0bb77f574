"""Parquet files with photos in their cells: broken ones are refused, or their photos are read as they are."""

import io
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from dali_pipes.errors import PipesError
from prep.sources.record import as_entry
from prep.tar.writer import Range
from tests.fuzz.target import BrokenPromiseError, Target
from tests.sources import hf

ROWS = [
    {
        "image": {"bytes": b"\xff\xd8\xff" + bytes(range(number, 200)), "path": None},
        "label": number,
        "text": f"photo {number}",
    }
    for number in range(5)
]


class ParquetFiles(Target):
    """`hf`, and the parts of its records."""

    name = "parquet"

    def seeds(self) -> Sequence[bytes]:
        import pyarrow
        import pyarrow.parquet

        stream = io.BytesIO()
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), stream, row_group_size=2)
        return [stream.getvalue()]

    def check(self, data: bytes) -> Literal["taken", "refused"]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "a.parquet"
            path.write_bytes(data)
            try:
                source = hf([path], components={"caption.txt": "text"})
                for record in source.records:
                    _, parts = as_entry(record, source)
                    for _, part in parts:
                        if isinstance(part, Range) and _length(part) != part.size:
                            raise BrokenPromiseError("a cell has another number of bytes than was found")
            except PipesError:
                return "refused"
        return "taken"


def _length(part: Range) -> int:
    assert not isinstance(part.file, Path), "cells are no files"
    done = 0
    while done < part.size:
        num = part.file.read_into(memoryview(bytearray(part.size - done)), offset=part.offset + done)
        if not num:
            break
        done += num
    return done
