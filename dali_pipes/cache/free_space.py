"""Measure how much space there is for cache files: on the file system, in memory, by the container's limit.

A tmpfs such as /dev/shm is memory: its files count against the machine's memory and the control group's limit.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from dali_pipes.cache.extents import EXTENT_ALIGNMENT, can_punch
from dali_pipes.errors import CacheError

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 (the cache's own directory there is its user's, mode 0700)

# Fractions of the free space that a cache takes by default: the program that reads from it keeps half of the memory,
# and others keep a tenth of a disk.
MEMORY_SHARE = 0.5
DISK_SHARE = 0.9

# A smaller cache file has so few pieces that the file system needs no blocks to list them.
_LEAST_ACCOUNTED = 64 << 10
# File systems that several machines share. A cache is for one node: its locks, and freeing blocks, may not work there.
_NETWORK = (
    *("nfs", "nfs4", "cifs", "smb3", "9p", "afs", "ceph", "glusterfs", "lustre", "gpfs", "beegfs", "orangefs"),
    "virtiofs",
)
_HUGE_PAGE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
_CGROUP = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60


@dataclass(frozen=True, kw_only=True)
class FreeSpace:
    """The space that a directory offers to a cache, in bytes."""

    directory: Path
    free: int
    """Bytes that can be written now, as file system, memory and control group allow."""
    total: int
    """The file system's size."""
    is_memory: bool
    alignment: int = EXTENT_ALIGNMENT
    """Size of a block: a page, or a huge page on a tmpfs that is mounted with ``huge=``."""

    @classmethod
    def of(cls, directory: Path) -> "FreeSpace":
        """Measure the space in ``directory``; a directory that does not exist has no space."""
        try:
            stat = os.statvfs(directory)
        except OSError:
            return cls(directory=directory, free=0, total=0, is_memory=False)
        free, total = stat.f_bavail * stat.f_frsize, stat.f_blocks * stat.f_frsize
        kind, options = _mount(directory)
        is_memory, alignment = kind in ("tmpfs", "ramfs"), EXTENT_ALIGNMENT
        if is_memory:
            free = min(free, available_memory())
            if {"huge=always", "huge=within_size"} & set(options.split(",")):
                alignment = max(alignment, _number(_HUGE_PAGE) or 0)
        return cls(directory=directory, free=free, total=total, is_memory=is_memory, alignment=alignment)

    def for_extents(self, cache_bytes: int) -> int:
        """Compute how many of ``cache_bytes`` shards may take: a disk's file system lists a file's pieces in blocks.

        ext4 needs a block of 4 KiB for some 340 pieces beyond those in the inode. A piece has at most 128 MiB; the
        calculation assumes at least 64 KiB.
        """
        if self.is_memory or cache_bytes < _LEAST_ACCOUNTED:
            return cache_bytes
        return cache_bytes - max(2 * 4096, cache_bytes // 4096)

    def cache_bytes_for(self, num_bytes: int) -> int:
        """Compute the least ``cache_bytes`` of which shards may take ``num_bytes``: the inverse of `for_extents`."""
        if self.for_extents(num_bytes) >= num_bytes:
            return num_bytes
        least = max(num_bytes + 2 * 4096, num_bytes * 4096 // 4095)
        return next(num for num in (least, least + 1) if self.for_extents(num) >= num_bytes)

    def default_bytes(self, *, taken: int) -> int:
        """Compute the size of a cache if the user gives none; the cache may reuse the bytes ``taken`` already."""
        return int((self.free + taken) * (MEMORY_SHARE if self.is_memory else DISK_SHARE))


def check_directory(directory: Path) -> None:
    """Refuse a directory that cannot hold a cache file.

    Raises:
        CacheError: If it does not exist, if it is on a network file system, or if blocks of its files cannot be freed.
    """
    if not directory.is_dir():
        raise CacheError(f"cache directory '{directory}' is not there; make it, or pass another")
    kind = file_system(directory)
    if kind in _NETWORK or kind.startswith("fuse."):
        raise CacheError(
            f"cache directory '{directory}' is on a network file system ({kind}), and a cache belongs to one node; "
            "pass a local directory: /dev/shm, or one on an NVMe disk"
        )
    if not can_punch(directory):
        raise CacheError(
            f"cache directory '{directory}': its file system ({kind or 'unknown'}) cannot free blocks of a file, "
            "which is how shards leave a cache; pass a directory on tmpfs, ext4, XFS or btrfs"
        )


def file_system(directory: Path) -> str:
    """Return the type of the file system that holds ``directory``, as the kernel names it; empty if unknown."""
    return _mount(directory)[0]


def _mount(directory: Path) -> tuple[str, str]:
    try:
        device = os.stat(directory).st_dev  # noqa: PTH116 (follows links, as writing does)
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return "", ""
    number = f"{os.major(device)}:{os.minor(device)}"
    # "36 35 98:0 /root /mount options - ext4 /dev/... rw,options": the file system's type and options follow the dash.
    found = [line.partition(" - ")[2].split() for line in lines if line.split()[2] == number]
    return (found[-1][0], found[-1][-1]) if found else ("", "")


def available_memory() -> int:
    """Estimate the bytes of memory that this process can take without swapping, within its control group's limit."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    available = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), 0)
    return min(available, memory_limit())


def memory_limit(*, cgroups: str | None = None, root: Path = _CGROUP) -> int:
    """Compute the bytes that this process's control group, and those above it, may still take (version 2 of cgroups).

    Without a limit it is a huge number. ``cgroups`` is the text of ``/proc/self/cgroup``; ``None``: read it.
    """
    if cgroups is None:
        try:
            cgroups = Path("/proc/self/cgroup").read_text()
        except OSError:
            return _UNLIMITED
    own = next((line.removeprefix("0::/") for line in cgroups.splitlines() if line.startswith("0::/")), None)
    if own is None:
        return _UNLIMITED
    remaining = _UNLIMITED
    # In a container the path may be the host's, which is not mounted here; then the root is the container's group.
    for folder in (root / own, *(root / parent for parent in Path(own).parents)):
        limit, usage = _number(folder / "memory.max"), _number(folder / "memory.current")
        if limit is not None and usage is not None:
            remaining = min(remaining, max(0, limit - usage + _reclaimable(folder / "memory.stat")))
    return remaining


def _reclaimable(path: Path) -> int:
    """Compute how much of a group's usage the kernel can reclaim: pages of files, but not of a tmpfs."""
    try:
        pairs = dict(line.split()[:2] for line in path.read_text().splitlines() if len(line.split()) >= 2)
        file, shmem = int(pairs.get("file", 0)), int(pairs.get("shmem", 0))
    except (OSError, ValueError):
        return 0
    return max(0, file - shmem)


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # "max" means no limit
        return None
