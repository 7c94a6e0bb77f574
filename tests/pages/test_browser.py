"""Where there is no browser, these tests are skipped; where one is wanted, they fail. The kit that all pages share."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from prep.inspect.html import html_document, html_table
from tests.pages.conftest import WIDTHS, Browser

REPOSITORY = Path(__file__).parents[2]
ONE_TEST = "tests/pages/test_browser.py::test_nothing_but_our_scripts_runs_and_nothing_is_loaded"


@pytest.mark.parametrize(
    ("required", "code", "text"),
    [
        ("", 0, "no browser: needs chromium and chromedriver"),
        ("1", 1, "REQUIRE_BROWSER=1 and there is no browser: install chromium and chromedriver"),
    ],
)
def test_without_a_browser(tmp_path: Path, required: str, code: int, text: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", ONE_TEST],
        cwd=REPOSITORY,
        env={**os.environ, "PATH": str(tmp_path), "REQUIRE_BROWSER": required},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == code, done.stdout
    assert text in done.stdout


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


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_and_paper_contrast(browser: Browser, table: Path, scheme: str) -> None:
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    try:
        browser.open(table)
        colours = browser.run(
            "const style = getComputedStyle(document.body); return [style.color, style.backgroundColor]"
        )
        ink, paper = (sum(int(part) for part in colour.strip("rgb()").split(",")) for colour in colours)
        assert abs(ink - paper) > 500
        assert (paper > ink) == (scheme == "light")
        browser.check()
    finally:
        browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
