"""Plan the numbered shards of a pack, and write them to a store, or compare them, each in a worker process.

Sizes and contents of all shards are known before the first is written, so running an interrupted pack again finishes
it. Equal shards are kept; other shards stop the pack, or with ``overwrite`` are replaced.
"""

import contextlib
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from dali_pipes.errors import StoreError, shown
from dali_pipes.formats.names import described, version_start
from dali_pipes.formats.tar_reader import BLOCK
from dali_pipes.progress import bar
from dali_pipes.store.base import Store
from dali_pipes.store.checksums import DEFAULT_CHECKSUM_TYPE, new_checksum
from dali_pipes.store.http.objects import ObjectFile
from dali_pipes.store.local import unnamed_file
from prep.tar.writer import CHUNK_BYTES, Entry, stream_tar
from prep.workers import Report, Workers

if TYPE_CHECKING:
    from dali_pipes.store.shard_names import ObjectEntry


# A tar ends with two empty blocks and is filled up to a multiple of this.
_RECORD = 20 * BLOCK
MAX_FILES = 10**6
"""Numbers in names have six digits."""
MIN_SHARED_BYTES = 64 << 20
"""Fewer bytes than this are written or compared in this process: starting others takes longer."""
MAX_SENT_BYTES = 8 << 20
"""A task takes no further record after so many bytes of components that are in memory, because they are sent to it."""

Stored = tuple[str, str] | Path | ObjectFile
"""A stored object to compare with: type and value of its checksum, or the file itself."""


# The plan


class PackedShard(NamedTuple):
    """A shard that a job will write."""

    name: str
    num_bytes: int
    numbers: Sequence[int]
    """The numbers of its records."""

    @property
    def num_samples(self) -> int:
        return len(self.numbers)


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

    def finished_bytes(filled: int) -> int:
        return -(-(filled + 2 * BLOCK) // _RECORD) * _RECORD

    shards: list[ShardPlan] = []
    start, filled = 0, 0
    for number, size in enumerate(sizes):
        if number > start and (number - start >= max_count or finished_bytes(filled + size) > max_bytes):
            shards.append(ShardPlan(start, number, finished_bytes(filled)))
            start, filled = number, 0
        filled += size
    if sizes:
        shards.append(ShardPlan(start, len(sizes), finished_bytes(filled)))
    if len(shards) > MAX_FILES:
        raise ValueError(f"{len(shards)} shards, names count to {MAX_FILES}; use larger --max-bytes and --max-count")
    return shards


# One file, in a worker


class StreamTarget(Protocol):
    """A directory or a bucket that a worker writes to."""

    def write_stream(self, name: str, chunks: Callable[[], Iterable[memoryview]], *, num_bytes: int) -> None:
        """Create or replace an object from a stream."""


@dataclass(frozen=True, kw_only=True)
class StreamTask(ABC):
    """A file to write or to compare; pickles, for a worker."""

    name: str
    num_bytes: int
    target: StreamTarget | None = None
    """The target that `write_file` writes to."""
    stored: Stored | None = None
    """The stored object that `is_stored` compares it with."""

    @abstractmethod
    def stream(self, on_sample: Callable[[], None]) -> Iterator[memoryview]:
        """The file's bytes, from the first on; ``on_sample`` is called after each sample."""


@dataclass(frozen=True, kw_only=True)
class ShardTask(StreamTask):
    """A shard with its samples."""

    entries: Sequence[Entry]

    def stream(self, on_sample: Callable[[], None]) -> Iterator[memoryview]:
        return stream_tar(self.entries, shard=self.name, num_bytes=self.num_bytes, on_sample=on_sample)


def write_file(task: StreamTask, report: Report) -> bool:
    """Stream a file to its target and return ``True``; each sample is reported, in a new attempt once more."""
    assert task.target is not None, "a task to write has a target"
    task.target.write_stream(task.name, lambda: task.stream(lambda: report(1)), num_bytes=task.num_bytes)
    return True


def is_stored(task: StreamTask, report: Report) -> bool:
    """Whether the stored object has the file's bytes. They are made for the comparison and not kept."""
    assert task.stored is not None, "a task to compare has a stored object"
    chunks = task.stream(lambda: report(1))
    if isinstance(task.stored, tuple):
        kind, checksum = task.stored
        return digest_of(chunks, kind) == checksum
    return digest_of(chunks) == digest_of(read_stored(task.stored))


def digest_of(chunks: Iterable[memoryview], kind: str = DEFAULT_CHECKSUM_TYPE) -> str:
    """The checksum of a stream's bytes."""
    state = new_checksum(kind)
    for chunk in chunks:
        state.update(chunk)
    return state.hexdigest()


def read_stored(file: Path | ObjectFile) -> Iterator[memoryview]:
    """The bytes of a stored object, front to back; each piece is valid until the next is asked for."""
    view = memoryview(bytearray(CHUNK_BYTES))
    if isinstance(file, ObjectFile):
        offset = 0
        while num := file.read_into(view, offset=offset):
            yield view[:num]
            offset += num
        file.close()
        return
    try:
        with file.open("rb", buffering=0) as stream:
            while num := stream.readinto(view):
                yield view[:num]
    except OSError as exc:
        raise StoreError(f"cannot read '{file}': {exc.strerror or exc}") from exc


@dataclass(frozen=True, kw_only=True)
class CopiedTarget:
    """A target, and a directory that gets the same bytes under the same names; pickles, for a worker.

    A file of the copy gets its name when the target has its bytes; what is not finished is deleted.
    """

    target: StreamTarget | None
    """``None`` if only the copy lacks the shard."""
    directory: Path

    def write_stream(self, name: str, chunks: Callable[[], Iterable[memoryview]], *, num_bytes: int) -> None:
        """Create or replace an object and then its copy; each is there whole or not at all."""
        path = self.directory / name
        with _writing(path), unnamed_file(path) as (stream, publish):

            def copied() -> Iterator[memoryview]:
                # The store may start another attempt, from the first byte on.
                stream.seek(0)
                stream.truncate()
                for chunk in chunks():
                    with _writing(path):  # the store would take the error for its own
                        stream.write(chunk)
                    yield chunk

            if self.target is not None:
                self.target.write_stream(name, copied, num_bytes=num_bytes)
            else:
                for _ in copied():
                    pass
            stream.flush()
            publish()


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        raise StoreError(f"cannot write the copy '{path}': {exc.strerror or exc}") from exc


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


# The store


class Target:
    """A store, which may not exist yet, and the names under a prefix that a pack writes there.

    With ``overwrite``, shards of other content are replaced, and those beyond the last one deleted.
    """

    def __init__(self, store: Store, prefix: str, *, overwrite: bool) -> None:
        self.store, self.prefix = store, prefix
        self.existing: dict[str, ObjectEntry] = {}
        """The objects under the prefix, and those that describe such shards, by name, before the pack writes."""
        if store.exists():
            listed = [*store.list_all(prefix), *store.list_all(described(prefix))]
            self.existing = {entry.name: entry for entry in listed}
        self.stale: list[str] = []
        """The shards to be deleted at the end; see `find_stale`."""
        self._overwrite = overwrite

    def find_stale(self, shards: Sequence[PackedShard]) -> None:
        """Find the numbered shards of another pack beyond the planned ones.

        `StoreError` if there are such, or shards of another size under the planned names, and they must stay.
        """
        sizes = {shard.name: shard.num_bytes for shard in shards}
        numbered = re.compile(rf"{re.escape(self.prefix)}[0-9]+\.tar")
        self.stale = [name for name in self.existing if numbered.fullmatch(name) and name not in sizes]
        others = [*self.stale, *(name for name, size in sizes.items() if self.size(name) not in (None, size))]
        versions = [name for name in self.existing if name.startswith(version_start(self.prefix))]
        if others and versions:
            raise StoreError(
                f"'{self.store.locate(self.prefix)}' is a data set with versions, {shown(versions)}; "
                "pack under another prefix, or delete it first"
            )
        self._refuse(others, "of another pack")

    def _refuse(self, others: Sequence[str], which: str) -> None:
        if others and not self._overwrite:
            raise StoreError(
                f"'{self.store.locate(self.prefix)}' holds shards {which}: {shown(others)}; --overwrite "
                "replaces them, or pack under another prefix"
            )

    def missing(
        self, shards: Sequence[PackedShard], task: Callable[..., ShardTask], run: Callable[..., list[bool]]
    ) -> list[PackedShard]:
        """The planned shards that the store does not have, byte for byte; `StoreError` if others must stay.

        ``task(shard, stored=...)`` makes the task that compares a shard with the stored object of its name and size;
        ``run`` is `run_tasks` with its workers.
        """

        def stored(name: str) -> Stored:
            entry = self.existing[name]
            return self.access.known_checksum(entry) or self.access.file(name, size=entry.size)

        suspects = [shard for shard in shards if self.size(shard.name) == shard.num_bytes]
        tasks = (task(shard, stored=stored(shard.name)) for shard in suspects)
        are_same = run(is_stored, tasks, suspects, what="compare")
        same = {shard.name for shard, is_same in zip(suspects, are_same, strict=True) if is_same}
        self._refuse([shard.name for shard in suspects if shard.name not in same], "with other content")
        return [shard for shard in shards if shard.name not in same]

    @cached_property
    def access(self) -> Store:
        """The store in the form that workers take; the bucket must exist."""
        return self.store.access()

    def size(self, name: str) -> int | None:
        """Bytes of an object that was there before the pack; ``None`` if there was none."""
        entry = self.existing.get(name)
        return None if entry is None else entry.size

    def holds(self, name: str, data: bytes) -> bool:
        """Whether a small object was there with these bytes."""
        return self.size(name) == len(data) and self.store.read(name) == data

    def delete(self, names: Iterable[str]) -> None:
        """Delete the named objects that were there before the pack."""
        for name in names:
            if self.existing.pop(name, None) is not None:
                self.store.delete(name)
