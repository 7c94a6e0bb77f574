"""Read the content of a gzip file, on disk or in a bucket, front to back, and name parts of it by their offsets."""

import gzip
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

from dali_pipes.errors import DataError, StoreError

if TYPE_CHECKING:
    from dali_pipes.store.http.objects import ObjectFile


class ReadStream:
    """A file that is read by offsets, as a stream from its first byte on; a context manager."""

    def __init__(self, file: "ObjectFile | UnpackedFile") -> None:
        self._file, self._position = file, 0

    def read(self, size: int) -> bytes:
        buffer = bytearray(size)
        num = self._file.read_into(memoryview(buffer), offset=self._position)
        self._position += num
        return bytes(memoryview(buffer)[:num])

    def seek(self, offset: int) -> int:
        self._position = offset
        return offset

    def __enter__(self) -> "ReadStream":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


class UnpackedFile:
    """The content of a gzip file. Two objects for the same file are equal; it pickles without open files.

    It should be read forward: to reach later bytes, it unpacks all bytes in between; for earlier ones it starts again.
    """

    def __init__(self, file: "Path | ObjectFile") -> None:
        self._file = file
        self._stream: gzip.GzipFile | None = None

    @property
    def url(self) -> str:
        return str(self._file) if isinstance(self._file, Path) else self._file.url

    def __eq__(self, other: object) -> bool:
        return isinstance(other, UnpackedFile) and self._file == other._file

    def __hash__(self) -> int:
        return hash(self._file)

    def __reduce__(self) -> "tuple[type[UnpackedFile], tuple[Path | ObjectFile]]":
        return UnpackedFile, (self._file,)

    def read_into(self, view: memoryview, *, offset: int) -> int:
        """Read into the view and return the number of bytes, at least one; 0 at the end of the content."""
        try:
            if self._stream is None:
                self._stream = self._open()
            return self._stream.readinto(view) if self._stream.seek(offset) == offset else 0
        except (gzip.BadGzipFile, EOFError, zlib.error) as exc:
            self.close()
            raise DataError(f"'{self.url}' is not a complete gzip file: {exc}; pack it anew") from exc
        except OSError as exc:
            self.close()
            raise StoreError(f"cannot read '{self.url}': {exc.strerror or exc}") from exc

    def close(self) -> None:
        """Can be called twice; reading opens it anew."""
        if self._stream is not None:
            self._stream.close()
        self._stream = None
        if not isinstance(self._file, Path):
            self._file.close()

    def _open(self) -> gzip.GzipFile:
        if isinstance(self._file, Path):
            return gzip.GzipFile(self._file, "rb")
        return gzip.GzipFile(fileobj=cast("BinaryIO", ReadStream(self._file)), mode="rb")
