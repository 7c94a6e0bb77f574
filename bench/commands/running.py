"""Make the command of a scenario; run the scenario, print its table, and write its record."""

import contextlib
import dataclasses
import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bench.engine.options import field_options, json_option, opened_shards
from dali_pipes.commands.options import cluster_options, join_options
from dali_pipes.errors import PipesError, shown

if TYPE_CHECKING:
    from bench.engine.scenario import Scenario


def scenario_command(kind: "type[Scenario[Any, Any, Any]]") -> click.Command:
    """Make the command that runs a scenario.

    Args:
        kind: The scenario's class. Its ``kind`` is the command's name, its docstring the help; its fields that were
            made by `option` are the options. With a field ``shards``, the command opens the shards that it names.
    """
    options = field_options(kind)
    reads_shards = "shards" in options

    @click.command(kind.kind, help=inspect.getdoc(kind))
    @join_options(*options.values(), json_option, *([cluster_options] if reads_shards else []))
    def command(*, json_path: Path | None, **given: Any) -> None:
        where = {name: given.pop(name) for name in ("endpoint", "embedded_dir") if reads_shards}
        shards = given.pop("shards", None)
        # A field whose option was not given has its own default.
        scenario: Any = kind(**{name: value for name, value in given.items() if value is not None})
        with contextlib.ExitStack() as stack:
            # Wrong settings were already refused, before anything is opened.
            if shards is not None:
                found, _ = stack.enter_context(opened_shards(shards, **where))
                scenario = dataclasses.replace(scenario, shards=found)
            run_and_tell(scenario, json_path=json_path)

    return command


def run_and_tell(scenario: "Scenario[Any, Any, Any]", *, json_path: Path | None) -> None:
    """Run a scenario, print its table, and write the record where that was asked for.

    If Ctrl-C, or a turn that fails, ends it early, the whole rounds before that are printed and written, too.
    """
    from bench.engine.run import run_scenario

    def keep(report: dict[str, Any]) -> None:
        _tell(report, json_path=json_path)
        where = "above; --json FILE writes them" if json_path is None else f"in '{json_path}'"
        click.echo(
            f"stopped in {report['stopped'] or 'its last moment'}; kept: {report['num_rounds']} whole rounds, {where}",
            err=True,
        )

    report = run_scenario(scenario, keep=keep)
    _tell(report, json_path=json_path)
    if failed := report.get("failed"):
        names = dict.fromkeys(row["loader"] for row in failed)
        raise PipesError(f"failed, and left out of the table: {shown([*names])}; the notes below the table say why")


def _tell(report: dict[str, Any], *, json_path: Path | None) -> None:
    """Print the table first: it is on the terminal even if the file cannot be written."""
    from bench.reports.record import write_record
    from bench.reports.tables import report_text

    click.echo(report_text(report))
    if json_path is not None:
        write_record(report, json_path)
