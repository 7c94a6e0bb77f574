"""Own a folder on local disk in which outputs, or parts of them, are put together, for one process at a time."""

import contextlib
import fcntl
import hashlib
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from dali_pipes.errors import StoreError
from dali_pipes.store.base import Store


@contextlib.contextmanager
def open_spool(target: Store, prefix: str, spool_dir: Path | None) -> Iterator[Path]:
    """Make a folder for one output, and remove it at the end. Files of a killed run in it are removed first.

    Raises:
        StoreError: If another process writes the same output, or the folder cannot be made or written.
    """
    if spool_dir is None and target.directory is not None:
        place = target.directory / prefix
        base, start, text = place.parent, ".partial-", place.name
    else:
        base, start = spool_dir or Path(tempfile.gettempdir()), f"dali-pipes-shuffle-{os.getuid()}-"
        text = target.locate(prefix)
    folder = base / (start + hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=6).hexdigest())
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise StoreError(f"'{folder}' is not a folder of this user; remove it, or name another with --spool-dir")
        lock = os.open(folder, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as exc:
        raise StoreError(f"cannot write '{folder}': {exc.strerror or exc}; name another with --spool-dir") from exc
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _empty(folder)
        try:
            yield folder
        except OSError as exc:
            if exc.filename is not None and folder not in Path(os.fsdecode(exc.filename)).parents:
                raise
            raise StoreError(
                f"cannot write '{exc.filename or folder}': {exc.strerror or exc}; parts of the output are kept there: "
                "name a disk with more free space with --spool-dir"
            ) from exc
        finally:
            _empty(folder)
            with contextlib.suppress(OSError):  # a worker that ends may still write, and NFS keeps open files
                folder.rmdir()
    except BlockingIOError as exc:
        raise StoreError(f"another process is writing '{target.locate(prefix)}' from '{folder}'; wait for it") from exc
    finally:
        os.close(lock)


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink(missing_ok=True)
