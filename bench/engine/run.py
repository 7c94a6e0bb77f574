"""Run a scenario: rounds of turns, interleaved, to one record.

A round has one turn of every subject, so a drift of the machine affects all subjects alike. If Ctrl-C, SIGTERM or a
turn that fails ends a run before its last round, the complete rounds before it are kept. A caller may also keep the
record around every turn, and go on with it later, in another process.
"""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import ExitStack
from contextvars import ContextVar
from typing import Any, TypeVar

from bench.engine.scenario import Rounds, Scenario, failure_text
from bench.engine.turn_process import call_apart, end_server, fork_server
from bench.reports.record import stamped
from bench.tools.environment import describe_environment
from bench.tools.folders import RunFolder, remove_leftovers
from dali_pipes.commands.output import print_note
from dali_pipes.progress import bar

EVERY_S = 10.0
"""Seconds between two lines where stderr is no terminal."""

_line: "ContextVar[LiveLine | None]" = ContextVar("live line", default=None)


class LiveLine:
    """The line that says how far a run is, and how fast its last turn was.

    It is written by the command's own process, and only where no clock runs: before and after a turn, and where the
    processes of a turn wait for each other. The measured processes write nothing. On a terminal the line is rewritten
    in place; elsewhere at most one line every `EVERY_S` seconds goes to stderr. ``--quiet`` leaves it out.
    """

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


Made = TypeVar("Made")
Subject = TypeVar("Subject", bound=Hashable)
Row = TypeVar("Row")


def run_scenario(
    scenario: Scenario[Made, Subject, Row],
    *,
    keep: Callable[[dict[str, Any]], None] | None = None,
    keep_turns: Callable[[dict[str, Any]], None] | None = None,
    earlier: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Prepare, take turns, and report.

    Args:
        scenario: What to do.
        keep: Called with the record of the complete rounds, if there is at least one, when something ends the run
            before its last round. The exception that ended it is raised afterwards.
        keep_turns: Called before and after every turn with the record so far; ``at`` names the turn that is being
            taken, so that a reader knows what a killed process was doing.
        earlier: A record that ``keep_turns`` was given; its turns are not taken again.

    Returns:
        The scenario's report with ``format``, ``version``, ``command``, ``environment``, ``complete``, ``num_rounds``
        and ``stopped``: the turn in which it ended early, or ``None``.

    Raises:
        PipesError: If a turn fails, its process ends early or takes too long.
        Exception: What preparing raises.
    """
    load_at_start = round(os.getloadavg()[0], 2)
    if left := remove_leftovers(scenario.work):
        print_note(f"removed the leftovers of runs that were killed: {', '.join(map(str, left))}")
    with ExitStack() as stack:
        folder = stack.enter_context(RunFolder(scenario.work))
        stack.push(_end_server_if_interrupted)
        if scenario.runs_in == "fork":
            fork_server()  # loads libraries while nothing is timed
        made = scenario.prepare(folder, stack)
        rounds: Rounds[Subject, Row] = Rounds(scenario.subjects(made), wanted=scenario.repeats)

        at_start = {} if keep_turns is None else describe_environment()  # it asks git, so not around every turn

        def record(environment: Mapping[str, Any]) -> dict[str, Any]:
            completeness = {
                "complete": rounds.is_complete,
                "num_rounds": rounds.num_whole,
                "stopped": None if rounds.is_complete else rounds.at,
            }
            of_the_machine = {"environment": {**environment, "load_at_start": load_at_start}}
            return stamped({**of_the_machine, **scenario.report(made, rounds), **completeness}, kind=scenario.kind)

        def tell(at: str | None) -> None:
            if keep_turns is not None:
                keep_turns({**record(at_start), "at": at})

        try:
            if earlier is not None:
                scenario.go_on(rounds, earlier)
            _take_turns(scenario, made, rounds, tell)
            return record(describe_environment())
        except BaseException:
            if rounds.num_whole and keep is not None:
                keep(record(describe_environment()))
            raise


def _end_server_if_interrupted(kind: type[BaseException] | None, *_: object) -> None:
    if kind is not None and not issubclass(kind, Exception):
        end_server()


def _take_turns(
    scenario: Scenario[Made, Subject, Row],
    made: Made,
    rounds: Rounds[Subject, Row],
    tell: Callable[[str | None], None],
) -> None:
    with live_line(scenario.title, num_turns=rounds.wanted * len(rounds.subjects)) as line:
        for number in range(rounds.wanted):
            for subject in scenario.order(rounds.subjects, number):
                is_late = scenario.deadline is not None and time.monotonic() > scenario.deadline
                is_due = subject not in rounds.errors and len(rounds.rows[subject]) <= number
                if is_late or not is_due:
                    line.skip()
                    continue
                name, speed = scenario.name_of(subject), ""
                rounds.at = f"round {number + 1} of {rounds.wanted}, {name}"
                tell(name)
                line.begin(scenario.short_name(subject))
                try:
                    row = _measure(scenario, made, subject, number)
                except Exception as exc:
                    if not scenario.goes_on_without(subject):
                        raise
                    rounds.errors[subject] = failure_text(exc)
                else:
                    rounds.rows[subject].append(row)
                    speed = scenario.speed(made, subject, row)
                tell(None)
                line.end(speed)


def _measure(scenario: Scenario[Made, Subject, Row], made: Made, subject: Subject, number: int) -> Row:
    if scenario.runs_in == "caller":
        return scenario.measure(made, subject, number)
    return call_apart(
        scenario.measure,
        made,
        subject,
        number,
        name=scenario.name_of(subject),
        timeout_s=scenario.timeout_s,
        fresh=scenario.runs_in == "interpreter",
    )
