"""The page of a data set, opened and clicked through."""

from pathlib import Path

import pytest

from tests.pages import hostile
from tests.pages.conftest import WIDTHS, Browser
from tests.prep.commands.calls import call_prep


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile")
    shards = hostile.write_hostile(folder / "shards")
    bad = folder / "bad.tsv"
    bad.write_text(f"s-000001.tar\t{hostile.KEY}12\tjpg\tDALI says {hostile.SCRIPT}\n")
    result = call_prep("view", shards, "-o", folder / "page.html", "--quarantine", bad)
    assert result.exit_code == 0, result.output
    return folder / "page.html"


def shown_keys(browser: Browser) -> list[str]:
    return [text[-2:] for text in browser.texts(".card .key")]


@pytest.mark.parametrize("width", WIDTHS)
def test_page_opens_without_errors_and_nothing_of_the_data_runs(browser: Browser, page: Path, width: int) -> None:
    """Class names, keys, captions and causes are texts: each is seen as it is."""
    browser.open(page, width=width)
    browser.check()
    assert browser.run("return document.title").endswith("s-")
    assert browser.find_all("img[src='x']") == []
    assert f"cat {hostile.SCRIPT}"[:40] in browser.find("#classes").text
    assert hostile.SCRIPT in browser.find(".card .caption").text
    assert f"{hostile.KEY}00" in browser.texts(".card .key")
    assert f"DALI says {hostile.SCRIPT}" in browser.find("#findings").text


def test_filters_by_class_key_and_bad(browser: Browser, page: Path) -> None:
    browser.open(page)
    assert len(shown_keys(browser)) == hostile.NUM
    assert browser.find("#count").text == "24 of 24 shown"
    # The class with a script in its name, by a click on it.
    browser.find('button.class[data-class="1"]').click()
    assert shown_keys(browser) == [f"{number:02d}" for number in range(hostile.NUM) if number % 3 == 1]
    browser.find("#key").send_keys("-1")
    assert shown_keys(browser) == ["10", "13", "16", "19"]
    assert browser.find("#count").text == "4 of 24 shown"
    assert [text[-2:] for text in browser.texts("#findings td:first-child")] == ["12"], "findings follow the key"
    browser.find('#class option[value=""]').click()
    browser.find("#key").clear()
    browser.run("document.getElementById('key').dispatchEvent(new Event('input', {bubbles: true}))")
    browser.find("#only-bad").click()
    assert shown_keys(browser) == ["05", "06"]
    browser.check()


def test_masks_and_boxes_lie_over_the_photos(browser: Browser, page: Path) -> None:
    """A mask has its photo's place; a box is where the data says, as far as the photo goes; both can be hidden."""
    browser.open(page)
    cards = browser.find_all(".card")
    photo, mask = (cards[1].find_element("css selector", name).rect for name in ("img", "img.mask"))
    assert {key: pytest.approx(value, abs=1) for key, value in photo.items()} == mask
    box, cut = (rect.rect for rect in cards[1].find_elements("css selector", "rect"))
    # 20, 30, 120, 105 in a photo of 201 x 150.
    assert (box["x"] - photo["x"]) / photo["width"] == pytest.approx(20 / 201, abs=0.02)
    assert (box["y"] - photo["y"]) / photo["height"] == pytest.approx(30 / 150, abs=0.02)
    assert box["width"] / photo["width"] == pytest.approx(100 / 201, abs=0.03)
    assert cut["x"] + cut["width"] <= photo["x"] + photo["width"] + 3
    turned = cards[hostile.TURNED]  # by 90 degrees; its mask was drawn on the upright photo
    photo, mask = (turned.find_element("css selector", name).rect for name in ("img", "img.mask"))
    assert "150 x 200" in turned.text
    assert photo["height"] > photo["width"]
    assert mask["height"] == pytest.approx(photo["height"], abs=1)
    for number in (hostile.OTHER_MASK, hostile.NO_MASK):
        assert cards[number].find_elements("css selector", "img.mask") == []
    browser.find("#with-mask").click()
    browser.find("#with-boxes").click()
    assert browser.texts(".card .mask") == []
    assert not cards[1].find_element("css selector", "svg").is_displayed()
    browser.check()


def test_what_is_bad_is_listed_with_its_reason_and_sorted_by_a_click(browser: Browser, page: Path) -> None:
    browser.open(page)
    rows = {row.text for row in browser.find_all("#findings tbody tr")}
    for number, reason in (
        (hostile.CUT_OFF, "is cut off: it has no end-of-image marker"),
        (hostile.NO_PHOTO, "holds no photo of a known format"),
        (hostile.OTHER_MASK, "has 90 x 10 pixels, 'jpg' 150 x 204"),
        (hostile.NO_MASK, "is missing (found: boxes.json, cls, jpg, txt)"),
    ):
        assert any(f"{hostile.KEY}{number:02d}" in row and reason in row for row in rows), rows
    for _ in range(2):
        browser.find("#findings th:first-child button").click()
    assert [text[-2:] for text in browser.texts("#findings td:first-child")] == sorted(
        text[-2:] for text in browser.texts("#findings td:first-child")
    )
    browser.check()
