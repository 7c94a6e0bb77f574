"""Write one stream to a store and to a directory, so that nothing is made or read twice.

A file gets its name when the store has its bytes. Before that it has none, on file systems that know files without
names (most do); on others its name begins with ``.partial-``, and it is deleted when its writer ends.
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
from prep.pack.tasks import StreamTarget

# Errors of file systems that have no files without names.
_NO_UNNAMED = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT)


@dataclass(frozen=True, kw_only=True)
class CopiedTarget:
    """A target, and a directory that gets the same bytes under the same names; pickles, for a worker."""

    target: StreamTarget | None
    """``None`` if it has the shard already, and only the copy lacks it."""
    directory: Path

    def write_stream(self, name: str, chunks: Callable[[], Iterable[memoryview]], *, num_bytes: int) -> None:
        """Create or replace an object and its copy; each is there whole or not at all.

        Raises:
            StoreError: If either cannot be written. The copy gets its name last: it is not there without its object.
        """
        path = self.directory / name
        with _writing(path), _unnamed(path) as (stream, publish):

            def copied() -> Iterator[memoryview]:
                # The store may start another attempt, from the first byte on.
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
    """A file without a name, and a function that gives it its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # The name is chosen before the file is made: a worker may be ended at any point in between.
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
                    # A link cannot replace a file, so the file gets a free name first. The path is absolute, so
                    # src_dir_fd has no effect; but without it Python calls link(), which does not follow links.
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
