"""Choose where an image lies and how much it may take, from what the user said and what there is.

Shared memory where the whole data set fits there, else a disk where it does, else whichever holds at least the windows
that must be resident at a time.
"""

import contextlib
import logging
from dataclasses import dataclass
from pathlib import Path

from dali_pipes.cache.cache import NodeCache
from dali_pipes.cache.files import cache_root
from dali_pipes.cache.free_space import SHARED_MEMORY, FreeSpace, check_directory, temporary_directory
from dali_pipes.errors import CacheError

__all__ = ["Placement", "default_directories", "extent_alignment", "place"]

_log = logging.getLogger(__name__)

# What container runtimes give /dev/shm unless they are told otherwise.
CONTAINER_SHM_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where an image lies."""

    space: FreeSpace
    cache_bytes: int
    """What all images there may take."""
    keep: bool
    """Whether it stays for the next job: only where the user named the directory."""


@dataclass(frozen=True, kw_only=True)
class _Offer:
    space: FreeSpace
    limit: int
    """What a cache there may take."""
    is_agreed: bool = False
    """Whether that is what loaders that are at work there share."""
    is_asked: bool = False
    """Whether that is what the user said, and there is so much."""


def default_directories() -> list[Path]:
    """Where images lie if nobody says where: shared memory, then the directory for temporary files."""
    found = dict.fromkeys([SHARED_MEMORY, temporary_directory()])
    return [directory for directory in found if directory.is_dir()]


def extent_alignment(cache_dir: Path | None) -> int:
    """What extents are to be aligned to where the image may come to lie."""
    directories = [cache_dir] if cache_dir is not None else default_directories()
    return max(FreeSpace.of(directory).alignment for directory in directories)


def place(
    cache_dir: Path | None, cache_bytes: int | None, *, key: str, reserved: int, total: int, is_windowed: bool
) -> Placement:
    """Where the image ``key`` is to lie.

    Args:
        cache_dir: As the user said.
        cache_bytes: As the user said: what all images there may take. ``None``: what the loaders share that are at work
            there; without any, half of what is free in memory, nine tenths of what is free on a disk. Never more than
            there is.
        key: See `dali_pipes.cache.share.cache_file_key`.
        reserved: Bytes that must be resident at a time.
        total: Bytes of the whole image.
        is_windowed: Whether ``reserved`` is two windows, and smaller ones could be asked for.

    Raises:
        CacheError: If there is no room, or the directory cannot hold an image; says how many bytes are needed.
        ValueError: If ``cache_bytes`` is not positive.
    """
    if cache_bytes is not None and cache_bytes < 1:
        raise ValueError(f"cache_bytes must be positive, got {cache_bytes}")
    if cache_dir is not None:
        check_directory(cache_dir)
        offer = _offer(cache_dir, cache_bytes)
        if reserved > offer.limit:
            raise CacheError(f"{_needed(reserved, total, is_windowed)}; {_found(offer, cache_bytes)}")
        return Placement(space=offer.space, cache_bytes=offer.limit, keep=True)
    offers, refused = [], []
    for directory in default_directories():
        try:
            check_directory(directory)
            offers.append(_offer(directory, cache_bytes))
        except CacheError as exc:  # the next may do
            refused.append(str(exc))
    # Where another rank of the job has its image: what is free now says less than what it has chosen.
    known = [offer for offer in offers if (cache_root(offer.space.directory) / f"{key}.table").exists()]
    fits_whole = [offer for offer in offers if total <= offer.limit]
    chosen = next((offer for offer in (*known, *fits_whole, *offers) if reserved <= offer.limit), None)
    if chosen is None:
        found = [*(_found(offer, cache_bytes) for offer in offers), *refused]
        raise CacheError("; ".join([_needed(reserved, total, is_windowed), *found]))
    for reason in refused:
        _log.info("%s", reason)
    return Placement(space=chosen.space, cache_bytes=chosen.limit, keep=False)


def _offer(directory: Path, cache_bytes: int | None) -> _Offer:
    space = FreeSpace.of(directory)
    taken, agreed = 0, None
    if cache_root(directory).exists():
        with contextlib.closing(NodeCache(directory)) as cache:
            taken, agreed = cache.budget()
    if cache_bytes is None:
        # Ranks that start one after the other see less and less that is free, and must not differ.
        limit = space.default_bytes(taken=taken) if agreed is None else agreed
        return _Offer(space=space, limit=limit if agreed else space.for_extents(limit), is_agreed=agreed is not None)
    available = max(space.free + taken, agreed or 0)
    if cache_bytes > available:
        _log.info("cache_bytes=%d: '%s' has room for %d only", cache_bytes, directory, available)
    limit = space.for_extents(min(available, cache_bytes))
    return _Offer(space=space, limit=limit, is_asked=cache_bytes <= available)


def _needed(reserved: int, total: int, is_windowed: bool) -> str:
    if is_windowed:
        return (
            f"two windows, which must be resident at a time, take {reserved} bytes; pass a smaller shuffle_window=, or "
            "a larger cache (cache_dir=, cache_bytes=)"
        )
    return (
        f"the shards take {total} bytes, and shuffle_window='all' wants all of them resident; pass "
        "shuffle_window=BYTES, at most half of the cache, or a larger cache (cache_dir=, cache_bytes=)"
    )


def _found(offer: _Offer, cache_bytes: int | None) -> str:
    space = offer.space
    if offer.is_asked:
        own = f", {offer.limit} of it for shards" if offer.limit != cache_bytes else ""
        return f"cache_bytes={cache_bytes} is allowed in '{space.directory}'{own}"
    if offer.is_agreed:
        return f"loaders that are at work in '{space.directory}' share {offer.limit} bytes"
    share = ", of which a cache takes half by itself" if space.is_memory and cache_bytes is None else ""
    text = f"'{space.directory}' has {space.free} bytes free{share}"
    if space.is_memory and space.total <= CONTAINER_SHM_BYTES:
        text += (
            f" ({space.total} in all, a container's default: start it with --shm-size or --ipc=host, or pass cache_dir= "
            "on a disk)"
        )
    return text
