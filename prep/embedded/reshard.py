"""Reshard: shards in, their samples in another order out, in shards of about one size.

What AIStore's dSort does, without a cluster. The order and the cuts (`arrange`, `cut`, `cut_mapped`) are pure
functions of names and sizes, and the only ones: the embedded node and the client's engine give the same shards for the
same request because both call them. What follows is the embedded node's way to the bytes, in three steps, so that it
can report on each and refuse before anything is written::

    samples = [sample for shard in shards for sample in scan(shard)]          # offsets only, no bytes
    outputs = plan(samples, names=names, output_shard_size=size, algorithm=algorithm)   # pure
    for output in outputs: tar_chunks(output.samples, sources=sources)        # copies ranges

Memory holds one small record a member, never their bytes. Members keep the bytes, name, mode and modification time (in
whole seconds) that they had, and within a sample the order in which they stood, as with dSort.
"""

import os
import tarfile
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from dali_pipes.errors import DataError
from dali_pipes.formats.keys import split_key
from prep.shuffle.order import Algorithm, arrange, cut
from prep.tar.writer import member_header

__all__ = [
    "InputShard",
    "Member",
    "OutputShard",
    "Sample",
    "Sources",
    "arranged",
    "check_keys",
    "has_key",
    "plan",
    "scan",
    "tar_chunks",
]


_BLOCK = tarfile.BLOCKSIZE  # 512
_CHUNK_BYTES = 1 << 20
_MAX_OPEN = 64  # a shuffled output reads from every input; more open files save little, opening costs 10 us


@dataclass(frozen=True, kw_only=True, slots=True)
class InputShard:
    """A tar file to read."""

    name: str
    """What errors call it."""
    path: Path
    num_bytes: int | None = None
    """The tar's length where the file goes on after it; None means the whole file."""


@dataclass(frozen=True, slots=True)
class Member:
    """One file of a sample, and the range that holds its bytes."""

    name: str
    offset: int
    num_bytes: int
    mode: int
    mtime_s: int


@dataclass(slots=True)
class Sample:
    """The members of one shard that share a key."""

    key: str
    shard: InputShard
    members: list[Member] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        """Bytes of the members, headers and padding not counted (that is what dSort's shard size means)."""
        return sum(member.num_bytes for member in self.members)


@dataclass(frozen=True, slots=True)
class OutputShard:
    """A shard to be written: its name and its samples in order."""

    name: str
    samples: Sequence[Sample]


def scan(shard: InputShard) -> list[Sample]:
    """The shard's samples, in the order of their first members; no member's bytes are read.

    A member that belongs to no sample (``split_key`` gives None: ``README``, ``._photo.jpg``) becomes a sample of its
    own under its full name, so that nothing is lost. Directories are left out.

    Raises:
        DataError: The file is no tar, is cut short or damaged, holds a link or a sparse file, or holds one member
            twice.
    """
    file_bytes = shard.path.stat().st_size
    num_bytes = file_bytes if shard.num_bytes is None else min(shard.num_bytes, file_bytes)
    samples: dict[tuple[bool, str], Sample] = {}
    seen: set[str] = set()
    try:
        with shard.path.open("rb") as file, tarfile.open(fileobj=file, mode="r:") as tar:
            while (info := tar.next()) is not None:
                if info.offset >= num_bytes:
                    break  # what follows the tar in its file
                if info.isdir():
                    continue
                if not info.isreg() or info.issparse():
                    raise DataError(f"shard '{shard.name}', member '{info.name}': is no regular file; pack it as one")
                if info.offset_data + info.size > num_bytes:
                    raise DataError(f"shard '{shard.name}', member '{info.name}': the shard is cut short")
                parts = split_key(info.name)
                if parts is not None and info.name in seen:
                    raise DataError(f"shard '{shard.name}', member '{info.name}': is there twice")
                seen.add(info.name)
                key = info.name if parts is None else parts[0]
                # A member "a" that belongs to no sample may stand beside "a.jpg".
                sample = samples.setdefault((parts is not None, key), Sample(key, shard))
                sample.members.append(Member(info.name, info.offset_data, info.size, info.mode, int(info.mtime)))
            end = min(tar.offset, num_bytes)
            # tarfile takes a damaged header, and the file's end anywhere, for the end of the archive.
            file.seek(end)
            if (block := file.read(min(_BLOCK, num_bytes - end))) != bytes(_BLOCK):
                what = "no tar header" if any(block) else "no end mark, so it was cut short or never closed,"
                raise DataError(f"shard '{shard.name}': {what} at byte {end} of {num_bytes}")
    except (tarfile.TarError, ValueError, OverflowError) as exc:
        raise DataError(f"shard '{shard.name}': cannot be read as a tar: {exc}") from exc
    return list(samples.values())


def plan(
    samples: Sequence[Sample],
    *,
    names: Iterable[str],
    output_shard_size: int,
    algorithm: Algorithm,
    contents: Sequence[int | float | bytes] | None = None,
) -> list[OutputShard]:
    """The shards to write: ``samples`` in the algorithm's order, cut at ``output_shard_size`` bytes.

    Files that belong to no sample (a README) come last, in input order: the order of the samples is that of a reader
    that does not see them.

    Args:
        samples: In input order, which the order depends on.
        names: The outputs' names, as many as there are or more; taken in order.
        output_shard_size: Bytes of members after which a shard ends (see ``cut``).
        algorithm: The order.
        contents: See `arrange`; of the samples that have a key, in order.

    Raises:
        DataError: A key is in two shards (their members would run together), or the names run out.
        ValueError: ``output_shard_size`` is not positive.
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
    samples: Sequence[Sample], *, algorithm: Algorithm, contents: Sequence[int | float | bytes] | None = None
) -> list[Sample]:
    """The samples in the algorithm's order, then the files that belong to none: see `plan`."""
    with_key = [sample for sample in samples if has_key(sample)]
    order = arrange([sample.members[0].name for sample in with_key], algorithm=algorithm, contents=contents)
    return [*(with_key[position] for position in order), *(sample for sample in samples if not has_key(sample))]


def has_key(sample: Sample) -> bool:
    """Whether it is a sample, and not a file that belongs to none."""
    return split_key(sample.members[0].name) is not None


def check_keys(samples: Iterable[Sample]) -> None:
    """Refuse a key of two shards.

    Raises:
        DataError: Names both.
    """
    origin: dict[str, str] = {}
    for sample in samples:
        if not has_key(sample):
            continue  # a README in every shard is no clash
        first = origin.setdefault(sample.key, sample.shard.name)
        if first != sample.shard.name:
            raise DataError(
                f"shard '{sample.shard.name}', key '{sample.key}': is in shard '{first}' too; "
                f"keys must be unique in the data set, pack it with other keys"
            )


class Sources:
    """The input files, at most 64 of them open at a time; a file that changes after its first use is refused."""

    def __init__(self) -> None:
        """Nothing is opened yet."""
        self._open: OrderedDict[Path, int] = OrderedDict()
        self._identity: dict[Path, tuple[int, int, int, int]] = {}

    def check(self, shard: InputShard) -> None:
        """Note which file it is, or find that it still is: call it around ``scan``, whose offsets are for this file."""
        self._same(shard, shard.path.stat())

    def read(self, shard: InputShard, member: Member) -> Iterator[bytes]:
        """The member's bytes, in pieces of at most 1 MiB.

        Raises:
            DataError: The file was replaced or changed, or ends early.
        """
        offset, stop = member.offset, member.offset + member.num_bytes
        while offset < stop:
            piece = os.pread(self._descriptor(shard), min(_CHUNK_BYTES, stop - offset), offset)
            if not piece:
                raise DataError(f"shard '{shard.name}', member '{member.name}': the file ends at byte {offset}")
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
        """Close what is open."""
        while self._open:
            os.close(self._open.popitem()[1])

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()


def tar_chunks(samples: Iterable[Sample], *, sources: Sources) -> Iterator[bytes]:
    """A tar of the samples, in pieces: ustar headers, PAX where a name needs it; owner 0; ends with two zero blocks."""
    for sample in samples:
        for member in sample.members:
            yield member_header(member.name, member.num_bytes, mode=member.mode, mtime_s=member.mtime_s)
            yield from sources.read(sample.shard, member)
            if padding := -member.num_bytes % _BLOCK:
                yield bytes(padding)
    yield bytes(2 * _BLOCK)
