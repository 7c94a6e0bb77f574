"""Each row of the comparison has its sources: a comment with the project, the version that the row names, and files."""

import re

import pytest

from tests.sources import REPOSITORY

PAGE = (REPOSITORY / "docs" / "comparison.md").read_text()
TABLE, _, REST = PAGE.partition("<!-- Sources")
ROWS = [row.split("|")[1].strip(" *").replace("`", "") for row in TABLE.splitlines() if row.startswith("| ")][2:]
SOURCES = {
    name: text
    for name, _, text in (
        entry.partition(":") for entry in re.split(r"\n(?! )", REST.partition("-->")[0].partition("\n")[2])
    )
    if text
}


@pytest.mark.parametrize("row", ROWS)
def test_each_row_names_its_sources(row: str) -> None:
    """So that the next reader can look whether a cell is still true."""
    texts = [text for name, text in SOURCES.items() if name in row]
    assert len(texts) == 1, f"sources are there for {', '.join(SOURCES)}"
    assert re.search(r"\w/\w|\.py\b", texts[0]), "a file is named"
    if version := re.search(r"\d+\.\d+(\.\d+)?", row):
        assert version[0] in texts[0]


def test_the_table_has_the_projects_that_users_ask_for() -> None:
    wanted = "DALI, WebDataset, Streaming, LitData, Energon, SPDL, Grain, datasets, LanceDB, FFCV, DataLoader"
    assert all(any(name in row for row in ROWS) for name in wanted.split(", "))
    assert "torchcodec" in TABLE
    assert "torchvision" in TABLE
