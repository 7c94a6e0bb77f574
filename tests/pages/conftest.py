"""A real browser, headless; what a page says on its console, and whether it is wider than its window, is checked."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

WIDTHS = (1280, 400)
"""Pixels of a laptop's window and of a phone's."""


class Browser:
    """Opens our pages, one at a time."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, page: Path, *, width: int = WIDTHS[0]) -> None:
        """Open a file; the console's earlier messages are forgotten."""
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        self.driver.get_log("browser")
        self.driver.get(page.as_uri())

    def run(self, script: str, *arguments: Any) -> Any:
        """What the script returns in the page."""
        return self.driver.execute_script(script, *arguments)

    def find(self, selector: str) -> Any:
        """The one element."""
        return self.driver.find_element("css selector", selector)

    def find_all(self, selector: str) -> list[Any]:
        """All elements."""
        return list(self.driver.find_elements("css selector", selector))

    def texts(self, selector: str) -> list[str]:
        """The texts of the elements that are seen."""
        return [element.text for element in self.find_all(selector) if element.is_displayed()]

    def check(self) -> None:
        """No error on the console, nothing loaded, nothing wider than the window."""
        assert self.driver.get_log("browser") == []
        assert self.run("return performance.getEntriesByType('resource').map((one) => one.name)") == []
        wide, window = self.run("return [document.documentElement.scrollWidth, window.innerWidth]")
        assert wide <= window, f"the page is {wide} pixels wide, its window {window}"


@pytest.fixture(scope="session")
def _driver() -> Iterator[Any]:
    """Debian's chromium with its driver; skips without them, or where they do not start, unless REQUIRE_BROWSER=1."""
    programs = [shutil.which("chromium"), shutil.which("chromedriver")]
    is_required = os.environ.get("REQUIRE_BROWSER") == "1"
    if None in programs:
        wanted = "chromium and chromedriver; on Debian: make system-tools"
        if is_required:
            pytest.fail(f"REQUIRE_BROWSER=1 and there is no browser: install {wanted}")
        pytest.skip(f"no browser: needs {wanted}")
    from selenium import webdriver
    from selenium.common.exceptions import WebDriverException
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = str(programs[0])
    # A sandbox needs rights that root in a container lacks. The pages are our own, and nothing is loaded.
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    try:
        driver = webdriver.Chrome(options=options, service=Service(executable_path=str(programs[1])))
    except WebDriverException as exc:
        if is_required:
            raise
        pytest.skip(f"the browser does not start on this machine: {exc.msg}")
    yield driver
    driver.quit()


@pytest.fixture
def browser(_driver: Any) -> Browser:
    return Browser(_driver)
