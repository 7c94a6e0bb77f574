"""The page that follows one sample prints what it shows."""

import doctest
import os
import re
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PAGE = REPOSITORY / "docs" / "how-it-works.md"


def test_the_page_shows_what_its_python_prints(tmp_path: Path) -> None:
    """Every number on the page is computed again, in a process and a folder of its own."""
    # Without the fences, which a doctest would take for expected output.
    text = re.sub(r"^```.*$", "", PAGE.read_text(), flags=re.MULTILINE)
    assert len(doctest.DocTestParser().get_examples(text)) > 30
    (tmp_path / "page.txt").write_text(text)
    run = subprocess.run(
        [sys.executable, "-m", "doctest", "page.txt"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
