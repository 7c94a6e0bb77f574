"""Files of a cache directory that are not what their names say: no loader stops, or reads a wrong byte."""

import contextlib
import logging
import os
import stat
from pathlib import Path

import numpy as np
import pytest

from dali_pipes.cache.extents import Extent
from dali_pipes.cache.files import cache_root
from dali_pipes.cache.placement import FreeSpace
from dali_pipes.cache.table import NOBODY, State, StateTable
from dali_pipes.errors import CacheError
from tests.dali_pipes.cache.damage import NUM_SHARDS, Loader, fill
from tests.dali_pipes.cache.member import PAGE

KEY, OTHER = "a" * 32, "b" * 32
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")


@pytest.mark.parametrize("name", [f"{KEY}.table", f"{KEY}.image", f"{KEY}.source", "lock", "slots"])
@pytest.mark.parametrize("kind", ["empty", "other", "nothing"])
def test_thing_in_a_files_place(tmp_path: Path, name: str, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """A cache file is made anew, which is logged; both data sets are there, the other one without a fetch."""
    fill(tmp_path, KEY, OTHER)
    path = cache_root(tmp_path) / name
    path.unlink()
    if kind != "nothing":
        path.write_bytes(b"\x81" * 70_000 if kind == "other" else b"")
    with caplog.at_level(logging.WARNING):
        other, mine = Loader(tmp_path, OTHER), Loader(tmp_path, KEY)
    assert other.hold_all() == 0
    assert mine.hold_all() == (NUM_SHARDS if name.endswith((".table", ".image")) else 0)
    assert mine.wrong() == other.wrong() == []
    assert ("is damaged" in caplog.text) == (
        name.endswith((".table", ".image")) and (kind, name[-5:]) != ("nothing", "table")
    )
    assert len(mine.cache.status()) == 2
    for loader in (mine, other):
        loader.close()


def test_cut_cache_file_is_made_anew(tmp_path: Path) -> None:
    fill(tmp_path, KEY, OTHER)
    os.truncate(cache_root(tmp_path) / f"{KEY}.image", 5000)
    other, mine = Loader(tmp_path, OTHER), Loader(tmp_path, KEY, verify="never")
    assert (other.hold_all(), mine.hold_all()) == (0, NUM_SHARDS)
    for loader in (mine, other):
        loader.close()


def test_every_file_is_its_owners_alone(tmp_path: Path) -> None:
    """Files have 0600 and the directory 0700; the umask does not matter."""
    before = os.umask(0)
    try:
        loader = Loader(tmp_path, KEY)
    finally:
        os.umask(before)
    root = cache_root(tmp_path)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in root.iterdir()}
    assert modes == dict.fromkeys([f"{KEY}.table", f"{KEY}.image", f"{KEY}.source", "lock", "slots"], 0o600)
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    loader.close()


@needs_root
def test_files_of_another_user_are_not_used(tmp_path: Path) -> None:
    """Planted while the directory was open to all: a file that another user owns, and can read later."""
    fill(tmp_path, KEY)
    root = cache_root(tmp_path)
    for path in root.glob("*.*"):
        os.chown(path, 12345, 12345)
    loader = Loader(tmp_path, KEY)
    assert loader.hold_all() == NUM_SHARDS
    assert {path.stat().st_uid for path in root.iterdir()} == {0}
    loader.close()


@pytest.mark.parametrize(
    ("column", "value", "text"),
    [
        ("starts", 3, "its extents were changed"),
        ("sizes", 1 << 40, "it has shards that are larger than their extents"),
        ("sizes", -1, "it has shards that are larger than their extents"),
        ("state", len(State), "it has states or owners that do not exist"),
        ("owner", NOBODY - 1, "it has states or owners that do not exist"),
        ("owner", 9999, "it has states or owners that do not exist"),
    ],
)
def test_a_table_with_impossible_values_is_made_anew(
    tmp_path: Path, column: str, value: int, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A loader that believed them could read past the end of an extent."""
    fill(tmp_path, KEY, OTHER)
    directory = os.open(cache_root(tmp_path), os.O_RDONLY)
    table = StateTable(f"{KEY}.table", directory=directory)
    getattr(table, column)[1] = value
    table.close()
    os.close(directory)
    with caplog.at_level(logging.WARNING):
        other, mine = Loader(tmp_path, OTHER), Loader(tmp_path, KEY)
    assert text in caplog.text
    assert (other.hold_all(), mine.hold_all()) == (0, NUM_SHARDS)
    assert mine.wrong() == other.wrong() == []
    for loader in (mine, other):
        loader.close()


def test_an_interrupted_change_is_repaired(tmp_path: Path) -> None:
    """The process repairs the table if it lives; otherwise the next process that changes the table does."""
    loader = Loader(tmp_path, KEY)
    assert loader.hold_all() == NUM_SHARDS
    directory = os.open(cache_root(tmp_path), os.O_RDONLY)
    table = StateTable(f"{KEY}.table", directory=directory)
    derived = (table.resident_bytes, sorted(table.resident))
    assert derived == (NUM_SHARDS * PAGE, list(range(NUM_SHARDS)))

    def break_off() -> None:
        """Do half of a change, then fail."""
        assert table.is_dirty
        table._header["num_resident"] = table._header["resident_bytes"] = 0
        table._place[:] = 0
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), table.changing():
        break_off()
    assert (table.resident_bytes, sorted(table.resident)) == derived
    with table.changing(), contextlib.suppress(ZeroDivisionError):
        break_off()
    table._header["dirty"] = 1  # as a killed process leaves it
    with table.changing():
        assert (table.resident_bytes, sorted(table.resident)) == derived
        assert (table.resident[table._place] == np.arange(NUM_SHARDS)).all()
    assert not table.is_dirty
    table.close()
    os.close(directory)
    loader.close()


def test_a_disk_that_fails_is_an_error(tmp_path: Path) -> None:
    """Here the file was opened for writing only, so reading fails. A check that is stopped first reads nothing."""
    file = os.open(tmp_path / "image", os.O_WRONLY | os.O_CREAT)
    try:
        extent = Extent(file, 0, 10)
        extent.write(b"0123456789", 0)
        with pytest.raises(CacheError, match="cannot read from the cache file: Bad file descriptor"):
            extent.read()
        assert extent.checksum_unless(lambda: True) is None
    finally:
        os.close(file)


def test_a_disk_that_cannot_keep_a_shard_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next loader fetches the shards anew."""
    if FreeSpace.of(tmp_path).is_memory:
        pytest.skip("needs a directory on a disk")
    loader = Loader(tmp_path, KEY)

    def fail(file: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", fail)
        with pytest.raises(CacheError, match=f"the disk of '{tmp_path}' failed: Input/output error"):
            loader.hold_all()
    other = Loader(tmp_path, KEY)
    loader.close()
    assert other.hold_all() == NUM_SHARDS
    other.close()
