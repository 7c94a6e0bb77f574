"""The engine of all benchmarks: `Scenario` says what is special about one, `run_scenario` takes its turns.

A round has one turn of every subject, so a drift of the machine affects all subjects alike. If Ctrl-C, SIGTERM or a
turn that fails ends a run before its last round, the complete rounds before it are kept. A caller may also keep the
record around every turn, and go on with it later, in another process.
"""

import os
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, TypeVar

from bench.engine.turn_process import call_apart, fork_server
from bench.reports.record import stamped
from bench.tools.environment import describe_environment, quiet_ms
from bench.tools.folders import RunFolder, check_writable, remove_leftovers
from dali_pipes.commands.output import print_note
from dali_pipes.errors import PipesError, printable
from dali_pipes.progress import bar

TURN_S = 7200.0
MAX_ERROR_CHARS = 600
MORE_ROUNDS, MOST_TIMES = 3, 5  # see ``is_steady`` of `run_scenario`

OURS = "dali-pipes"
"""The row of our loader where no other one is timed."""
_NO_OPTIONS = {"shards", "work", "timeout_s", "deadline"}

Measured = dict[str, Any]
"""The measurements of a turn: ``figures``, by their names in `bench.reports.figures.FIGURES`, and further ones."""
Made = TypeVar("Made")
Subject = TypeVar("Subject", bound=Hashable)
Row = TypeVar("Row")


def failure_text(exc: Exception) -> str:
    """Return an exception as a record keeps it: kind and message, in one line."""
    text = str(exc) if isinstance(exc, PipesError) else f"{type(exc).__name__}: {exc}"
    return printable(text, max_chars=MAX_ERROR_CHARS)


@dataclass
class Rounds(Generic[Subject, Row]):
    """The turns of each subject so far, and the turn that is being taken."""

    subjects: Sequence[Subject]
    wanted: int
    rows: dict[Subject, list[Row]] = field(init=False)
    errors: dict[Subject, str] = field(default_factory=dict)
    """The errors of failed subjects, in a scenario that continues without them (see `goes_on_without`)."""
    at: str = ""
    quiet_ms: list[float] = field(default_factory=list)
    """How long a fixed loop took before, between and after the turns: see `bench.tools.environment.quiet_ms`."""

    def __post_init__(self) -> None:
        self.rows = {subject: [] for subject in self.subjects}

    @property
    def num_whole(self) -> int:
        """Rounds in which every subject that did not fail had its turn."""
        return min((len(rows) for subject, rows in self.rows.items() if subject not in self.errors), default=0)

    def whole(self, subject: Subject) -> list[Row]:
        """Return the subject's rows of complete rounds: subjects are compared within a round."""
        return self.rows[subject][: self.num_whole]


@dataclass(frozen=True, kw_only=True)
class Scenario(ABC, Generic[Made, Subject, Row]):
    """A benchmark, without the loop that all benchmarks share: `run_scenario` has that.

    A scenario is a frozen dataclass. Its fields are its settings, and those made by `bench.engine.options.option` are
    the options of its command, with the class's docstring as help. Whole numbers among them, except the seed, must be
    at least 1. A subject is a name, or a named tuple: its field ``loader`` names its row in tables, and its other
    fields are its setting. `bench.scenarios.fetch` is an example.
    """

    kind: ClassVar[str]
    """Ends the record's format, and is the name of the command."""
    title: ClassVar[str]
    runs_in: ClassVar[Literal["fork", "interpreter", "caller"]] = "fork"
    """Where `measure` is called: in a process forked from a server that has loaded all libraries; in a new interpreter,
    if it measures memory; or in this process, if it starts the processes of a turn itself."""
    ratio_to: ClassVar[str | None] = None
    """The row that ratios are to; ``None``: there are no ratios."""
    needs_one: ClassVar[bool] = True
    """Whether a run in which every subject failed is an error."""
    work_option: ClassVar[str] = "--cache"

    repeats: int = 5
    """Rounds: turns of each subject."""
    seed: int = 7
    """The seed; it also decides the order within each round."""
    work: Path | None = None
    """The run makes its folder here; ``None``: in the directory for temporary files."""
    timeout_s: float | None = TURN_S
    deadline: float | None = None
    """A time of ``time.monotonic()``; turns that would begin later are left out."""

    def __post_init__(self) -> None:
        for option in fields(self):
            value = getattr(self, option.name)
            if isinstance(value, int) and not isinstance(value, bool) and option.name != "seed" and value < 1:
                raise ValueError(f"{option.name} must be at least 1, got {value}")
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise ValueError(f"timeout_s must be more than 0, got {self.timeout_s:g}")
        if self.work is not None:
            check_writable(self.work, option=self.work_option)

    @abstractmethod
    def prepare(self, folder: RunFolder, stack: ExitStack) -> Made:
        """Make the inputs of all turns, which go through pickle, unless `measure` runs in this process. Nothing is
        timed yet.

        ``folder`` gives directories that are deleted at the end, or by a later run if this one is killed. ``stack`` is
        for servers and the like; it is closed before the folder.
        """

    @abstractmethod
    def subjects(self, made: Made) -> Sequence[Subject]:
        """Return what is measured once in each round, in the order of the record."""

    @abstractmethod
    def measure(self, made: Made, subject: Subject, number: int) -> Row:
        """Take one turn of a subject, in round ``number`` from 0."""

    def repeat(self, made: Made, subject: Subject, row: Row) -> Measured:
        """Return a turn for the record: its ``figures``, and what else was measured."""
        assert isinstance(row, dict), "a scenario whose turns are other objects converts them"
        return row

    def record(self, made: Made, subject: Subject, rows: Sequence[Row]) -> dict[str, Any]:
        """Return the record of a subject's complete rounds."""
        setting: dict[str, Any] = subject._asdict() if hasattr(subject, "_asdict") else {"loader": str(subject)}
        return {
            "loader": setting.pop("loader", OURS),
            "decode": "none",
            "device": "cpu",
            "setting": setting,
            "data": 0,
            "repeats": [self.repeat(made, subject, row) for row in rows],
        }

    def data(self, made: Made) -> list[dict[str, Any]]:
        """Return descriptions of the data sets; records have an index into them."""
        return []

    def options_json(self) -> dict[str, Any]:
        """Return the settings by name, without directories, time limits and what is no plain value."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in _NO_OPTIONS}
        kept = (str, int, float, bool, list, tuple, type(None))
        return {name: value for name, value in values.items() if isinstance(value, kept)}

    def baseline_name(self) -> str | None:
        """Return the row that ratios are to."""
        return self.ratio_to

    def failed(self, made: Made, rounds: Rounds[Subject, Row]) -> list[dict[str, Any]]:
        """Return loader, setting and error of each subject that failed, and that the run went on without."""
        rows = [(self.record(made, subject, ()), error) for subject, error in rounds.errors.items()]
        return [{"loader": row["loader"], "setting": row["setting"], "error": error} for row, error in rows]

    def notes(self, made: Made, rounds: Rounds[Subject, Row]) -> list[str]:
        """Return what a reader of the table must know besides what every table says."""
        return []

    def report(self, made: Made, rounds: Rounds[Subject, Row]) -> dict[str, Any]:
        """Return the record of the complete rounds for JSON; the engine adds format, environment and completeness."""
        subjects = [subject for subject in rounds.subjects if subject not in rounds.errors]
        failed = self.failed(made, rounds)
        if not subjects and failed and self.needs_one:
            raise PipesError("; ".join(row["error"] for row in failed))
        return {
            "options": self.options_json(),
            "baseline": self.baseline_name(),
            "data": self.data(made),
            "records": [self.record(made, subject, rounds.whole(subject)) for subject in subjects],
            **({"failed": failed} if failed else {}),
            "notes": self.notes(made, rounds) if rounds.num_whole else [],
        }

    def name_of(self, subject: Subject) -> str:
        """Return the subject's name for errors."""
        return f"'{subject}'"

    def goes_on_without(self, subject: Subject) -> bool:
        """Return whether an exception in a turn ends the turns of this subject only, and is kept in `Rounds.errors`."""
        return False

    def take_over(self, rounds: Rounds[Subject, Row]) -> None:
        """Put the turns of an earlier run into ``rounds``, if this run goes on with it."""

    def order(self, subjects: Sequence[Subject], number: int) -> Sequence[Subject]:
        """Return the order of round ``number``; it changes, so that no subject always follows the same other one."""
        return random.Random(f"{self.seed} {number}").sample(subjects, len(subjects))


def run_scenario(
    scenario: Scenario[Made, Subject, Row],
    *,
    keep: Callable[[dict[str, Any]], None] | None = None,
    keep_turns: Callable[[dict[str, Any]], None] | None = None,
    is_steady: Callable[[dict[str, Any]], bool] | None = None,
) -> dict[str, Any]:
    """Prepare, take turns, and report.

    Args:
        scenario: What to do.
        keep: Called with the record of the complete rounds, if there is at least one, when something ends the run
            before its last round. The exception that ended it is raised afterwards.
        keep_turns: Called before and after every turn with the record so far; ``at`` names the turn that is being
            taken, so that a reader knows what a killed process was doing.
        is_steady: Called with the record when all rounds are taken. While it returns ``False``, `MORE_ROUNDS` are
            added, until there are `MOST_TIMES` as many as the scenario asks for. No round is left out.

    Returns:
        The scenario's report with ``format``, ``version``, ``command``, ``environment``, ``complete``, ``num_rounds``
        and ``stopped``: the turn in which it ended early, or ``None``.
    """
    load_at_start = round(os.getloadavg()[0], 2)
    if left := remove_leftovers(scenario.work):
        print_note(f"removed the leftovers of runs that were killed: {', '.join(map(str, left))}")
    with ExitStack() as stack:
        folder = stack.enter_context(RunFolder(scenario.work))
        if scenario.runs_in == "fork":
            fork_server()  # loads libraries while nothing is timed
        made = scenario.prepare(folder, stack)
        rounds: Rounds[Subject, Row] = Rounds(scenario.subjects(made), wanted=scenario.repeats)
        scenario.take_over(rounds)
        at_start = {} if keep_turns is None else describe_environment()  # it asks git, so not around every turn

        def record(environment: Mapping[str, Any]) -> dict[str, Any]:
            is_complete = rounds.num_whole == rounds.wanted
            report = {
                "environment": {**environment, "load_at_start": load_at_start},
                **scenario.report(made, rounds),
                "complete": is_complete,
                "num_rounds": rounds.num_whole,
                "quiet_ms": rounds.quiet_ms,
                "stopped": None if is_complete else rounds.at,
            }
            return stamped(report, kind=scenario.kind)

        def tell(at: str | None) -> None:
            if keep_turns is not None:
                keep_turns({**record(at_start), "at": at})

        try:
            _take_turns(scenario, made, rounds, tell)
            while is_steady and rounds.wanted < MOST_TIMES * scenario.repeats and not is_steady(record({})):
                rounds.wanted = min(rounds.wanted + MORE_ROUNDS, MOST_TIMES * scenario.repeats)
                _take_turns(scenario, made, rounds, tell)
            return record(describe_environment())
        except BaseException:
            if rounds.num_whole and keep is not None:
                keep(record(describe_environment()))
            raise


def _take_turns(
    scenario: Scenario[Made, Subject, Row],
    made: Made,
    rounds: Rounds[Subject, Row],
    tell: Callable[[str | None], None],
) -> None:
    with bar(what=scenario.title, total=rounds.wanted * len(rounds.subjects), unit="turn") as line:
        for number in range(rounds.wanted):
            for subject in scenario.order(rounds.subjects, number):
                is_late = scenario.deadline is not None and time.monotonic() > scenario.deadline
                is_due = subject not in rounds.errors and len(rounds.rows[subject]) <= number
                if is_due and not is_late:
                    name = scenario.name_of(subject)
                    rounds.at = f"round {number + 1} of {rounds.wanted}, {name}"
                    tell(name)
                    line.set_postfix_str(name)
                    rounds.quiet_ms.append(quiet_ms())
                    try:
                        rounds.rows[subject].append(_measure(scenario, made, subject, number))
                    except Exception as exc:
                        if not scenario.goes_on_without(subject):
                            raise
                        rounds.errors[subject] = failure_text(exc)
                    tell(None)
                line.update(1)
    rounds.quiet_ms.append(quiet_ms())


def _measure(scenario: Scenario[Made, Subject, Row], made: Made, subject: Subject, number: int) -> Row:
    if scenario.runs_in == "caller":
        return scenario.measure(made, subject, number)
    name, is_fresh = scenario.name_of(subject), scenario.runs_in == "interpreter"
    return call_apart(scenario.measure, made, subject, number, name=name, timeout_s=scenario.timeout_s, fresh=is_fresh)
