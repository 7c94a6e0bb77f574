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
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

from dali_pipes.errors import DataError, StoreError

_KIND = "dali-pipes quarantine"
_VERSION = 1
_HEADER = re.compile(rf"# {_KIND}, version ([0-9]+), manifest ([0-9a-f]*)")

# Digits of the digest, enough to tell data sets apart.
_NUM_DIGITS = 12
_BREAKS = re.compile(r"[\t\r\n]")
_SHOWN = 60


class Exclusion(NamedTuple):
    """One sample to leave out, and the line that lists it."""

    shard: str | None
    """The shard's name; ``None`` for any shard that has the key."""
    key: str
    file: str
    line: int
    """Counted from 1."""

    @property
    def where(self) -> str:
        """File and line, for errors."""
        return f"'{self.file}':{self.line}"


class QuarantineFile:
    """Adds samples to a quarantine file, each once. A context manager.

    Several processes can add to one file: every line is written as a whole.

    Args:
        path: The file.
        manifest: The manifest's digest, for the header; empty if there is no manifest.
        is_made: Create the file now, with its header, if it does not exist: an empty list can be passed to a loader,
            too. Otherwise it is created with the first sample.
        takes_lists: Also add to a list of keys that a person wrote; otherwise that is refused.

    Raises:
        DataError: If the file exists and is not a list of samples, or is a list that must not be changed.
        StoreError: If the file cannot be read or written.
    """

    def __init__(self, path: str | Path, *, manifest: str, is_made: bool = True, takes_lists: bool = False) -> None:
        self.path = Path(path)
        self.num_added = 0
        """Lines that this object wrote."""
        digest = manifest[:_NUM_DIGITS]
        self._header = f"# {_KIND}, version {_VERSION}, manifest {digest}: shard, key, component, cause\n"
        self._check_place()
        data = _read(self.path) if self.path.exists() else b""
        is_quarantine = any(line.startswith(f"# {_KIND}".encode()) for line in data.split(b"\n"))
        if data and not (is_quarantine or takes_lists):
            found = data[:40].decode(errors="backslashreplace")
            raise DataError(f"'{path}' exists and is not a quarantine (found {found!r}); name another file")
        self._known = {(entry.shard, entry.key) for entry in _entries(data, str(self.path))}
        # A file that lists samples of several data sets has a header for each.
        self._has_header = self._header.encode() in data
        if is_made and not self._has_header:
            self._append("")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def __contains__(self, sample: tuple[str, str]) -> bool:
        """Whether the file lists this shard and key."""
        return sample in self._known

    def __len__(self) -> int:
        """The number of samples that the file lists, earlier ones included."""
        return len(self._known)

    def add(self, shard: str, key: str, component: str, cause: str) -> bool:
        """Write a line, unless the file lists this shard and key already.

        Args:
            shard: The shard's name.
            key: The sample's key.
            component: The bad component; empty if it is not known, or the whole sample is bad.
            cause: Why the sample is bad. Line breaks are replaced by spaces.

        Returns:
            Whether a line was written.

        Raises:
            DataError: If a name holds a tab or a line break, which the format cannot hold.
            StoreError: If the file cannot be written.
        """
        if (shard, key) in self._known:
            return False
        if bad := next((name for name in (shard, key, component) if _BREAKS.search(name)), None):
            raise DataError(f"cannot write {bad!r} to the quarantine '{self.path}': it holds a tab or a line break")
        self._append(f"{shard}\t{key}\t{component}\t{' '.join(cause.split())}\n")
        self._known.add((shard, key))
        self.num_added += 1
        return True

    def close(self) -> None:
        """Flush the file to the disk. Can be called twice."""
        if not self.path.exists():
            return
        with _writing(self.path):
            file = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(file)
            finally:
                os.close(file)

    def _check_place(self) -> None:
        """Check that the file can be written: before a job starts, not at its first bad sample."""
        if not self.path.parent.is_dir():
            raise StoreError(
                f"cannot write the quarantine '{self.path}': No such file or directory: '{self.path.parent}'; make it"
            )
        writable = self.path if self.path.exists() else self.path.parent
        if not os.access(writable, os.W_OK):
            raise StoreError(f"cannot write the quarantine '{self.path}': no permission for '{writable}'")

    def _append(self, line: str) -> None:
        """Append in a single write, so that lines of several processes do not mix."""
        with _writing(self.path):
            file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                line = line if self._has_header else self._header + line
                size = os.fstat(file).st_size
                if size and os.pread(file, 1, size - 1) != b"\n":
                    line = f"\n{line}"  # a process was killed while it wrote the last line, or a person wrote it
                data = line.encode(errors="backslashreplace")
                if os.write(file, data) != len(data):
                    raise OSError("only a part of the line was written; is the disk full?")
            finally:
                os.close(file)
        self._has_header = True


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        raise StoreError(f"cannot write the quarantine '{path}': {exc.strerror or exc}") from exc


@dataclass
class _Lines:
    """Parses the lines of one file. After a quarantine's header only complete lines are valid."""

    file: str
    is_quarantine: bool = False

    def entry(self, text: str, number: int) -> Exclusion | None:
        if text.startswith("#") and "\t" not in text:
            self._read_note(text, number)
            return None
        if not text.strip():
            return None
        fields = text.split("\t")
        # In a quarantine, a line that was cut off must not pass for a key.
        expected = (
            "shard, key, component and cause, separated by tabs"
            if self.is_quarantine
            else "a key; shard and key; or shard, key, component and cause, separated by tabs"
        )
        if len(fields) not in ((4,) if self.is_quarantine else (1, 2, 4)) or not all(fields[:2]):
            raise DataError(
                f"'{self.file}':{number}: expected {expected}, found {text[:_SHOWN]!r}; mend the line, or delete it"
            )
        shard, key = (None, fields[0]) if len(fields) == 1 else fields[:2]
        return Exclusion(shard, key, self.file, number)

    def _read_note(self, text: str, number: int) -> None:
        match = _HEADER.match(text)
        if match is None:
            return
        if int(match[1]) != _VERSION:
            raise DataError(
                f"'{self.file}':{number}: expected a {_KIND}, version {_VERSION}, found version "
                f"{match[1]}; read it with the dali-pipes that wrote it"
            )
        self.is_quarantine = True


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
    """The path itself, or, if it has a wildcard and is not a file, all paths that match; there may be none."""
    if not glob.has_magic(path) or Path(path).exists():
        return [path]
    return sorted(glob.glob(path))  # noqa: PTH207 (a wildcard may stand in any part of an absolute path)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as exc:
        raise StoreError(f"cannot read '{path}', a list of samples to leave out: {exc.strerror or exc}") from exc


def _entries(data: bytes, file: str) -> Iterator[Exclusion]:
    lines = _Lines(file)
    # Split at line feeds only: keys may hold Unicode's other line breaks. A byte order mark is not part of a key.
    for number, raw in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        try:
            text = raw.removesuffix(b"\r").decode()
        except UnicodeDecodeError as exc:
            raise DataError(
                f"'{file}':{number}: expected UTF-8, found {raw[:_SHOWN]!r}; is it a list of keys?"
            ) from exc
        if (entry := lines.entry(text, number)) is not None:
            yield entry
