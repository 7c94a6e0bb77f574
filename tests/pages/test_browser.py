"""Where there is no browser, these tests are skipped; where one is wanted, they fail. The kit that all pages share."""

import re
from pathlib import Path

import pytest

from prep.inspect.view_page import html_document, html_table
from tests.pages.conftest import WIDTHS, Browser

REPOSITORY = Path(__file__).parents[2]


def test_nothing_but_our_scripts_runs_and_nothing_is_loaded(browser: Browser, tmp_path: Path) -> None:
    """Even where a page forgot to escape: its policy refuses other scripts, handlers of events, and addresses."""
    forgotten = (
        "<script>document.title='owned'</script>"
        "<img src='nowhere.png' onerror=\"document.title='owned'\">"
        "<link rel=stylesheet href='http://localhost:9/a.css'><iframe src='nowhere.html'></iframe>"
    )
    table = html_table([["name", "number"], ["b", "9"], ["a", "10"]])
    page = tmp_path / "page.html"
    page.write_text(html_document("a page", [f"<h1>{forgotten}</h1>", table]))
    browser.open(page)
    assert browser.run("return document.title") == "a page"
    refused = [entry["message"] for entry in browser.driver.get_log("browser")]
    assert len(refused) >= 4
    assert all(re.search("Content Security Policy|violates", message) for message in refused), refused
    browser.find("th:nth-child(2) button").click()
    assert browser.texts("tbody td:first-child") == ["a", "b"], "ours runs"


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """A page with a wide table of speeds; some cells are a dash."""
    rows = [["loader", "samples/s", "share", "a title that is long " * 5]]
    rows += [["webloader", "300 [275-307]", "0.16", "x"], ["dali", "1900 [1740-1946]", "-", "x"]]
    rows += [["spdl", "99 [90-102]", "0.05", "x"], ["synthetic", "1000000", "-", "x"]]
    page = tmp_path / "table.html"
    page.write_text(html_document("a page", ["<h1>a page</h1>", html_table(rows)]))
    return page


@pytest.mark.parametrize("width", WIDTHS)
def test_wide_tables_scroll_in_their_box(browser: Browser, table: Path, width: int) -> None:
    browser.open(table, width=width)
    browser.check()
    (box,) = browser.find_all(".wide")
    if width < 600:
        assert browser.run("return arguments[0].scrollWidth > arguments[0].clientWidth", box)


def test_tables_sort_by_numbers_and_by_names(browser: Browser, table: Path) -> None:
    """A million is more than 99, and a dash comes last in either order."""
    browser.open(table)

    def sorted_by(column: int) -> list[str]:
        browser.find(f"th:nth-child({column}) button").click()
        return [text.split()[0] for text in browser.texts(f"tbody td:nth-child({column})")]

    assert sorted_by(2) == ["1000000", "1900", "300", "99"]
    assert sorted_by(2) == ["99", "300", "1900", "1000000"]
    assert sorted_by(3)[2:] == sorted_by(3)[2:] == ["-", "-"]
    names = ["dali", "spdl", "synthetic", "webloader"]
    assert [sorted_by(1), sorted_by(1)] == [names[::-1], names]
    browser.check()
