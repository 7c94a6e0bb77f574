"""A Dockerfile to its instructions, and a stage of it to what its steps do, in a folder and without a container."""

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class Stage(list[tuple[str, str]]):
    """The instructions of one stage: each is a word and its arguments."""

    def texts(self, word: str) -> list[str]:
        return [text for name, text in self if name == word]


def read_stages(path: Path) -> tuple[dict[str, str], dict[str, Stage]]:
    """Default values of the arguments before the first stage, and the stages by name."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    arguments: dict[str, str] = {}
    stages: dict[str, Stage] = {}
    stage: Stage | None = None
    for line in filter(str.strip, joined.splitlines()):
        word, _, text = line.strip().partition(" ")
        if word == "FROM":
            stage = stages[text.partition(" AS ")[2]] = Stage()
        elif stage is None:
            assert word == "ARG", line
            name, _, value = text.partition("=")
            arguments[name] = value
        else:
            stage.append((word, text.strip()))
    return arguments, stages


def run_steps(
    stage: Stage, folder: Path, *, arguments: Mapping[str, str], environment: Mapping[str, str], skip: str
) -> list[str]:
    """Do a stage's COPY, WORKDIR, ARG, ENV and RUN below ``folder``, which stands for ``/``; the commands run.

    ``arguments`` take the place of defaults; commands with the pattern ``skip`` want root, and are left out.
    """
    variables = dict(environment)
    directory = folder
    folder.mkdir(exist_ok=True)
    commands = []

    def placed(text: str) -> str:
        return re.sub(r"(?<![\w./-])/(opt|build)\b", lambda match: f"{folder}/{match[1]}", text)

    for word, text in stage:
        if word == "ARG":
            name, _, default = text.partition("=")
            variables[name] = arguments.get(name, default)
        elif word == "ENV":
            for pair in shlex.split(placed(text)):
                name, _, value = pair.partition("=")
                variables[name] = value.replace("$PATH", variables["PATH"])
        elif word == "WORKDIR":
            directory = folder / text.lstrip("/")
            directory.mkdir(parents=True, exist_ok=True)
        elif word == "COPY":
            *sources, target = [one for one in text.split() if not one.startswith("--")]
            for source in sources:
                goal = directory / target
                if (ROOT / source).is_dir():
                    shutil.copytree(
                        ROOT / source, goal, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__")
                    )
                else:
                    copy = goal / Path(source).name if target.endswith("/") else goal
                    copy.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(ROOT / source, copy)
        elif word == "RUN":
            command = placed(re.sub(r"^(--\S+\s+)+", "", text))
            if re.search(skip, command):
                continue
            commands.append(command)
            done = subprocess.run(
                ["/bin/sh", "-c", command],
                cwd=directory,
                env=variables,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
            assert done.returncode == 0, f"{command}\n{done.stdout}"
    return commands


def plain_environment(*first: Path) -> dict[str, str]:
    """PATH with ``first`` before the system's directories, and what pip needs to find an index."""
    wanted = re.compile(r"PIP_|HOME$|\w*_(proxy|PROXY)$|SSL_")
    kept = {name: value for name, value in os.environ.items() if wanted.match(name)}
    return kept | {"PATH": ":".join([*map(str, first), "/usr/local/bin", "/usr/bin", "/bin"])}
