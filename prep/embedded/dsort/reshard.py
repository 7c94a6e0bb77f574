"""Read the samples of stored shards, plan the output shards of a dSort job, and copy the bytes into them.

`prep.shuffle.order` gives the order and the cuts, also to the client's engine: both give the same shards for the same
request. The embedded node takes three steps, so that it can report each one and refuse a job before it writes::

    samples = [sample for shard in shards for sample in scan(shard)]          # only offsets are kept
    outputs = plan(samples, names=names, output_shard_size=size, algorithm=algorithm)   # pure
    for output in outputs: tar_chunks(output.samples)                         # copies ranges

Memory holds one small record for each file, never its bytes. Files keep their bytes, name, mode and modification time
(in whole seconds). The files of a sample keep their order, as with dSort.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

from dali_pipes.errors import DataError
from dali_pipes.formats.names import split_key
from dali_pipes.formats.tar_reader import BLOCK, DIRECTORY, REGULAR, ArchiveReader, Member, parse_number
from prep.shuffle.order import Algorithm, arrange, cut
from prep.tar.writer import CHUNK_BYTES, member_header


@dataclass(frozen=True, kw_only=True, slots=True)
class InputShard:
    """A tar file to read, which must stay as it was when this record was made."""

    name: str
    """Used in errors."""
    path: Path
    num_bytes: int
    """Length of the tar; the file may continue after it."""
    identity: tuple[int, int, int, int]
    """Device, inode, size and modification time of the file."""

    @classmethod
    def of(cls, name: str, path: Path, stat: os.stat_result, *, num_bytes: int | None = None) -> "InputShard":
        """Describe a file by its ``stat``; by default the whole file is the tar."""
        identity = _identity(stat)
        return cls(name=name, path=path, num_bytes=stat.st_size if num_bytes is None else num_bytes, identity=identity)

    @contextmanager
    def open(self) -> Iterator[BinaryIO]:
        """Open the file; raises `DataError` if it was changed or replaced."""
        with self.path.open("rb", buffering=0) as file:
            if _identity(os.fstat(file.fileno())) != self.identity:
                raise DataError(f"shard '{self.name}': changed while it was being read; start again")
            yield cast("BinaryIO", file)


def _identity(stat: os.stat_result) -> tuple[int, int, int, int]:
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


class StoredFile(NamedTuple):
    """One file of a sample, and the place of its bytes."""

    name: str
    offset: int
    num_bytes: int
    mode: int
    mtime_s: int

    def read(self, file: BinaryIO, shard: InputShard) -> Iterator[bytes]:
        """Yield the bytes from the open shard, in pieces of at most 1 MiB; raises `DataError` if it ends early."""
        offset, stop = self.offset, self.offset + self.num_bytes
        while offset < stop:
            piece = os.pread(file.fileno(), min(CHUNK_BYTES, stop - offset), offset)
            if not piece:
                raise DataError(f"shard '{shard.name}', member '{self.name}': the file ends at byte {offset}")
            offset += len(piece)
            yield piece


@dataclass(slots=True)
class StoredSample:
    """The files of one shard that share a key, or one file without a key."""

    key: str
    shard: InputShard
    has_key: bool
    """False for a file that does not belong to a sample, such as ``README`` or ``._photo.jpg``: its key is its name."""
    files: list[StoredFile] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        """Bytes of the files without headers and padding; dSort's shard size counts these."""
        return sum(file.num_bytes for file in self.files)


class OutputShard(NamedTuple):
    """A shard to write: its name, and its samples in order."""

    name: str
    samples: Sequence[StoredSample]


class FileHead:
    """Reads the first bytes of a file as if it ended there: an object's file continues with its metadata."""

    def __init__(self, file: BinaryIO, num_bytes: int) -> None:
        self._file, self._left = file, num_bytes

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(self._left if size < 0 else min(size, self._left))
        self._left -= len(data)
        return data


class _EveryFile(ArchiveReader):
    """Yields every regular file of a tar, also files without a key, and holds mode and time of the current file."""

    mode, mtime_s = 0, 0

    def _skip_special(self, name: str, kind: int) -> None:
        if kind != DIRECTORY:
            raise DataError(f"shard '{self._shard}', member '{name}' is not a regular file; pack it as one")

    def _names(self, name: str) -> tuple[str, str]:
        return split_key(name) or (name, "")

    def _member(self, name: str, size: int, kind: int, said: Mapping[bytes, bytes]) -> Iterator[Member]:
        if kind not in REGULAR and kind != ord("S"):  # the reader itself refuses a sparse file
            self._skip_special(name, kind)
        self.mode = parse_number(self._block[100:108]) or 0
        mtime = said.get(b"mtime")
        self.mtime_s = int(float(mtime)) if mtime else parse_number(self._block[136:148]) or 0
        return super()._member(name, size, kind, said)


def scan(shard: InputShard) -> list[StoredSample]:
    """List the samples of a shard, in the order of their first files.

    A file without a key becomes a sample of its own, so that no file is lost. Directories are left out.

    Raises:
        DataError: If the file is not a tar, is cut off or damaged, was changed, holds a link or a sparse file, or holds
            one file of a sample twice.
    """
    samples: dict[tuple[bool, str], StoredSample] = {}
    seen: set[str] = set()
    with shard.open() as file:
        head = cast("BinaryIO", FileHead(file, shard.num_bytes))
        archive = _EveryFile(head, shard=shard.name, size=shard.num_bytes)
        try:
            for member in archive:
                has_key = bool(member.component)
                if has_key and member.name in seen:
                    raise DataError(f"shard '{shard.name}', member '{member.name}' occurs twice")
                seen.add(member.name)
                # A file "a" without a key may stand beside "a.jpg".
                sample = samples.setdefault((has_key, member.key), StoredSample(member.key, shard, has_key))
                sample.files.append(StoredFile(member.name, member.offset, member.size, archive.mode, archive.mtime_s))
        except (ValueError, OverflowError) as exc:
            raise DataError(f"shard '{shard.name}': cannot be read as a tar: {exc}") from exc
    return list(samples.values())


def plan(
    samples: Sequence[StoredSample],
    *,
    names: Iterable[str],
    output_shard_size: int,
    algorithm: Algorithm,
    contents: Sequence[int | float | bytes] | None = None,
) -> list[OutputShard]:
    """Put ``samples``, given in input order, into the algorithm's order, and cut them at ``output_shard_size`` bytes.

    Args:
        samples: The samples in input order.
        names: The outputs' names, taken in order; there may be more than needed.
        output_shard_size: See `cut`.
        algorithm: The order.
        contents: The values to sort by, of the samples that have a key: see `arrange`.

    Raises:
        DataError: If a key is in two shards (an output would mix their files), or there are too few names.
        ValueError: If ``output_shard_size`` is not positive.
    """
    if output_shard_size <= 0:
        raise ValueError(f"output_shard_size must be positive, got {output_shard_size}")
    order = arranged(samples, algorithm=algorithm, contents=contents)
    outputs: list[OutputShard] = []
    supply = iter(names)
    start = 0
    for count in cut((sample.num_bytes for sample in order), target=output_shard_size):
        name = next(supply, None)
        if name is None:  # dSort's words
            raise DataError(f"number of shards to be created exceeds expected number of shards ({len(outputs)})")
        outputs.append(OutputShard(name, order[start : start + count]))
        start += count
    return outputs


def arranged(
    samples: Sequence[StoredSample], *, algorithm: Algorithm, contents: Sequence[int | float | bytes] | None = None
) -> list[StoredSample]:
    """Return the samples in the algorithm's order, then the files without a key, in input order.

    So files without a key do not change the order of the samples. They may have one name in several shards.

    Raises:
        DataError: If a key is in two shards; names both.
    """
    first_shard: dict[str, str] = {}
    with_key = [sample for sample in samples if sample.has_key]
    for sample in with_key:
        first = first_shard.setdefault(sample.key, sample.shard.name)
        if first != sample.shard.name:
            raise DataError(
                f"shard '{sample.shard.name}', key '{sample.key}': is in shard '{first}' too; "
                f"keys must be unique in the data set, pack it with other keys"
            )
    order = arrange([sample.files[0].name for sample in with_key], algorithm=algorithm, contents=contents)
    return [*(with_key[position] for position in order), *(sample for sample in samples if not sample.has_key)]


def tar_chunks(samples: Iterable[StoredSample]) -> Iterator[bytes]:
    """Yield a tar of the samples in pieces; it ends with two empty blocks.

    Raises:
        DataError: If a shard was changed or replaced since it was scanned.
    """
    for sample in samples:
        # Opened for each sample, in 10 us: a job may have more inputs than a process may have open files.
        with sample.shard.open() as source:
            for file in sample.files:
                yield member_header(file.name, file.num_bytes, mode=file.mode, mtime_s=file.mtime_s)
                yield from file.read(source, sample.shard)
                if padding := -file.num_bytes % BLOCK:
                    yield bytes(padding)
    yield bytes(2 * BLOCK)
