"""Make the bytes of a tar from its members' files, in pieces of at most 1 MiB.

The bytes are those that `webdataset.TarWriter` writes for the same members with a fixed time, owner and mode. It is not
used because it holds each member in memory, and importing it takes seconds (it imports torch).
"""

import errno
import os
import stat
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from dali_pipes.errors import DataError, StoreError
from dali_pipes.formats.tar_reader import BLOCK

if TYPE_CHECKING:
    from dali_pipes.formats.photo_header import PhotoHeader
    from dali_pipes.store.base import StoredFile
    from prep.tar.gzipped import UnpackedFile
    from prep.tar.parquet import ParquetCells


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

_NUL_BLOCK = bytes(BLOCK)


class Range(NamedTuple):
    """Bytes ``[offset, offset + size)`` of a file, of an object in a bucket, of the content of a compressed one, or of
    cells.
    """

    file: "Path | StoredFile | UnpackedFile | ParquetCells"
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
    pieces = _Pieces(shard, num_bytes)
    files = Files()
    try:
        for key, members in entries:
            for component, part in members:
                name = f"{key}.{component}"
                size = len(part) if isinstance(part, bytes) else files.open(part)
                # Mostly the buffer has space for all of it: a generator for each piece would take as long as reading.
                header = member_header(name, size)
                if not pieces.fill(header):
                    yield from pieces.add(header)
                if isinstance(part, bytes):
                    yield from pieces.add(part)
                elif not pieces.fill_from(files, size):
                    yield from pieces.add_from(files, size)
                rest = _NUL_BLOCK[: -size % BLOCK]
                if not pieces.fill(rest):
                    yield from pieces.add(rest)
            on_sample()
        yield from pieces.finish()
    finally:
        files.close()


class _Pieces:
    """A buffer that is filled, yielded and filled again."""

    def __init__(self, shard: str, num_bytes: int) -> None:
        self._view = memoryview(bytearray(min(CHUNK_BYTES, num_bytes)))
        self._shard = shard
        self._num_bytes = num_bytes
        self._filled = self._total = 0

    def fill(self, data: bytes) -> bool:
        """Add ``data`` and return ``True``, if that leaves space in the buffer."""
        stop = self._filled + len(data)
        if stop >= len(self._view):
            return False
        self._count(len(data))
        self._view[self._filled : stop] = data
        self._filled = stop
        return True

    def add(self, data: bytes) -> Iterator[memoryview]:
        self._count(len(data))
        yield from self._put(data)

    def fill_from(self, files: "Files", size: int) -> bool:
        """Add ``size`` bytes of the open file and return ``True``, if that leaves space in the buffer."""
        stop = self._filled + size
        if stop >= len(self._view):
            return False
        self._count(size)
        while self._filled < stop:
            self._filled += files.read_into(self._view[self._filled : stop])
        return True

    def add_from(self, files: "Files", size: int) -> Iterator[memoryview]:
        self._count(size)
        while size:
            num = files.read_into(self._view[self._filled : self._filled + min(size, len(self._view) - self._filled)])
            size -= num
            yield from self._advance(num)

    def finish(self) -> Iterator[memoryview]:
        # Two empty blocks, and zeros that fill the last record.
        if self._num_bytes - self._total >= MAX_FILL:
            raise self._changed(self._total + 2 * BLOCK)
        yield from self._put(bytes(self._num_bytes - self._total))
        if self._filled:
            yield self._view[: self._filled]

    def _put(self, data: bytes) -> Iterator[memoryview]:
        start = 0
        while start < len(data):
            num = min(len(data) - start, len(self._view) - self._filled)
            self._view[self._filled : self._filled + num] = data[start : start + num]
            start += num
            yield from self._advance(num)

    def _count(self, num: int) -> None:
        self._total += num
        # Space for the two blocks that end a tar: without them the stream is not complete.
        if self._total + 2 * BLOCK > self._num_bytes:
            raise self._changed(self._total + 2 * BLOCK)

    def _advance(self, num: int) -> Iterator[memoryview]:
        self._filled += num
        if self._filled == len(self._view):
            self._filled = 0
            yield self._view

    def _changed(self, found: int) -> DataError:
        what = "at least " if found > self._num_bytes else ""
        return DataError(
            f"shard '{self._shard}' came out at {what}{found} bytes, {self._num_bytes} were planned: source files "
            "changed while they were packed; run it again"
        )


class Files:
    """Reads parts, one at a time. A file with ranges stays open, because the next range is mostly in the same file."""

    def __init__(self) -> None:
        self._path: str | None = None
        self._file = -1
        self._remote: StoredFile | UnpackedFile | ParquetCells | None = None
        self._offset = 0

    def open(self, part: str | Range) -> int:
        """Open a part and return its size."""
        if isinstance(part, str):
            self._open_path(part)
            self._offset = 0
            return os.fstat(self._file).st_size
        if not isinstance(part.file, Path):
            if part.file != self._remote:
                self.close()
            self._remote = part.file
        elif str(part.file) != self._path:
            self._open_path(str(part.file))
        self._offset = part.offset
        return part.size

    def read_into(self, view: memoryview) -> int:
        if self._remote is not None:
            num = self._remote.read_into(view, offset=self._offset)
            where = self._remote.url
        else:
            where = str(self._path)
            try:
                num = os.preadv(self._file, [view], self._offset)
            except OSError as exc:
                raise StoreError(f"cannot read '{where}': {exc.strerror or exc}") from exc
        if not num:
            raise DataError(f"'{where}' ends at byte {self._offset}: it was cut while it was packed; run it again")
        self._offset += num
        return num

    def read(self, size: int) -> bytes:
        """All ``size`` bytes of the open part."""
        buffer = memoryview(bytearray(size))
        num = 0
        while num < size:
            num += self.read_into(buffer[num:])
        return bytes(buffer)

    def close(self) -> None:
        """Can be called twice."""
        if self._file >= 0:
            os.close(self._file)
        if self._remote is not None:
            self._remote.close()
        self._path, self._file, self._remote = None, -1, None

    def _open_path(self, path: str) -> None:
        self.close()
        self._file = open_regular(path)
        self._path = path


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
