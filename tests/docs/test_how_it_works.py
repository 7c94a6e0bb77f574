"""The page that follows one sample prints what it shows."""

import doctest
import re
from pathlib import Path

from tests.docs.pages import REPOSITORY, run_python

PAGE = REPOSITORY / "docs" / "how-it-works.md"


def test_the_page_shows_what_its_python_prints(tmp_path: Path) -> None:
    """Every number on the page is computed again, in a process and a folder of its own."""
    # Without the fences, which a doctest would take for expected output.
    text = re.sub(r"^```.*$", "", PAGE.read_text(), flags=re.MULTILINE)
    assert len(doctest.DocTestParser().get_examples(text)) > 30
    (tmp_path / "page.txt").write_text(text)
    run_python("-m", "doctest", "page.txt", folder=tmp_path)
