"""Targets that fail on purpose: the harness must see it."""

import os
import signal
import time
from abc import abstractmethod
from collections.abc import Sequence
from typing import Literal

from tests.fuzz.target import BrokenPromiseError, Target

SEED = b"a valid input"


class _Broken(Target):
    def seeds(self) -> Sequence[bytes]:
        return [SEED]

    def check(self, data: bytes) -> Literal["taken", "refused"]:
        if data != SEED:
            self.fail()
        return "taken"

    @abstractmethod
    def fail(self) -> None:
        """Go wrong."""


class Crashes(_Broken):
    """Ends its process, as a decoder in C does."""

    name = "crashes"

    def fail(self) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)


class Hangs(_Broken):
    """Does not come back."""

    name = "hangs"

    def fail(self) -> None:
        time.sleep(3600)


class Lies(_Broken):
    """Gives a wrong byte."""

    name = "lies"

    def fail(self) -> None:
        raise BrokenPromiseError("a wrong byte")


class CannotStart(_Broken):
    """Fails before it has an input."""

    name = "cannot-start"

    def __init__(self) -> None:
        raise OSError("no room")

    def fail(self) -> None:
        """Never called: there is no instance."""


BROKEN: dict[str, type[Target]] = {target.name: target for target in (CannotStart, Crashes, Hangs, Lies)}
