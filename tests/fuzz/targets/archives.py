"""Shards: what an index says about a broken tar, Python's own reader of tars says, too."""

import contextlib
import io
import tarfile
from collections.abc import Sequence
from typing import Literal

from dali_pipes.data_set.indexing import index_shard
from dali_pipes.errors import DataError
from dali_pipes.formats.shard_index import ShardIndex
from tests.fuzz.seeds.archives import shards
from tests.fuzz.target import BrokenPromiseError, Target

SHARD = "s-000000.tar"


class Archives(Target):
    """`index_shard` refuses a tar, or its index names members that are there."""

    name = "archives"

    def seeds(self) -> Sequence[bytes]:
        return shards()

    def check(self, data: bytes) -> Literal["taken", "refused"]:
        try:
            index = index_shard(io.BytesIO(data), shard=SHARD, size=len(data))
        except DataError:
            return "refused"
        _check_places(index, data)
        if ShardIndex.from_bytes(index.to_bytes(), where=SHARD).keys != index.keys:
            raise BrokenPromiseError("the index has other keys when it is read again")
        return "taken"


def _check_places(index: ShardIndex, data: bytes) -> None:
    found = set(_members(data))
    last = max((offset for offset, _ in found), default=0)
    for component, offsets in index.offsets.items():
        for offset, size in zip(offsets.tolist(), index.sizes[component].tolist(), strict=True):
            if offset < 0:
                continue
            if offset % 512 or offset + size > len(data):
                raise BrokenPromiseError(f"{component} at {offset} with {size} bytes lies outside of {len(data)} bytes")
            # `tarfile` ends without an error at a member whose date or owner is not a number.
            if offset <= last and (offset, size) not in found:
                raise BrokenPromiseError(f"{component} at {offset} with {size} bytes is no member of the tar")


def _members(data: bytes) -> list[tuple[int, int]]:
    """Places of the members, up to the first header that `tarfile` cannot read."""
    places: list[tuple[int, int]] = []
    with contextlib.suppress(tarfile.ReadError), tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
        # `tarfile` wants a member after a global PAX header, too.
        places.extend((member.offset_data, member.size) for member in archive)
    return places
