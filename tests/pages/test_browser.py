"""Where there is no browser, these tests are skipped; where one is wanted, they fail. The kit that all pages share."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dali_pipes.pages.page import html_document, html_table
from tests.pages.conftest import Browser

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
