"""The page of data sets that grow, as it stands there."""

import os
import subprocess
import sys
from pathlib import Path

from tests.docs.pages import REPOSITORY, blocks_of, follows
from tests.prep.versions.sets import class_folders

PAGE = REPOSITORY / "docs" / "how-to" / "living-data-sets.md"
END = "@ end of block"


def test_the_page_runs_as_it_stands(tmp_path: Path) -> None:
    """Every block in one shell, in order; what the page shows is printed, but for numbers."""
    class_folders(tmp_path / "photos", {"cat": 6, "dog": 6})
    class_folders(tmp_path / "more", {"dog": 2, "fox": 2}, first=50)
    blocks, files = blocks_of(PAGE)
    assert len(blocks) >= 6
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    script = 'set -eu\ndali-pipes() { python -m dali_pipes "$@"; }\n'
    script += "".join(f"{block.commands}echo '{END}'\n" for block in blocks)
    run = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        env=os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
        check=False,
    )
    printed = run.stdout.split(f"{END}\n")
    for block, text in zip(blocks, printed, strict=False):
        missing = follows(block.shown, text)
        assert missing is None, f"{PAGE.name}:{block.line}: shows {missing!r}, printed was:\n{text}"
    assert run.returncode == 0, printed[-1]
    assert len(printed) == len(blocks) + 1
