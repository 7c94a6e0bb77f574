"""One of N processes that share a job without speaking to each other: ``--part I/N``.

Each process makes the same plan and does its own part of it. Parts are disjoint and complete, so the processes need no
common clock, lock or list, and a part may be done again.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self, TypeVar

from dali_pipes.store.shard_set import ShardSet

Item = TypeVar("Item")

_TEXT = re.compile("([0-9]{1,9})/([0-9]{1,9})")


@dataclass(frozen=True, kw_only=True)
class JobPart:
    """Part ``number`` of ``total``, counted from 1."""

    number: int = 1
    total: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.number <= self.total:
            raise ValueError(f"a part must be I/N with 1 <= I <= N, got '{self}'; parts are counted from 1")

    def __str__(self) -> str:
        return f"{self.number}/{self.total}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """The part that ``"3/16"`` names; raises `ValueError` for other texts."""
        match = _TEXT.fullmatch(text)
        if match is None:
            raise ValueError(f"a part must be I/N, such as 3/16, got '{text}'")
        return cls(number=int(match[1]), total=int(match[2]))

    @property
    def is_all(self) -> bool:
        return self.total == 1

    def of(self, items: Sequence[Item]) -> Sequence[Item]:
        """The items of this part: every N-th, so that neighbours, which are often alike in size, are spread.

        >>> JobPart(number=2, total=3).of("abcdefgh")
        'beh'
        """
        return items[self.number - 1 :: self.total]

    def of_shards(self, shards: ShardSet) -> ShardSet:
        """The shards of this part, as some of the same data set; none, if there are fewer shards than parts."""
        if self.is_all:
            return shards
        return replace(shards, names=tuple(self.of(shards.names)), manifest_prefix=shards.prefix)


ALL = JobPart()
