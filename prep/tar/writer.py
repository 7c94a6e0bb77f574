"""Make the bytes of a tar from its members' files, in pieces of at most 1 MiB.

The bytes are those that `webdataset.TarWriter` writes for the same members with a fixed time, owner and mode. It is not
used because it holds each member in memory, and importing it takes seconds (it imports torch).
"""

import errno
import io
import os
import stat
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from dali_pipes.errors import DataError, StoreError
from dali_pipes.formats.tar_reader import BLOCK

if TYPE_CHECKING:
    from dali_pipes.formats.photo_header import PhotoHeader
    from dali_pipes.store.http.objects import ObjectFile
    from prep.tar.inside import ParquetCells, UnpackedFile


CHUNK_BYTES = 1 << 20
"""Bytes of a stream in memory. Smaller pieces cost more calls, larger ones do not fit the processor's cache."""

# The longest name and the largest number of a plain header; others need a second one.
MAX_PLAIN_NAME = 100
MAX_PLAIN_NUMBER = 8**11 - 1

# The part of a regular file's header after its checksum, and its sum with the eight spaces of the checksum.
_TAIL = tarfile.TarInfo("x").tobuf(tarfile.PAX_FORMAT)[156:]
_OWNER = b"0000000\0" * 2
_TAIL_SUM = sum(_TAIL) + 8 * ord(" ")

# A tar ends with two empty blocks and is filled up to a multiple of twenty blocks.
MAX_FILL = 22 * BLOCK


class Range(NamedTuple):
    """Bytes ``[offset, offset + size)`` of a file, of an object in a bucket, or of what is inside one."""

    file: "Path | ObjectFile | UnpackedFile | ParquetCells"
    offset: int
    size: int
    head: bytes | None = None
    """The first bytes, if they are known; then the file is not opened to check them."""
    photo: "PhotoHeader | None" = None
    """The header of a photo by all its bytes, if these were read already."""


Part = bytes | str | Range
"""The bytes of a component, the path of its file, or a range of a file."""

Entry = tuple[str, Sequence[tuple[str, Part]]]
"""A sample as it is written: its key, and the component and part of each member in order."""


def member_header(name: str, size: int, *, mode: int = 0o644, mtime_s: int = 0) -> bytes:
    """The header blocks of a regular file without an owner: one, or three if a name or a number needs PAX records.

    >>> len(member_header("a.jpg", 1)), len(member_header("ä.jpg", 1))
    (512, 1536)
    """
    if _is_plain(name, size) and 0 <= mtime_s <= MAX_PLAIN_NUMBER and 0 <= mode < 1 << 12:
        # The same bytes as below, 20 us faster.
        head = name.encode().ljust(MAX_PLAIN_NAME, b"\0")
        head += b"%07o\0%b%011o\0%011o\0" % (mode, _OWNER, size, mtime_s)
        return b"%b%06o\0 %b" % (head, sum(head) + _TAIL_SUM, _TAIL)
    member = tarfile.TarInfo(name)
    member.size, member.mode, member.mtime = size, mode, mtime_s
    # A name may have bytes that are not UTF-8: they stay as they are.
    return member.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def tar_bytes(name: str, size: int) -> int:
    """Bytes of a member in a tar: header blocks, more than one for a long or non-ASCII name, and data blocks.

    >>> tar_bytes("a.jpg", 1)
    1024
    """
    header = BLOCK if _is_plain(name, size) else len(member_header(name, size))
    return header + -(-size // BLOCK) * BLOCK


def stream_tar(
    entries: Iterable[Entry],
    *,
    shard: str,
    num_bytes: int,
    on_sample: Callable[[], None] = lambda: None,
) -> Iterator[memoryview]:
    """Yield the bytes of the tar ``shard``; each piece is valid until the next is asked for.

    ``num_bytes`` is the tar's size; zeros fill it up. ``on_sample`` is called after each sample.

    Raises:
        DataError: If the files have changed since ``num_bytes`` was computed. Fewer bytes have been yielded by then, so
            a receiver that knows the length does not take the stream for complete.
        StoreError: If a file cannot be read.
    """
    buffer, filled = memoryview(bytearray(min(CHUNK_BYTES, num_bytes))), 0
    with closing(Files()) as files:
        for size, read_into in _contents(entries, files, shard=shard, num_bytes=num_bytes, on_sample=on_sample):
            remaining = size
            while remaining:
                num = read_into(buffer[filled : filled + min(remaining, len(buffer) - filled)])
                remaining, filled = remaining - num, filled + num
                if filled == len(buffer):
                    yield buffer
                    filled = 0
        if filled:
            yield buffer[:filled]


def _contents(
    entries: Iterable[Entry], files: "Files", *, shard: str, num_bytes: int, on_sample: Callable[[], None]
) -> Iterator[tuple[int, Callable[[memoryview], int]]]:
    """The size of each header, component and fill of a tar, and the function that reads it into a buffer."""
    total = fill = 0
    for key, members in entries:
        for component, part in members:
            size = files.open(part)
            header = bytes(fill) + member_header(f"{key}.{component}", size)
            fill = -size % BLOCK
            total += len(header) + size
            if total + fill + 2 * BLOCK > num_bytes:
                raise _changed(shard, f"at least {total + fill + 2 * BLOCK}", num_bytes)
            yield len(header), io.BytesIO(header).readinto
            yield size, files.read_into
        on_sample()
    end = num_bytes - total
    if end - fill >= MAX_FILL:
        raise _changed(shard, str(total + fill + 2 * BLOCK), num_bytes)
    yield end, io.BytesIO(bytes(end)).readinto


def _changed(shard: str, found: str, num_bytes: int) -> DataError:
    return DataError(
        f"shard '{shard}' came out at {found} bytes, {num_bytes} were planned: source files changed while they were "
        "packed; run it again"
    )


class Files:
    """Reads parts, one at a time. A file stays open until another one is needed: most ranges follow each other."""

    def __init__(self) -> None:
        self._data: bytes | None = None
        self._file: str | ObjectFile | UnpackedFile | ParquetCells | None = None
        self._descriptor = -1
        self._offset = 0

    def open(self, part: Part) -> int:
        """Open a part and return its size."""
        self._data = part if isinstance(part, bytes) else None
        self._offset = part.offset if isinstance(part, Range) else 0
        if isinstance(part, bytes):
            return len(part)
        file = part.file if isinstance(part, Range) else part
        file = str(file) if isinstance(file, Path) else file
        if file != self._file:
            self.close()
            self._descriptor = open_regular(file) if isinstance(file, str) else -1
            self._file = file
        return part.size if isinstance(part, Range) else os.fstat(self._descriptor).st_size

    def read_into(self, view: memoryview) -> int:
        """Read the next bytes of the open part, at least one, and return their number."""
        if self._data is not None:
            found = self._data[self._offset : self._offset + len(view)]
            num = len(found)
            view[:num] = found
        elif isinstance(self._file, str):
            try:
                num = os.preadv(self._descriptor, [view], self._offset)
            except OSError as exc:
                raise StoreError(f"cannot read '{self._file}': {exc.strerror or exc}") from exc
        else:
            assert self._file is not None, "a part is open"
            num = self._file.read_into(view, offset=self._offset)
        if not num:
            name = self._file if isinstance(self._file, str) else getattr(self._file, "url", "")
            raise DataError(f"'{name}' ends at byte {self._offset}: it was cut while it was packed; run it again")
        self._offset += num
        return num

    def read(self, size: int, *, offset: int = 0) -> bytes:
        """Skip ``offset`` bytes of the open part, and read ``size``."""
        self._offset += offset
        buffer = memoryview(bytearray(size))
        num = 0
        while num < size:
            num += self.read_into(buffer[num:])
        return bytes(buffer)

    def close(self) -> None:
        """Can be called twice."""
        if isinstance(self._file, str):
            os.close(self._descriptor)
        elif self._file is not None:
            self._file.close()
        self._data = self._file = None


def open_regular(path: str) -> int:
    """Open a file to read it, and return its descriptor.

    Raises:
        StoreError: If it cannot be opened, or is a pipe, a device or a folder: reading these may never end.
    """
    try:
        # O_NONBLOCK: to open a pipe would wait for a writer. It has no effect on files.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as exc:
        raise StoreError(f"cannot read '{path}': {exc.strerror or exc}") from exc
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    found = os.strerror(errno.EISDIR) if stat.S_ISDIR(mode) else "expected a file, found a pipe or a device"
    raise StoreError(f"cannot read '{path}': {found}")


def _is_plain(name: str, size: int) -> bool:
    return len(name) <= MAX_PLAIN_NAME and size <= MAX_PLAIN_NUMBER and name.isascii()
