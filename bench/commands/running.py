"""Run a scenario for a command: print its table, and write its record."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from bench.commands.options import opened_shards

if TYPE_CHECKING:
    from bench.engine.scenario import Scenario


Command = TypeVar("Command", bound=Callable[..., Any])


def needs_extras(command: Command) -> Command:
    """Have a command say in one line which packages are missing, before it imports what needs them."""

    @functools.wraps(command)
    def checked(*arguments: Any, **keywords: Any) -> Any:
        from bench.tools.environment import check_extras

        check_extras()
        return command(*arguments, **keywords)

    return cast("Command", checked)


def run_and_tell(scenario: "Scenario[Any, Any, Any]", *, json_path: Path | None, html_path: Path | None = None) -> None:
    """Run a scenario, print its table, and write the record where that was asked for.

    What Ctrl-C, or a turn that fails, leaves of whole rounds is printed and written, too.

    Args:
        scenario: What to do.
        json_path: For the record; ``None``: nowhere.
        html_path: For the page of a run's record; ``None``: nowhere.
    """
    from bench.engine.run import run_scenario

    paths = [path for path in (json_path, html_path) if path is not None]

    def keep(report: dict[str, Any]) -> None:
        _tell(scenario, report, json_path=json_path, html_path=html_path)
        files = " and ".join(f"'{path}'" for path in paths)
        click.echo(
            f"stopped in {report['stopped'] or 'its last moment'}; kept: {report['num_rounds']} whole rounds, "
            f"{f'in {files}' if files else 'above; --json FILE writes them'}",
            err=True,
        )

    _tell(scenario, run_scenario(scenario, keep=keep), json_path=json_path, html_path=html_path)


def run_on_shards(kind: "Callable[..., Scenario[Any, Any, Any]]", given: dict[str, Any]) -> None:
    """Run a scenario on the shards that `scenario_options` name.

    Args:
        kind: The scenario's class, whose fields are the options of the command, and ``shards``.
        given: The values of the command's options.
    """
    shards, endpoint, embedded_dir, json_path = (
        given.pop(name) for name in ("shards", "endpoint", "embedded_dir", "json_path")
    )
    scenario: Any = kind(**given)  # wrong settings are refused before anything is opened
    with contextlib.ExitStack() as stack:
        if shards is not None:
            found, _ = stack.enter_context(opened_shards(shards, endpoint=endpoint, embedded_dir=embedded_dir))
            scenario = dataclasses.replace(scenario, shards=found)
        run_and_tell(scenario, json_path=json_path)


def _tell(
    scenario: "Scenario[Any, Any, Any]", report: dict[str, Any], *, json_path: Path | None, html_path: Path | None
) -> None:
    """The table first: it is on the terminal even if a file cannot be written."""
    from bench.reports.record import write_record, write_text

    click.echo(scenario.table(report))
    if json_path is not None:
        write_record(report, json_path)
    if html_path is not None:
        from bench.reports.page import html_page

        write_text(html_page([(html_path.stem, report)]), html_path)
