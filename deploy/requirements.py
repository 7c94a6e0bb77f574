"""Print what pip is to install before the project itself, or the versions to pin, for one choice of CUDA.

The package requires DALI's build for CUDA 12, and pip has no way to put another in its place. Runs before
anything is installed: the standard library only.

    python3 deploy/requirements.py --cuda 13 --extras bench > requirements.txt
    python3 deploy/requirements.py --cuda 13 --pins > pins.txt
    pip install --dry-run --quiet --only-binary :all: --report report.json -c pins.txt -r requirements.txt
    python3 deploy/requirements.py --hashes report.json > hashed.txt
    pip install --require-hashes --only-binary :all: --no-deps -r hashed.txt
"""

import argparse
import json
import re
import sys
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

__all__ = ["hashed", "main", "pins", "requirements"]

ROOT = Path(__file__).resolve().parents[1]
DALI = "nvidia-dali-cuda"
CHOICES = {"12": "120", "13": "130", "12+13": "120", "none": "120"}
"""Choice of CUDA -> DALI's build. ``12+13``: DALI for 12, torch for 13. ``none``: torch comes from a CPU-only index."""
PINS = {"12": "cuda12.txt", "13": "cuda13.txt"}
"""Choice of CUDA -> the file beside this one whose lines go before those of constraints.txt."""
HASHES = "hashes.txt"
"""The file beside this one with the hashes of all pinned versions."""


def requirements(project: dict[str, Any], *, extras: Sequence[str], cuda: str) -> list[str]:
    """The requirements of a project and its extras, each once, DALI's build replaced.

    Args:
        project: The table ``[project]``.
        extras: Names of ``[project.optional-dependencies]``; one may name others of the same project.
        cuda: One of `CHOICES`.

    Raises:
        ValueError: If there is no such extra or choice, or the project does not require DALI.

    >>> project = {"name": "p", "dependencies": ["nvidia-dali-cuda120>=2.4,<3", "numpy"]}
    >>> requirements(project, extras=[], cuda="13")
    ['nvidia-dali-cuda130>=2.4,<3', 'numpy']
    """
    if cuda not in CHOICES:
        raise ValueError(f"--cuda must be one of {', '.join(CHOICES)}, got '{cuda}'")
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
    replaced = [re.sub(rf"^{DALI}\d+", f"{DALI}{CHOICES[cuda]}", line) for line in lines]
    if not any(line.startswith(DALI) for line in replaced):
        raise ValueError(f"pyproject.toml requires no {DALI}..., of which --cuda chooses the build")
    return list(dict.fromkeys(replaced))


def pins(common: Iterable[str], own: Iterable[str]) -> list[str]:
    """Lines of a constraints file: those of ``own``, and those of ``common`` for other packages.

    >>> pins(["numpy==2.5.5", "torch==2.15.0"], ["# newest for CUDA 12", "torch==2.10.0"])
    ['numpy==2.5.5', 'torch==2.10.0']
    """
    chosen = [line for line in own if not line.startswith("#")]
    names = {line.partition("==")[0] for line in chosen}
    return [line for line in common if line.partition("==")[0] not in names] + chosen


def hashed(report: dict[str, Any], known: str) -> list[str]:
    """One line for each package that pip would install: its version, and the hashes of its files.

    Args:
        report: What ``pip install --dry-run --report`` writes.
        known: Requirements with hashes, as ``uv pip compile --generate-hashes`` writes them.

    Raises:
        ValueError: If there are no hashes of one of these versions.

    >>> report = {"install": [{"metadata": {"name": "PyYAML", "version": "6.0"}}]}
    >>> hashed(report, "numpy==2.5 \\\\\\n    --hash=sha256:ab\\npyyaml==6.0 \\\\\\n    --hash=sha256:cd\\n")
    ['pyyaml==6.0 --hash=sha256:cd']
    """
    lines = {line.split()[0]: " ".join(line.split()) for line in known.replace("\\\n", "").splitlines()}
    found = [item["metadata"] for item in report["install"]]
    wanted = [f"{re.sub('[-_.]+', '-', item['name']).lower()}=={item['version']}" for item in found]
    if missing := [name for name in wanted if name not in lines]:
        raise ValueError(f"no hashes of {', '.join(missing)}; run: make constraints")
    return [lines[name] for name in wanted]


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="Print what pip is to install before the project itself.")
    parser.add_argument("--extras", default="", help="extras, with commas between them")
    parser.add_argument("--cuda", default="12", choices=CHOICES, help="the choice of CUDA: docs/how-to/install.md")
    parser.add_argument("--pins", action="store_true", help="print the versions to pin, in place of the requirements")
    parser.add_argument("--hashes", metavar="REPORT", help="print hashes of what pip would install, by its report")
    arguments = parser.parse_args(argv)
    try:
        if arguments.hashes:
            lines = hashed(json.loads(Path(arguments.hashes).read_text()), (ROOT / "deploy" / HASHES).read_text())
        elif arguments.pins:
            own = PINS.get(arguments.cuda)
            lines = pins(_lines(ROOT / "constraints.txt"), _lines(ROOT / "deploy" / own) if own else [])
        else:
            table = tomllib.loads((ROOT / "pyproject.toml").read_text())
            project = table["project"]
            extras = [name for name in arguments.extras.split(",") if name]
            # What builds the project: in an image it is built without a network.
            lines = requirements(project, extras=extras, cuda=arguments.cuda) + table["build-system"]["requires"]
    except ValueError as exc:
        parser.error(str(exc))
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 0


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


if __name__ == "__main__":
    sys.exit(main())
