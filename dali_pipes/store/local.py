"""TODO: dali_pipes/store/local.py."""

import contextlib
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from dali_pipes.errors import StoreError
from dali_pipes.store.base import ObjectEntry

__all__ = [
    "LocalStore",
]


class LocalStore:
    """A directory of files. Writes go to a temporary name and are renamed."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @property
    def url(self) -> str:
        return str(self.directory)

    def locate(self, name: str) -> str:
        return str(self.directory / name)

    def list(self, prefix: str) -> list[ObjectEntry]:
        folder = self.directory / prefix.rpartition("/")[0]
        if not folder.is_dir():
            return []
        # Not the folders below: a bucket lists itself, a directory may be the root of everything.
        files = (path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
        named = ((str(path.relative_to(self.directory)), path) for path in files)
        return [
            ObjectEntry(name=name, size=path.stat().st_size, checksum=None)
            for name, path in sorted(named)
            if name.startswith(prefix)
        ]

    def read(self, name: str) -> bytes:
        with self.open(name) as stream:
            return stream.read()

    def find(self, name: str) -> bytes | None:
        return self.read(name) if (self.directory / name).is_file() else None

    def read_range(self, name: str, *, start: int, size: int) -> bytes:
        with self.open(name) as stream:
            stream.seek(start)
            return stream.read(size)

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[BinaryIO]:
        try:
            stream = (self.directory / name).open("rb")
        except OSError as exc:
            raise StoreError(f"cannot read '{self.locate(name)}': {exc.strerror or exc}") from exc
        with stream:
            yield stream

    def write(self, name: str, data: bytes) -> None:
        with self._replacing(name) as stream:
            stream.write(data)

    def upload(self, name: str, path: Path) -> None:
        with path.open("rb") as source, self._replacing(name) as stream:
            shutil.copyfileobj(source, stream, 1 << 20)

    def write_stream(self, name: str, chunks: "Callable[[], Iterable[memoryview]]", *, num_bytes: int) -> None:
        """Create or replace a file from a stream; what ``chunks`` raises comes through as it is."""
        with self._replacing(name) as stream:
            for chunk in chunks():
                stream.write(chunk)
        assert self.size(name) == num_bytes, "the stream's length was announced"

    @contextlib.contextmanager
    def _replacing(self, name: str) -> Iterator[BinaryIO]:
        target = self.directory / name
        # Named before it is made: a worker may be told to end at any point in between.
        partial = target.parent / f".partial-{secrets.token_hex(8)}"
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                with partial.open("xb") as stream:
                    yield stream
                    stream.flush()
                    partial.chmod(0o644)
                    partial.rename(target)
            except BaseException:
                partial.unlink(missing_ok=True)
                raise
        except OSError as exc:
            raise StoreError(f"cannot write '{self.locate(name)}': {exc.strerror or exc}") from exc

    def size(self, name: str) -> int | None:
        path = self.directory / name
        return path.stat().st_size if path.is_file() else None

    def delete(self, name: str) -> None:
        (self.directory / name).unlink(missing_ok=True)
