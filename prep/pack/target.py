"""Plan the numbered shards of a pack, and write them to a store. Equal shards are kept; other shards stop the pack.

With ``overwrite`` the other shards are replaced. Sizes and contents of all shards are known before the first is
written, so running an interrupted pack again finishes it.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from dali_pipes.errors import StoreError, shown
from dali_pipes.formats.names import version_start
from dali_pipes.formats.tar_reader import BLOCK
from dali_pipes.progress import bar
from dali_pipes.store.base import Store
from prep.pack.tasks import ShardTask, Stored, is_stored
from prep.workers import Report, Workers

if TYPE_CHECKING:
    from dali_pipes.store.entries import ObjectEntry


# A tar ends with two empty blocks and is filled up to a multiple of this.
_RECORD = 20 * BLOCK
MAX_FILES = 10**6
"""Numbers in names have six digits."""
MIN_SHARED_BYTES = 64 << 20
"""Fewer bytes than this are written or compared in this process: starting others takes longer."""


class PackedShard(NamedTuple):
    """A shard that a job will write."""

    name: str
    num_bytes: int
    numbers: Sequence[int]
    """The numbers of its records."""

    @property
    def num_samples(self) -> int:
        return len(self.numbers)


def check_limits(*, prefix: str, **limits: int | None) -> None:
    """Raise `ValueError` if the prefix, or one of the named limits, is not valid."""
    if not prefix or prefix.endswith("/") or prefix[-1].isdigit():
        raise ValueError(
            f"prefix must end in a name's start that is not a digit, such as 'train/samples-', got '{prefix}'"
        )
    for name, limit in limits.items():
        if limit is not None and limit < 1:
            raise ValueError(f"{name} must be positive, got {limit}")


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


def _finished_bytes(filled: int) -> int:
    return -(-(filled + 2 * BLOCK) // _RECORD) * _RECORD


def run_tasks(
    workers: Workers,
    function: Callable[[ShardTask, Report], bool],
    tasks: Iterable[ShardTask],
    shards: Sequence[PackedShard],
    *,
    what: str,
    show_progress: bool,
) -> list[bool]:
    """Run `write_file` or `is_stored` for the task of each shard, several at a time, and return the results."""
    if not shards:
        return []
    is_small = len(shards) == 1 or sum(shard.num_bytes for shard in shards) < MIN_SHARED_BYTES
    total = sum(shard.num_samples for shard in shards)
    with bar(what=what, total=total, unit="samples", shown=show_progress) as drawn:
        done = workers.map(
            function,
            tasks,
            inline=lambda _: is_small,
            on_progress=drawn.update,
            name=lambda task: f"'{task.name}'",
        )
        return list(done)


class Target:
    """A store, which may not exist yet, and the names under a prefix that a pack writes there.

    Args:
        store: The store.
        prefix: The beginning of all names.
        overwrite: Replace shards of other content, and delete those beyond the last one.
    """

    def __init__(self, store: Store, prefix: str, *, overwrite: bool) -> None:
        self.store, self.prefix = store, prefix
        self.existing: dict[str, ObjectEntry] = {}
        """The objects under the prefix, by name, before the pack writes."""
        if store.exists():
            self.existing = {entry.name: entry for entry in store.list_all(prefix)}
        self.stale: list[str] = []
        """The shards to be deleted at the end; see `find_stale`."""
        self._overwrite = overwrite
        self._pattern = re.compile(rf"{re.escape(prefix)}[0-9]+\.tar")

    def find_stale(self, shards: Sequence[PackedShard]) -> None:
        """Find the numbered shards of another pack beyond the planned ones.

        Raises:
            StoreError: If there are such shards, or shards of another size under the planned names, and they must stay.
        """
        sizes = {shard.name: shard.num_bytes for shard in shards}
        self.stale = [name for name in self.existing if self._pattern.fullmatch(name) and name not in sizes]
        others = [*self.stale, *(name for name, size in sizes.items() if self.size(name) not in (None, size))]
        versions = [name for name in self.existing if name.startswith(version_start(self.prefix))]
        if others and versions:
            raise StoreError(
                f"'{self.store.locate(self.prefix)}' is a data set with versions, {shown(versions)}; "
                "pack under another prefix, or delete it first"
            )
        if others and not self._overwrite:
            raise StoreError(
                f"'{self.store.locate(self.prefix)}' holds shards of another pack: {shown(others)}; --overwrite "
                "replaces them, or pack under another prefix"
            )

    def missing(
        self, shards: Sequence[PackedShard], task: Callable[..., ShardTask], run: Callable[..., list[bool]]
    ) -> list[PackedShard]:
        """The planned shards that the store does not have, byte for byte.

        ``task(shard, stored=...)`` makes the task that compares a shard with the stored object of its name and size;
        ``run`` is `run_tasks` with its workers.

        Raises:
            StoreError: If the store has shards of the same size and other content, and they must stay.
        """
        suspects = [shard for shard in shards if self.size(shard.name) == shard.num_bytes]
        tasks = (task(shard, stored=self._stored(shard.name)) for shard in suspects)
        are_same = run(is_stored, tasks, suspects, what="compare")
        same = {shard.name for shard, is_same in zip(suspects, are_same, strict=True) if is_same}
        others = [shard.name for shard in suspects if shard.name not in same]
        if others and not self._overwrite:
            raise StoreError(
                f"'{self.store.locate(self.prefix)}' holds shards with other content: {shown(others)}; --overwrite "
                "replaces them, or pack under another prefix"
            )
        return [shard for shard in shards if shard.name not in same]

    @cached_property
    def access(self) -> Store:
        """The store in the form that workers take; the bucket must exist."""
        return self.store.access()

    def create(self) -> None:
        """Make the store, if it does not exist. (A bucket of a cloud cannot be made.)"""
        if not self.store.exists():
            self.store.create()

    def size(self, name: str) -> int | None:
        """Bytes of an object that was there before the pack; ``None`` if there was none."""
        entry = self.existing.get(name)
        return None if entry is None else entry.size

    def _stored(self, name: str) -> Stored:
        entry = self.existing[name]
        return self.access.known_checksum(entry) or self.access.file(name, size=entry.size)

    def holds(self, name: str, data: bytes) -> bool:
        """Whether a small object was there with these bytes."""
        return self.size(name) == len(data) and self.store.read(name) == data

    def delete(self, names: Iterable[str]) -> None:
        """Delete the named objects that were there before the pack."""
        for name in names:
            if self.existing.pop(name, None) is not None:
                self.store.delete(name)
