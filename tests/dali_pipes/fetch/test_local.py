"""Local files are checked and copied, by the kernel or through a buffer."""

import errno
import os
import tempfile
from pathlib import Path

import pytest

from dali_pipes.cache.extents import Extent
from dali_pipes.cache.placement import SHARED_MEMORY
from dali_pipes.errors import CacheError, DataError
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


@pytest.mark.parametrize("by_kernel", [True, False])
def test_file_that_ends_while_it_is_copied_is_refused(
    tmp_path: Path, by_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another program cuts the file meanwhile."""
    (tmp_path / "a.tar").write_bytes(DATA)
    copy = os.copy_file_range

    def cut_and_copy(*arguments: int) -> int:
        os.truncate(tmp_path / "a.tar", len(DATA) - 5000)
        return copy(*arguments) if by_kernel else fail(errno.EXDEV)

    monkeypatch.setattr(os, "copy_file_range", cut_and_copy)
    with tempfile.TemporaryFile(dir=tmp_path) as file:
        wanted = [Wanted("a.tar", Extent(file.fileno(), 8192, len(DATA)), checksum(DATA))]
        with pytest.raises(DataError, match=f"has {len(DATA) - 5000} bytes, the manifest says {len(DATA)}"):
            LocalFetcher(tmp_path).fetch(wanted, stopped=lambda: False)


def test_full_disk_is_an_error_that_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.tar").write_bytes(DATA)
    with tempfile.TemporaryFile(dir=tmp_path) as file:
        wanted = [Wanted("a.tar", Extent(file.fileno(), 8192, len(DATA)), checksum(DATA))]
        monkeypatch.setattr(os, "copy_file_range", lambda *_: fail(errno.ENOSPC))
        with pytest.raises(CacheError, match=r"cannot copy 'a.tar' into the cache file: No space left on device"):
            LocalFetcher(tmp_path).fetch(wanted, stopped=lambda: False)


def fail(number: int) -> int:
    raise OSError(number, os.strerror(number))
