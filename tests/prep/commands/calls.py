"""Call a command of ``dali-pipes prep`` in this process."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from prep.commands.group import prep


def call_prep(*arguments: str | Path) -> Result:
    """The result of a command, whether it succeeds or not."""
    return CliRunner().invoke(prep, [str(argument) for argument in arguments], prog_name="dali-pipes prep")


def run_prep(*arguments: str | Path, expect: type[BaseException] | None = None, match: str = "") -> Result:
    """The result of a command that succeeds, or that raises the expected exception."""
    result = call_prep(*arguments)
    if expect is None:
        if result.exception is not None:
            raise result.exception
        return result
    with pytest.raises(expect, match=match):
        raise result.exception or AssertionError(result.output)
    return result


def json_of_prep(*arguments: str | Path) -> dict[str, Any]:
    """The document that a command prints with ``--json``."""
    found: dict[str, Any] = json.loads(run_prep(*arguments, "--json").stdout)
    return found
