"""The line that says how far a run is, and how fast its last turn was.

It is written by the command's own process, and only where no clock runs: before and after a turn, and where the
processes of a turn wait for each other. The measured processes write nothing. On a terminal the line is rewritten in
place; elsewhere at most one line every `EVERY_S` seconds goes to stderr. ``--quiet`` leaves it out.
"""

import contextlib
import sys
import time
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from dali_pipes.commands.output import print_note
from dali_pipes.progress import bar

EVERY_S = 10.0
"""Seconds between two lines where stderr is no terminal."""

_line: "ContextVar[LiveLine | None]" = ContextVar("live line", default=None)


class LiveLine:
    """The line of one run."""

    def __init__(self, drawn: Any, *, title: str, num_turns: int) -> None:
        self._bar, self._title, self._num_turns = drawn, title, num_turns
        self._num_done = 0
        self._turn = self._speed = ""
        self._last_told = time.monotonic()

    def begin(self, turn: str) -> None:
        """A turn begins; ``turn`` names it."""
        self._turn = turn
        self._draw(turn)

    def say(self, part: str) -> None:
        """The turn begins a part, such as its first epoch."""
        self._draw(f"{self._turn}: {part}")

    def end(self, speed: str) -> None:
        """The turn is over; ``speed`` is what it measured, empty if it failed or measures none."""
        self._speed = f"{self._turn}: {speed}" if speed else self._speed
        self.skip()
        self._draw("")
        if not sys.stderr.isatty() and time.monotonic() - self._last_told >= EVERY_S:
            self._last_told = time.monotonic()
            last = f"; {self._speed}" if self._speed else ""
            print_note(f"{self._title}: {self._num_done} of {self._num_turns} turns{last}")

    def skip(self) -> None:
        """A turn is not taken."""
        self._num_done += 1
        self._bar.update(1)

    def _draw(self, now: str) -> None:
        # The speed first: a narrow terminal cuts the end off.
        self._bar.set_postfix_str("; ".join(part for part in (self._speed, now and f"now {now}") if part))


@contextlib.contextmanager
def live_line(title: str, *, num_turns: int) -> Iterator[LiveLine]:
    """Show the line of a run until its end; `say` writes to it meanwhile."""
    with bar(what=title, total=num_turns, unit="turn") as drawn:
        line = LiveLine(drawn, title=title, num_turns=num_turns)
        token = _line.set(line)
        try:
            yield line
        finally:
            _line.reset(token)


def say(part: str) -> None:
    """Name the part of the present turn; the command calls it where no clock runs. Without a live line: nothing."""
    if (line := _line.get()) is not None:
        line.say(part)
