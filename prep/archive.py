"""Read a shard front to back: a stream in, its samples' members out, one after the other; what was cut off is found."""

import functools
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import BinaryIO, cast

import xxhash

from prep.errors import DataError
from prep.keys import split_key

__all__ = ["ArchiveReader", "Member"]

BLOCK = 512
READ_BYTES = 1 << 20


@dataclass(frozen=True)
class Member:
    """One file of a sample, while the archive stands at it."""

    name: str
    key: str
    component: str
    """In lower case, as WebDataset has it."""
    offset: int
    """First byte in the archive, a multiple of 512."""
    size: int
    read: Callable[[], bytes]
    """Its bytes; only before the next member is asked for."""


class ArchiveReader:
    """Iterates the members of a tar, of whatever format, that belong to samples.

    Directories, links and names that belong to no sample are passed over. The stream is read to its end, front to back,
    so it may come from the network; afterwards `num_bytes` and `checksum` are those of the whole archive.

    Args:
        stream: The archive's bytes.
        shard: Its name, for errors.

    Raises:
        DataError: While iterating, if the archive is no tar, was cut off, also between two members, or holds a sparse
            file.
    """

    def __init__(self, stream: BinaryIO, *, shard: str) -> None:
        self._stream, self._shard = stream, shard
        self._state = xxhash.xxh64()
        self.num_bytes = 0

    def read(self, size: int = -1) -> bytes:
        """What `tarfile` reads through: counts and hashes."""
        data = self._stream.read(size)
        self._state.update(data)
        self.num_bytes += len(data)
        return data

    @property
    def checksum(self) -> int:
        """XXH64 of what was read."""
        return cast("int", self._state.intdigest())

    def __iter__(self) -> Iterator[Member]:
        data_stop = 0
        try:
            # Stream mode: sequential reads only, so a header never has to be sought back to.
            with tarfile.open(fileobj=cast("BinaryIO", self), mode="r|", bufsize=READ_BYTES) as archive:
                for member in archive:
                    data_stop = member.offset_data + -(-member.size // BLOCK) * BLOCK
                    names = split_key(member.name)
                    if not member.isreg() or names is None:
                        continue
                    if member.issparse():
                        raise DataError(
                            f"shard '{self._shard}', key '{names[0]}': component '{names[1]}' is a sparse file, "
                            "expected its bytes in one run; pack it anew"
                        )
                    content = functools.partial(self._read_member, archive, member)
                    yield Member(member.name, names[0], names[1].lower(), member.offset_data, member.size, content)
        except tarfile.ReadError as exc:
            raise self._unreadable(exc) from exc
        while self.read(READ_BYTES):
            pass
        if self.num_bytes < data_stop + BLOCK:
            # tarfile takes the end of a file for the end of the archive.
            expected = f"expected an end-of-archive block after byte {data_stop}"
            raise DataError(f"shard '{self._shard}' is cut off: {self.num_bytes} bytes, {expected}")

    def _read_member(self, archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
        content = archive.extractfile(member)
        assert content is not None, "only regular members are read"
        try:
            return content.read()
        except tarfile.ReadError as exc:
            raise self._unreadable(exc) from exc

    def _unreadable(self, exc: tarfile.ReadError) -> DataError:
        return DataError(f"shard '{self._shard}' is no readable tar: {exc}, {self.num_bytes} bytes read")
