"""The pages about deployment: commands that there are, links that lead somewhere, figures that the records have."""

import re
import shlex
from pathlib import Path

import click
import pytest

from dali_pipes.cli import cli
from tests.deploy.dockerfile import ROOT

PAGES = sorted({*(ROOT / "deploy").glob("*.md"), *(ROOT / "deploy").glob("[!e]*/*.md"), ROOT / "docs" / "dgx.md"})


def shown_commands(text: str) -> list[list[str]]:
    """Every ``dali-pipes ...`` in a code block or between backticks."""
    joined = re.sub(r"\\\n\s*", " ", text)
    lines = re.findall(r"^\s*(dali-pipes [^\n#]*)", joined, re.MULTILINE)
    lines += re.findall(r"`(dali-pipes [^`]*)`", re.sub(r"\s*\n\s*", " ", text))
    return [shlex.split(line.partition(" && ")[0]) for line in lines]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_and_files_on_pages_exist(page: Path) -> None:
    for words in shown_commands(page.read_text()):
        command: click.Command = cli
        rest = words[1:]
        while isinstance(command, click.Group) and rest:
            found = command.get_command(click.Context(command), rest.pop(0))
            assert found is not None, words
            command = found
        known = {option for parameter in command.params for option in parameter.opts}
        named = {word.partition("=")[0] for word in rest if word.startswith("--")}
        assert named <= known, words
    for name in re.findall(r"(?<![\w/])(?:deploy|docs|examples|tests)/[\w./-]*\w", page.read_text()):
        assert (ROOT / name).exists(), name
