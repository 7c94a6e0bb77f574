"""Read the samples of stored shards, plan the output shards of a dSort job, and copy the bytes into them.

The order and the cuts are those of `prep.shuffle.order`, which the client's engine uses too: both give the same shards
for the same request. The embedded node takes three steps, so that it can report each and refuse before it writes::

    samples = [sample for shard in shards for sample in scan(shard)]          # offsets only, no bytes are kept
    outputs = plan(samples, names=names, output_shard_size=size, algorithm=algorithm)   # pure
    for output in outputs: tar_chunks(output.samples, sources=sources)        # copies ranges

Memory holds one small record per file, never its bytes. Files keep their bytes, name, mode and modification time (in
whole seconds); the files of a sample keep their order, as with dSort.
"""

import os
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Self, cast

from dali_pipes.errors import DataError
from dali_pipes.formats.keys import split_key
from dali_pipes.formats.tar_reader import BLOCK, DIRECTORY, REGULAR, ArchiveReader, Member, parse_number
from prep.shuffle.order import Algorithm, arrange, cut
from prep.tar.writer import CHUNK_BYTES, member_header

_MAX_OPEN = 64  # a shuffled output reads from every input; more open files save little, opening costs 10 us


@dataclass(frozen=True, kw_only=True, slots=True)
class InputShard:
    """A tar file to read."""

    name: str
    """For errors."""
    path: Path
    num_bytes: int | None = None
    """Length of the tar, where the file goes on after it; ``None``: the whole file."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One file of a sample, and where its bytes are."""

    name: str
    offset: int
    num_bytes: int
    mode: int
    mtime_s: int


@dataclass(slots=True)
class StoredSample:
    """The files of one shard that share a key, or one file that belongs to no sample."""

    key: str
    shard: InputShard
    has_key: bool
    """Whether it is a sample. ``README`` or ``._photo.jpg`` is none: its key is its name."""
    files: list[StoredFile] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        """Bytes of the files without headers and padding, which is what dSort's shard size means."""
        return sum(file.num_bytes for file in self.files)


@dataclass(frozen=True, slots=True)
class OutputShard:
    """A shard to write: its name, and its samples in order."""

    name: str
    samples: Sequence[StoredSample]


class FileHead:
    """Reads the first bytes of a file as if it ended there: an object's file goes on after the object."""

    def __init__(self, file: BinaryIO, num_bytes: int) -> None:
        self._file, self._left = file, num_bytes

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(self._left if size < 0 else min(size, self._left))
        self._left -= len(data)
        return data


class _EveryFile(ArchiveReader):
    """Yields every regular file of a tar, also those of no sample, and knows the mode and time of the current one."""

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
    """The samples of a shard, in the order of their first files.

    A file that belongs to no sample becomes a sample of its own, so that nothing is lost. Directories are left out.

    Raises:
        DataError: If the file is not a tar, is cut off or damaged, holds a link or a sparse file, or holds one file of
            a sample twice.
    """
    num_bytes = shard.path.stat().st_size
    if shard.num_bytes is not None:
        num_bytes = min(num_bytes, shard.num_bytes)
    samples: dict[tuple[bool, str], StoredSample] = {}
    seen: set[str] = set()
    with shard.path.open("rb", buffering=0) as file:
        archive = _EveryFile(cast("BinaryIO", FileHead(file, num_bytes)), shard=shard.name, size=num_bytes)
        try:
            for member in archive:
                has_key = bool(member.component)
                if has_key and member.name in seen:
                    raise DataError(f"shard '{shard.name}', member '{member.name}' occurs twice")
                seen.add(member.name)
                # A file "a" that belongs to no sample may stand beside "a.jpg".
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
    """The shards to write: ``samples`` in the algorithm's order, cut at ``output_shard_size`` bytes.

    Args:
        samples: In input order, on which the order depends.
        names: The names of the outputs, as many as are needed or more; taken in order.
        output_shard_size: Bytes after which a shard ends: see `cut`.
        algorithm: The order.
        contents: See `arrange`; of the samples that have a key, in order.

    Raises:
        DataError: If a key is in two shards (their files would run together), or the names run out.
        ValueError: If ``output_shard_size`` is not positive.
    """
    if output_shard_size <= 0:
        raise ValueError(f"output_shard_size must be positive, got {output_shard_size}")
    check_keys(samples)
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
    """The samples in the algorithm's order; then the files of no sample, in input order.

    So the order of the samples is that of a reader that does not see the other files.
    """
    with_key = [sample for sample in samples if sample.has_key]
    order = arrange([sample.files[0].name for sample in with_key], algorithm=algorithm, contents=contents)
    return [*(with_key[position] for position in order), *(sample for sample in samples if not sample.has_key)]


def check_keys(samples: Iterable[StoredSample]) -> None:
    """Refuse a key that is in two shards; a ``README`` may be in each.

    Raises:
        DataError: Names both.
    """
    origin: dict[str, str] = {}
    for sample in samples:
        first = origin.setdefault(sample.key, sample.shard.name) if sample.has_key else sample.shard.name
        if first != sample.shard.name:
            raise DataError(
                f"shard '{sample.shard.name}', key '{sample.key}': is in shard '{first}' too; "
                f"keys must be unique in the data set, pack it with other keys"
            )


class Sources:
    """Reads ranges of the input files, with at most 64 of them open; refuses a file that changes after its first use.

    A context manager.
    """

    def __init__(self) -> None:
        self._open: OrderedDict[Path, int] = OrderedDict()
        self._identity: dict[Path, tuple[int, int, int, int]] = {}

    def check(self, shard: InputShard) -> None:
        """Remember which file it is, or check that it is the same; call it before and after `scan`."""
        self._same(shard, shard.path.stat())

    def read(self, shard: InputShard, file: StoredFile) -> Iterator[bytes]:
        """The file's bytes, in pieces of at most 1 MiB.

        Raises:
            DataError: If the shard was replaced or changed, or ends early.
        """
        offset, stop = file.offset, file.offset + file.num_bytes
        while offset < stop:
            piece = os.pread(self._descriptor(shard), min(CHUNK_BYTES, stop - offset), offset)
            if not piece:
                raise DataError(f"shard '{shard.name}', member '{file.name}': the file ends at byte {offset}")
            offset += len(piece)
            yield piece

    def _descriptor(self, shard: InputShard) -> int:
        descriptor = self._open.pop(shard.path, None)
        if descriptor is None:
            descriptor = os.open(shard.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                self._same(shard, os.fstat(descriptor))
            except DataError:
                os.close(descriptor)
                raise
            if len(self._open) >= _MAX_OPEN:
                os.close(self._open.popitem(last=False)[1])
        self._open[shard.path] = descriptor
        return descriptor

    def _same(self, shard: InputShard, stat: os.stat_result) -> None:
        identity = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)
        if self._identity.setdefault(shard.path, identity) != identity:
            raise DataError(f"shard '{shard.name}': changed while it was being read; start again")

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def tar_chunks(samples: Iterable[StoredSample], *, sources: Sources) -> Iterator[bytes]:
    """A tar of the samples, in pieces; it ends with two empty blocks."""
    for sample in samples:
        for file in sample.files:
            yield member_header(file.name, file.num_bytes, mode=file.mode, mtime_s=file.mtime_s)
            yield from sources.read(sample.shard, file)
            if padding := -file.num_bytes % BLOCK:
                yield bytes(padding)
    yield bytes(2 * BLOCK)
