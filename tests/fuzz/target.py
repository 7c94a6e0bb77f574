"""What is fuzzed: valid inputs, and a check that says whether the code under test kept its promise."""

import faulthandler
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Literal

Answer = Literal["taken", "refused"]

# A worker hangs if it reports nothing for this time, less than a test may take. A loaded machine needs far less.
HANG_S = 240.0


def watch(hang_s: float = HANG_S) -> None:
    """End this process unless it calls this again within ``hang_s``; stderr then shows the stack of each thread."""
    faulthandler.dump_traceback_later(hang_s, exit=True)


class BrokenPromiseError(AssertionError):
    """The code took an input that it must refuse, gave wrong bytes, or ended its process.

    ``files`` are those that the input stands for, where it does not hold them itself.
    """

    def __init__(self, text: str, *, files: Mapping[str, bytes] | None = None) -> None:
        super().__init__(text)
        self._files = files or {}

    def keep_files(self, folder: Path) -> None:
        for name, data in self._files.items():
            folder.mkdir(exist_ok=True)
            (folder / name).write_bytes(data)


class Target(ABC):
    """A reader of bytes that strangers make. A worker process has one of each, and calls `check` with many inputs.

    An instance may own servers and directories; `close` ends them.
    """

    num_daily: ClassVar[int] = 400
    """The number of mutants that every test run checks; the code takes some and refuses some."""

    @abstractmethod
    def seeds(self) -> Sequence[bytes]:
        """Valid inputs, made here; mutants are made of them. Every one of them must be taken."""

    def strangers(self) -> Sequence[bytes]:
        """Further inputs to make mutants of, which may be refused themselves."""
        return ()

    @abstractmethod
    def check(self, data: bytes) -> Answer:
        """Give one input to the code under test.

        A `BrokenPromiseError` says that it took the input and did not do what it promises. Whatever else it raises that
        is not an error of this project is a finding, too.
        """

    def close(self) -> None:  # noqa: B027 (most targets own nothing)
        """Release what the instance owns."""
