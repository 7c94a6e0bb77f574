"""Open and remove the files of a user's own cache directory, and move aside what cannot be read.

The directory is opened once, and names are looked up in it, not in a path: whoever may write to the directories above
can put another one at the path, but not under an open descriptor. So the cache also works below a directory that others
may write to, such as /dev/shm or a volume of a container.
"""

import contextlib
import errno
import fcntl
import logging
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from dali_pipes.cache.blocks import OTHER_DIRECTORY
from dali_pipes.errors import CacheError

_log = logging.getLogger(__name__)

DAMAGED = ".damaged"
"""The end of the name of a file that was moved aside."""

# Errors of open(2) for names that this user cannot open as a file: a link, a directory, a socket.
_NOT_A_FILE = {errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.ENODEV, errno.EACCES, errno.EPERM, errno.ETXTBSY}


class DamagedFileError(CacheError):
    """A file of the cache directory cannot be used. The cause is in the file, and trying again does not help."""


def open_own(name: str | Path, *, directory: int | None = None, flags: int = 0) -> int:
    """Open a file of this user for reading and writing, and return its descriptor; it never waits, nor follows a link.

    Args:
        name: The file's name.
        directory: Descriptor of its directory; ``None``: ``name`` is a path.
        flags: Further flags of open(2). A file that is made has mode 0600.

    Raises:
        DamagedFileError: If the name belongs to anything but a file of this user with one name.
        OSError: If it cannot be opened for another reason.
    """
    wanted = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | flags
    try:
        file = os.open(name, wanted, 0o600, dir_fd=directory)
    except OSError as exc:
        if exc.errno in _NOT_A_FILE:
            raise DamagedFileError(f"'{name}' is not a file that this user can read and write: {exc.strerror}") from exc
        raise
    try:
        found = os.fstat(file)
        # A file with a second name may be any file of this user, which nobody meant for the cache.
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_nlink != 1:
            raise DamagedFileError(f"'{name}' is not a file of this user's cache")
        if stat.S_IMODE(found.st_mode) & 0o077:
            os.fchmod(file, 0o600)
    except BaseException:
        os.close(file)
        raise
    return file


class OwnDirectory:
    """A user's own cache directory, mode 0700, which is made if it is not there.

    Raises:
        CacheError: If something else has its name, or it cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = -1
        """Its descriptor, -1 when closed."""
        try:
            with contextlib.suppress(FileExistsError):  # checked below
                path.mkdir(mode=0o700)
            self.file = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as exc:
            if exc.errno in (errno.ELOOP, errno.ENOTDIR, errno.EACCES, errno.EPERM) and os.path.lexists(path):
                raise self._not_own() from exc
            raise CacheError(f"cannot make '{path}': {exc.strerror}; {OTHER_DIRECTORY}") from exc
        found = os.fstat(self.file)
        if found.st_uid != os.geteuid():
            self.close()
            raise self._not_own()
        if stat.S_IMODE(found.st_mode) & 0o077:
            os.fchmod(self.file, 0o700)

    def close(self) -> None:
        """Close it. Can be called twice."""
        file, self.file = self.file, -1
        if file >= 0:
            os.close(file)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Exclude other processes here, also before there is a lock file."""
        fcntl.flock(self.file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self.file, fcntl.LOCK_UN)

    def names(self) -> list[str]:
        """List the names in it, in no order."""
        return os.listdir(self.file)  # noqa: PTH208 (of a descriptor)

    def stat(self, name: str) -> os.stat_result:
        """Return what is known of a name; a link is not followed."""
        return os.stat(name, dir_fd=self.file, follow_symlinks=False)

    def open(self, name: str, *, flags: int = 0) -> int:
        """See `open_own`."""
        return open_own(name, directory=self.file, flags=flags)

    def read_text(self, name: str, *, max_bytes: int) -> str:
        """Read the beginning of a small file; empty if it cannot be read."""
        try:
            file = self.open(name)
        except (OSError, DamagedFileError):
            return ""
        try:
            return os.pread(file, max_bytes, 0).decode(errors="replace")
        finally:
            os.close(file)

    def rename(self, name: str, other: str) -> None:
        os.rename(name, other, src_dir_fd=self.file, dst_dir_fd=self.file)

    def remove(self, name: str) -> None:
        """Remove a file; a directory is moved aside. Nothing happens if there is no such name."""
        try:
            os.unlink(name, dir_fd=self.file)
        except FileNotFoundError:
            pass
        except (IsADirectoryError, PermissionError):
            self.set_aside(name, "a directory has its name")

    def set_aside(self, name: str, cause: str) -> None:
        """Give a file that cannot be used another name, which no loader reads, and log that."""
        taken, number = set(self.names()), 0
        while f"{name}.{number}{DAMAGED}" in taken:
            number += 1
        other = f"{name}.{number}{DAMAGED}"
        try:
            self.rename(name, other)
        except FileNotFoundError:
            return
        _log.warning(
            "the cache's file '%s' is damaged (%s): it is called '%s' from now on, and a new one is made; "
            "dali-pipes cache clear removes it",
            self.path / name,
            cause,
            other,
        )

    def damaged(self) -> dict[str, int]:
        """List what was moved aside, and the bytes that each name takes."""
        return {name: self.stat(name).st_blocks * 512 for name in self.names() if name.endswith(DAMAGED)}

    def remove_damaged(self) -> int:
        """Remove what was moved aside, directories with all that is in them; returns the bytes freed."""
        freed = 0
        for name, num_bytes in self.damaged().items():
            try:
                os.unlink(name, dir_fd=self.file)
            except (IsADirectoryError, PermissionError):
                shutil.rmtree(name, ignore_errors=True, dir_fd=self.file)
            freed += num_bytes
        return freed

    def _not_own(self) -> CacheError:
        return CacheError(f"'{self.path}' is not this user's own directory; remove it, or {OTHER_DIRECTORY}")
