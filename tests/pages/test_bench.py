"""The page of a benchmark, opened and sorted."""

from pathlib import Path

import pytest

from bench.reports.page import html_page
from tests.bench.reports.records import record, report
from tests.pages.conftest import WIDTHS, Browser

RUN = report(
    record("webloader", 300, 7.5),
    record("dali", 1900, 2.5, decode="dali"),
    record("spdl", 99, 5.5, decode="turbo"),
    record("synthetic", 1e6, 0.1, decode="none", gives=[]),
)
SWEEP = report(
    *(
        record(loader, speed, 5, setting={"latency_ms": latency, "cache": cache})
        for cache in ("warm", "cold")
        for latency in (0.0, 20.0, 100.0)
        for loader, speed in (("dali", 600), ("webloader", 300))
    )
)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("bench") / "page.html"
    out.write_text(html_page([("a <script>alert(1)</script> run", RUN), ("a sweep", SWEEP)], [("windows", "x <1>")]))
    return out


@pytest.mark.parametrize("width", WIDTHS)
def test_page_opens_without_errors_and_wide_tables_scroll_in_their_box(
    browser: Browser, page: Path, width: int
) -> None:
    browser.open(page, width=width)
    browser.check()
    assert "a <script>alert(1)</script> run" in browser.texts("h2")
    boxes = browser.find_all(".wide")
    assert boxes
    if width < 600:
        assert any(browser.run("return arguments[0].scrollWidth > arguments[0].clientWidth", box) for box in boxes)


def test_tables_sort_by_numbers_and_by_names(browser: Browser, page: Path) -> None:
    """A million is more than 99, and a dash comes last in either order."""
    browser.open(page)
    button = browser.find_all("table.sortable")[0].find_element("css selector", "th:nth-child(3) button")

    def speeds() -> list[str]:
        table = browser.find_all("table.sortable")[0]
        return [cell.text.split()[0] for cell in table.find_elements("css selector", "tbody td:nth-child(3)")]

    button.click()
    assert speeds() == ["1000000", "1900", "300", "99"]
    button.click()
    assert speeds() == ["99", "300", "1900", "1000000"]
    shares = browser.find_all("table.sortable")[0].find_element("css selector", "th:nth-child(4) button")
    for _ in range(2):
        shares.click()
        table = browser.find_all("table.sortable")[0]
        cells = [cell.text for cell in table.find_elements("css selector", "tbody td:nth-child(4)")]
        assert cells[2:] == ["-", "-"]
    browser.check()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_ours_is_highlighted_on_light_and_on_dark_paper(browser: Browser, page: Path, scheme: str) -> None:
    """The row has a colour of its own, and text and paper contrast."""
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    try:
        browser.open(page)
        ours, other = (browser.find(f"table tbody tr{kind} td") for kind in (".ours", ":not(.ours)"))
        assert ours.value_of_css_property("background-color") != other.value_of_css_property("background-color")
        assert ours.value_of_css_property("font-weight") == "600"
        colours = browser.run(
            "const style = getComputedStyle(document.body); return [style.color, style.backgroundColor]"
        )
        ink, paper = (sum(int(part) for part in colour.strip("rgb()").split(",")) for colour in colours)
        assert abs(ink - paper) > 500
        assert (paper > ink) == (scheme == "light")
        browser.check()
    finally:
        browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
