"""The page of a profile, opened and pointed at."""

import re
from pathlib import Path

import pytest

from dali_pipes.cli import main
from tests.conftest import make_samples, write_shards
from tests.pages.conftest import WIDTHS, Browser


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two epochs; the graph sleeps once in the first of them, and the folder's name is a tag."""
    folder = tmp_path_factory.mktemp("profile")
    shards = write_shards(folder / "<script>alert(1)<", make_samples([(60, 40)] * 24), per_shard=6)
    out = folder / "page.html"
    arguments = ["profile", str(shards), "--graph", "tests.dali_pipes.commands.test_timeline:slow_graph"]
    assert main([*arguments, "--batch-size", "2", "--device", "cpu", "--compute-ms", "5", "-o", str(out)]) == 0
    return out


@pytest.mark.parametrize("width", WIDTHS)
def test_page_opens_without_errors(browser: Browser, page: Path, width: int) -> None:
    browser.open(page, width=width)
    browser.check()
    assert "<script>alert(1)<" in browser.find("h1").text
    assert len(browser.find_all(".timeline")) == 2


def test_stalls_are_marked_where_they_are_and_listed(browser: Browser, page: Path) -> None:
    """A mark for each row of the list; the longest is the graph's, as wide as it took long."""
    browser.open(page)
    timeline, table = browser.find_all(".timeline")[0], browser.find_all(".stalls table")[0]
    marks = timeline.find_elements("css selector", "rect.stall")
    rows = [row.text for row in table.find_elements("css selector", "tbody tr")]
    assert len(marks) == len(rows) > 0
    widest = max(marks, key=lambda mark: mark.rect["width"])
    title = widest.find_element("css selector", "title").get_attribute("textContent")
    assert re.fullmatch(
        r"batch \d+, at [\d.]+ s, waits for inputs: .* work of 'inputs' in the thread that iterates", title
    )
    assert any("work of 'inputs'" in row for row in rows)
    assert widest.rect["width"] > 30
    assert widest.value_of_css_property("fill") not in ("none", "rgb(0, 0, 0)")


def test_pointer_reads_the_stages(browser: Browser, page: Path) -> None:
    """In the middle of the stall the step waits, and `inputs` works; outside the line is gone."""
    from selenium.webdriver.common.action_chains import ActionChains

    browser.open(page)
    timeline = browser.find_all(".timeline")[0]
    widest = max(timeline.find_elements("css selector", "rect.stall"), key=lambda mark: mark.rect["width"])
    ActionChains(browser.driver).move_to_element(widest).perform()
    readout = browser.find_all(".readout")[0].text
    assert re.match(r"[\d.]+ s: step 0 % \(waits 100 %\) · hand-over 0 %.* · inputs 100 % · ", readout), readout
    assert timeline.find_element("css selector", ".cursor").is_displayed()
    ActionChains(browser.driver).move_to_element(browser.find("h1")).perform()
    assert not timeline.find_element("css selector", ".cursor").is_displayed()
    browser.check()


def test_stalls_sort_by_their_length(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.find(".stalls th:nth-child(2) button").click()
    table = browser.find_all(".stalls table")[0]
    lengths = [float(cell.text) for cell in table.find_elements("css selector", "tbody td:nth-child(2)")]
    assert lengths == sorted(lengths, reverse=True)
