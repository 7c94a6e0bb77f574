"""One shard to be, in a worker: its samples' places in, its bytes written or compared.

Apart from `prep.pack.pack`, whose imports (numpy among them) would cost every worker a tenth of a second.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from dali_pipes.errors import StoreError
from dali_pipes.store.checksums import DEFAULT_CHECKSUM_TYPE, new_checksum
from dali_pipes.store.transfer import RemoteFile
from prep.tar.writer import CHUNK_BYTES, Entry, stream_tar
from prep.workers import Report

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["ShardTask", "StreamTarget", "digest_of", "is_same", "is_stored", "write_shard", "write_streamed"]


class StreamTarget(Protocol):
    """A directory or a bucket, as a worker has it."""

    def write_stream(self, name: str, chunks: Callable[[], Iterable[memoryview]], *, num_bytes: int) -> None:
        """Create or replace an object from a stream."""


class ShardTask(NamedTuple):
    """A shard to be, with its samples, for a worker."""

    name: str
    num_bytes: int
    entries: Sequence[Entry]
    held_bytes: int
    target: StreamTarget | None
    """Where to write it."""
    stored: "tuple[str, str] | Path | RemoteFile | None"
    """What to compare it with: type and checksum, or the file itself."""


def write_shard(task: ShardTask, report: Report) -> bool:
    """Stream a shard to where it goes; always ``True``."""
    assert task.target is not None, "a task to write says where"

    def stream(on_sample: Callable[[], None]) -> Iterator[memoryview]:
        return stream_tar(task.entries, shard=task.name, num_bytes=task.num_bytes, on_sample=on_sample)

    return write_streamed(task.target, task.name, stream, num_bytes=task.num_bytes, report=report)


def is_stored(task: ShardTask, report: Report) -> bool:
    """Whether what is stored has the shard's bytes; they are made for that, and dropped."""
    assert task.stored is not None, "a task to compare says with what"
    chunks = stream_tar(task.entries, shard=task.name, num_bytes=task.num_bytes, on_sample=lambda: report(1))
    return is_same(task.stored, chunks)


def write_streamed(
    target: StreamTarget,
    name: str,
    stream: Callable[[Callable[[], None]], Iterator[memoryview]],
    *,
    num_bytes: int,
    report: Report,
) -> bool:
    """Write what ``stream`` makes, a sample at a time reported once however often it is tried; always ``True``.

    Args:
        target: Where to.
        name: The object's name there.
        stream: Called for each attempt, with what it is to call after each sample.
        num_bytes: What comes out.
        report: Told of each sample.
    """
    told = 0

    def chunks() -> Iterator[memoryview]:
        done = 0

        def on_sample() -> None:
            nonlocal done, told
            done += 1
            # A second attempt goes over samples that were told of.
            if done > told:
                told = done
                report(1)

        return stream(on_sample)

    target.write_stream(name, chunks, num_bytes=num_bytes)
    return True


def is_same(stored: "tuple[str, str] | Path | RemoteFile", chunks: Iterable[memoryview]) -> bool:
    """Whether what is stored, a file or a checksum and its type, has these bytes."""
    if isinstance(stored, tuple):
        kind, checksum = stored
        return digest_of(chunks, kind) == checksum
    return digest_of(chunks, DEFAULT_CHECKSUM_TYPE) == digest_of(_blocks(stored), DEFAULT_CHECKSUM_TYPE)


def _blocks(file: "Path | RemoteFile") -> Iterator[memoryview]:
    """A stored shard's bytes."""
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


def digest_of(chunks: Iterable[memoryview], kind: str) -> str:
    """The checksum of a stream, of one of `CHECKSUM_TYPES`, in hexadecimal."""
    state = new_checksum(kind)
    for chunk in chunks:
        state.update(chunk)
    return state.hexdigest()
