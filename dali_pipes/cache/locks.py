"""Lock bytes of a file between the processes of a node; a lock ends with its owner, however the owner ends.

These are open-file-description locks (``fcntl(2)``, ``F_OFD_SETLK``). They belong to the opened file, not to the
process: two loaders of one process exclude each other too, and closing another descriptor of the same file drops no
lock. A forked child inherits the opened file, and with it the locks. It closes the file at once; otherwise the
parent's locks would outlive the parent.

# Note [signals]: an exception from a signal's handler, Ctrl-C for instance, can come between any two instructions, also
between taking a lock and the block that would release it. If a living process keeps a lock by mistake, it stops all
others on the node. Handlers run in the main thread only. So `shielded` moves the main thread's work under a lock into
another thread, while the main thread waits: an exception ends the waiting, not the work.
"""

import _thread
import errno
import fcntl
import functools
import os
import struct
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

from dali_pipes.cache.own_files import open_own

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

# struct flock of 64-bit Linux: type, whence, start, length, pid; the pid must be 0.
_FLOCK = struct.Struct("@hhqqi4x")

_inside = threading.local()
_open: "weakref.WeakSet[LockFile]" = weakref.WeakSet()


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
        _open.add(self)

    def lock(self, byte: int) -> None:
        """Wait for the byte's lock; an exception from a signal's handler ends the wait."""
        self._call(fcntl.F_OFD_SETLKW, fcntl.F_WRLCK, byte)
        self.held.add(byte)

    def try_lock(self, byte: int) -> bool:
        """Take the byte's lock if it is free."""
        try:
            self._call(fcntl.F_OFD_SETLK, fcntl.F_WRLCK, byte)
        except OSError as exc:
            if exc.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise
        self.held.add(byte)
        return True

    def unlock(self, byte: int) -> None:
        self._call(fcntl.F_OFD_SETLK, fcntl.F_UNLCK, byte)
        self.held.discard(byte)

    def is_locked(self, byte: int) -> bool:
        """Whether another opening of this file has the byte's lock."""
        found = self._call(fcntl.F_OFD_GETLK, fcntl.F_WRLCK, byte)
        return bool(_FLOCK.unpack(found)[0] != fcntl.F_UNLCK)

    def close(self) -> None:
        """Close the file, which drops its locks. Can be called twice."""
        file, self.file = self.file, -1
        if file >= 0:
            os.close(file)

    def _call(self, command: int, kind: int, byte: int) -> bytes:
        return fcntl.fcntl(self.file, command, _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0))


class Mutex:
    """One byte's lock as a context manager; excludes other processes and other threads of this one."""

    def __init__(self, file: LockFile, byte: int) -> None:
        self._file, self._byte = file, byte
        # Threads share the opened file, so its lock does not exclude them.
        self._threads = threading.Lock()

    def __enter__(self) -> None:
        _inside.depth = getattr(_inside, "depth", 0) + 1
        try:
            self._threads.acquire()
            try:
                self._file.lock(self._byte)
            except BaseException:
                self._threads.release()
                raise
        except BaseException:
            _inside.depth -= 1
            raise

    def __exit__(self, *_: object) -> None:
        try:
            self._file.unlock(self._byte)
        finally:
            self._threads.release()
            _inside.depth -= 1


def in_mutex() -> bool:
    """Whether this thread is inside a `Mutex`, or waits for one.

    The garbage collector can run a finalizer anywhere, also there. Then the finalizer must not wait for a mutex.
    """
    return bool(getattr(_inside, "depth", 0))


def shielded(call: Callable[[], Result]) -> Result:
    """Call a function and return its result; signals do not interrupt it. Note [signals]."""
    if threading.get_ident() != threading.main_thread().ident or sys.is_finalizing():
        return call()
    results: list[Result] = []
    errors: list[BaseException] = []
    ended = threading.Lock()
    ended.acquire()

    def run() -> None:
        try:
            results.append(call())
        except BaseException as exc:  # noqa: BLE001 (raised below, in the thread that called)
            errors.append(exc)
        finally:
            ended.release()

    try:
        # Not a threading.Thread: its start and join are Python code, and break if an exception interrupts them.
        _thread.start_new_thread(run, ())
    except RuntimeError:  # the interpreter is about to end, and starts no thread
        return call()
    ended.acquire()
    if errors:
        # If this frame kept a reference to the error, the error would keep itself alive, and all that its frames hold.
        try:
            raise errors[0]
        finally:
            errors.clear()
    return results[0]


def uninterrupted(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Decorate a function or method: each call is `shielded`. Note [signals]."""

    @functools.wraps(function)
    def wrapped(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        return shielded(lambda: function(*args, **kwargs))

    return wrapped


def _close_in_child() -> None:
    for file in list(_open):
        file.close()


os.register_at_fork(after_in_child=_close_in_child)
