"""Files of a cache directory that are not what their names say: moved aside; no loader stops, or reads a wrong byte."""

import logging
import os
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dali_pipes.cache.cache import NodeCache
from dali_pipes.cache.directory import DAMAGED
from dali_pipes.cache.files import cache_root
from dali_pipes.errors import CacheError
from tests.dali_pipes.cache.damage import KINDS, NUM_SHARDS, Loader, fill, replace_by, trial

KEY, OTHER = "a" * 32, "b" * 32
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of this user that has nothing to do with the cache."""
    monkeypatch.chdir(tmp_path)  # the name of a socket must be short
    path = tmp_path / "elsewhere"
    path.write_bytes(b"not to be touched" * 5000)
    return path


@pytest.mark.parametrize("name", [f"{KEY}.table", f"{KEY}.image", f"{KEY}.source", "lock", "slots"])
@pytest.mark.parametrize("kind", KINDS)
def test_thing_in_a_files_place(
    tmp_path: Path, elsewhere: Path, name: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It is moved aside once, and said; both data sets are there, the other one without a fetch; clear removes it."""
    directory = tmp_path / "cache"
    directory.mkdir()
    fill(directory, KEY, OTHER)
    before, mode = elsewhere.read_bytes(), elsewhere.stat().st_mode
    replace_by(kind, cache_root(directory) / name, elsewhere)
    with caplog.at_level(logging.WARNING):
        other, mine = Loader(directory, OTHER), Loader(directory, KEY)
    assert other.hold_all() == 0
    assert mine.hold_all() in (0, NUM_SHARDS)
    assert mine.wrong() == other.wrong() == []
    for loader in (mine, other):
        loader.close()
    cache = NodeCache(directory)
    damaged = cache.damaged()
    assert len(damaged) <= (2 if name.endswith(".image") else 1)  # with its table
    assert ("is damaged" in caplog.text) == bool(damaged)
    if kind == "directory" and not name.endswith(".source"):  # that one is read by "cache ls" alone
        assert f"{name}.0{DAMAGED}" in damaged
    assert len(cache.status()) == 2
    cache.clear()
    assert not cache.damaged()
    cache.close()
    assert (elsewhere.read_bytes(), elsewhere.stat().st_mode) == (before, mode)


def test_random_damage(tmp_path: Path, elsewhere: Path) -> None:
    """Bytes and numbers changed, files cut, extended and replaced: each loader reads the right bytes and goes on."""
    template = tmp_path / "template"
    template.mkdir()
    fill(template, KEY, OTHER)
    for seed in range(200):
        trial(template, tmp_path / "run", seed, (KEY, OTHER), elsewhere)


def test_cut_cache_file_is_made_anew(tmp_path: Path) -> None:
    fill(tmp_path, KEY, OTHER)
    os.truncate(cache_root(tmp_path) / f"{KEY}.image", 5000)
    other, mine = Loader(tmp_path, OTHER), Loader(tmp_path, KEY, verify="never")
    assert (other.hold_all(), mine.hold_all()) == (0, NUM_SHARDS)
    for loader in (mine, other):
        loader.close()


def test_damage_under_a_loader_leaves_its_bytes(tmp_path: Path) -> None:
    """Another process moves the table aside: the loader reads what it holds, and an error says why it gets no more."""
    mine = Loader(tmp_path, KEY)
    mine.hold_all()
    (cache_root(tmp_path) / f"{KEY}.table").unlink()
    (cache_root(tmp_path) / f"{KEY}.table").write_bytes(b"x" * 9000)
    second = Loader(tmp_path, KEY)
    assert second.hold_all() == NUM_SHARDS
    assert mine.wrong() == []
    mine.cache.release(mine.slot, [0])
    with pytest.raises(CacheError, match="was removed or taken from this loader"):
        mine.cache.take(mine.slot, np.array([0]))
    second.close()
    mine.close()


def test_changed_row_of_a_dead_loader_is_emptied(tmp_path: Path) -> None:
    """A name that is none, numbers that cannot be: whoever comes next is not stopped by it."""
    dead = Loader(tmp_path, KEY)
    dead.hold_all()
    row = dead.cache._slots.rows[dead.slot : dead.slot + 1]
    row["image"], row["cache_bytes"] = b"\xff\xfe" * 16, -5
    dead.die()
    other = Loader(tmp_path, OTHER)
    assert other.hold_all() == NUM_SHARDS
    assert np.flatnonzero(other.cache._slots.rows["used"]).tolist() == [other.slot]
    other.close()


def test_changed_row_of_a_loader_at_work_stops_changes(tmp_path: Path) -> None:
    """Nobody knows what it holds: an error says so, nothing is evicted, and the cache works again when it is gone."""
    mine, other = Loader(tmp_path, KEY), Loader(tmp_path, OTHER)
    mine.hold_all()
    other.hold_all()
    other.cache._slots.rows["image"][mine.slot] = b"\xff" * 32
    third = NodeCache(tmp_path)
    for call in (third.clear, third.status, lambda: other.cache.release(other.slot, [0])):
        with pytest.raises(CacheError, match=f"slots' is damaged: slot {mine.slot}, of a loader at work; wait until"):
            call()
    assert mine.wrong() == other.wrong() == []
    mine.die()
    assert [status.key for status in third.status() if status.pids] == [OTHER]
    third.close()
    other.close()


def test_every_file_is_its_owners_alone(tmp_path: Path) -> None:
    """Whatever the umask: 0600 for files, 0700 for the directory, also for those that were wider."""
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
    for name in ("lock", "slots", f"{KEY}.table"):
        (root / name).chmod(0o644)
    Loader(tmp_path, KEY).close()
    assert {stat.S_IMODE(path.stat().st_mode) for path in root.iterdir()} == {0o600}


@needs_root
def test_files_of_another_user_are_not_used(tmp_path: Path) -> None:
    """Planted while the directory was open to all: a file that another user owns, and can read later."""
    fill(tmp_path, KEY)
    root = cache_root(tmp_path)
    for path in root.iterdir():
        os.chown(path, 12345, 12345)
    loader = Loader(tmp_path, KEY)
    assert loader.hold_all() == NUM_SHARDS
    owners = {path.name: path.stat().st_uid for path in root.iterdir() if not path.name.endswith(DAMAGED)}
    assert set(owners.values()) == {0}
    loader.close()


_PLANT = """
import os, sys
os.setgid(65534); os.setuid(65534)
os.symlink(sys.argv[2], sys.argv[1])
"""


@needs_root
def test_link_that_another_user_planted_is_refused(tmp_path: Path) -> None:
    """In a directory as /dev/shm, mode 1777: the cache's own name leads to another directory."""
    shared, victim = tmp_path / "shared", tmp_path / "victim"
    shared.mkdir()
    victim.mkdir(mode=0o755)
    shared.chmod(0o1777)
    for path in (tmp_path, *tmp_path.parents):
        if path.stat().st_mode & 0o005 != 0o005:
            if not path.is_relative_to("/tmp"):
                pytest.skip(f"another user cannot reach '{path}'")
            path.chmod(0o755)
    subprocess.run([sys.executable, "-c", _PLANT, cache_root(shared), victim], check=True, timeout=60)
    with pytest.raises(CacheError, match="is not this user's own directory"):
        NodeCache(shared)
    assert list(victim.iterdir()) == []


def test_directory_that_is_swapped_is_not_followed(tmp_path: Path) -> None:
    """Who may write above renames it and puts another in its place: a loader goes on in its own."""
    loader = Loader(tmp_path, KEY)
    root = cache_root(tmp_path)
    root.rename(tmp_path / "away")
    root.mkdir()
    (root / "slots").write_bytes(b"theirs")
    assert loader.hold_all() == NUM_SHARDS
    assert (root / "slots").read_bytes() == b"theirs"
    loader.close()
    assert {path.name for path in (tmp_path / "away").iterdir()} >= {"lock", "slots", f"{KEY}.image"}


def test_two_processes_that_find_a_damaged_lock_agree_on_one(tmp_path: Path) -> None:
    """Neither moves the other's new lock file aside: then each would have a mutex of its own."""
    program = """
import os, sys
from pathlib import Path
from dali_pipes.cache.cache import NodeCache
sys.stdin.readline()
cache = NodeCache(Path(sys.argv[1]))
print(os.fstat(cache._files.lock.file).st_ino, flush=True)
sys.stdin.readline()
"""
    root = cache_root(tmp_path)
    for _ in range(2):
        root.mkdir(mode=0o700, exist_ok=True)
        (root / "lock").unlink(missing_ok=True)
        (root / "lock").mkdir()
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", program, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            for _ in range(3)
        ]
        try:
            for process in processes:
                assert process.stdin is not None
                process.stdin.write("\n")
                process.stdin.flush()
            inodes = {process.stdout.readline() for process in processes if process.stdout is not None}
            assert inodes == {f"{(root / 'lock').stat().st_ino}\n"}
        finally:
            for process in processes:
                process.communicate("\n", timeout=60)
