"""--quiet and --verbose: every command has them, with one meaning, and the processes that it starts follow."""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from dali_pipes.cli import cli, main
from dali_pipes.formats.names import manifest_name
from dali_pipes.progress import current_verbosity


def run(*words: str) -> subprocess.CompletedProcess[str]:
    program = "import sys; from dali_pipes.cli import main; sys.exit(main())"
    return subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True)


def commands(context: click.Context) -> Iterator[click.Context]:
    yield context
    if isinstance(context.command, click.Group):
        for name in context.command.list_commands(context):
            found = context.command.get_command(context, name)
            assert found is not None
            yield from commands(click.Context(found, info_name=name, parent=context))


def test_every_command_has_both_options_in_its_help() -> None:
    for context in commands(click.Context(cli, info_name="dali-pipes")):
        text = context.get_help()
        for line in ("-q, --quiet", "-v, --verbose"):
            assert text.count(line) == 1, context.command_path


@pytest.fixture
def warned(tmp_path: Path, small_shards: Path) -> Path:
    """Shards with a broken manifest: indexing them gives a warning and a result."""
    shards = Path(shutil.copytree(small_shards, tmp_path / "shards"))
    (shards / manifest_name("s-")).write_bytes(b"broken")
    return shards


@pytest.mark.parametrize("place", [0, 1, 3])
def test_quiet_leaves_the_result_and_verbose_adds_the_steps(warned: Path, place: int) -> None:
    """Before and after each name of the command. In processes: a test has a logging of its own."""
    steps = {}
    for option in ("-q", "-v")[: 1 + (place == 1)]:
        (warned / manifest_name("s-")).write_bytes(b"broken")
        words = ["prep", "index", str(warned / "s-")]
        words.insert(place, option)
        done = run(*words)
        assert done.returncode == 0, done.stderr
        assert re.match(r"indexed 4 shards( \(4 indexed before\))?, 23 samples", done.stdout)
        steps[option] = done.stderr
    assert steps["-q"] == ""
    if place == 1:
        assert "WARNING prep.index: " in steps["-v"]
        assert "INFO dali_pipes.progress: index" in steps["-v"]


@pytest.mark.parametrize("words", [["-q", "-v", "cache", "ls"], ["-q", "cache", "-v", "ls"], ["cache", "ls", "-qv"]])
def test_both_at_once_are_misuse(words: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    """And a program that calls `main` is as it was before."""
    assert main(words) == 2
    assert "--quiet and --verbose exclude each other" in capfd.readouterr().err
    assert current_verbosity() == "normal"
