"""``--quiet`` and ``--verbose``, which each command takes, before or after its name."""

from typing import TypeVar

import click

from dali_pipes.commands import verbosity

CommandType = TypeVar("CommandType", bound=click.Command)
_FORMER = "dali-pipes"  # the key of the option that was given, in the context's notes


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


def _option(name: verbosity.Verbosity, help: str) -> click.Option:
    return click.Option(
        [f"-{name[0]}", f"--{name}"], is_flag=True, is_eager=True, expose_value=False, callback=_use, help=help
    )


def _use(context: click.Context, option: click.Parameter, is_given: bool) -> None:
    if not is_given:
        return
    given: verbosity.Verbosity = "quiet" if option.name == "quiet" else "verbose"
    if context.meta.setdefault(_FORMER, given) != given:  # the contexts of a command and its groups share it
        raise click.UsageError("--quiet and --verbose exclude each other")
    verbosity.use(given)
