"""The shared cache: holding, filling, evicting, reservations."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from dali_pipes.cache.cache import NodeCache
from dali_pipes.cache.directory import LockFile
from dali_pipes.cache.files import FIRST_SLOT_BYTE, cache_root
from dali_pipes.cache.table import NUM_SLOTS, State
from dali_pipes.errors import CacheError
from tests.dali_pipes.cache.member import KEY, OTHER, PAGE, Member, blocks

on_a_disk_too = pytest.mark.parametrize("directory", ["/dev/shm", "disk"], indirect=True)


@pytest.fixture
def directory(request: pytest.FixtureRequest) -> Path:
    """Shared memory, or a disk."""
    is_disk = getattr(request, "param", "") == "disk"
    found: Path = request.getfixturevalue("tmp_path" if is_disk else "shared_memory")
    return found


@on_a_disk_too
def test_eviction_takes_the_longest_unused_of_what_nobody_holds(directory: Path) -> None:
    """Of any cache file; held shards stay, whichever loader holds them; blocks are freed."""
    one = Member(directory, allowed=6, reserved=3)
    two = Member(directory, key=OTHER, allowed=6, reserved=3)
    one.fill(0, 1, 2)
    two.fill(0, 1, 2)
    one.release(1)
    two.release(2)
    one.release(0)
    one.fill(3)  # evicts `one`'s shard 1, released first; `two` loses nothing
    assert one.states() == [State.READY, State.EMPTY, State.READY, State.READY, State.EMPTY, State.EMPTY]
    two.fill(4)  # evicts one's 0 next: two's own 2 was released before that, and goes first
    assert two.states() == [State.READY, State.READY, State.EMPTY, State.EMPTY, State.READY, State.EMPTY]
    assert blocks(directory) == 6 * PAGE
    assert one.read(1) == bytes(PAGE)
    assert one.take(2, 3).blocked == ""
    one.close()
    two.close()


@on_a_disk_too
def test_least_of_different_budgets_counts(directory: Path) -> None:
    """Two loaders with different limits: neither takes the cache past the smaller while both are at work."""
    large = Member(directory, reserved=2, allowed=6)
    large.fill(0, 1, 2, 3, 4)
    large.release(0, 1, 2, 3)
    small = Member(directory, reserved=1, allowed=3, group=2)  # what nobody holds goes at once
    assert blocks(directory) <= 3 * PAGE
    assert large.cache.budget() == (3 * PAGE, 3 * PAGE)
    assert large.take(0, 1).blocked in ("", "space")
    assert blocks(directory) <= 3 * PAGE
    with pytest.raises(CacheError, match="may take 12288 bytes"):
        Member(directory, reserved=4, allowed=100, group=3)
    small.die()
    assert large.cache.budget()[1] == 6 * PAGE
    large.close()


def test_bytes_that_are_reserved_later_count_for_others(directory: Path) -> None:
    one = Member(directory, allowed=6, reserved=1)
    one.cache.reserve_more(4 * PAGE)
    with pytest.raises(CacheError, match="may take 24576 bytes"):
        Member(directory, key=OTHER, allowed=6, reserved=3)
    Member(directory, key=OTHER, allowed=6, reserved=2).close()
    one.close()


def test_a_loader_that_leaves_gives_up_what_it_was_filling(directory: Path) -> None:
    one, two = Member(directory), Member(directory, group=2)
    assert one.take(0).fill.tolist() == [0]
    assert two.take(0).blocked == "busy"
    one.close()
    two.fill(0)
    two.close()


def test_small_shards_are_filled_together_and_checked_together(directory: Path) -> None:
    """Up to a number and to bytes; not those to fill with those to check; only as many as there is space for."""
    one = Member(directory, reserved=4, allowed=6)
    assert one.cache.take((0, 1, 2, 3), most=3, most_bytes=9 * PAGE).fill.tolist() == [0, 1, 2]
    one.cache.fail([0, 1, 2])
    assert one.cache.take((0, 1, 2, 3), most=4, most_bytes=2 * PAGE).fill.tolist() == [0, 1]
    one.cache.fail([0, 1])
    one.fill(0, 3)
    one.close()
    two = Member(directory, reserved=4, allowed=6)  # the kept shards have to be checked
    taken = two.cache.take((0, 3, 1, 2), most=4, most_bytes=9 * PAGE)
    assert (taken.fill.tolist(), taken.is_there) == ([0, 3], True)
    two.cache.finish([0, 3])
    other = Member(directory, key=OTHER, reserved=1, allowed=6)
    other.fill(0)
    taken = two.cache.take((1, 2, 4, 5), most=4, most_bytes=9 * PAGE)
    assert (taken.fill.tolist(), taken.is_there) == ([1, 2, 4], False)
    two.close()
    other.close()


def test_each_loader_has_its_row_of_holds_reserved(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a tmpfs is full, a write to a page that was not allocated ends the process (SIGBUS)."""
    reserved: list[tuple[int, int]] = []
    allocate = os.posix_fallocate

    def reserve(file: int, start: int, size: int) -> None:
        reserved.append((start, start + size))
        allocate(file, start, size)

    monkeypatch.setattr(os, "posix_fallocate", reserve)
    num = 3 * PAGE
    members = [Member(directory, pages=num, group=number, allowed=6) for number in range(3)]
    for member in members:
        table = member.cache._opened.table
        row, file = table.holds[member.cache._slot], np.frombuffer(table._map, np.uint8)
        start = row.ctypes.data - file.ctypes.data
        assert any(begin <= start and start + num <= stop for begin, stop in reserved)
        member.close()


def test_slots_are_as_many_as_said(directory: Path) -> None:
    """The 257th loader is told so; a slot that is given up is the next one's."""
    one, locks = Member(directory), LockFile(cache_root(directory) / "lock")
    for slot in range(1, NUM_SLOTS):
        locks.lock(FIRST_SLOT_BYTE + slot)
    with pytest.raises(CacheError, match="256 loaders at work, which is the most"):
        Member(directory)
    locks.unlock(FIRST_SLOT_BYTE + 77)
    two = Member(directory)
    assert (one.cache._slot, two.cache._slot) == (0, 77)
    assert not locks.try_lock(FIRST_SLOT_BYTE + 77)
    locks.close()
    one.close()
    two.close()


@on_a_disk_too
def test_kept_cache_file_stays_and_others_go_with_their_last_loader(directory: Path) -> None:
    """By name: a cache that the user named is for the next job, one that we chose leaves nothing."""
    kept, left = Member(directory, keep=True), Member(directory, key=OTHER, keep=False)
    kept.fill(0)
    left.fill(0)
    again = Member(directory, key=OTHER, keep=False)
    left.close()
    assert (cache_root(directory) / f"{OTHER}.image").exists()
    again.close()
    kept.close()
    dead, last = Member(directory, key=OTHER, keep=False), Member(directory, key=OTHER, keep=False)
    dead.die()
    last.close()
    names = sorted(path.name for path in cache_root(directory).iterdir())
    assert names == [f"{KEY}.image", f"{KEY}.source", f"{KEY}.table", "lock", "slots"]
    kept = Member(directory)
    taken = kept.take(0)
    assert (taken.fill.tolist(), taken.is_there) == ([0], True)
    assert kept.read(0) == kept.content(0)
    kept.close()


def test_cache_file_removed_under_a_running_loader(directory: Path) -> None:
    """It can read what it has; an error says when it wants more; it never changes the cache file made since."""
    one = Member(directory, reserved=2)
    one.fill(0)
    assert one.take(1).fill.tolist() == [1]
    shutil.rmtree(cache_root(directory))
    with pytest.raises(CacheError, match="was removed or taken from this loader while it was at work"):
        one.take(2)
    two = Member(directory)
    two_taken = two.take(1)
    assert two_taken.fill.tolist() == [1]
    one.write(1)
    with pytest.raises(CacheError, match="was removed"):
        one.cache.finish([1])
    one.cache.fail([1])
    assert one.read(0) == one.content(0)
    assert two.take(0).fill.tolist() == [0]
    assert two.read(1) == bytes(PAGE)
    one.close()
    two.close()


def test_directory_of_somebody_else_is_refused(tmp_path: Path) -> None:
    """A link, a file, another user's: /dev/shm is everybody's, and a name there can be taken."""
    root = cache_root(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    root.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CacheError, match=r"is not this user's own directory; .* pass another cache=dali_pipes"):
        NodeCache(tmp_path)
    root.unlink()
    root.touch()
    with pytest.raises(CacheError, match="is not this user's own directory"):
        NodeCache(tmp_path)
    root.unlink()
    if os.geteuid() == 0:
        root.mkdir()
        os.chown(root, 12345, -1)
        with pytest.raises(CacheError, match="is not this user's own directory"):
            NodeCache(tmp_path)
        root.rmdir()
    root.mkdir(mode=0o755)
    NodeCache(tmp_path).close()
    assert root.stat().st_mode & 0o777 == 0o700


def test_slots_of_another_version_are_not_believed(directory: Path) -> None:
    """Left by a job that is over they are forgotten; while it runs, it is left alone."""
    one = Member(directory)
    slots = cache_root(directory) / "slots"
    slots.write_bytes(b"\xee" * slots.stat().st_size)
    with pytest.raises(CacheError, match="in use by loaders of another version"):
        NodeCache(directory)
    one.die()
    two = Member(directory)
    two.fill(0)
    two.close()


def test_full_file_system_leaves_a_cache_that_works(tmp_path: Path) -> None:
    """A tmpfs of a megabyte, full at each point: errors say so, nothing is half made, no SIGBUS."""
    mount = tmp_path / "small"
    mount.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", mount], capture_output=True).returncode:
        pytest.skip("only root can mount a file system of a megabyte")
    try:
        for free_pages in range(14):
            total = os.statvfs(mount)
            with (mount / "filler").open("wb") as filler:
                os.posix_fallocate(filler.fileno(), 0, (total.f_bavail - free_pages) * total.f_bsize)
            try:
                one = Member(mount, allowed=100, keep=False)
            except CacheError as exc:
                if not re.search("no space for|No space left", str(exc)):
                    raise
            else:
                taken = one.take(0)
                assert taken.fill.tolist() == [0]
                try:
                    one.write(0)
                    one.cache.finish([0])
                except OSError:
                    one.cache.fail([0])
                one.close()
            (mount / "filler").unlink()
            whole = Member(mount, allowed=100, keep=False)
            whole.fill(0, 1, 2)
            whole.close()
            shutil.rmtree(cache_root(mount))
    finally:
        subprocess.run(["umount", "--lazy", mount], check=True)  # mapped still, until it is collected
