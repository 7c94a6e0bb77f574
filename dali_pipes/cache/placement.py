"""Choose the directory of a cache file and how many bytes it may take, by the user's options and the free space.

The choice is shared memory if the whole data set fits there, else a disk if it fits there, else the first of both that
can hold the windows that must be resident at a time.

A tmpfs such as /dev/shm is memory: its files count against the machine's memory and the control group's limit.
"""

import contextlib
import logging
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from dali_pipes.cache.cache import NodeCache
from dali_pipes.cache.extents import EXTENT_ALIGNMENT, can_punch
from dali_pipes.cache.files import cache_root
from dali_pipes.errors import CacheError

_log = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 (the cache's own directory there is its user's, mode 0700)

# Fractions of the free space that a cache takes by default: the program that reads from it keeps half of the memory,
# and others keep a tenth of a disk.
MEMORY_SHARE = 0.5
DISK_SHARE = 0.9

# File systems that several machines share. A cache is for one node: its locks, and freeing blocks, may not work there.
_NETWORK = (
    *("nfs", "nfs4", "cifs", "smb3", "9p", "afs", "ceph", "glusterfs", "lustre", "gpfs", "beegfs", "orangefs"),
    "virtiofs",
)
_HUGE_PAGE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
_CGROUP = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60
# Size of /dev/shm by default in container runtimes.
CONTAINER_SHM_BYTES = 64 << 20


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
    except OSError:
        return "", ""
    lines = _text(Path("/proc/self/mountinfo")).splitlines()
    number = f"{os.major(device)}:{os.minor(device)}"
    # "36 35 98:0 /root /mount options - ext4 /dev/... rw,options": the file system's type and options follow the dash.
    found = [line.partition(" - ")[2].split() for line in lines if line.split()[2] == number]
    return (found[-1][0], found[-1][-1]) if found else ("", "")


def available_memory() -> int:
    """Estimate the bytes of memory that this process can take without swapping, within its control group's limit.

    0: the system does not say.
    """
    lines = _text(Path("/proc/meminfo")).splitlines()
    available = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), 0)
    return min(available, memory_limit())


def memory_limit(*, cgroups: str | None = None, root: Path = _CGROUP) -> int:
    """Compute the bytes that this process's control group, and those above it, may still take (version 2 of cgroups).

    Without a limit it is a huge number. ``cgroups`` is the text of ``/proc/self/cgroup``; ``None``: read it.
    """
    if cgroups is None:
        cgroups = _text(Path("/proc/self/cgroup"))
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
    pairs = dict(line.split()[:2] for line in _text(path).splitlines())
    return max(0, int(pairs.get("file", 0)) - int(pairs.get("shmem", 0)))


def _text(path: Path) -> str:
    """A file of the kernel; empty if it is not there."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None  # "max" means no limit


# The choice


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The place of a cache file."""

    space: FreeSpace
    cache_bytes: int
    """The largest number of bytes that all cache files there may take together."""
    keep: bool
    """Whether it stays for the next job: only if the user named the directory."""
    limited_by: str = ""
    """The reason for ``cache_bytes``, for errors."""


def default_directories() -> list[Path]:
    """List the directories for cache files if the user names none: shared memory, then the one for temporary files."""
    found = dict.fromkeys([SHARED_MEMORY, Path(tempfile.gettempdir())])
    return [directory for directory in found if directory.is_dir()]


def extent_alignment(cache_dir: Path | None) -> int:
    """Find an alignment of extents that suits every directory in which the cache file may be placed."""
    directories = [cache_dir] if cache_dir is not None else default_directories()
    return max(FreeSpace.of(directory).alignment for directory in directories)


def place(
    cache_dir: Path | None, cache_bytes: int | None, *, key: str, reserved: int, total: int, is_windowed: bool
) -> Placement:
    """Choose the place of a cache file.

    Args:
        cache_dir: The user's choice, if any.
        cache_bytes: The user's choice of the most that all cache files there may take. ``None``: the limit of the
            loaders at work there, or, without loaders, half of the free memory, or nine tenths of a disk's free space.
            Never more than there is.
        key: See `dali_pipes.cache.share.cache_file_key`.
        reserved: Bytes that must be resident at a time.
        total: Bytes of the whole cache file.
        is_windowed: Whether ``reserved`` is two windows, which could be smaller.

    Raises:
        CacheError: If there is no space (the text says how many bytes are needed), or if the directory cannot hold a
            cache file.
        ValueError: If ``cache_bytes`` is not positive.
    """
    if cache_bytes is not None and cache_bytes < 1:
        raise ValueError(f"the cache's max_bytes must be positive, got {cache_bytes}")
    if cache_dir is not None:
        check_directory(cache_dir)
        offer = _offer(cache_dir, cache_bytes, keep=True)
        if reserved > offer.cache_bytes:
            raise CacheError(f"{_needed(reserved, total, is_windowed)}; {offer.limited_by}")
        return offer
    offers, refused = [], []
    for directory in default_directories():
        try:
            check_directory(directory)
            offers.append(_offer(directory, cache_bytes, keep=False))
        except CacheError as exc:  # the next directory may be suitable
            refused.append(str(exc))
    # If another rank of the job has its cache file in a directory, that one comes first, even if it is nearly full.
    known = [offer for offer in offers if (cache_root(offer.space.directory) / f"{key}.table").exists()]
    fits_whole = [offer for offer in offers if total <= offer.cache_bytes]
    chosen = next((offer for offer in (*known, *fits_whole, *offers) if reserved <= offer.cache_bytes), None)
    if chosen is None:
        found = [offer.limited_by for offer in offers]
        raise CacheError("; ".join([_needed(reserved, total, is_windowed), *found, *refused]))
    for reason in refused:
        _log.info("%s", reason)
    return chosen


def _offer(directory: Path, cache_bytes: int | None, *, keep: bool) -> Placement:
    space = FreeSpace.of(directory)
    taken, agreed = 0, None
    if cache_root(directory).exists():
        with contextlib.closing(NodeCache(directory)) as cache:
            taken, agreed = cache.budget()
    available = max(space.free + taken, agreed or 0)
    if cache_bytes is None and agreed is not None:
        # Ranks that start one after the other find less and less free space, and must not choose differently.
        limit, limited_by = agreed, f"the loaders at work in '{directory}' share {agreed} bytes"
    elif cache_bytes is None:
        share = ", of which a cache takes half by default" if space.is_memory else ""
        limit, limited_by = space.default_bytes(taken=taken), _free(space, share)
    elif cache_bytes > available:
        _log.info("the cache's max_bytes=%d: '%s' has space for %d only", cache_bytes, directory, available)
        limit, limited_by = available, _free(space)
    else:
        limit, limited_by = cache_bytes, f"max_bytes={cache_bytes} is allowed in '{directory}'"
    return Placement(space=space, cache_bytes=limit, keep=keep, limited_by=limited_by)


def _free(space: FreeSpace, share: str = "") -> str:
    text = f"'{space.directory}' has {space.free} bytes free{share}"
    if space.is_memory and space.total <= CONTAINER_SHM_BYTES:
        text += (
            f" ({space.total} in all, a container's default: start it with --shm-size or --ipc=host, or pass "
            "cache=dali_pipes.Cache(directory=...) on a disk)"
        )
    return text


def _needed(reserved: int, total: int, is_windowed: bool) -> str:
    least = reserved if is_windowed else total
    larger = f"a larger cache=dali_pipes.Cache(directory=..., max_bytes={least})"
    if is_windowed:
        return (
            f"two windows, and all shards that a step may span, must be resident at a time; they take {reserved} "
            f"bytes; pass a smaller shuffle=dali_pipes.Shuffle(window_bytes=...), or {larger}; a window has at least "
            "one shard, and small shards with few samples need a smaller batch_size"
        )
    return (
        f"the shards take {total} bytes, and window_bytes='all' needs all of them resident; pass "
        f"shuffle=dali_pipes.Shuffle(window_bytes=...), two of which fit the cache, or {larger}"
    )
