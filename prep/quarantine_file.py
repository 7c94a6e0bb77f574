"""Bad samples to the lines of a quarantine: the list of samples to leave out that a loader takes as ``exclude=``.

UTF-8, a line each of ``shard<TAB>key<TAB>component<TAB>cause``, after a first line that says what it is:

    # dali-pipes quarantine, version 1, manifest 0123456789ab: shard, key, component, cause
"""

import os
import re
from pathlib import Path

from prep.errors import DataError, StoreError

__all__ = ["QUARANTINE_KIND", "QUARANTINE_VERSION", "QuarantineFile", "quarantine_header", "quarantine_line"]

QUARANTINE_KIND = "dali-pipes quarantine"
QUARANTINE_VERSION = 1

# Of the digest: enough to tell data sets apart.
_NUM_DIGITS = 12
_BREAKS = re.compile(r"[\t\r\n]")


def quarantine_header(manifest: str) -> str:
    """The first line.

    Args:
        manifest: The manifest's digest; empty where there is no manifest.
    """
    digest = manifest[:_NUM_DIGITS]
    return f"# {QUARANTINE_KIND}, version {QUARANTINE_VERSION}, manifest {digest}: shard, key, component, cause\n"


def quarantine_line(shard: str, key: str, component: str, cause: str, *, where: str) -> str:
    """The line of one sample.

    Args:
        shard: The shard's name.
        key: The sample's key.
        component: What of it is bad; empty where that is not known, or it is the sample as a whole.
        cause: Why, in any number of lines: they are joined.
        where: Names the file, for errors.

    Raises:
        DataError: If a name holds a tab or a line break, and so cannot stand here.
    """
    if bad := next((name for name in (shard, key, component) if _BREAKS.search(name)), None):
        raise DataError(f"cannot write {bad!r} to the quarantine '{where}': it holds a tab or a line break")
    return f"{shard}\t{key}\t{component}\t{' '.join(cause.split())}\n"


class QuarantineFile:
    """Adds samples to a quarantine; what is in it already is not written again. A context manager.

    Args:
        path: The file; made, with its first line, if it is not there: a list of no samples is one that can be passed.
        manifest: See `quarantine_header`.

    Raises:
        DataError: If what is there is no quarantine.
        StoreError: If it cannot be read and written.
    """

    def __init__(self, path: Path, *, manifest: str) -> None:
        self.path = path
        self.num_added = 0
        header = quarantine_header(manifest)
        try:
            self._stream = path.open("a+", encoding="utf-8", errors="backslashreplace", newline="\n")
            self._stream.seek(0)
            text = self._stream.read()
        except OSError as exc:
            raise StoreError(f"cannot write the quarantine '{path}': {exc.strerror or exc}") from exc
        lines = text.split("\n")
        if text and not any(line.startswith(f"# {QUARANTINE_KIND}") for line in lines):
            self._stream.close()
            raise DataError(f"'{path}' is there, and no quarantine (found {text[:40]!r}); name another file")
        self._known = {tuple(line.split("\t")[:2]) for line in lines if "\t" in line}
        if text and not text.endswith("\n"):
            self._stream.write("\n")
        if header.rstrip("\n") not in lines:
            self._stream.write(header)

    def __enter__(self) -> "QuarantineFile":
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def add(self, shard: str, key: str, component: str, cause: str) -> None:
        """Write a line, unless there is one for this shard and key.

        Raises:
            DataError: See `quarantine_line`.
            StoreError: If it cannot be written.
        """
        if (shard, key) in self._known:
            return
        line = quarantine_line(shard, key, component, cause, where=str(self.path))
        try:
            self._stream.write(line)
        except OSError as exc:
            raise StoreError(f"cannot write the quarantine '{self.path}': {exc.strerror or exc}") from exc
        self._known.add((shard, key))
        self.num_added += 1

    def close(self) -> None:
        """Write what is left to the disk. Can be called twice."""
        try:
            if not self._stream.closed:
                self._stream.flush()
                os.fsync(self._stream.fileno())
        except OSError as exc:
            raise StoreError(f"cannot write the quarantine '{self.path}': {exc.strerror or exc}") from exc
        finally:
            self._stream.close()
