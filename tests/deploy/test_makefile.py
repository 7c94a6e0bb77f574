"""Test what ``make`` installs for each choice of CUDA."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.dockerfile import ROOT

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="no make")


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Commands, printed and not run."""
    environment = {name: value for name, value in os.environ.items() if name not in ("CUDA", "CPU", "MAKEFLAGS")}
    command = ["make", "--dry-run", "-C", str(ROOT), f"PYTHON={sys.executable}", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("made", "wanted", "message"),
    [
        ("", "CUDA=11", "CUDA must be 12, 13 or 12+13, got '11'; CPU=1 is for a torch without CUDA"),
        ("12", "CUDA=13", "was made for CUDA=12, not CUDA=13: 'make clean' first, or name another environment"),
        ("12+13", "CPU=1", "was made for CUDA=12+13, not CUDA=none"),
    ],
)
def test_choice_that_cannot_be(tmp_path: Path, made: str, wanted: str, message: str) -> None:
    """DALI's builds share a directory: one environment is for one choice."""
    if made:
        (tmp_path / ".cuda").write_text(f"{made}\n")
    done = make("demo", f"VENV={tmp_path}", wanted)
    assert done.returncode == 2
    assert message in done.stderr


def test_later_commands_follow_the_choice_of_the_environment(tmp_path: Path) -> None:
    (tmp_path / ".cuda").write_text("12\n")
    asked = [line for line in make("test", f"VENV={tmp_path}").stdout.splitlines() if "deploy/requirements.py" in line]
    assert len(asked) == 2
    assert all("--cuda 12 " in line for line in asked)


def test_cpu_only_torch_comes_first_and_from_its_own_index(tmp_path: Path) -> None:
    lines = make("demo", f"VENV={tmp_path}", "CPU=1", "TORCH_CPU_INDEX=http://torch").stdout.splitlines()
    first, *others = [line for line in lines if " -m pip install " in line]
    assert "--index-url http://torch" in first
    assert others
    assert not any("http://torch" in line for line in others)
