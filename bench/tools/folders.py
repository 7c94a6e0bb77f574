"""Give a run directories to write into, check the free space first, and delete them, even if the run was killed.

All directories of a run lie in one folder, ``dali-pipes-bench-...``, in which the run holds a lock while it lives. The
kernel releases the lock however the run ends. So the next run in the same place knows which folders have no owner.
"""

import contextlib
import shutil
import tempfile
from pathlib import Path

from dali_pipes.cache.directory import LockFile
from dali_pipes.commands.options import format_bytes

PREFIX = "dali-pipes-bench-"
LOCK = ".owner"
_BYTE = 0


class RunFolder:
    """The folder of one run, made in ``parent`` or for temporary files with its first directory; a context manager
    deletes it.
    """

    def __init__(self, parent: Path | None = None) -> None:
        self.parent = Path(tempfile.gettempdir()) if parent is None else parent
        self._path: Path | None = None
        self._lock: LockFile | None = None
        self._made = 0

    def new(self) -> Path:
        """Make an empty directory in it."""
        if self._path is None:
            self._path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=self.parent))
            # Lock it before it gets its name, so that `remove_leftovers` finds it locked or not at all.
            unnamed = self._path / f"{LOCK}.new"
            self._lock = LockFile(unnamed)
            self._lock.lock(_BYTE)
            unnamed.rename(self._path / LOCK)
        self._made += 1
        path = self._path / f"{self._made}"
        path.mkdir()
        return path

    def close(self) -> None:
        """Delete the folder with its contents. Can be called twice."""
        path, self._path = self._path, None
        lock, self._lock = self._lock, None
        if path is not None:
            shutil.rmtree(path, ignore_errors=True)
        if lock is not None:
            lock.close()

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def remove_leftovers(parent: Path | None = None) -> list[Path]:
    """Delete the folders of runs that were killed, and return them; those of live runs and of other users stay."""
    removed = []
    for path in sorted((Path(tempfile.gettempdir()) if parent is None else parent).glob(f"{PREFIX}*/{LOCK}")):
        # The folder may be gone by now, or belong to another user.
        with contextlib.suppress(OSError):
            lock = LockFile(path)
            try:
                if lock.try_lock(_BYTE):
                    shutil.rmtree(path.parent, ignore_errors=True)
                    removed.append(path.parent)
            finally:
                lock.close()
    return removed


def check_writable(directory: Path, *, option: str = "--work") -> None:
    """Refuse a directory that is missing or cannot be written."""
    if not directory.is_dir():
        raise ValueError(f"{option} '{directory}': no such directory; name one with space for the data set")
    try:
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as exc:
        raise ValueError(f"{option} '{directory}': cannot be written: {exc.strerror}; name another directory") from exc


def check_room(
    directory: Path, num_bytes: int, *, what: str, option: str = "--work", less: str = "take less: --samples"
) -> None:
    """Refuse to write more bytes than the disk has free."""
    free = shutil.disk_usage(directory).free
    if free < num_bytes:
        raise ValueError(
            f"{what} needs {format_bytes(num_bytes)}, and '{directory}' has {format_bytes(free)} free; name a "
            f"directory with more: {option} DIRECTORY, or {less}"
        )
