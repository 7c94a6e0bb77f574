"""Run a scenario: rounds of turns, interleaved, to one record.

A round has one turn of every subject, so a drift of the machine affects all subjects alike. If Ctrl-C, SIGTERM or a
turn that fails ends a run before its last round, the complete rounds before it are kept. A caller may also keep the
record around every turn, and go on with it later, in another process.
"""

import os
import time
from collections.abc import Callable, Hashable, Mapping
from contextlib import ExitStack
from typing import Any, TypeVar

from bench.engine.scenario import Rounds, Scenario, failure_text
from bench.engine.turn_process import call_apart, fork_server
from bench.reports.record import stamped
from bench.tools.environment import describe_environment
from bench.tools.folders import RunFolder, remove_leftovers
from dali_pipes.commands.output import print_note
from dali_pipes.progress import bar

Made = TypeVar("Made")
Subject = TypeVar("Subject", bound=Hashable)
Row = TypeVar("Row")


def run_scenario(
    scenario: Scenario[Made, Subject, Row],
    *,
    keep: Callable[[dict[str, Any]], None] | None = None,
    keep_turns: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Prepare, take turns, and report.

    Args:
        scenario: What to do.
        keep: Called with the record of the complete rounds, if there is at least one, when something ends the run
            before its last round. The exception that ended it is raised afterwards.
        keep_turns: Called before and after every turn with the record so far; ``at`` names the turn that is being
            taken, so that a reader knows what a killed process was doing.

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
                "stopped": None if is_complete else rounds.at,
            }
            return stamped(report, kind=scenario.kind)

        def tell(at: str | None) -> None:
            if keep_turns is not None:
                keep_turns({**record(at_start), "at": at})

        try:
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
                    try:
                        rounds.rows[subject].append(_measure(scenario, made, subject, number))
                    except Exception as exc:
                        if not scenario.goes_on_without(subject):
                            raise
                        rounds.errors[subject] = failure_text(exc)
                    tell(None)
                line.update(1)


def _measure(scenario: Scenario[Made, Subject, Row], made: Made, subject: Subject, number: int) -> Row:
    if scenario.runs_in == "caller":
        return scenario.measure(made, subject, number)
    name, is_fresh = scenario.name_of(subject), scenario.runs_in == "interpreter"
    return call_apart(scenario.measure, made, subject, number, name=name, timeout_s=scenario.timeout_s, fresh=is_fresh)
