"""Groups of commands that import a command only when it runs, and ``--quiet`` and ``--verbose`` of every command."""

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from dali_pipes.progress import Verbosity, use_verbosity

CommandType = TypeVar("CommandType", bound=click.Command)
_ROOT = Path(__file__).parents[2]
"""The folder that holds our packages, installed or not."""
# A package of ours -> itself and the packages of ours that it imports.
_NEEDED = {"prep": ("prep",), "bench": ("bench", "prep")}


class LazyGroup(click.Group):
    """A group that knows its commands' names and first lines without importing the commands.

    ``lazy`` maps a name to the command's place, ``module:attribute``, and its line in the group's ``--help``.
    """

    def __init__(self, *, lazy: Mapping[str, tuple[str, str]], **arguments: Any) -> None:
        super().__init__(**arguments)
        self._lazy = dict(sorted(lazy.items()))

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._lazy:
            return super().get_command(ctx, cmd_name)
        module, _, attribute = self._lazy[cmd_name][0].partition(":")
        for package in _NEEDED.get(module.partition(".")[0], ()):
            _check_ours(package)
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return with_verbosity(command)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in self._lazy.items()])


def _check_ours(package: str) -> None:
    """Refuse to import a user's module that has the name of one of our packages."""
    spec = importlib.util.find_spec(package)  # finds the package without running it
    origin = None if spec is None else spec.origin
    ours = _ROOT / package / "__init__.py"
    if origin is not None:
        if Path(origin).resolve() != ours.resolve():
            raise click.ClickException(
                f"'{origin}' hides dali-pipes' own package '{package}'; rename it, or start the "
                "program as `dali-pipes` or `python -P -m dali_pipes`, or from another folder"
            )
        return
    # A user's folder without an __init__.py hides our package if ours is installed in editable mode.
    if not ours.exists():
        raise click.ClickException(f"dali-pipes' own package '{package}' is not installed; expected '{ours}'")
    sys.path.insert(0, str(_ROOT))
    try:
        importlib.import_module(package)
    finally:
        sys.path.remove(str(_ROOT))


def with_verbosity(command: CommandType) -> CommandType:
    """Add the options to a command and to the commands below it, unless they have them."""
    if not any(parameter.name == "verbose" for parameter in command.params):
        command.params += [
            _option("quiet", "Only errors and the result."),
            _option("verbose", "Log each step to stderr."),
        ]
    if isinstance(command, click.Group):
        for below in command.commands.values():
            with_verbosity(below)
    return command


def _option(name: Verbosity, help: str) -> click.Option:
    return click.Option(
        [f"-{name[0]}", f"--{name}"], is_flag=True, is_eager=True, expose_value=False, callback=_use, help=help
    )


def _use(context: click.Context, option: click.Parameter, is_given: bool) -> None:
    if not is_given:
        return
    given: Verbosity = "quiet" if option.name == "quiet" else "verbose"
    # The contexts of a command and its groups share `meta`.
    if context.meta.setdefault("dali-pipes verbosity", given) != given:
        raise click.UsageError("--quiet and --verbose exclude each other")
    use_verbosity(given)
