"""Write one file of a set in a worker process, or compare it with the stored one.

Apart from `prep.pack.pack`, whose imports (numpy among them) would cost every worker a tenth of a second.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from dali_pipes.errors import StoreError
from dali_pipes.store.checksums import DEFAULT_CHECKSUM_TYPE, new_checksum
from dali_pipes.store.cluster.transfer import RemoteFile
from prep.tar.writer import CHUNK_BYTES, Entry, stream_tar
from prep.workers import Report

Stored = tuple[str, str] | Path | RemoteFile
"""A stored object to compare with: type and value of its checksum, or the file itself."""


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
    """Where `write_file` writes it."""
    stored: Stored | None = None
    """What `is_stored` compares it with."""

    @abstractmethod
    def stream(self, on_sample: Callable[[], None]) -> Iterator[memoryview]:
        """The file's bytes, from the first on; ``on_sample`` is called after each sample."""


@dataclass(frozen=True, kw_only=True)
class ShardTask(StreamTask):
    """A shard with its samples."""

    entries: Sequence[Entry]
    held_bytes: int
    """Bytes of components that are in memory, and are sent to the worker."""

    def stream(self, on_sample: Callable[[], None]) -> Iterator[memoryview]:
        return stream_tar(self.entries, shard=self.name, num_bytes=self.num_bytes, on_sample=on_sample)


def write_file(task: StreamTask, report: Report) -> bool:
    """Stream a file to its target; each sample is reported once, however many attempts there are. Always ``True``."""
    assert task.target is not None, "a task to write has a target"
    reported = 0

    def chunks() -> Iterator[memoryview]:
        done = 0

        def on_sample() -> None:
            nonlocal done, reported
            done += 1
            if done > reported:
                reported = done
                report(1)

        return task.stream(on_sample)

    task.target.write_stream(task.name, chunks, num_bytes=task.num_bytes)
    return True


def is_stored(task: StreamTask, report: Report) -> bool:
    """Whether the stored object has the file's bytes, which are made for that and dropped."""
    assert task.stored is not None, "a task to compare has a stored object"
    chunks = task.stream(lambda: report(1))
    if isinstance(task.stored, tuple):
        kind, checksum = task.stored
        return _digest_of(chunks, kind) == checksum
    return _digest_of(chunks, DEFAULT_CHECKSUM_TYPE) == _digest_of(_read(task.stored), DEFAULT_CHECKSUM_TYPE)


def _digest_of(chunks: Iterable[memoryview], kind: str) -> str:
    """The checksum of a stream, in hexadecimal."""
    state = new_checksum(kind)
    for chunk in chunks:
        state.update(chunk)
    return state.hexdigest()


def _read(file: Path | RemoteFile) -> Iterator[memoryview]:
    view = memoryview(bytearray(CHUNK_BYTES))
    if isinstance(file, RemoteFile):
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
