"""Groups that import a command only when it runs, and the options and sizes that commands of several packages share.

Only click, and modules that need nothing else, are imported before a command runs.
"""

import dataclasses
import difflib
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

import click

from dali_pipes.progress import Verbosity, use_verbosity
from dali_pipes.store.patience import PATIENCE_S, current_patience, use_patience

Command = TypeVar("Command", bound=Callable[..., Any])
CommandType = TypeVar("CommandType", bound=click.Command)
_ROOT = Path(__file__).parents[2]
"""The folder that holds our packages, installed or not."""
# A package of ours -> itself and the packages of ours that it imports.
_NEEDED = {"prep": ("prep",), "bench": ("bench", "prep")}
_BINARY_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_UNITS = _BINARY_UNITS | {"kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


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

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as exc:
            name, path = args[0], ctx.command_path
            commands = {known: f"{path} {known}" for known in self._lazy}
            for group in self._lazy:  # `make` for `prep make`
                if isinstance(command := self.get_command(ctx, group), LazyGroup):
                    commands |= {below: f"{path} {group} {below}" for below in command.list_commands(ctx)}
            near = difflib.get_close_matches(name, commands, 1)
            guess = f"did you mean '{commands[near[0]]}'?" if near else f"there are {', '.join(self._lazy)}"
            raise click.UsageError(f"no command '{name}'; {guess}", ctx) from exc

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in self._lazy.items()])


def _check_ours(package: str) -> None:
    """Refuse to import a user's module that has the name of one of our packages."""
    spec = importlib.util.find_spec(package)  # finds the package without running it
    ours = _ROOT / package / "__init__.py"
    if spec is not None and spec.origin is not None:
        if Path(spec.origin).resolve() != ours.resolve():
            raise click.ClickException(
                f"'{spec.origin}' hides dali-pipes' own package '{package}'; rename it, or start the program as "
                "`dali-pipes` or `python -P -m dali_pipes`, or from another folder"
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
    """Add ``--quiet`` and ``--verbose`` to a command and to the commands below it, unless they have them."""
    if not any(parameter.name == "verbose" for parameter in command.params):
        for name, text in (("quiet", "Only errors and the result."), ("verbose", "Log each step to stderr.")):
            flag: dict[str, Any] = {"is_flag": True, "is_eager": True, "expose_value": False, "callback": _use}
            command.params.append(click.Option([f"-{name[0]}", f"--{name}"], help=text, **flag))
    if isinstance(command, click.Group):
        for below in command.commands.values():
            with_verbosity(below)
    return command


def _use(context: click.Context, option: click.Parameter, is_given: bool) -> None:
    if not is_given:
        return
    given: Verbosity = "quiet" if option.name == "quiet" else "verbose"
    # The contexts of a command and its groups share `meta`.
    if context.meta.setdefault("dali-pipes verbosity", given) != given:
        raise click.UsageError("--quiet and --verbose exclude each other")
    use_verbosity(given)


def size(text: str) -> int:
    """Read an option that is a number of bytes: ``4096``, ``64MB`` (10**6), ``1.5GiB`` (2**30). ``--help`` shows this
    function's name.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or (match[2] or "B") not in _UNITS:
        raise click.BadParameter(f"a size is a number and one of {', '.join(_UNITS)}, got '{text}'")
    num_bytes = round(float(match[1]) * _UNITS[match[2] or "B"])
    if num_bytes < 1:
        raise click.BadParameter(f"a size must be at least one byte, got '{text}'")
    return num_bytes


def format_bytes(num_bytes: int) -> str:
    """Show a number of bytes in the largest binary unit that gives at least 1.

    >>> format_bytes(23173530)
    '22.1 MiB'
    """
    for unit, scale in reversed(_BINARY_UNITS.items()):
        if num_bytes >= scale > 1:
            return f"{num_bytes / scale:.1f} {unit}"
    return f"{num_bytes} B"


def join_options(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Join several options into one decorator; ``--help`` lists them in this order."""

    def add(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def _use_patience(context: click.Context, option: click.Parameter, seconds: float) -> None:
    """Give all stores that the command opens this patience."""
    changes: dict[str, Any] = {"patience_s" if option.name == "patience" else "start_s": seconds}
    try:
        patience = dataclasses.replace(current_patience(), **changes)
    except ValueError as exc:
        raise click.BadParameter(str(exc)) from exc
    context.with_resource(use_patience(patience))


cluster_options = join_options(
    click.option(
        "--endpoint",
        envvar="AIS_ENDPOINT",
        show_envvar=True,
        help="AIStore's proxy, for buckets; several of one cluster with commas between them. Without one, an embedded "
        "node runs on this machine during the command.",
    ),
    click.option(
        "--patience",
        type=float,
        default=PATIENCE_S,
        show_default=True,
        metavar="SECONDS",
        expose_value=False,
        callback=_use_patience,
        help="How long to wait, without progress, for a cluster that is away: restarts, rebalances, limits its rate. "
        "An endpoint that does not answer when the command starts is an error at once, unless --patience-at-start "
        "is given.",
    ),
    click.option(
        "--patience-at-start",
        type=float,
        default=0.0,
        show_default=True,
        metavar="SECONDS",
        expose_value=False,
        callback=_use_patience,
        help="The same for a cluster that is away when the command starts.",
    ),
    click.option(
        "--embedded-dir",
        envvar="DALI_PIPES_EMBEDDED_DIR",
        show_envvar=True,
        type=click.Path(file_okay=False, path_type=Path),
        help="The embedded node's folder.  [default: $XDG_DATA_HOME/dali-pipes/embedded]",
    ),
)
cache_bytes_option = click.option(
    "--cache-bytes",
    type=size,
    help="Limit of all cache files in that directory.  [default: half of free memory, or nine tenths of a disk's free "
    "space]",
)
# With --json, stdout holds one document and nothing else, and no bars are drawn. Messages on stderr and the exit code
# stay the same. (The commands of bench differ: there the option takes a file, to which a record is written.)
json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON document.")


def endpoint_for(
    reads: str | Iterable[str],
    endpoint: str | None,
    embedded_dir: Path | None,
    *,
    writes: Iterable[str] = (),
    etl_function: str | None = None,
) -> AbstractContextManager[str | None]:
    """See `dali_pipes.store.cluster.endpoint.endpoint_for`, which is imported only when a command runs."""
    from dali_pipes.store.cluster import endpoint as endpoints

    urls = [reads] if isinstance(reads, str) else reads
    return endpoints.endpoint_for(
        urls, writes=writes, endpoint=endpoint, embedded_dir=embedded_dir, etl_function=etl_function
    )
