"""Commands that stand in YAML, held against the programs that they call."""

import sys
from collections.abc import Sequence
from pathlib import Path

import click

from dali_pipes.cli import cli
from tests.deploy.dockerfile import ROOT

sys.path.insert(0, str(ROOT / "examples"))


def parse_dali_pipes(words: Sequence[str]) -> click.Context:
    """The context in which ``dali-pipes WORDS`` would run; click's own error for what it does not take."""
    command: click.Command = cli
    rest = list(words)
    context = click.Context(cli)
    while isinstance(command, click.Group):
        name, found, rest = command.resolve_command(context, rest)
        assert found is not None, words
        command = found
        context = click.Context(found, info_name=name, parent=context)
    return command.make_context(command.name, rest)


def parse_training(words: Sequence[str]) -> tuple[dict[str, str], dict[str, object]]:
    """torchrun's options, and what the example's own parser makes of those after the program's name."""
    from options import make_parser

    (place,) = [index for index, word in enumerate(words) if word.endswith(".py")]
    assert (ROOT / words[place]).is_file()
    launcher = dict(word.removeprefix("--").partition("=")[::2] for word in words[1:place])
    parser = make_parser("", batch_size=1, crop=64, width=8, lr=1.0)
    return launcher, vars(parser.parse_args(list(words[place + 1 :])))


def shell_commands(words: Sequence[str], *, tmp_path: Path) -> list[list[str]]:
    """``bash -euc TEXT`` to the words of each line; what the container has in /data lies in ``tmp_path``."""
    assert list(words[:2]) == ["bash", "-euc"]
    (tmp_path / "data" / "pets").mkdir(parents=True, exist_ok=True)
    return [line.replace("/data/", f"{tmp_path}/data/").split() for line in words[2].splitlines()]
