"""Write the figures to a file that Prometheus' node exporter reads: for nodes where no further port may be open.

Each process has a file of its own, ``dali_pipes_N.prom``. It holds a lock on ``.dali_pipes_N.lock`` while it lives, so
the file of a process that was killed is known by its free lock: the next process that starts removes it.
"""

import atexit
import contextlib
import fcntl
import logging
import os
import tempfile
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest

from dali_pipes.arguments import as_number
from dali_pipes.metrics.collector import LoaderCollector

_log = logging.getLogger(__name__)

# Processes of one node that write into one directory.
_MAX_FILES = 1024
_writers: "weakref.WeakSet[TextfileWriter]" = weakref.WeakSet()


class TextfileWriter:
    """Writes one process's file again and again until it is closed. Made by `write_textfile`; a context manager."""

    def __init__(self, directory: Path, *, every_s: float, labels: Mapping[str, str] | None) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(LoaderCollector(labels=labels))
        self._pid, self._every_s = os.getpid(), every_s
        self._is_over = threading.Event()
        self._has_failed = False
        _remove_left_over(directory)
        self._lock, self.path = _claim(directory)
        try:
            self._write()
            self._thread = threading.Thread(target=self._work, name="dali-pipes-textfile", daemon=True)
            self._thread.start()
        except BaseException:
            os.close(self._lock)
            raise
        _writers.add(self)
        atexit.register(self.close)

    def __enter__(self) -> "TextfileWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the file. Can be called twice; the end of the process does it, too."""
        if self._is_over.is_set() or os.getpid() != self._pid:
            return
        self._is_over.set()
        self._thread.join()
        atexit.unregister(self.close)
        _writers.discard(self)
        self.path.unlink(missing_ok=True)
        os.close(self._lock)

    def forget(self) -> None:
        """Close the lock's descriptor, which a forked child inherits: a worker may outlive the process."""
        os.close(self._lock)

    def _work(self) -> None:
        while not self._is_over.wait(self._every_s):
            try:
                self._write()
                self._has_failed = False
            except OSError as exc:
                if not self._has_failed:
                    _log.warning("cannot write the metrics to '%s': %s; trying again", self.path, exc.strerror)
                self._has_failed = True

    def _write(self) -> None:
        # Made under a name that the exporter does not read and nobody could foresee, then renamed.
        file, path = tempfile.mkstemp(dir=self.path.parent, prefix=".dali_pipes_")
        try:
            with os.fdopen(file, "wb") as stream:
                stream.write(generate_latest(self._registry))
                os.fchmod(stream.fileno(), 0o644)  # the exporter is another user
            Path(path).replace(self.path)
        except BaseException:
            with contextlib.suppress(OSError):
                Path(path).unlink()
            raise


def write_textfile(
    directory: str | os.PathLike[str], *, every_s: float = 15.0, labels: Mapping[str, str] | None = None
) -> TextfileWriter:
    """Write the figures of this process's loaders to a file for Prometheus' node exporter, from now on.

    Call it once in each process. The file is replaced as a whole, and removed when the process ends; a file that a
    killed process left is removed when the next one starts.

    Args:
        directory: The one that the node exporter was given as ``--collector.textfile.directory``.
        every_s: Seconds between two writes; Prometheus usually asks the exporter once in 15 to 60 seconds.
        labels: See `LoaderCollector`. The exporter's ``job`` is its own: name your run here.

    Raises:
        ImportError: If prometheus-client is not installed: ``pip install 'dali-pipes[metrics]'``.
        OSError: If nothing can be written there.
        ValueError: If ``every_s`` is not positive, or a label has no proper name.
    """
    if not as_number("every_s", every_s) > 0:
        raise ValueError(f"every_s must be positive, got {every_s}")
    found = Path(directory)
    if not found.is_dir():
        raise NotADirectoryError(
            f"'{found}' is not a directory; name the one of the node exporter's --collector.textfile.directory"
        )
    return TextfileWriter(found, every_s=every_s, labels=labels)


def _remove_left_over(directory: Path) -> None:
    for path in directory.glob("dali_pipes_[0-9]*.prom"):
        with contextlib.suppress(OSError):  # of another user, or in use
            lock = _try_lock(directory / f".{path.stem}.lock")
            try:
                path.unlink()
            finally:
                os.close(lock)


def _claim(directory: Path) -> tuple[int, Path]:
    """Lock the first name that no living process has; returns the lock's descriptor and the path of the file."""
    for number in range(_MAX_FILES):
        try:
            lock = _try_lock(directory / f".dali_pipes_{number}.lock")
        except (BlockingIOError, PermissionError):
            continue
        return lock, directory / f"dali_pipes_{number}.prom"
    raise OSError(f"'{directory}' has the metrics of {_MAX_FILES} processes, which is the most it takes")


def _try_lock(path: Path) -> int:
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(file)
        raise
    return file


def _forget_in_child() -> None:
    while _writers:
        _writers.pop().forget()


os.register_at_fork(after_in_child=_forget_in_child)
