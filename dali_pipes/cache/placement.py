"""Choose the directory of a cache file and how many bytes it may take, by the user's options and the free space.

The choice is shared memory if the whole data set fits there, else a disk if it fits there, else the first of both that
can hold the windows that must be resident at a time.
"""

import contextlib
import logging
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from dali_pipes.cache.cache import NodeCache
from dali_pipes.cache.files import cache_root
from dali_pipes.cache.free_space import SHARED_MEMORY, FreeSpace, check_directory
from dali_pipes.errors import CacheError

_log = logging.getLogger(__name__)

# Size of /dev/shm by default in container runtimes.
CONTAINER_SHM_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The place of a cache file."""

    space: FreeSpace
    cache_bytes: int
    """The largest number of bytes that all cache files there may take together."""
    keep: bool
    """Whether it stays for the next job: only if the user named the directory."""


class _Offer(NamedTuple):
    space: FreeSpace
    limit: int
    """The largest number of bytes that a cache there may take."""
    found: str
    """The reason for this limit, for errors."""


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
        offer = _offer(cache_dir, cache_bytes)
        if reserved > offer.limit:
            raise CacheError(f"{_needed(reserved, total, is_windowed, [offer])}; {offer.found}")
        return Placement(space=offer.space, cache_bytes=offer.limit, keep=True)
    offers, refused = [], []
    for directory in default_directories():
        try:
            check_directory(directory)
            offers.append(_offer(directory, cache_bytes))
        except CacheError as exc:  # the next directory may be suitable
            refused.append(str(exc))
    # If another rank of the job has its cache file in a directory, that one comes first, even if it is nearly full.
    known = [offer for offer in offers if (cache_root(offer.space.directory) / f"{key}.table").exists()]
    fits_whole = [offer for offer in offers if total <= offer.limit]
    chosen = next((offer for offer in (*known, *fits_whole, *offers) if reserved <= offer.limit), None)
    if chosen is None:
        found = [offer.found for offer in offers]
        raise CacheError("; ".join([_needed(reserved, total, is_windowed, offers), *found, *refused]))
    for reason in refused:
        _log.info("%s", reason)
    return Placement(space=chosen.space, cache_bytes=chosen.limit, keep=False)


def _offer(directory: Path, cache_bytes: int | None) -> _Offer:
    space = FreeSpace.of(directory)
    taken, agreed = 0, None
    if cache_root(directory).exists():
        with contextlib.closing(NodeCache(directory)) as cache:
            taken, agreed = cache.budget()
    if cache_bytes is None and agreed is not None:
        # Ranks that start one after the other find less and less free space, and must not choose differently.
        return _Offer(space, agreed, f"the loaders at work in '{directory}' share {agreed} bytes")
    if cache_bytes is None:
        share = ", of which a cache takes half by default" if space.is_memory else ""
        return _Offer(space, space.for_extents(space.default_bytes(taken=taken)), _free(space, share))
    available = max(space.free + taken, agreed or 0)
    limit = space.for_extents(min(available, cache_bytes))
    if cache_bytes > available:
        _log.info("the cache's max_bytes=%d: '%s' has space for %d only", cache_bytes, directory, available)
        return _Offer(space, limit, _free(space))
    own = f", {limit} of it for shards" if limit != cache_bytes else ""
    return _Offer(space, limit, f"max_bytes={cache_bytes} is allowed in '{directory}'{own}")


def _free(space: FreeSpace, share: str = "") -> str:
    text = f"'{space.directory}' has {space.free} bytes free{share}"
    if space.is_memory and space.total <= CONTAINER_SHM_BYTES:
        text += (
            f" ({space.total} in all, a container's default: start it with --shm-size or --ipc=host, or pass "
            "cache=dali_pipes.Cache(directory=...) on a disk)"
        )
    return text


def _needed(reserved: int, total: int, is_windowed: bool, offers: Sequence[_Offer]) -> str:
    needed = reserved if is_windowed else total
    # A disk's file system takes blocks of its own.
    least = max((offer.space.cache_bytes_for(needed) for offer in offers), default=needed)
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
