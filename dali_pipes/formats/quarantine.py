"""Bad samples to the lines of a quarantine, and such files, and lists of keys, to the samples that a loader leaves out.

A quarantine is UTF-8, a line each of ``shard<TAB>key<TAB>component<TAB>cause``, after a first line that says what it
is:

    # dali-pipes quarantine, version 1, manifest 0123456789ab: shard, key, component, cause

A list for ``exclude=`` may also be one that a person wrote: a key a line, or ``shard<TAB>key``. Lines that start with
``#`` and hold no tab are notes; a key that starts so is written with its shard.
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

__all__ = ["Exclusion", "QuarantineFile", "read_exclusions"]

_KIND = "dali-pipes quarantine"
_VERSION = 1
_HEADER = re.compile(rf"# {_KIND}, version ([0-9]+), manifest ([0-9a-f]*)")

# Of the digest: enough to tell data sets apart.
_NUM_DIGITS = 12
_BREAKS = re.compile(r"[\t\r\n]")
_SHOWN = 60


class Exclusion(NamedTuple):
    """One sample that is to be left out, and which line says so."""

    shard: str | None
    """Its name; ``None``: wherever the key is."""
    key: str
    file: str
    line: int
    """From 1."""

    @property
    def where(self) -> str:
        """File and line, as errors give them."""
        return f"'{self.file}':{self.line}"


class QuarantineFile:
    """Adds samples to a quarantine; what is in it already is not written again. A context manager.

    Of processes that name the same file each line comes whole.

    Args:
        path: The file.
        manifest: The manifest's digest, for the first line; empty where there is no manifest.
        is_made: Make the file now, with its first line, if it is not there: a list of no samples is one that can be
            passed. Else it is made with the first sample.
        takes_lists: Add to a list of keys that a person wrote, too; else that is refused.

    Raises:
        DataError: If what is there is no list of samples, or one that is not to be added to.
        StoreError: If it cannot be read, or not be written.
    """

    def __init__(self, path: str | Path, *, manifest: str, is_made: bool = True, takes_lists: bool = False) -> None:
        self.path = Path(path)
        self.num_added = 0
        """Lines that were written by this object."""
        digest = manifest[:_NUM_DIGITS]
        self._header = f"# {_KIND}, version {_VERSION}, manifest {digest}: shard, key, component, cause\n"
        self._check_place()
        data = _read(self.path) if self.path.exists() else b""
        is_quarantine = any(line.startswith(f"# {_KIND}".encode()) for line in data.split(b"\n"))
        if data and not (is_quarantine or takes_lists):
            found = data[:40].decode(errors="backslashreplace")
            raise DataError(f"'{path}' is there, and no quarantine (found {found!r}); name another file")
        self._known = {(entry.shard, entry.key) for entry in _entries(data, str(self.path))}
        # A file that goes on from one data set to the next has a header for each.
        self._has_header = self._header.encode() in data
        if is_made and not self._has_header:
            self._append("")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def __contains__(self, sample: tuple[str, str]) -> bool:
        """Whether the file has this shard and key."""
        return sample in self._known

    def __len__(self) -> int:
        """How many samples the file has: this object's, and those from before."""
        return len(self._known)

    def add(self, shard: str, key: str, component: str, cause: str) -> bool:
        """Write a line, unless there is one for this shard and key.

        Args:
            shard: The shard's name.
            key: The sample's key.
            component: What of it is bad; empty where that is not known, or it is the sample as a whole.
            cause: Why, in any number of lines: they are joined.

        Returns:
            Whether it was written.

        Raises:
            DataError: If a name holds a tab or a line break, and so cannot stand here.
            StoreError: If it cannot be written.
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
        """Bring what was written to the disk. Can be called twice."""
        if not self.path.exists():
            return
        with _writing(self.path):
            file = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(file)
            finally:
                os.close(file)

    def _check_place(self) -> None:
        """Before a job starts, not when it meets the first bad sample."""
        if not self.path.parent.is_dir():
            raise StoreError(
                f"cannot write the quarantine '{self.path}': No such file or directory: '{self.path.parent}'; make it"
            )
        writable = self.path if self.path.exists() else self.path.parent
        if not os.access(writable, os.W_OK):
            raise StoreError(f"cannot write the quarantine '{self.path}': no permission for '{writable}'")

    def _append(self, line: str) -> None:
        """One write: others that append to the file at the same time write before or after it."""
        with _writing(self.path):
            file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                line = line if self._has_header else self._header + line
                size = os.fstat(file).st_size
                if size and os.pread(file, 1, size - 1) != b"\n":
                    line = f"\n{line}"  # whoever wrote the last line was cut off, or is a person
                data = line.encode(errors="backslashreplace")
                if os.write(file, data) != len(data):
                    raise OSError("the disk took a part of the line only; is it full?")
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
    """What is expected of the lines of one file so far."""

    file: str
    is_quarantine: bool = False

    def entry(self, text: str, number: int) -> Exclusion | None:
        if text.startswith("#") and "\t" not in text:
            self._read_note(text, number)
            return None
        if not text.strip():
            return None
        fields = text.split("\t")
        # A line of a quarantine that was cut off must not be taken for a key.
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
    """The samples that these files list, in the files' order; one that is listed twice comes twice.

    Args:
        paths: Quarantines, and lists of a key a line; one or several, or ``"bad-*.tsv"``. A rank that met no bad sample
            leaves no file: a wildcard that matches nothing lists nothing.

    Raises:
        DataError: If a line is none that such a file can have, or the file is not UTF-8; names file and line.
        StoreError: If a file cannot be read.
    """
    listed = [paths] if isinstance(paths, str | Path) else list(paths)
    return [entry for path in listed for file in _files(str(path)) for entry in _entries(_read(Path(file)), file)]


def _files(path: str) -> list[str]:
    """What a path stands for: itself, or, where it has a wildcard and is no file, all that match, be it none."""
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
    # Split at line feeds only: keys may hold what Unicode breaks lines at. A mark of the byte order is no part of one.
    for number, raw in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        try:
            text = raw.removesuffix(b"\r").decode()
        except UnicodeDecodeError as exc:
            raise DataError(
                f"'{file}':{number}: expected UTF-8, found {raw[:_SHOWN]!r}; is it a list of keys?"
            ) from exc
        if (entry := lines.entry(text, number)) is not None:
            yield entry
