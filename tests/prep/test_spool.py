"""The folder on local disk in which an output is put together: for one process at a time, and gone afterwards."""

from pathlib import Path

import pytest

from dali_pipes.errors import StoreError
from dali_pipes.store.local import LocalStore
from prep.spool import open_spool


def test_spool_is_for_one_process_at_a_time_and_gone_afterwards(tmp_path: Path) -> None:
    with open_spool(LocalStore(tmp_path), "out-", None) as folder:
        assert list(tmp_path.iterdir()) == [folder]
        refused = pytest.raises(StoreError, match="another process is writing")
        with refused, open_spool(LocalStore(tmp_path), "out-", None):
            pass
    assert list(tmp_path.iterdir()) == []


def test_spool_removes_the_files_of_a_killed_run_and_tells_of_a_full_disk(tmp_path: Path) -> None:
    with open_spool(LocalStore(tmp_path), "out-", None) as folder:
        (folder / "part").touch()
    folder.mkdir()
    (folder / "old").touch()
    found = []

    def fill() -> None:
        with open_spool(LocalStore(tmp_path), "out-", None) as again:
            found.extend(again.iterdir())
            raise OSError(28, "No space left on device")

    with pytest.raises(StoreError, match=r"No space left on device; .*--spool-dir"):
        fill()
    assert found == []
    assert list(tmp_path.iterdir()) == []
