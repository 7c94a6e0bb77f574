"""The commit in a record."""

import subprocess
from pathlib import Path

import pytest

from bench.tools import environment


def test_commit_of_a_record_is_the_last_one_that_changed_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def commit(name: str) -> str:
        (tmp_path / name).write_text(name)
        git("add", ".")
        git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", name)
        return git("rev-parse", "HEAD").strip()

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    for folder in ("bench/tools", "bench/results", "docs", "tests"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.setattr(environment, "__file__", str(tmp_path / "bench/tools/environment.py"))
    git("init", "-q")
    of_code = commit("bench/tools/environment.py")
    for name in ("README.md", "docs/make_figures.py", "bench/results/a.json", "tests/test_a.py"):
        assert commit(name) != of_code
        (tmp_path / name).write_text("changed")
    assert environment.describe_commit() == {"commit": of_code, "is_dirty": False}
    (tmp_path / "bench/new.py").touch()
    assert environment.describe_commit() == {"commit": of_code, "is_dirty": True}
