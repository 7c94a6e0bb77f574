"""Write bad samples to a quarantine file, and read quarantines and lists of keys as samples to leave out.

A quarantine is UTF-8 text. It starts with a header, and each bad sample has one line
``shard<TAB>key<TAB>component<TAB>cause``:

    # dali-pipes quarantine, version 1, manifest 0123456789ab: shard, key, component, cause

``Select(exclude=...)`` also takes lists that a person wrote, with ``key`` or ``shard<TAB>key`` on each line. Lines that
start with ``#`` and hold no tab are comments; to list a key that starts with ``#``, write it with its shard.
"""

import contextlib
import glob
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, Self

from dali_pipes.errors import DataError, StoreError, printable

_KIND = "dali-pipes quarantine"
_VERSION = 1
_HEADER = re.compile(rf"# {_KIND}, version ([0-9]+), manifest ([0-9a-f]*)")

# Digits of the digest, enough to tell data sets apart.
_NUM_DIGITS = 12
CAUSE_CHARS = 1000
"""Characters of a cause that are kept."""
_BREAKS = re.compile(r"[\t\r\n]")
_SHOWN = 60


class Exclusion(NamedTuple):
    """One sample to leave out, and the line that lists it."""

    shard: str | None
    """The shard's name; ``None`` for any shard that has the key."""
    key: str
    file: str
    line: int
    """Counted from 1; 0 for an option's value: ``file`` is the option."""
    component: str = ""
    """The component that is bad; empty in a list that a person wrote."""
    cause: str = ""
    """Why it is bad; empty likewise."""

    @property
    def where(self) -> str:
        """File and line, or the option, for errors."""
        return f"'{self.file}':{self.line}" if self.line else self.file

    @property
    def cure(self) -> str:
        """What to do about a wrong entry, for errors."""
        return "mend the line, or delete it" if self.line else "name other keys"


class Quarantine:
    """Adds samples to a quarantine file, each once. A context manager.

    Several processes can add to one file: every line is written as a whole.

    Args:
        path: The file.
        manifest: The manifest's digest, or empty, for the header.
        made_now: Create the file now, with its header, so that even an empty list can be passed to a loader; and refuse
            to add to a list of keys that a person wrote. Otherwise, as for a loader's own file, it is created with its
            first sample, and may continue such a list.

    Raises:
        DataError: If the file exists and is not a list of samples, or is a list that must not be changed.
        StoreError: If the file cannot be read or written.
    """

    def __init__(self, path: str | Path, *, manifest: str, made_now: bool = False) -> None:
        self.path = Path(path)
        digest = manifest[:_NUM_DIGITS]
        self._header = f"# {_KIND}, version {_VERSION}, manifest {digest}: shard, key, component, cause\n"
        self._check_place()
        data = _read(self.path) if self.path.exists() else b""
        is_quarantine = any(line.startswith(f"# {_KIND}".encode()) for line in data.split(b"\n"))
        if data and made_now and not is_quarantine:
            found = data[:40].decode(errors="backslashreplace")
            raise DataError(f"'{path}' exists and is not a quarantine (found {found!r}); name another file")
        self._known = {(entry.shard, entry.key) for entry in _entries(data, str(self.path))}
        # A file that lists samples of several data sets has a header for each.
        self._has_header = self._header.encode() in data
        if made_now and not self._has_header:
            self._append("")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def add(self, shard: str, key: str, component: str, cause: str) -> bool:
        """Write a line, and return whether it was written: not if the file lists this shard and key already.

        ``component`` is empty if it is not known, or the whole sample is bad. In the cause, line breaks are replaced by
        spaces, and other control characters shown as escapes.

        Raises:
            DataError: If a name holds a tab or a line break, which the format cannot hold.
            StoreError: If the file cannot be written.
        """
        if (shard, key) in self._known:
            return False
        if bad := next((name for name in (shard, key, component) if _BREAKS.search(name)), None):
            raise DataError(f"cannot write {bad!r} to the quarantine '{self.path}': it holds a tab or a line break")
        cause = printable(" ".join(cause.split()), max_chars=CAUSE_CHARS)
        self._append(f"{shard}\t{key}\t{component}\t{cause}\n")
        self._known.add((shard, key))
        return True

    def close(self) -> None:
        """Flush the file to the disk. Can be called twice."""
        if self.path.exists():
            with _writing(self.path), self.path.open("rb") as file:
                os.fsync(file)

    def _check_place(self) -> None:
        """Check that the file can be written, before a job starts and not at its first bad sample."""
        if not self.path.parent.is_dir():
            raise StoreError(
                f"cannot write the quarantine '{self.path}': No such file or directory: '{self.path.parent}'; make it"
            )
        writable = self.path if self.path.exists() else self.path.parent
        if not os.access(writable, os.W_OK):
            raise StoreError(f"cannot write the quarantine '{self.path}': no permission for '{writable}'")

    def _append(self, line: str) -> None:
        """Append by one write, so that lines of several processes do not mix."""
        with _writing(self.path), self.path.open("ab+", buffering=0) as file:
            line = line if self._has_header else self._header + line
            size = file.seek(0, os.SEEK_END)
            if size and os.pread(file.fileno(), 1, size - 1) != b"\n":
                line = f"\n{line}"  # a process was killed while it wrote the last line, or a person wrote it
            data = line.encode(errors="backslashreplace")
            if file.write(data) != len(data):
                raise OSError("only a part of the line was written; is the disk full?")
        self._has_header = True


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        raise StoreError(f"cannot write the quarantine '{path}': {exc.strerror or exc}") from exc


def read_exclusions(paths: str | Path | Iterable[str | Path]) -> list[Exclusion]:
    """The samples that these files list, in the files' order. A sample that is listed twice comes twice.

    Args:
        paths: One or several quarantines or lists of keys, or a wildcard such as ``"bad-*.tsv"``. A rank that has seen
            no bad sample leaves no file, so a wildcard may match no file.

    Raises:
        DataError: If a line is not valid, or a file is not UTF-8; names file and line.
        StoreError: If a file cannot be read.
    """
    listed = [paths] if isinstance(paths, str | Path) else list(paths)
    return [entry for path in listed for file in _files(str(path)) for entry in _entries(_read(Path(file)), file)]


def _files(path: str) -> list[str]:
    """List the path itself. If no file has this name and it holds wildcards, list all paths that match instead."""
    if "://" in path:
        raise StoreError(f"cannot read '{path}', a list of samples to leave out: it must be a file of this machine")
    if not glob.has_magic(path) or Path(path).exists():
        return [path]
    return sorted(glob.glob(path))  # noqa: PTH207 (a wildcard may stand in any part of an absolute path)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as exc:
        raise StoreError(f"cannot read '{path}', a list of samples to leave out: {exc.strerror or exc}") from exc


def _entries(data: bytes, file: str) -> Iterator[Exclusion]:
    is_quarantine = False
    # Split at line feeds only: keys may hold Unicode's other line breaks. A byte order mark is not part of a key.
    for number, raw in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        where = f"'{file}':{number}"
        try:
            text = raw.removesuffix(b"\r").decode()
        except UnicodeDecodeError as exc:
            raise DataError(f"{where}: expected UTF-8, found {raw[:_SHOWN]!r}; is it a list of keys?") from exc
        if text.startswith("#") and "\t" not in text:
            if header := _HEADER.match(text):
                is_quarantine = True
                if header[1] != str(_VERSION):
                    raise DataError(
                        f"{where}: expected a {_KIND}, version {_VERSION}, found version {header[1][:_SHOWN]}; read it "
                        "with the dali-pipes that wrote it"
                    )
        elif text.strip():
            fields = text.split("\t")
            # A line of a quarantine that was cut off must not be taken for a key.
            if len(fields) not in ((4,) if is_quarantine else (1, 2, 4)) or not all(fields[:2]):
                raise DataError(
                    f"{where}: expected {'' if is_quarantine else 'a key; shard and key; or '}shard, key, component "
                    f"and cause, separated by tabs, found {text[:_SHOWN]!r}; mend the line, or delete it"
                )
            shard, key = (None, fields[0]) if len(fields) == 1 else (fields[0], fields[1])
            yield Exclusion(shard, key, file, number, *fields[2:])
