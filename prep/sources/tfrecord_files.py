"""Find TFRecord files, and read their records with all checksums verified. TensorFlow is not needed.

A record in a file is::

    length, 8 bytes   masked CRC32C of the length   data   masked CRC32C of the data     (little-endian)
"""

import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import google_crc32c

from dali_pipes.errors import DataError

_LENGTH = struct.Struct("<QI")
_CRC = struct.Struct("<I")
LENGTH_BYTES = _LENGTH.size
"""Bytes before a record's data: its length, and the length's checksum."""
FRAME_BYTES = _LENGTH.size + _CRC.size
"""Bytes of a record without its data."""
# A record is in memory while it is read. A protocol buffer has less than 2 GiB.
MAX_RECORD_BYTES = 1 << 31


def find_tfrecords(paths: Sequence[Path]) -> list[Path]:
    """The named files, and of a directory its files with ``tfrecord`` in their names, sorted."""
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            # An .idx file is DALI's index of such a file.
            inside = sorted(
                entry
                for entry in path.iterdir()
                if "tfrecord" in entry.name.lower() and entry.suffix != ".idx" and entry.is_file()
            )
            if not inside:
                raise DataError(f"directory '{path}' holds no file with 'tfrecord' in its name; name the files")
            files += inside
        elif path.is_file():
            files.append(path)
        else:
            raise DataError(f"no such file or directory: '{path}'")
    return files


def masked_crc32c(data: bytes) -> int:
    """TFRecord's checksum: CRC32C, rotated and plus a constant, because the data may contain CRCs of their own.

    >>> hex(masked_crc32c(b"123456789"))
    '0xc78ab0e5'
    """
    crc: int = google_crc32c.value(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def read_frames(stream: BinaryIO, num_bytes: int) -> Iterator[tuple[int, bytes, str | None]]:
    """Yield each record's offset, data and fault, if it has one. A wrong length ends the search."""
    offset = 0
    while head := stream.read(_LENGTH.size):
        if len(head) < _LENGTH.size:
            yield offset, head, f"the file ends after {len(head)} of its first {_LENGTH.size} bytes"
            return
        length, crc = _LENGTH.unpack(head)
        if (found := masked_crc32c(head[:8])) != crc:
            problem = (
                f"its length has the checksum {found:08x}, the file says {crc:08x}; this and the rest of the file, "
                f"{num_bytes - offset} bytes, cannot be read"
            )
            yield offset, head, problem
            return
        stop = offset + _LENGTH.size + length + _CRC.size
        if length > MAX_RECORD_BYTES or stop > num_bytes:
            yield offset, head, f"it claims bytes {offset} to {stop}, the file has {num_bytes}: it was cut off"
            return
        data = stream.read(length)
        (crc,) = _CRC.unpack(stream.read(_CRC.size))
        is_good = (found := masked_crc32c(data)) == crc
        yield offset, data, None if is_good else f"its data have the checksum {found:08x}, the file says {crc:08x}"
        offset = stop


def file_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as exc:
        raise DataError(f"cannot read '{path}': {exc.strerror or exc}") from exc
