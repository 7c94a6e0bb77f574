"""Take the scenarios of `bench gpu` one after another, each in a process of its own, and keep what is done.

A GPU is often lent for minutes, and a command on it may be killed. A scenario's record is written before and after
every turn, as a whole or not at all. The next command goes on with it: no turn that has a result is taken again. A
process that dies takes one turn with it; the scenario then goes on in another process.
"""

import time
from pathlib import Path
from typing import Any

import click

from bench.engine.run import run_scenario
from bench.engine.turn_process import call_apart
from bench.gpu.copies import count_copies, is_counted
from bench.gpu.sweep import GpuScenario
from bench.reports.record import read_record, write_record
from bench.tools.environment import describe_environment
from dali_pipes.errors import DataError, PipesError

GRACE_S = 20.0
"""A turn that has begun before the deadline has this time to end; then its process is killed."""
_SAME = ("commit", "versions", "gpus", "python")
"""What a record's environment must have in common with this machine's, so that its figures belong together."""


def take_scenario(scenario: GpuScenario, path: Path) -> dict[str, Any]:
    """Run a scenario, or go on with its record, and return the record.

    Args:
        scenario: With the deadline, which holds for checks, too.
        path: The record's file.

    Raises:
        DataError: If the record there was made with other options, or on another machine.
        PipesError: If the scenario cannot be opened.
    """
    if path.exists():
        earlier = read_record(path)
        scenario.check_options(earlier)
        _check_machine(earlier, path)
    while not _is_over(scenario) and not (path.exists() and is_done(read_record(path))):
        _call(run_kept, scenario, path)
    if scenario.device == "gpu":
        while not _is_over(scenario) and is_done(report := read_record(path)) and not is_counted(report):
            _call(count_copies, scenario, path)
    if not path.exists():
        raise PipesError(f"scenario '{scenario.name}': the time was over before its first turn; pass more --minutes")
    return read_record(path)


def is_done(report: dict[str, Any]) -> bool:
    """Whether every turn of a record has a result or failed."""
    return not report["left_out"] and report["at"] is None


def run_kept(scenario: GpuScenario, path: Path) -> None:
    """Run a scenario in this process, or go on with its record, which is written before and after every turn."""
    earlier = read_record(path) if path.exists() else None
    report = run_scenario(scenario, keep_turns=lambda report: write_record(report, path), earlier=earlier)
    write_record({**report, "at": None}, path)


def _call(function: Any, scenario: GpuScenario, path: Path) -> None:
    """Call a function in a process of its own; return also if that dies in a turn, or if the time is over."""
    limit_s = None if scenario.deadline is None else max(0.0, scenario.deadline - time.monotonic()) + GRACE_S
    before = path.read_bytes() if path.exists() else None
    try:
        call_apart(function, scenario, path, name=f"scenario '{scenario.name}'", timeout_s=limit_s)
    except PipesError as exc:
        # A process that has written nothing would fail again in the same way.
        if (path.read_bytes() if path.exists() else None) == before:
            raise
        click.echo(f"{exc}; its record is kept, and goes on", err=True)


def _is_over(scenario: GpuScenario) -> bool:
    return scenario.deadline is not None and time.monotonic() > scenario.deadline


def _check_machine(report: dict[str, Any], path: Path) -> None:
    here, there = describe_environment(), report["environment"]
    if changed := [name for name in _SAME if here[name] != there[name]]:
        name = changed[0]
        raise DataError(
            f"'{path.name}': made with another {name} ({there[name]}, here {here[name]}); its figures do not belong "
            "together with new ones: name another directory, or delete it"
        )
