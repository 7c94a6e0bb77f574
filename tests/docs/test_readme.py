"""The README stays short, and its training loop runs as it stands."""

from pathlib import Path

from tests.builders import make_samples, write_shards
from tests.docs.pages import REPOSITORY, python_of, run_python

README = REPOSITORY / "README.md"
MAX_LINES = 150


def test_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) <= MAX_LINES


def test_training_loop_runs(tmp_path: Path) -> None:
    """On shards in the folder that `make demo` leaves."""
    (tmp_path / "demo-out").mkdir()
    write_shards(tmp_path / "demo-out" / "shards", make_samples([(80, 72)] * 6), per_shard=3)
    assert README.read_text().count("```python\n") == 1
    assert run_python("-c", python_of(README), folder=tmp_path) == "6 1\n"
