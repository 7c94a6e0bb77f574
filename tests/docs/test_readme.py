"""The README stays short, and its training loop runs as it stands."""

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.conftest import make_samples, write_shards

REPOSITORY = Path(__file__).parents[2]
README = REPOSITORY / "README.md"
MAX_LINES = 150


def test_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) <= MAX_LINES


def test_training_loop_runs(tmp_path: Path) -> None:
    """On shards in the folder that `make demo` leaves."""
    (tmp_path / "demo-out").mkdir()
    write_shards(tmp_path / "demo-out" / "shards", make_samples([(80, 72)] * 6), per_shard=3)
    (block,) = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "train.py").write_text(block)
    run = subprocess.run(
        [sys.executable, "train.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout == "6 1\n"
