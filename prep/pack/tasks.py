"""Write one file of a set in a worker process, with a second copy if one is wanted, or compare it with the stored one.

It is a module of its own, because the imports of `prep.pack.pack` (numpy among them) would cost every worker a tenth of
a second.
"""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from dali_pipes.errors import StoreError
from dali_pipes.store.checksums import DEFAULT_CHECKSUM_TYPE, new_checksum
from dali_pipes.store.http.objects import ObjectFile
from dali_pipes.store.local import unnamed_file
from prep.tar.writer import CHUNK_BYTES, Entry, stream_tar
from prep.workers import Report

Stored = tuple[str, str] | Path | ObjectFile
"""A stored object to compare with: type and value of its checksum, or the file itself."""
MAX_SENT_BYTES = 8 << 20
"""A task takes no further record after so many bytes of components that are in memory, because they are sent to it."""


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
