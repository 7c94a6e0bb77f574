"""How much space there is by file system, kernel and container; directories that cannot hold a cache file."""

import os
import subprocess
from pathlib import Path

import pytest

import dali_pipes.cache.placement
from dali_pipes.cache.placement import (
    SHARED_MEMORY,
    FreeSpace,
    check_directory,
    file_system,
    memory_limit,
)
from dali_pipes.errors import CacheError

UNLIMITED = 1 << 60


def test_shared_memory_counts_as_memory() -> None:
    """What can be written there is bounded by the file system and by what memory is left."""
    space = FreeSpace.of(SHARED_MEMORY)
    stat = os.statvfs(SHARED_MEMORY)
    assert space.is_memory
    assert 0 < space.free <= stat.f_bavail * stat.f_frsize
    assert space.total == stat.f_blocks * stat.f_frsize
    # What a cache has there already is its own to use, and half of all that is left to others.
    assert space.default_bytes(taken=1000) == (space.free + 1000) // 2


def test_disk_is_not_memory(tmp_path: Path) -> None:
    """A tenth of what is free is left to others."""
    if file_system(tmp_path) == "tmpfs":
        pytest.skip("the directory for temporary files is in memory")
    space = FreeSpace.of(tmp_path)
    assert not space.is_memory
    assert space.default_bytes(taken=0) == int(space.free * 0.9)


def test_directory_that_is_not_there_has_no_space(tmp_path: Path) -> None:
    space = FreeSpace.of(tmp_path / "not")
    assert (space.free, space.total) == (0, 0)


@pytest.mark.parametrize(
    ("cgroups", "files", "left"),
    [
        ("0::/job\n", {}, UNLIMITED),  # no such files: not limited
        ("0::/job\n", {"job/memory.max": "max", "job/memory.current": "5"}, UNLIMITED),
        ("0::/job\n", {"job/memory.max": "1000", "job/memory.current": "300"}, 700),
        ("0::/job\n", {"job/memory.max": "1000", "job/memory.current": "1300"}, 0),
        # Pages of files make way, those of a tmpfs, counted among them, do not.
        (
            "0::/job\n",
            {"job/memory.max": "1000", "job/memory.current": "900", "job/memory.stat": "anon 1\nfile 500\nshmem 200\n"},
            400,
        ),
        # A limit further up counts as well, and so does the root's: a container sees its own group there.
        ("0::/a/b\n", {"a/memory.max": "100", "a/memory.current": "1", "a/b/memory.max": "max"}, 99),
        ("0::/../x\n", {"memory.max": "50", "memory.current": "10"}, 40),
        ("", {}, UNLIMITED),
    ],
)
def test_memory_limit(tmp_path: Path, cgroups: str, files: dict[str, str], left: int) -> None:
    """What the process's control group may still take, as its files say."""
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert memory_limit(cgroups=cgroups, root=tmp_path) == left


def test_memory_limit_of_this_process_can_be_read() -> None:
    assert memory_limit() > 0


def test_check_directory_refuses_what_cannot_hold_a_cache_file(tmp_path: Path) -> None:
    """Not there, a file, a file system that cannot free blocks or hold files: what is wrong, and what to pass."""
    check_directory(tmp_path)
    check_directory(SHARED_MEMORY)
    (tmp_path / "file").touch()
    for name in ("not", "file"):
        with pytest.raises(CacheError, match=f"cache directory '.*/{name}' is not there; make it, or pass another"):
            check_directory(tmp_path / name)
    with pytest.raises(
        CacheError, match=r"cannot make a cache file in '/proc/self'.*pass another cache=dali_pipes.Cache\(directory="
    ):
        check_directory(Path("/proc/self"))


def test_check_directory_refuses_a_file_system_that_cannot_free_blocks(tmp_path: Path) -> None:
    """A ramfs cannot; found out by trying."""
    if subprocess.run(["mount", "-t", "ramfs", "ramfs", tmp_path], capture_output=True).returncode:
        pytest.skip("only root can mount a ramfs")
    try:
        with pytest.raises(CacheError, match=r"its file system \(ramfs\) cannot free blocks.*tmpfs, ext4, XFS"):
            check_directory(tmp_path)
    finally:
        subprocess.run(["umount", "--lazy", tmp_path], check=True)


@pytest.mark.parametrize(
    ("options", "expected"),
    [("rw,size=8g", 4096), ("rw,huge=within_size", 2 << 20), ("rw,huge=always", 2 << 20), ("rw,huge=advise", 4096)],
)
def test_space_on_huge_pages_is_aligned_to_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: str, expected: int
) -> None:
    """A tmpfs that is mounted with huge=: a smaller extent would take a whole huge page, and count as less."""
    huge_page = tmp_path / "hpage_pmd_size"
    huge_page.write_text(f"{2 << 20}\n")
    monkeypatch.setattr(dali_pipes.cache.placement, "_HUGE_PAGE", huge_page)
    monkeypatch.setattr(dali_pipes.cache.placement, "_mount", lambda directory: ("tmpfs", options))
    assert FreeSpace.of(tmp_path).alignment == expected
