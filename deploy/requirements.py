"""pyproject.toml to the list of requirements that the image installs: pip has no command for a project's needs alone.

A layer of its own, which only another list makes anew, not every change of the code. And the one place where DALI's
build is chosen: the project names that for CUDA 12, and pip has no way to put another in its place. Runs before
anything is installed: the standard library only.

    python3 deploy/requirements.py --extras bench --dali-cuda 130 > requirements.txt
"""

import argparse
import re
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["main", "requirements"]

PYPROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"
DALI = "nvidia-dali-cuda"
BUILDS = ("120", "130")
"""CUDA versions that DALI is built for, as its packages' names have them."""


def requirements(project: dict[str, Any], *, extras: Sequence[str], dali_cuda: str) -> list[str]:
    """The requirements of a project and its extras, each once, DALI's build replaced.

    Args:
        project: The table ``[project]``.
        extras: Names of ``[project.optional-dependencies]``; one may name others of the same project.
        dali_cuda: ``"120"`` or ``"130"``.

    Raises:
        ValueError: If there is no such extra or build, or the project does not require DALI.

    >>> project = {"name": "p", "dependencies": ["nvidia-dali-cuda120>=2.4,<3", "numpy"]}
    >>> requirements(project, extras=[], dali_cuda="130")
    ['nvidia-dali-cuda130>=2.4,<3', 'numpy']
    """
    if dali_cuda not in BUILDS:
        raise ValueError(f"--dali-cuda must be one of {', '.join(BUILDS)}, got '{dali_cuda}'")
    lines = [*project["dependencies"]]
    optional = project.get("optional-dependencies", {})
    wanted, seen = [*extras], set()
    while wanted:
        extra = wanted.pop(0)
        if extra in seen:
            continue
        seen.add(extra)
        if extra not in optional:
            there = ", ".join(optional)
            raise ValueError(f"--extras names '{extra}', which pyproject.toml does not have (found: {there})")
        for line in optional[extra]:
            own = re.fullmatch(rf"{re.escape(project['name'])}\[([^]]+)]", line)
            if own:
                wanted += [name.strip() for name in own[1].split(",")]
            else:
                lines.append(line)
    replaced = [re.sub(rf"^{DALI}\d+", f"{DALI}{dali_cuda}", line) for line in lines]
    if not any(line.startswith(DALI) for line in replaced):
        raise ValueError(f"pyproject.toml requires no {DALI}..., of which --dali-cuda chooses the build")
    return list(dict.fromkeys(replaced))


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="Print what pip is to install before the project itself.")
    parser.add_argument("--extras", default="", help="extras, with commas between them")
    parser.add_argument("--dali-cuda", default="120", help=f"DALI's build: {' or '.join(BUILDS)}")
    arguments = parser.parse_args(argv)
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    extras = [name for name in arguments.extras.split(",") if name]
    try:
        lines = requirements(project, extras=extras, dali_cuda=arguments.dali_cuda)
    except ValueError as exc:
        parser.error(str(exc))
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
