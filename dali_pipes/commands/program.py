"""How this program is started again from the shell that started it, which may not have its environment activated."""

import shlex
import shutil
import sys
from pathlib import Path

__all__ = ["activation", "program"]

_NAME = "dali-pipes"


def program() -> str:
    """Return what to type in place of ``dali-pipes``: the name if the shell finds it, else a path or a module."""
    script = Path(sys.executable).parent / _NAME
    if shutil.which(_NAME) == str(script):
        return _NAME
    if script.exists():
        return _typed(script)
    return f"{_typed(Path(sys.executable))} -m dali_pipes"  # a checkout that is not installed


def activation() -> str:
    """Return the command that activates this environment; empty if it is active, or is no virtual environment."""
    script = Path(sys.executable).parent / "activate"
    return f". {_typed(script)}" if script.exists() and program() != _NAME else ""


def _typed(path: Path) -> str:
    """Quote a path for a shell, relative if it is below the current directory."""
    here = Path.cwd()
    return shlex.quote(str(path.relative_to(here) if path.is_relative_to(here) else path))
