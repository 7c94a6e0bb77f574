"""One stream to a store and to a directory: what is uploaded is kept, without its being made or read twice.

A file gets its name when the store has what it holds. Before that it has none, where the file system knows files
without names (most do); elsewhere it has a name that begins with ``.partial-`` and goes with whoever writes it.
"""

import contextlib
import errno
import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from dali_pipes.errors import StoreError
from dali_pipes.store.local import LocalStore
from prep.pack.tasks import StreamTarget

__all__ = ["CopiedTarget"]

# What file systems say that have no files without names.
_NO_UNNAMED = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT)


@dataclass(frozen=True, kw_only=True)
class CopiedTarget:
    """Where shards go, and a directory that gets the same bytes under the same names; pickles, for a worker."""

    target: StreamTarget | None
    """``None``: it has them already, the copy alone is lacking."""
    copy: LocalStore

    def write_stream(self, name: str, chunks: Callable[[], Iterable[memoryview]], *, num_bytes: int) -> None:
        """Create or replace an object and its copy; each is there whole or not at all.

        Raises:
            StoreError: If either cannot be written. The copy is named last: it is not there without its object.
        """
        path = self.copy.directory / name
        with _writing(path), _unnamed(path) as (stream, publish):

            def copied() -> Iterator[memoryview]:
                # The store may ask for another attempt, from the first byte on.
                with _writing(path):
                    stream.seek(0)
                    stream.truncate()
                for chunk in chunks():
                    with _writing(path):
                        stream.write(chunk)
                    yield chunk

            if self.target is not None:
                self.target.write_stream(name, copied, num_bytes=num_bytes)
            else:
                for _ in copied():
                    pass
            stream.flush()
            assert stream.tell() == num_bytes, "the stream's length was announced"
            publish()


@contextlib.contextmanager
def _unnamed(path: Path) -> Iterator[tuple[BinaryIO, Callable[[], None]]]:
    """A file to be, and what gives it its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Named before it is made: a worker may be told to end at any point in between.
    partial = path.parent / f".partial-{secrets.token_hex(8)}"
    try:
        try:
            descriptor = os.open(path.parent, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600)
            is_named = False
        except OSError as exc:
            if exc.errno not in _NO_UNNAMED:
                raise
            descriptor = os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
            is_named = True
        with os.fdopen(descriptor, "wb") as stream:

            def publish() -> None:
                os.fchmod(descriptor, 0o644)
                if not is_named:
                    # A name cannot be given that is taken: by way of one that is not. Of a path that is absolute
                    # src_dir_fd is not looked at; without it Python calls link(), which follows no link.
                    os.link(f"/proc/self/fd/{descriptor}", partial, src_dir_fd=descriptor, follow_symlinks=True)
                partial.rename(path)

            yield stream, publish
    finally:
        partial.unlink(missing_ok=True)


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        raise StoreError(f"cannot write the copy '{path}': {exc.strerror or exc}") from exc
