"""A Dockerfile to its instructions."""

import re
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
