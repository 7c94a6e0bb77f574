"""Describe a benchmark to the engine: its settings, what it prepares, what each turn measures, and its record."""

import random
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, TypeVar

from bench.tools.folders import RunFolder, check_writable
from dali_pipes.errors import PipesError, printable

TURN_S = 7200.0
MAX_ERROR_CHARS = 600

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
    """Number of rounds."""
    rows: dict[Subject, list[Row]] = field(init=False)
    """The measurements of each subject, in the order of the rounds."""
    errors: dict[Subject, str] = field(default_factory=dict)
    """The errors of failed subjects, in a scenario that continues without them (see `goes_on_without`)."""
    at: str = ""
    """The turn that is being taken, in words."""

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
    """A benchmark, without the loop that all benchmarks share: `bench.engine.run.run_scenario` has that.

    A scenario is a frozen dataclass. Its fields are its settings, and those made by `bench.engine.options.option` are
    the options of its command, with the class's docstring as help. Whole numbers among them, except the seed, must be
    at least 1. A subject is a name, or a named tuple: its field ``loader`` names its row in tables, and its other
    fields are its setting. `bench.scenarios.fetch` is an example.
    """

    kind: ClassVar[str]
    """Ends the record's format, and is the name of the command."""
    title: ClassVar[str]
    """The title of the progress bar."""
    runs_in: ClassVar[Literal["fork", "interpreter", "caller"]] = "fork"
    """Where `measure` is called: in a process forked from a server that has loaded all libraries; in a new interpreter,
    if it measures memory; or in this process, if it starts the processes of a turn itself."""
    ratio_to: ClassVar[str | None] = None
    """The row that ratios are to; ``None``: there are no ratios."""
    needs_one: ClassVar[bool] = True
    """Whether a run in which every subject failed is an error."""
    work_option: ClassVar[str] = "--cache"
    """The option that names ``work``, for errors."""

    repeats: int = 5
    """Rounds: turns of each subject."""
    seed: int = 7
    """The seed; it also decides the order within each round."""
    work: Path | None = None
    """The run makes its folder here; ``None``: in the directory for temporary files."""
    timeout_s: float | None = TURN_S
    """Limit of one turn."""
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
        """Make the inputs of all turns. Nothing is timed yet.

        Args:
            folder: Gives directories that are deleted at the end, or by a later run if this one is killed.
            stack: For servers and the like; it is closed before the folder.

        Returns:
            What every turn is given; it goes through pickle, unless `measure` runs in this process.
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
