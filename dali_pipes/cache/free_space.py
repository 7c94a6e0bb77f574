"""How much room there is for images: free space, memory, and what the container is allowed.

A tmpfs such as /dev/shm is memory: what lies there counts against the machine's and against the control group's limit.
"""

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from dali_pipes.cache.blocks import can_punch
from dali_pipes.cache.extents import EXTENT_ALIGNMENT
from dali_pipes.errors import CacheError

__all__ = ["SHARED_MEMORY", "FreeSpace", "available_memory", "check_directory", "memory_limit", "parse_cgroup"]

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 (the cache's own directory there is its user's, mode 0700)

# Shares of what is free that a cache takes by itself: half of memory is left to the program that is fed from it, and
# a tenth of a disk to everybody else.
MEMORY_SHARE = 0.5
DISK_SHARE = 0.9

# Below this an image has so few pieces that nothing is written down apart.
LEAST_ACCOUNTED = 64 << 10

# What several machines see at once. Locks and holes there are theirs to agree on, and a cache is for one node.
_NETWORK = (
    *("nfs", "nfs4", "cifs", "smb3", "9p", "afs", "ceph", "glusterfs", "lustre", "gpfs", "beegfs", "orangefs"),
    "virtiofs",
)
_HUGE_PAGE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
_CGROUP = Path("/sys/fs/cgroup")
# cgroup v1 says "no limit" with a number near 2**63.
_UNLIMITED = 1 << 60


@dataclass(frozen=True, kw_only=True)
class FreeSpace:
    """What a directory offers to a cache, in bytes."""

    directory: Path
    free: int
    """What could be written now, by file system, memory and control group."""
    total: int
    """The file system's size."""
    is_memory: bool
    alignment: int = EXTENT_ALIGNMENT
    """What blocks are given and taken in: pages, huge ones on a tmpfs that is mounted with ``huge=``."""

    @classmethod
    def of(cls, directory: Path) -> "FreeSpace":
        """The room in ``directory``; nothing where it is not there."""
        try:
            stat = os.statvfs(directory)
        except OSError:
            return cls(directory=directory, free=0, total=0, is_memory=False)
        free, total = stat.f_bavail * stat.f_frsize, stat.f_blocks * stat.f_frsize
        kind, options = _mount(directory)
        if kind not in ("tmpfs", "ramfs"):
            return cls(directory=directory, free=free, total=total, is_memory=False)
        free = min(free, available_memory())
        alignment = EXTENT_ALIGNMENT
        if {"huge=always", "huge=within_size"} & set(options.split(",")):
            alignment = max(alignment, _number(_HUGE_PAGE) or 0)
        return cls(directory=directory, free=free, total=total, is_memory=True, alignment=alignment)

    def for_extents(self, cache_bytes: int) -> int:
        """What of ``cache_bytes`` shards may take: a disk's file system writes down where a file's pieces lie.

        ext4 has a block of 4 KiB for some 340 pieces that the inode has no place for; a piece is at most 128 MiB, and
        here taken to be 64 KiB at least.
        """
        if self.is_memory or cache_bytes < LEAST_ACCOUNTED:
            return cache_bytes
        return cache_bytes - max(2 * 4096, cache_bytes // 4096)

    def default_bytes(self, *, taken: int) -> int:
        """A cache's size where none is given.

        Args:
            taken: Bytes that the cache has there already: they are its own to use.
        """
        return int((self.free + taken) * (MEMORY_SHARE if self.is_memory else DISK_SHARE))


def check_directory(directory: Path) -> None:
    """Refuse a directory that cannot hold an image.

    Raises:
        CacheError: If it is not there, is on a network file system, or files there cannot have holes punched.
    """
    if not directory.is_dir():
        raise CacheError(f"cache directory '{directory}' is not there; make it, or pass another")
    kind = file_system(directory)
    if kind in _NETWORK or kind.startswith("fuse."):
        raise CacheError(
            f"cache directory '{directory}' is on a network file system ({kind}), and a cache is one node's own; "
            "pass a local directory: /dev/shm, or one on an NVMe disk"
        )
    if not can_punch(directory):
        raise CacheError(
            f"cache directory '{directory}': its file system ({kind or 'unknown'}) cannot punch holes, which is how "
            "shards leave a cache; pass a directory on tmpfs, ext4, XFS or btrfs"
        )


def file_system(directory: Path) -> str:
    """The type of the file system that holds ``directory``, as the kernel names it; empty where it cannot be told."""
    return _mount(directory)[0]


def _mount(directory: Path) -> tuple[str, str]:
    """Type and options of the file system that holds ``directory``; empty where they cannot be told."""
    try:
        device = os.stat(directory).st_dev  # noqa: PTH116 (follows links, and so does what is written there)
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return "", ""
    number = f"{os.major(device)}:{os.minor(device)}"
    # "36 35 98:0 /root /mount options - ext4 /dev/... rw,options": the file system's own stand after the dash.
    found = [line.partition(" - ")[2].split() for line in lines if line.split()[2] == number]
    return (found[-1][0], found[-1][-1]) if found else ("", "")


def available_memory() -> int:
    """Bytes of memory that this process may still take, by the kernel and by its control group."""
    return min(_available_memory(), memory_limit())


def memory_limit(*, cgroups: str | None = None, root: Path = _CGROUP) -> int:
    """Bytes that this process's control group, and those above it, may still take; a huge number without a limit.

    Args:
        cgroups: The text of ``/proc/self/cgroup``; read where ``None``.
        root: Where the groups are mounted.
    """
    if cgroups is None:
        try:
            cgroups = Path("/proc/self/cgroup").read_text()
        except OSError:
            return _UNLIMITED
    left = _UNLIMITED
    for folder, limit_name, usage_name in parse_cgroup(cgroups, root=root):
        limit, usage = _number(folder / limit_name), _number(folder / usage_name)
        if limit is None or usage is None or limit >= _UNLIMITED:
            continue
        left = min(left, max(0, limit - usage + _reclaimable(folder / "memory.stat")))
    return left


def parse_cgroup(text: str, *, root: Path) -> list[tuple[Path, str, str]]:
    """The folders that may limit memory, from the process's own group up, and the names of limit and usage there.

    >>> [str(folder) for folder, _, _ in parse_cgroup("0::/a/b", root=Path("/cg"))]
    ['/cg/a/b', '/cg/a', '/cg']
    >>> parse_cgroup("5:memory:/a", root=Path("/cg"))[0]
    (PosixPath('/cg/memory/a'), 'memory.limit_in_bytes', 'memory.usage_in_bytes')
    """
    found = []
    for line in text.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            base, names = root, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            base, names = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        # Inside a container the path may be the host's, which is not mounted here; the root is then the container's.
        inner = Path(path.lstrip("/"))
        found += [(base / folder, *names) for folder in (inner, *inner.parents)]
    return found


def temporary_directory() -> Path:
    """Where temporary files go."""
    return Path(tempfile.gettempdir())


def _reclaimable(path: Path) -> int:
    """Bytes of a group's usage that are files' pages and would make way: all but those of a tmpfs."""
    try:
        pairs = dict(line.split()[:2] for line in path.read_text().splitlines() if len(line.split()) >= 2)
        file, shmem = int(pairs.get("file", pairs.get("cache", 0))), int(pairs.get("shmem", 0))
    except (OSError, ValueError):
        return 0
    return max(0, file - shmem)


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # "max" is no number: no limit
        return None


def _available_memory() -> int:
    """Bytes that can be had without swapping, as the kernel reckons."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), 0)
