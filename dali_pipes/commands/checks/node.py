"""Check this node: directories for caches, memory, open files and the clock.

The checks write only test files in the cache directories, and delete them at once.
"""

import contextlib
import datetime
import resource
import tempfile
from pathlib import Path

from dali_pipes.cache.directory import LockFile
from dali_pipes.cache.extents import reserve
from dali_pipes.cache.free_space import (
    SHARED_MEMORY,
    FreeSpace,
    available_memory,
    check_directory,
    file_system,
    memory_limit,
)
from dali_pipes.cache.placement import CONTAINER_SHM_BYTES, default_directories
from dali_pipes.commands.checks.findings import Finding, Findings, fail, ok, warn
from dali_pipes.commands.options import format_bytes
from dali_pipes.errors import CacheError
from dali_pipes.reader.aio_reader import Aio

# A loader has a descriptor for each segment and each connection, and torch has its own; the embedded node has one for
# each connection. Most systems allow 1,024.
MIN_FILES, ENOUGH_FILES = 256, 1024
# The smallest useful cache: two windows of one shard each; `prep pack` makes shards of 256 MiB.
MIN_CACHE_BYTES = 512 << 20
MIN_MEMORY_BYTES = 1 << 30
# No build of this project is older: a clock that shows an earlier date was never set.
EARLIEST = datetime.datetime(2025, 1, 1, tzinfo=datetime.UTC)
UNLIMITED = 1 << 59


def check_caches(directory: Path | None) -> Findings:
    """Check the named directory, or the default ones, of which one must be suitable for a cache."""
    if directory is not None:
        yield _check_cache(directory, is_named=True)
        return
    directories = default_directories()
    findings = [_check_cache(default, is_named=False) for default in directories]
    yield from findings
    if not any(finding.status == "ok" for finding in findings):
        found = f"no default directory is suitable: {', '.join(map(str, directories)) or 'none exists'}"
        yield fail("cache", found, "name one on tmpfs, ext4, XFS or btrfs: cache=Cache(directory=...)")


def check_memory() -> Findings:
    """Check the memory that this process can have."""
    left, limit = available_memory(), memory_limit()
    bound = f"; the control group leaves {format_bytes(limit)}" if limit < UNLIMITED else "; no control group's limit"
    found = f"{format_bytes(left)} available{bound}"
    if left < MIN_MEMORY_BYTES:
        advice = f"caches in {SHARED_MEMORY} count as memory; raise the limit, or pass cache=Cache(directory=...)"
        yield warn("memory", found, f"under {format_bytes(MIN_MEMORY_BYTES)}: {advice}")
    else:
        yield ok("memory", found)


def check_open_files() -> Findings:
    """Check the limit of open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    shown = ["unlimited" if limit == resource.RLIM_INFINITY else str(limit) for limit in (soft, hard)]
    found = f"{shown[0]} open files, at most {shown[1]}"
    if soft != resource.RLIM_INFINITY and soft < ENOUGH_FILES:
        report = fail if soft < MIN_FILES else warn
        yield report("limits", found, f"raise it: ulimit -n {ENOUGH_FILES} or more")
    else:
        yield ok("limits", found)


def check_reader() -> Findings:
    """Check whether the system allows the calls by which loaders read batches from the cache file."""
    try:
        with contextlib.closing(Aio()):
            pass
    except OSError as exc:
        advice = (
            "loaders use DALI's reader, which takes more CPU time; allow io_setup, io_submit, io_getevents and "
            "io_destroy in the container's filter of system calls, or raise fs.aio-max-nr"
        )
        yield warn("reader", f"no asynchronous I/O of Linux ({exc.strerror})", advice)
    else:
        yield ok("reader", "asynchronous I/O of Linux works: a batch is read with one system call")


def check_clock() -> Findings:
    """Check whether the clock was ever set."""
    now = datetime.datetime.now(datetime.UTC)
    if now < EARLIEST:
        yield warn("clock", f"shows {now:%Y-%m-%d}, a past date", "set it: certificates and tokens are not valid yet")


def _check_cache(directory: Path, *, is_named: bool) -> Finding:
    name = f"cache {directory}"
    try:
        check_directory(directory)
        _try_files(directory)
    except CacheError as exc:
        report = fail if is_named else warn
        found, _, advice = str(exc).rpartition("; ")
        return report(name, found or str(exc), advice if found else "")
    space = FreeSpace.of(directory)
    default_bytes = space.default_bytes(taken=0)
    pages = f", huge pages of {format_bytes(space.alignment)}" if space.alignment > 4096 else ""
    kind = f"memory{pages}" if space.is_memory else file_system(directory) or "an unknown file system"
    found = (
        f"{kind}, {format_bytes(space.free)} free of {format_bytes(space.total)}, a cache takes "
        f"{format_bytes(default_bytes)} by default; reserving and freeing blocks, and locks, work"
    )
    if space.is_memory and space.total <= CONTAINER_SHM_BYTES:
        return warn(name, found, "a container's default: start it with --shm-size=8g or --ipc=host")
    if default_bytes < MIN_CACHE_BYTES:
        few = f"less than {format_bytes(MIN_CACHE_BYTES)} holds few shards"
        return warn(name, found, f"{few}: free some space, or name another directory: cache=Cache(directory=...)")
    return ok(name, found)


def _try_files(directory: Path) -> None:
    """Try the operations that a cache file and its locks need.

    Raises:
        CacheError: If the file system does not support one of them.
    """
    advice = "pass a directory on tmpfs, ext4, XFS or btrfs"
    try:
        with tempfile.TemporaryFile(dir=directory) as stream:
            reserve(stream.fileno(), 1 << 20, 1 << 16)
    except OSError as exc:
        raise CacheError(f"its file system cannot reserve blocks ({exc.strerror}); {advice}") from exc
    try:
        with tempfile.NamedTemporaryFile(dir=directory, prefix=".doctor-") as stream:
            path = Path(stream.name)
            with contextlib.closing(LockFile(path)) as mine, contextlib.closing(LockFile(path)) as others:
                if not mine.try_lock(0) or others.try_lock(0):
                    raise CacheError(f"open-file-description locks do not exclude each other there; {advice}")
    except OSError as exc:
        raise CacheError(f"its file system has no open-file-description locks ({exc.strerror}); {advice}") from exc
