"""Where a cache file lies, how much space there is, and directories that cannot hold a cache file."""

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import dali_pipes.cache.placement
from dali_pipes.cache.files import cache_root
from dali_pipes.cache.placement import SHARED_MEMORY, FreeSpace, Placement, check_directory, memory_limit, place
from dali_pipes.errors import CacheError
from tests.dali_pipes.cache.member import KEY, PAGE, Member

HUGE = 1 << 60


@pytest.fixture
def directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, Path]]:
    """What stands for shared memory and for the directory of temporary files, both new."""
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY, prefix="dali-pipes-test-") as memory:
        monkeypatch.setattr(dali_pipes.cache.placement, "default_directories", lambda: [Path(memory), tmp_path])
        yield Path(memory), tmp_path


def placed(cache_dir: Path | None = None, cache_bytes: int | None = None, *, reserved: int, total: int) -> Placement:
    return place(cache_dir, cache_bytes, key=KEY, reserved=reserved, total=total, is_windowed=reserved < total)


def test_named_directory_is_taken_and_kept(tmp_path: Path) -> None:
    """With its share of what is free, or with what is asked for."""
    with pytest.raises(ValueError, match="max_bytes must be positive, got 0"):
        placed(tmp_path, 0, reserved=1, total=1)
    found = placed(tmp_path, reserved=10, total=100)
    assert (found.space.directory, found.keep) == (tmp_path, True)
    assert found.cache_bytes == pytest.approx(FreeSpace.of(tmp_path).default_bytes(taken=0), rel=0.05)
    assert placed(tmp_path, 1000, reserved=10, total=100).cache_bytes == 1000
    # Never more than there is.
    assert placed(tmp_path, HUGE, reserved=10, total=100).cache_bytes <= FreeSpace.of(tmp_path).total


def test_shared_memory_if_all_fits_else_the_disk(directories: tuple[Path, Path]) -> None:
    """A data set that fits memory is read from there; one that only the disk holds, from the disk; else as windows."""
    memory, disk = directories
    in_memory, on_disk = (FreeSpace.of(directory).default_bytes(taken=0) for directory in directories)
    found = placed(reserved=10, total=in_memory // 2)
    assert (found.space.directory, found.keep) == (memory, False)
    if on_disk > 2 * in_memory:
        assert placed(reserved=10, total=in_memory + (1 << 30)).space.directory == disk
    assert placed(reserved=10, total=HUGE).space.directory == memory
    assert placed(None, 1000, reserved=1000, total=HUGE).cache_bytes == 1000


def test_directory_that_cannot_be_used_is_passed_over(directories: tuple[Path, Path]) -> None:
    """Somebody has taken our name in shared memory: the disk will do; where nothing does, all reasons are told."""
    memory, disk = directories
    cache_root(memory).touch()
    assert placed(reserved=10, total=100).space.directory == disk
    cache_root(disk).symlink_to(memory)
    with pytest.raises(
        CacheError, match=r"take 10 bytes.*not this user's own directory.*not this user's own directory"
    ):
        placed(reserved=10, total=100)


@pytest.mark.parametrize(
    ("cache_bytes", "reserved", "text"),
    [
        (100, 200, "they take 200 bytes; pass a smaller shuffle=dali_pipes.Sh.*max_bytes=100 is allowed in '{}'"),
        (None, HUGE // 2, "has [0-9]+ bytes free"),
        (100, HUGE, f"the shards take {HUGE} bytes, and window_bytes='all' needs all of them resident"),
    ],
)
def test_no_space_says_what_is_needed_and_what_there_is(
    tmp_path: Path, cache_bytes: int | None, reserved: int, text: str
) -> None:
    with pytest.raises(CacheError, match=text.format(re.escape(str(tmp_path)))):
        placed(tmp_path, cache_bytes, reserved=reserved, total=HUGE)


def test_container_with_little_shared_memory_is_told_how_to_get_more(
    directories: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Docker's 64 MB: what to start it with."""
    memory, _ = directories
    monkeypatch.setattr(
        dali_pipes.cache.placement.FreeSpace,
        "of",
        lambda directory: FreeSpace(directory=directory, free=64 << 20, total=64 << 20, is_memory=directory == memory),
    )
    with pytest.raises(
        CacheError, match=r"67108864 in all, a container's default: start it with --shm-size or --ipc=host"
    ):
        placed(reserved=HUGE // 2, total=HUGE)


def test_ranks_that_start_later_take_what_the_first_has_chosen(
    directories: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is free has become less meanwhile, by what the others use: where and how much does not change by that."""
    memory, disk = directories
    for directory in (memory, disk):
        first = Member(directory, pages=1, reserved=1, allowed=(10 << 20) // PAGE, keep=False)
        monkeypatch.setattr(dali_pipes.cache.placement.FreeSpace, "default_bytes", lambda self, taken: 4096)
        found = placed(reserved=1 << 20, total=5 << 20)
        assert (found.space.directory, found.cache_bytes) == (directory, 10 << 20)
        with pytest.raises(CacheError, match=r"the loaders at work in .* share 10485760 bytes"):
            placed(directory, reserved=20 << 20, total=20 << 20)
        first.close()
        monkeypatch.undo()
        monkeypatch.setattr(dali_pipes.cache.placement, "default_directories", lambda: [memory, disk])


# How much space there is


def test_shared_memory_counts_as_memory() -> None:
    """The file system's size and the free memory both limit the free space there."""
    space = FreeSpace.of(SHARED_MEMORY)
    stat = os.statvfs(SHARED_MEMORY)
    assert space.is_memory
    assert 0 < space.free <= stat.f_bavail * stat.f_frsize
    assert space.total == stat.f_blocks * stat.f_frsize
    # The default is half of the free space and the cache's own bytes together; others get the other half.
    assert space.default_bytes(taken=1000) == (space.free + 1000) // 2
    assert FreeSpace.of(SHARED_MEMORY / "not-there").total == 0


@pytest.mark.parametrize(
    ("cgroups", "files", "left"),
    [
        ("0::/job\n", {}, HUGE),  # no such files: no limit
        ("0::/job\n", {"job/memory.max": "max", "job/memory.current": "5"}, HUGE),
        ("0::/job\n", {"job/memory.max": "1000", "job/memory.current": "300"}, 700),
        ("0::/job\n", {"job/memory.max": "1000", "job/memory.current": "1300"}, 0),
        # The kernel can drop pages of files. It counts pages of a tmpfs among them, but cannot drop these.
        (
            "0::/job\n",
            {"job/memory.max": "1000", "job/memory.current": "900", "job/memory.stat": "anon 1\nfile 500\nshmem 200\n"},
            400,
        ),
        # A parent's limit counts as well, and so does the root's: a container sees its own group as the root.
        ("0::/a/b\n", {"a/memory.max": "100", "a/memory.current": "1", "a/b/memory.max": "max"}, 99),
        ("0::/../x\n", {"memory.max": "50", "memory.current": "10"}, 40),
        ("", {}, HUGE),
    ],
)
def test_memory_limit(tmp_path: Path, cgroups: str, files: dict[str, str], left: int) -> None:
    """The memory that the process's control group may still take, according to the group's files."""
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert memory_limit(cgroups=cgroups, root=tmp_path) == left
    assert memory_limit() > 0  # the limit of this process


def test_check_directory_refuses_what_cannot_hold_a_cache_file(tmp_path: Path) -> None:
    """The directory is missing, is a file, or cannot hold files: the error says so, and what to pass instead."""
    check_directory(tmp_path)
    check_directory(SHARED_MEMORY)
    (tmp_path / "file").touch()
    for name in ("not", "file"):
        with pytest.raises(CacheError, match=f"cache directory '.*/{name}' is not there; make it, or pass another"):
            placed(tmp_path / name, reserved=0, total=0)
    with pytest.raises(
        CacheError, match=r"cannot make a cache file in '/proc/self'.*pass another cache=dali_pipes.Cache\(directory="
    ):
        check_directory(Path("/proc/self"))


def test_check_directory_refuses_a_file_system_that_cannot_free_blocks(tmp_path: Path) -> None:
    """A ramfs cannot free blocks; `check_directory` finds this out by a trial."""
    if subprocess.run(["mount", "-t", "ramfs", "ramfs", tmp_path], capture_output=True).returncode:
        pytest.skip("only root can mount a ramfs")
    try:
        with pytest.raises(CacheError, match=r"its file system \(ramfs\) cannot free blocks.*tmpfs, ext4, XFS"):
            check_directory(tmp_path)
    finally:
        subprocess.run(["umount", "--lazy", tmp_path], check=True)


@pytest.mark.parametrize(
    ("options", "expected"), [("rw,size=8g", 4096), ("rw,huge=always", 2 << 20), ("rw,huge=advise", 4096)]
)
def test_space_on_huge_pages_is_aligned_to_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: str, expected: int
) -> None:
    """On a tmpfs mounted with huge=, a smaller extent would take a whole huge page but count as less."""
    huge_page = tmp_path / "hpage_pmd_size"
    huge_page.write_text(f"{2 << 20}\n")
    monkeypatch.setattr(dali_pipes.cache.placement, "_HUGE_PAGE", huge_page)
    monkeypatch.setattr(dali_pipes.cache.placement, "_mount", lambda directory: ("tmpfs", options))
    assert FreeSpace.of(tmp_path).alignment == expected
