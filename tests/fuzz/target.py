"""What is fuzzed: valid inputs, and a check that says whether the code under test kept its promise."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal

Answer = Literal["taken", "refused"]


class BrokenPromiseError(AssertionError):
    """The code took what it must refuse, or gave other bytes than were there."""


class Target(ABC):
    """A reader of bytes that strangers make. A worker process has one of each, and calls `check` with many inputs.

    An instance may own servers and directories; `close` ends them.
    """

    @abstractmethod
    def seeds(self) -> Sequence[bytes]:
        """Valid inputs, made here; mutants are made of them. Every one of them must be taken."""

    def strangers(self) -> Sequence[bytes]:
        """Further inputs to make mutants of, which may be refused themselves."""
        return ()

    @abstractmethod
    def check(self, data: bytes) -> Answer:
        """Give one input to the code under test.

        Raises:
            BrokenPromiseError: If the code took the input and did not do what it promises.
            Exception: Whatever the code raised that is not an error of this project: that is a finding, too.
        """

    def close(self) -> None:  # noqa: B027 (most targets own nothing)
        """Release what the instance owns."""
