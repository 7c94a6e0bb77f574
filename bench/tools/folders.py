"""Give a run directories to write into, check the free space first, and delete them, even if the run was killed.

All directories of a run lie in one, ``dali-pipes-bench-...``, in which the run holds a lock for as long as it lives.
The kernel releases the lock however the run ends (`dali_pipes.cache.locks`). So the next run in the same place knows
which directories have no owner any more, without process numbers, which are reused, and without ages.
"""

import contextlib
import shutil
import tempfile
from pathlib import Path

from dali_pipes.cache.locks import LockFile
from dali_pipes.commands.options import format_bytes

PREFIX = "dali-pipes-bench-"
LOCK = ".owner"
BYTE = 0
"""Of the lock's file."""


class RunFolder:
    """The directory of one run, made when the first is asked for; a context manager that deletes it.

    Args:
        parent: Where it lies; ``None``: the directory for temporary files.
    """

    def __init__(self, parent: Path | None = None) -> None:
        self.parent = Path(tempfile.gettempdir()) if parent is None else parent
        self._path: Path | None = None
        self._lock: LockFile | None = None
        self._made = 0

    def new(self) -> Path:
        """A new empty directory in it."""
        if self._path is None:
            self._path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=self.parent))
            # Held before it has its name: who looks for leftovers finds it locked or not at all.
            unnamed = self._path / f"{LOCK}.new"
            self._lock = LockFile(unnamed)
            self._lock.lock(BYTE)
            unnamed.rename(self._path / LOCK)
        self._made += 1
        path = self._path / f"{self._made}"
        path.mkdir()
        return path

    def close(self) -> None:
        """Delete it with all that is in it. Can be called twice."""
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
    """Delete the directories of runs that were killed; those of runs that go on, and of other users, stay.

    Args:
        parent: As of `RunFolder`.

    Returns:
        What was deleted.
    """
    removed = []
    for path in sorted((Path(tempfile.gettempdir()) if parent is None else parent).glob(f"{PREFIX}*/{LOCK}")):
        # Gone since, or somebody else's.
        with contextlib.suppress(OSError):
            lock = LockFile(path)
            try:
                if lock.try_lock(BYTE):
                    shutil.rmtree(path.parent, ignore_errors=True)
                    removed.append(path.parent)
            finally:
                lock.close()
    return removed


def check_writable(directory: Path, *, option: str = "--work") -> None:
    """Refuse a directory that takes no file.

    Raises:
        ValueError: If it is not there, or cannot be written.
    """
    if not directory.is_dir():
        raise ValueError(f"{option} '{directory}': no such directory; name one with room for the data set")
    try:
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as exc:
        raise ValueError(f"{option} '{directory}': cannot be written: {exc.strerror}; name another directory") from exc


def check_room(
    directory: Path, num_bytes: int, *, what: str, option: str = "--work", less: str = "take less: --samples"
) -> None:
    """Refuse what would fill the disk.

    Args:
        directory: Where it would be written.
        num_bytes: Bytes that are needed.
        what: What is written, for the error.
        option: The option that names another directory.
        less: How to need fewer bytes, for the error.

    Raises:
        ValueError: If less is free.
    """
    free = shutil.disk_usage(directory).free
    if free < num_bytes:
        raise ValueError(
            f"{what} needs {format_bytes(num_bytes)}, and '{directory}' has {format_bytes(free)} free; name a "
            f"directory with more: {option} DIRECTORY, or {less}"
        )
