"""Cut records into shards whose sizes are known to the byte before one is written."""

from collections.abc import Sequence
from typing import NamedTuple

from dali_pipes.formats.tar_reader import BLOCK
from prep.tar.writer import header_bytes

# A tar ends with two empty blocks and is filled up to a multiple of this.
RECORD = 20 * BLOCK
MAX_FILES = 10**6
"""Numbers in names have six digits."""


class ShardPlan(NamedTuple):
    """The records ``[start, stop)`` of one shard, and its size."""

    start: int
    stop: int
    num_bytes: int


def plan_shards(sizes: Sequence[int], *, max_count: int, max_bytes: int) -> list[ShardPlan]:
    """Cut records into shards, in order, each as full as both limits allow.

    Args:
        sizes: The bytes that each record takes in a tar; see `tar_bytes`.
        max_count: The most records of a shard.
        max_bytes: The most bytes of a finished tar; a single record may be larger.

    >>> plan_shards([2048, 2048, 2048], max_count=2, max_bytes=1 << 20)
    [ShardPlan(start=0, stop=2, num_bytes=10240), ShardPlan(start=2, stop=3, num_bytes=10240)]
    """
    shards: list[ShardPlan] = []
    start, filled = 0, 0
    for number, size in enumerate(sizes):
        if number > start and (number - start >= max_count or _finished_bytes(filled + size) > max_bytes):
            shards.append(ShardPlan(start, number, _finished_bytes(filled)))
            start, filled = number, 0
        filled += size
    if sizes:
        shards.append(ShardPlan(start, len(sizes), _finished_bytes(filled)))
    if len(shards) > MAX_FILES:
        raise ValueError(f"{len(shards)} shards, names count to {MAX_FILES}; use larger --max-bytes and --max-count")
    return shards


def tar_bytes(name: str, size: int) -> int:
    """Bytes of a member in a tar: header blocks, more than one for a long or non-ASCII name, and data blocks.

    >>> tar_bytes("a.jpg", 1)
    1024
    """
    return header_bytes(name, size) + -(-size // BLOCK) * BLOCK


def _finished_bytes(filled: int) -> int:
    return -(-(filled + 2 * BLOCK) // RECORD) * RECORD
