"""Read the members of a tar from a stream, front to back, and detect an archive that was cut off.

`tarfile` is not used, for three reasons: it takes a header that it cannot read for the end of the archive; it loops
over as many bytes as a header claims, even if they are missing; it holds an extended header of any size in memory.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import BinaryIO, NamedTuple, cast

import xxhash

from dali_pipes.errors import DataError, printable
from dali_pipes.formats.names import split_key

BLOCK = 512
READ_BYTES = 1 << 20
# The limit for a member's name or its set of PAX records. A path of Linux has at most 4 KiB.
MAX_EXTENDED_BYTES = 1 << 20

# Kinds of members, by their type flag.
REGULAR = frozenset(b"0\x007")
WITHOUT_DATA = frozenset(b"123456")
"""Links, devices, directories and pipes. No data follow their header, even if it gives a size."""
LINKS = frozenset(b"12")
DIRECTORY = ord("5")
_PAX, _PAX_GLOBAL = frozenset(b"xX"), ord("g")
_GNU_NAME, _GNU_LINK, _GNU_SPARSE = b"LKS"
_PAX_SPARSE = b"GNU.sparse."

_OCTAL = re.compile(rb"[ \0]*([0-7]*)[ \0]*")
_PAX_RECORD = re.compile(rb"([1-9][0-9]{0,6}) ([^=]+)=", re.DOTALL)
_DIGITS = re.compile(rb"[0-9]{1,19}")


@dataclass(frozen=True)
class Member:
    """One file of a sample, valid until the next member is read."""

    name: str
    """The name in the archive, unchanged. It is used as a key, never as a path. Bytes that are not UTF-8 become
    surrogates."""
    key: str
    component: str
    """The component's name in lower case, as in WebDataset."""
    offset: int
    """The position of its first byte in the archive, a multiple of 512."""
    size: int
    take: Callable[[int], bytes]
    """Returns the file's next bytes, at most so many; nothing at its end. Call it before the next member is read."""
    checksum: Callable[[], int]
    """Reads the rest of the file, and returns the XXH64 of all of it. Call it before the next member is read."""

    def read(self) -> bytes:
        """The file's bytes. Use it where the size was checked: a small compressed tar can hold a file of any size."""
        return self.take(self.size)

    def pieces(self) -> Iterator[bytes]:
        """The file's bytes, in pieces of at most `READ_BYTES`."""
        while piece := self.take(READ_BYTES):
            yield piece


class Header(NamedTuple):
    name: bytes
    size: int
    kind: int


class ArchiveReader:
    """Iterates the members of a tar that belong to samples. Reads all formats of tar: ustar, GNU and PAX.

    Directories, links, devices and names that belong to no sample are skipped. The stream is read once, front to back
    and to its end, so it may come from the network. Afterwards `num_bytes` and `checksum` describe the whole archive.
    The reader holds the bytes of a member that `Member.take` is asked for, and never as many as a wrong header claims.

    It has no len(), because a tar has no table of contents. For indexed shards, the manifest and the shard index know
    the number of samples.

    Args:
        stream: The archive's bytes.
        shard: The archive's name, for errors.
        size: The archive's size in bytes, if it is known. Then a header that claims more is refused before its member
            is read; otherwise at the end of the stream.

    Raises:
        DataError: While iterating: if the archive is not a tar, was cut off (also between two members), lacks a
            member's header, or holds a sparse file.
    """

    def __init__(self, stream: BinaryIO, *, shard: str, size: int | None = None) -> None:
        self._stream, self._shard, self._size = stream, shard, size
        self._state = xxhash.xxh64()
        self._piece, self._piece_start = b"", 0
        self._block = b""
        """The header block that was read last."""
        self._position = 0
        """The number of bytes that were taken; `num_bytes`, the number that was read, may be larger."""
        self.num_bytes = 0

    @property
    def checksum(self) -> int:
        """XXH64 of the bytes read so far."""
        return cast("int", self._state.intdigest())

    def __iter__(self) -> Iterator[Member]:
        everywhere: dict[bytes, bytes] = {}
        records: dict[bytes, bytes] = {}
        long_name: bytes | None = None
        is_described = False  # whether an extended header waits for its member
        while (header := self._next_header()) is not None:
            name, size, kind = header
            is_described = kind in _PAX or kind in (_GNU_NAME, _GNU_LINK)
            if kind == _PAX_GLOBAL:
                everywhere |= self._pax_records(header)
            elif kind in _PAX:
                records = self._pax_records(header)
            elif kind in (_GNU_NAME, _GNU_LINK):
                content = self._extended(header)
                long_name = content.partition(b"\0")[0] if kind == _GNU_NAME else long_name
            else:
                said = everywhere | records
                # An empty record has the same meaning as no record.
                name = said.get(b"path") or (name if long_name is None else long_name)
                if kind in WITHOUT_DATA:
                    self._skip_special(name.decode("utf-8", "surrogateescape"), kind)
                else:
                    size = self._pax_size(said, name, size)
                    yield from self._member(name.decode("utf-8", "surrogateescape"), size, kind, said)
                records, long_name = {}, None
        if is_described:
            raise self._unreadable("the last extended header describes a member that does not follow")
        while self._read_piece():
            pass

    def _skip_special(self, name: str, kind: int) -> None:
        """Called for each link, directory, device and pipe. Override it to raise instead of skipping."""

    def _names(self, name: str) -> tuple[str, str] | None:
        """Key and component of a regular file, or ``None`` to skip it."""
        return split_key(name)

    def _member(self, name: str, size: int, kind: int, said: Mapping[bytes, bytes]) -> Iterator[Member]:
        offset = self._position
        stop = offset + size
        if self._size is not None and stop > self._size:
            raise DataError(
                f"shard '{self._shard}' is cut off: member '{printable(name)}' claims bytes {offset} to {stop}, the "
                f"shard has {self._size}"
            )
        if kind == _GNU_SPARSE or _PAX_SPARSE in said:
            raise DataError(
                f"shard '{self._shard}': member '{printable(name)}' is a sparse file, expected a file without gaps; "
                "pack it anew"
            )
        names = self._names(name)
        if names is not None and kind in REGULAR:
            state = xxhash.xxh64()

            def take(num: int) -> bytes:
                data = self._take_data(offset, stop, name, num)
                state.update(data)
                return data

            def checksum() -> int:
                while take(READ_BYTES):
                    pass
                return cast("int", state.intdigest())

            yield Member(name, names[0], names[1].lower(), offset, size, take, checksum)
        self._skip(offset + -(-size // BLOCK) * BLOCK - self._position)
        if self._position < stop:
            raise self._cut_off(f"member '{printable(name)}' claims bytes {offset} to {stop}")

    def _next_header(self) -> Header | None:
        """The next member's header, or ``None`` at the block of zeros that ends an archive."""
        start = self._position
        block = self._block = self._take(BLOCK)
        if len(block) < BLOCK:
            if self.num_bytes >= BLOCK:
                raise self._cut_off(f"expected an end-of-archive block after byte {start}")
            raise self._unreadable(f"{'its header is cut off' if block else 'empty file'}, {self.num_bytes} bytes read")
        if not any(block):
            return None
        if not _is_header(block):
            raise self._unreadable(f"no header at byte {start}")
        size = parse_number(block[124:136])
        if size is None or size < 0:
            shown = "not a number" if size is None else str(size)
            raise self._unreadable(f"the header at byte {start} claims a size that is {shown}")
        name = block[:100].partition(b"\0")[0]
        kind = block[156]
        if block[257:263] == b"ustar\0" and (folder := block[345:500].partition(b"\0")[0]):
            name = folder + b"/" + name
        if kind == 0 and name.endswith(b"/"):
            kind = DIRECTORY  # the oldest tars have no kinds and mark a directory by a slash
        return Header(name, size, kind)

    def _extended(self, header: Header) -> bytes:
        """The content of a header of PAX records or of a long name."""
        start = self._position
        if header.size > MAX_EXTENDED_BYTES:
            raise self._unreadable(
                f"the extended header at byte {start} claims {header.size} bytes, at most {MAX_EXTENDED_BYTES} are read"
            )
        content = self._take(-(-header.size // BLOCK) * BLOCK)[: header.size]
        if len(content) < header.size:
            raise self._cut_off(f"the extended header at byte {start} claims {header.size} bytes")
        return content

    def _pax_records(self, header: Header) -> dict[bytes, bytes]:
        """The PAX records that describe a member's place; the many records of a sparse file become one."""
        start = self._position
        content = self._extended(header)
        records: dict[bytes, bytes] = {}
        at = 0
        # Some writers pad the rest with zeros.
        while at < len(content) and content[at]:
            match = _PAX_RECORD.match(content, at)
            stop = at + int(match[1]) if match else 0
            if match is None or not match.end() < stop <= len(content) or content[stop - 1] != ord("\n"):
                raise self._unreadable(f"no PAX record at byte {start + at}")
            if match[2] in (b"path", b"size", b"mtime"):
                records[match[2]] = content[match.end() : stop - 1]
            elif match[2].startswith(_PAX_SPARSE):
                records[_PAX_SPARSE] = b""
            at = stop
        return records

    def _pax_size(self, said: Mapping[bytes, bytes], name: bytes, size: int) -> int:
        text = said.get(b"size")
        if not text:
            return size
        if not _DIGITS.fullmatch(text):
            member, claimed = (part.decode("utf-8", "surrogateescape") for part in (name, text))
            raise self._unreadable(
                f"member '{printable(member)}' claims a size that is '{printable(claimed, max_chars=40)}'"
            )
        return int(text)

    def _take_data(self, offset: int, stop: int, name: str, num: int) -> bytes:
        assert offset <= self._position <= stop, "read before the next member is asked for"
        num = min(num, stop - self._position)
        data = self._take(num)
        if len(data) < num:
            raise self._cut_off(f"member '{printable(name)}' claims bytes {offset} to {stop}")
        return data

    def _take(self, size: int) -> bytes:
        """The next ``size`` bytes, or fewer at the end of the stream."""
        parts: list[bytes] = []
        while size and (self._piece_start < len(self._piece) or self._read_piece()):
            part = self._piece[self._piece_start : self._piece_start + size]
            self._piece_start += len(part)
            self._position += len(part)
            size -= len(part)
            parts.append(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _skip(self, size: int) -> None:
        """Skip ``size`` bytes, or all to the end of the stream."""
        while size and (self._piece_start < len(self._piece) or self._read_piece()):
            step = min(size, len(self._piece) - self._piece_start)
            self._piece_start += step
            self._position += step
            size -= step

    def _read_piece(self) -> bool:
        self._piece, self._piece_start = self._stream.read(READ_BYTES), 0
        self._state.update(self._piece)
        self.num_bytes += len(self._piece)
        return bool(self._piece)

    def _cut_off(self, expected: str) -> DataError:
        return DataError(f"shard '{self._shard}' is cut off: {self.num_bytes} bytes, {expected}")

    def _unreadable(self, found: str) -> DataError:
        return DataError(f"shard '{self._shard}' is not a readable tar: {found}; pack it anew")


def _is_header(block: bytes) -> bool:
    """Whether a block has the checksum that its own field states; for the sum, that field counts as eight spaces."""
    match = _OCTAL.match(block[148:156])
    said = int(match[1] or b"0", 8) if match else -1
    found = sum(block) - sum(block[148:156]) + 8 * ord(" ")
    # Old writers summed signed characters.
    return found == said or found - 256 * sum(byte >> 7 for byte in block[:148] + block[156:]) == said


def parse_number(field: bytes) -> int | None:
    """A number in a header: octal digits, or a signed binary number if the first bit is set (GNU tar, from 8 GiB)."""
    if field[0] & 0x80:
        value = int.from_bytes(field) & ~(0x80 << 8 * (len(field) - 1))
        is_negative = field[0] & 0x40
        return value - (0x80 << 8 * (len(field) - 1)) if is_negative else value
    text = field.partition(b"\0")[0].strip()
    return int(text or b"0", 8) if re.fullmatch(rb"[0-7]*", text) else None
