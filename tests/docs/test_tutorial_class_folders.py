"""The tutorial of class folders, as it stands: its model has learned something."""

import re
from pathlib import Path

import pytest

from tests.docs.pages import REPOSITORY, run_blocks


@pytest.mark.slow
def test_the_tutorial_ends_with_a_model_that_has_learned_something(tmp_path: Path) -> None:
    """Held-out tiles lie beside those that were trained on, and share no pixel with them."""
    pytest.importorskip("skimage")
    assert run_blocks(REPOSITORY / "docs" / "tutorial-class-folders.md", folder=tmp_path) == 4
    found = re.search(r"accuracy ([\d.]+) on (\d+) held-out photos", (tmp_path / "printed.txt").read_text())
    assert found is not None
    assert float(found[1]) > 0.6
    assert 50 < int(found[2]) < 110
