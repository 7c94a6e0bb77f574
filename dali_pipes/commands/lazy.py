"""A group of commands that imports a command only when it runs, so that ``--help`` answers at once."""

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

_ROOT = Path(__file__).parents[2]
"""The folder that holds our packages, installed or not."""
# A package -> the packages of ours that it imports, itself among them.
_NEEDED = {"prep": ("prep",), "bench": ("bench", "prep")}


class LazyGroup(click.Group):
    """A group that knows its commands' names and first lines without importing them.

    Args:
        lazy: Name -> where the command is, ``module:attribute``, and its line in the group's ``--help``.
        arguments: Those of `click.Group`.
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
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in self._lazy.items()])


def _check_ours(package: str) -> None:
    """Refuse to import a module of the user's that has the name of one of our packages."""
    spec = importlib.util.find_spec(package)  # finds it, and runs nothing
    origin = None if spec is None else spec.origin
    ours = _ROOT / package / "__init__.py"
    if origin is not None and Path(origin).resolve() == ours.resolve():
        return
    if origin is None:
        # A folder of the user's without an __init__.py: it hides ours where ours is installed in editable mode.
        if not ours.exists():
            raise click.ClickException(f"dali-pipes' own package '{package}' is not installed; expected '{ours}'")
        sys.path.insert(0, str(_ROOT))
        try:
            importlib.import_module(package)
        finally:
            sys.path.remove(str(_ROOT))
        return
    raise click.ClickException(
        f"'{origin}' is in the way of dali-pipes' own package '{package}'; rename it, or run dali-pipes from another "
        "folder: `dali-pipes` or `python -P -m dali_pipes`"
    )
