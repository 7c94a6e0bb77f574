"""Local files: their bytes come whole and checked, copied by the kernel or through a buffer."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from dali_pipes.cache.extents import Extent
from dali_pipes.cache.placement import SHARED_MEMORY
from dali_pipes.errors import DataError
from dali_pipes.fetch.fetcher import Wanted
from dali_pipes.formats.manifest import checksum
from dali_pipes.store.local import LocalFetcher

DATA = os.urandom((3 << 20) + 4321)
START = 8192


@pytest.fixture(params=["the same file system", "another file system"])
def extent(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Extent]:
    """A place in a cache file, with other bytes around it."""
    folder = tmp_path if request.param == "the same file system" else SHARED_MEMORY
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(b"x" * (START + len(DATA) + 100))
        file.flush()
        yield Extent(file.fileno(), START, len(DATA))


def test_file_of_other_bytes_is_refused(tmp_path: Path, extent: Extent) -> None:
    """Wherever they are: in the first block, or the last byte."""
    for position in (0, len(DATA) - 1):
        changed = bytearray(DATA)
        changed[position] ^= 1
        (tmp_path / "a.tar").write_bytes(changed)
        text = f"has the xxhash2 {checksum(bytes(changed)):016x}, the manifest says {checksum(DATA):016x}"
        with pytest.raises(DataError, match=text):
            LocalFetcher(tmp_path).fetch([Wanted("a.tar", extent, checksum(DATA))], stopped=lambda: False)
