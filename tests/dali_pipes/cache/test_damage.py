"""Files of a cache directory that are not what their names say: no loader stops, or reads a wrong byte."""

import logging
import os
import stat
from pathlib import Path

import pytest

from dali_pipes.cache.files import cache_root
from tests.dali_pipes.cache.damage import NUM_SHARDS, Loader, fill

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
