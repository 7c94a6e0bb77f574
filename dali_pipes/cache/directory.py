"""Open, lock and remove the files of a user's own cache directory.

The directory is opened once, and names are looked up in it, not in a path: whoever may write to the directories above
can put another one at the path, but not under an open descriptor. So the cache also works below a directory that others
may write to, such as /dev/shm or a volume of a container.

Locks are open-file-description locks of single bytes (``fcntl(2)``, ``F_OFD_SETLK``). A lock ends with its owner,
however the owner ends. It belongs to the opened file, not to the process: two loaders of one process exclude each other
too, and closing another descriptor of the same file drops no lock. A forked child inherits the opened file, and with it
the locks. It closes the file at once; otherwise the parent's locks would outlive the parent.

# Note [signals]: an exception from a signal's handler, Ctrl-C for instance, can come after any call in the main thread.
A living process that keeps the mutex by mistake would stop all others on the node. So `Mutex.run` takes the lock inside
a ``try`` whose ``finally`` begins with the call that ends it, and which does no harm without a lock. No change needs
more: one that was interrupted is repaired as after SIGKILL.
"""

import contextlib
import errno
import fcntl
import os
import stat
import struct
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from dali_pipes.cache.extents import OTHER_DIRECTORY
from dali_pipes.errors import CacheError

Result = TypeVar("Result")

# struct flock of 64-bit Linux: type, whence, start, length, pid; the pid must be 0.
_FLOCK = struct.Struct("@hhqqi4x")


class DamagedFileError(CacheError):
    """A file of the cache directory cannot be used. The cause is in the file, and trying again does not help."""


def open_own(name: str | Path, *, directory: int | None = None, flags: int = 0) -> int:
    """Open a file of this user for reading and writing, and return its descriptor; a link is not followed.

    Args:
        name: The file's name.
        directory: Descriptor of its directory; ``None``: ``name`` is a path.
        flags: Further flags of open(2). A file that is made has mode 0600.

    Raises:
        DamagedFileError: If it belongs to another user, who may have put it there while the directory was open to all.
        OSError: If it cannot be opened.
    """
    file = os.open(name, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o600, dir_fd=directory)
    if os.fstat(file).st_uid != os.geteuid():
        os.close(file)
        raise DamagedFileError(f"'{name}' is not a file of this user")
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

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.file)

    def _not_own(self) -> CacheError:
        return CacheError(f"'{self.path}' is not this user's own directory; remove it, or {OTHER_DIRECTORY}")


class LockFile:
    """A file whose bytes are locks, readable by its owner only; each opening has its own locks.

    ``directory`` is the descriptor of the directory that ``path`` is relative to; ``None``: the working directory.

    Raises:
        DamagedFileError: If something else has the file's name.
    """

    def __init__(self, path: Path | str, *, directory: int | None = None) -> None:
        self.file = open_own(path, directory=directory, flags=os.O_CREAT)
        """The descriptor, -1 when closed."""
        self.held: set[int] = set()
        """Bytes that this opening has locked: `is_locked` shows only those of others."""
        _open_lock_files.add(self)

    def lock(self, byte: int) -> None:
        """Wait for the byte's lock."""
        fcntl.fcntl(self.file, fcntl.F_OFD_SETLKW, _flock(fcntl.F_WRLCK, byte))
        self.held.add(byte)

    def try_lock(self, byte: int) -> bool:
        """Take the byte's lock if it is free."""
        try:
            fcntl.fcntl(self.file, fcntl.F_OFD_SETLK, _flock(fcntl.F_WRLCK, byte))
        except OSError as exc:
            if exc.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise
        self.held.add(byte)
        return True

    def unlock(self, byte: int) -> None:
        fcntl.fcntl(self.file, fcntl.F_OFD_SETLK, _flock(fcntl.F_UNLCK, byte))
        self.held.discard(byte)

    def is_locked(self, byte: int) -> bool:
        """Whether another opening of this file has the byte's lock."""
        found = fcntl.fcntl(self.file, fcntl.F_OFD_GETLK, _flock(fcntl.F_WRLCK, byte))
        return bool(_FLOCK.unpack(found)[0] != fcntl.F_UNLCK)

    def close(self) -> None:
        """Close the file, which drops its locks. Can be called twice."""
        file, self.file = self.file, -1
        if file >= 0:
            os.close(file)


class Mutex:
    """One byte's lock; excludes other processes and other threads of this one."""

    def __init__(self, file: LockFile, byte: int) -> None:
        self._file = file
        self._take, self._give = _flock(fcntl.F_WRLCK, byte), _flock(fcntl.F_UNLCK, byte)
        # Threads share the opened file, so its lock does not exclude them.
        self._threads = threading.Lock()

    def run(self, function: Callable[[], Result]) -> Result:
        """Call a function while nobody else has the mutex. Note [signals]; one also ends the wait for the mutex."""
        thread = threading.get_ident()
        try:
            _threads_in_mutex.add(thread)
            with self._threads:
                try:
                    fcntl.fcntl(self._file.file, fcntl.F_OFD_SETLKW, self._take)
                    return function()
                finally:
                    fcntl.fcntl(self._file.file, fcntl.F_OFD_SETLK, self._give)
        finally:
            _threads_in_mutex.discard(thread)


_open_lock_files: "weakref.WeakSet[LockFile]" = weakref.WeakSet()
_threads_in_mutex: set[int] = set()


def in_mutex() -> bool:
    """Whether this thread is inside a `Mutex`, or waits for one.

    The garbage collector can run a finalizer anywhere, also there. Then the finalizer must not wait for a mutex.
    """
    return threading.get_ident() in _threads_in_mutex


def _flock(kind: int, byte: int) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0)


def _close_in_child() -> None:
    _threads_in_mutex.clear()
    for file in list(_open_lock_files):
        file.close()


os.register_at_fork(after_in_child=_close_in_child)
