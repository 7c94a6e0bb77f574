"""Choose where an image lies and how much it may take, from what the user said and what there is.

Shared memory where the whole data set fits there, else a disk where it does, else whichever holds at least the windows
that must be resident at a time.
"""

import logging
from dataclasses import dataclass
from pathlib import Path

from dali_pipes.cache import Cache, cache_root
from dali_pipes.errors import CacheError
from dali_pipes.room import SHARED_MEMORY, Room, check_directory, temporary_directory

__all__ = ["Placement", "default_directories", "place"]

_log = logging.getLogger(__name__)

# What container runtimes give /dev/shm unless they are told otherwise.
CONTAINER_SHM_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where an image lies."""

    room: Room
    cache_bytes: int
    """What all images there may take."""
    keep: bool
    """Whether it stays for the next job: only where the user named the directory."""


def default_directories() -> list[Path]:
    """Where images lie if nobody says where: shared memory, then the directory for temporary files."""
    found = dict.fromkeys([SHARED_MEMORY, temporary_directory()])
    return [directory for directory in found if directory.is_dir()]


def place(
    cache_dir: Path | None, cache_bytes: int | None, *, key: str, reserved: int, total: int, is_windowed: bool
) -> Placement:
    """Where the image ``key`` is to lie.

    Args:
        cache_dir: As the user said.
        cache_bytes: As the user said: what all images there may take. ``None``: half of what is free in memory, nine
            tenths of what is free on a disk. Never more than there is.
        key: See `dali_pipes.image.image_key`.
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
        limit, room = _limit(cache_dir, cache_bytes)
        if reserved > limit:
            raise CacheError(f"{_needed(reserved, total, is_windowed)}; {_found(room, limit, cache_bytes)}")
        return Placement(room=room, cache_bytes=limit, keep=True)
    candidates = [_limit(directory, cache_bytes) for directory in default_directories()]
    # Where another rank of the job has its image: what is free now says less than what it has chosen.
    known = [found for found in candidates if (cache_root(found[1].directory) / f"{key}.table").exists()]
    fits_whole = [found for found in candidates if total <= found[0]]
    fits = [found for found in (*known, *fits_whole, *candidates) if reserved <= found[0]]
    for limit, room in fits:
        try:
            check_directory(room.directory)
        except CacheError as exc:
            _log.info("%s", exc)
            continue
        return Placement(room=room, cache_bytes=limit, keep=False)
    raise CacheError(
        f"{_needed(reserved, total, is_windowed)}; " + "; ".join(_found(room, limit, cache_bytes) for limit, room in candidates)
    )


def _limit(directory: Path, cache_bytes: int | None) -> tuple[int, Room]:
    room = Room.of(directory)
    taken = 0
    if cache_root(directory).is_dir():
        cache = Cache(directory)
        try:
            taken = cache.resident_bytes
        finally:
            cache.close()
    available = room.free + taken
    if cache_bytes is not None and cache_bytes > available:
        _log.info("cache_bytes=%d: '%s' has room for %d only", cache_bytes, directory, available)
    return min(available, cache_bytes) if cache_bytes is not None else room.default_bytes(taken=taken), room


def _needed(reserved: int, total: int, is_windowed: bool) -> str:
    if is_windowed:
        return (
            f"two windows, which must be resident at a time, take {reserved} bytes; pass a smaller shuffle_window=, or "
            "a larger cache (cache_dir=, cache_bytes=)"
        )
    return (
        f"the shards take {total} bytes, and shuffle_window='all' wants all of them resident; pass shuffle_window=BYTES, "
        "at most half of the cache, or a larger cache (cache_dir=, cache_bytes=)"
    )


def _found(room: Room, limit: int, cache_bytes: int | None) -> str:
    if cache_bytes is not None and limit == cache_bytes:
        return f"cache_bytes={cache_bytes} is allowed in '{room.directory}'"
    share = ", of which a cache takes half by itself" if room.is_memory and cache_bytes is None else ""
    text = f"'{room.directory}' has {room.free} bytes free{share}"
    if room.is_memory and room.total <= CONTAINER_SHM_BYTES:
        text += (
            f" ({room.total} in all, a container's default: start it with --shm-size or --ipc=host, or pass cache_dir= "
            "on a disk)"
        )
    return text
