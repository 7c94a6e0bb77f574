"""What a person types to start the program again."""

import sys
from pathlib import Path

import pytest

from dali_pipes.commands.output import activation, program


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder ``bin`` of a virtual environment below the current directory, which the shell does not look into."""
    folder = tmp_path / "my env" / "bin"
    folder.mkdir(parents=True)
    for name in ("python", "dali-pipes", "activate"):
        (folder / name).write_text("#!/bin/sh\n")
        (folder / name).chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    return folder


def test_environment_that_is_not_active(environment: Path) -> None:
    assert program() == "'my env/bin/dali-pipes'"
    assert activation() == ". 'my env/bin/activate'"


def test_environment_that_is_active(environment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{environment}:/usr/bin:/bin")
    assert (program(), activation()) == ("dali-pipes", "")


def test_environment_elsewhere(environment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its path is typed whole."""
    monkeypatch.setattr(sys, "executable", "/nowhere/bin/python")
    assert (program(), activation()) == ("/nowhere/bin/python -m dali_pipes", "")
