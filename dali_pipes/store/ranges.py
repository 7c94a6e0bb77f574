"""Read components of shards by their places, without the rest of the shards: `Store.read_ranges`.

Whatever a server answers, only bytes with the checksum of the shard index are returned. A range that one way does not
bring, or brings wrongly, is read in the next way.
"""

from collections.abc import Callable, Sequence

from dali_pipes.errors import DataError, printable
from dali_pipes.formats.shard_index import ComponentRange
from dali_pipes.store.patience import in_threads

# Requests in flight: a batch of 64 samples, each in a shard of its own, waits for one round trip.
NUM_THREADS = 64
# Ranges with gaps up to this size, such as the members of one sample, are read by one request.
_MAX_GAP_BYTES = 32 << 10
_MAX_JOINED_BYTES = 4 << 20


Way = Callable[[Sequence[ComponentRange]], Sequence[bytes]]
"""Reads ranges; returns empty bytes for a range that it cannot read."""


def read_in_ways(ranges: Sequence[ComponentRange], ways: Sequence[Way], *, locate: Callable[[str], str]) -> list[bytes]:
    """Read ranges in the first way. Ranges that it does not return rightly are read in the next way.

    Raises:
        DataError: If also the last way returns other bytes than those that were indexed.
    """
    found = [b""] * len(ranges)
    missing = [at for at, one in enumerate(ranges) if not one.is_of(b"")]  # GetBatch refuses a range of no bytes
    for way in ways:
        if not missing:
            break
        for at, data in zip(missing, way([ranges[at] for at in missing]), strict=True):
            found[at] = data
        missing = [at for at in missing if not ranges[at].is_of(found[at])]
    if not missing:
        return found
    first = ranges[missing[0]]
    raise DataError(
        f"shard '{locate(first.shard)}', key '{printable(first.key)}': component '{first.component}' has other bytes "
        "than when it was indexed: the shard was replaced or damaged since; put it back, or index the shards anew: "
        "dali-pipes prep index URL --anew"
    )


def read_joined(read_range: Callable[..., bytes], ranges: Sequence[ComponentRange]) -> list[bytes]:
    """Read ranges by `Store.read_range`, in several threads; one request reads ranges that are near in a shard."""
    pieces: list[list[int]] = []
    stop, first, shard = 0, 0, None
    for at in sorted(range(len(ranges)), key=lambda at: ranges[at][:2]):
        one = ranges[at]
        is_near = one.shard == shard and one.start - stop <= _MAX_GAP_BYTES
        if not (is_near and one.start + one.size - first <= _MAX_JOINED_BYTES):
            pieces.append([])
            stop, first, shard = 0, one.start, one.shard
        pieces[-1].append(at)
        stop = max(stop, one.start + one.size)
    found = [b""] * len(ranges)

    def read(piece: list[int]) -> None:
        parts = [ranges[at] for at in piece]
        start, stop = parts[0].start, max(one.start + one.size for one in parts)
        data = read_range(parts[0].shard, start=start, size=stop - start)
        for at, one in zip(piece, parts, strict=True):
            found[at] = data[one.start - start : one.start - start + one.size]

    in_threads(read, pieces, num_threads=NUM_THREADS)
    return found
