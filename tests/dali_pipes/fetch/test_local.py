"""Local files are checked and copied, by the kernel or through a buffer."""

import os
import tempfile
from pathlib import Path

import pytest

from dali_pipes.cache.extents import Extent
from dali_pipes.cache.placement import SHARED_MEMORY
from dali_pipes.errors import DataError
from dali_pipes.fetch.fetcher import Wanted
from dali_pipes.formats.manifest import checksum
from dali_pipes.store.local import LocalFetcher

DATA = os.urandom((3 << 20) + 4321)


@pytest.mark.parametrize("is_another_file_system", [False, True])
def test_file_of_other_bytes_is_refused(tmp_path: Path, is_another_file_system: bool) -> None:
    """A changed first or last byte is an error; the right file is copied into its extent."""
    with tempfile.TemporaryFile(dir=SHARED_MEMORY if is_another_file_system else tmp_path) as file:
        wanted = [Wanted("a.tar", Extent(file.fileno(), 8192, len(DATA)), checksum(DATA))]
        for position in (0, len(DATA) - 1):
            changed = bytearray(DATA)
            changed[position] ^= 1
            (tmp_path / "a.tar").write_bytes(changed)
            text = f"has the xxhash2 {checksum(bytes(changed)):016x}, the manifest says {checksum(DATA):016x}"
            with pytest.raises(DataError, match=text):
                LocalFetcher(tmp_path).fetch(wanted, stopped=lambda: False)
        (tmp_path / "a.tar").write_bytes(DATA)
        assert LocalFetcher(tmp_path).fetch(wanted, stopped=lambda: False)
        assert os.pread(file.fileno(), len(DATA) + 1, 8192) == DATA
