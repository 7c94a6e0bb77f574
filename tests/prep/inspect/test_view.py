"""Contact sheets of samples that are known by their colours; and the page of a data set as a text.

`tests/pages` opens the page.
"""

import json
import re
import zlib
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dali_pipes.errors import DataError
from dali_pipes.store.local import LocalStore
from dali_pipes.store.urls import resolve_shards
from prep.inspect.contact_sheet import CELL_GAP, HEADER, MARGIN, TILE, TILE_GAP, draw_sheet, overlaid
from prep.inspect.samples import ShowOptions
from prep.inspect.view_page import PICTURE_BYTES, REST_BYTES, SAMPLE_BYTES, Page, view_page
from tests.prep.commands.calls import call_prep
from tests.shards import Sample, encode_photo, image_bytes, npy_bytes, photo_bytes, write_classes, write_shards

call = partial(call_prep, "view")


def test_picture_has_the_samples_that_were_asked_for(tmp_path: Path) -> None:
    """The user gives keys in order, classes or a seed. Left is the photo, right the photo with its mask."""
    samples = []
    for number, colour in enumerate([(200, 30, 30), (30, 200, 30), (30, 30, 200), (200, 200, 30)]):
        photo = image_bytes(np.full((40, 60, 3), colour, np.uint8), "BMP")
        mask = image_bytes(np.full((40, 60), 2, np.uint8))
        samples.append(Sample(f"k{number}", {"bmp": photo, "cls": b"%d" % (number % 2), "mask.png": mask}))
    write_classes(tmp_path, {"0": "cat", "1": "dog"})
    shards = resolve_shards(write_shards(tmp_path, samples, per_shard=2), endpoint=None)
    sheet = draw_sheet(shards, ShowOptions(num=4, keys=["k3", "k0"]))
    cells = range(MARGIN + TILE // 2, sheet.picture.width, 2 * TILE + TILE_GAP + CELL_GAP)
    middle = MARGIN + HEADER + TILE // 2
    assert [sheet.picture.getpixel((x, middle)) for x in cells] == [(200, 200, 30), (200, 30, 30)]
    over = overlaid(np.full((1, 1, 3), (200, 200, 30), np.uint8), np.full((1, 1), 2, np.uint8))[0, 0]
    assert sheet.picture.getpixel((cells[0] + TILE + TILE_GAP, middle)) == tuple(over.tolist()) != (200, 200, 30)
    assert draw_sheet(shards, ShowOptions(num=4, labels=["dog"])).keys == ["k1", "k3"]
    drawn = [tuple(draw_sheet(shards, ShowOptions(num=2, seed=seed)).keys) for seed in (*range(6), 0)]
    assert drawn[0] == drawn[-1]
    assert len(set(drawn)) > 1
    out = tmp_path / "sheet.png"
    assert call(tmp_path, out, "--num", "2").stdout.startswith("drew 2 samples of 4, ")
    with Image.open(out) as picture:
        assert picture.height == sheet.picture.height
    for wrong, text in (
        ({"keys": ["k1", "zebra"]}, "no sample of '.*s-' has key 'zebra'"),
        ({"labels": ["bird"]}, r"no class 'bird' in '.*s-' \(found: 'cat', 'dog'\)"),
        ({"photo": "jpg"}, r"tar', key 'k\d': no component 'jpg' to show \(found: bmp, cls, mask.png\)"),
    ):
        with pytest.raises(DataError, match=text):
            draw_sheet(shards, ShowOptions(**{"num": 4} | wrong))  # type: ignore[arg-type]


def page_of(shards: Path, **options: Any) -> Page:
    return view_page(resolve_shards(shards, endpoint=None), ShowOptions(**{"num": 200} | options))


def data_of(page: Page | str) -> dict[str, Any]:
    html = page if isinstance(page, str) else page.html
    found = re.search(r'<script type="application/json" id="samples">(.*?)</script>', html)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


def a_sample(number: int, **more: bytes) -> Sample:
    return Sample(f"k{number:03d}", {"jpg": photo_bytes(number, 60, 40), "cls": b"%d" % (number % 2), **more})


def test_command_writes_a_page_and_says_how_large_it_is(small_shards: Path, tmp_path: Path) -> None:
    """With -o or as the last argument; --json has the same figures."""
    out = tmp_path / "page.html"
    result = call(small_shards, "-o", out, "--num", "4")
    assert result.exit_code == 0, result.output
    assert re.fullmatch(rf"wrote 4 samples of 23, 0 bad or missing, [0-9.]+ KiB -> {out}\n", result.stdout)
    answer = json.loads(call(small_shards, tmp_path / "b.html", "--num", "4", "--json").stdout)
    assert answer["num_bytes"] == out.stat().st_size == (tmp_path / "b.html").stat().st_size
    assert (len(answer["keys"]), answer["num_matching"], answer["bad"]) == (4, 23, {})
    assert [one["key"] for one in data_of(out.read_text())["samples"]] == answer["keys"]


def test_figures_are_those_of_the_whole_set(tmp_path: Path) -> None:
    """Though two samples are shown."""
    samples = [a_sample(number) for number in range(9)]
    samples.append(Sample("png", {"png": encode_photo("png", size=(10, 90)), "cls": b"7"}))
    write_classes(tmp_path, {"0": "even", "1": "odd", "2": "none of them", "7": "seven"})
    page = page_of(write_shards(tmp_path, samples, per_shard=4), num=2)
    assert "10 samples, 3 shards" in page.html
    assert "4 classes, 0 to 5 samples, median 2; 1 without a sample." in page.html
    for cells in (
        '<td class="name">even</td><td class="name">0</td><td>5</td>',
        '<td class="name">jpg</td><td class="name">JPEG</td><td>9</td><td>100.0%</td>',
        '<td class="name">width</td><td>60</td><td>60</td><td>60</td><td>60</td><td>60</td>',
        '<td class="name">shorter side</td><td>40</td><td>40</td><td>40</td><td>40</td><td>40</td>',
        '<td class="name">32 to 47</td><td>9</td>',
        '<td class="name">1.1 to 1.5</td><td>0</td>',
        '<td class="name">1.5 to 2</td><td>9</td>',
    ):
        assert cells in page.html
    assert len(data_of(page)["samples"]) == 2


def test_bad_samples_are_counted_once_and_named(tmp_path: Path) -> None:
    """The index names bad samples; decoding finds more among those that are shown; a quarantine gives causes."""
    whole = photo_bytes(1, 300, 200)
    samples = [a_sample(number) for number in range(6)]
    samples[1].components["jpg"] = whole[:-2]  # the index knows
    png = encode_photo("png", size=(64, 64))
    at, end = png.index(b"IDAT"), png.index(b"IEND") - 4
    content = b"IDAT" + bytes(end - at - 8)
    # Whole chunks with their checksums: only its pixels are broken.
    samples[2].components["jpg"] = png[:at] + content + zlib.crc32(content).to_bytes(4) + png[end:]
    del samples[3].components["cls"]
    shards = write_shards(tmp_path / "shards", samples, per_shard=6)
    (tmp_path / "bad.tsv").write_text("k000\ns-000000.tar\tk004\tjpg\tsome cause\ns-000000.tar\tk001\tjpg\ttoo\n")
    result = call(shards, "-o", tmp_path / "page.html", "--quarantine", tmp_path / "bad.tsv", "--json")
    assert json.loads(result.stdout)["bad"] == {"photo": 2, "missing": 1, "quarantine": 2}
    html = (tmp_path / "page.html").read_text()
    for text in (
        'is cut off: it has no end-of-image marker</td><td class="name">pixels',
        'is missing (found: jpg)</td><td class="name">index',
        "some cause</td>",
        "is listed without a cause</td>",
        'photos that cannot be decoded</td><td class="name">is cut off: it has no end-of-image marker</td></tr>',
        'components that samples lack</td><td class="name">is missing (found: jpg)</td></tr>',
    ):
        assert text in html
    assert re.search(r'k002</td>.*?cannot be decoded.*?</td><td class="name">pixels</td>', html)
    bad = [one["key"] for one in data_of(html)["samples"] if one["bad"]]
    assert bad == ["k001", "k002"]


@pytest.mark.parametrize(
    ("component", "data", "boxes"),
    [
        ("boxes.json", b"[[6, 4, 60, 20]]", [[0.1, 0.1, 1.0, 0.5]]),
        ("json", b'{"bboxes": [[6, 4, 30, 20], [0, 0, 6, 4]], "x": 1}', [[0.1, 0.1, 0.5, 0.5], [0, 0, 0.1, 0.1]]),
        (
            "json",
            b'{"boxes": [{"bbox": [0, 0, 600, 4]}, {"bbox": [-5, 0, 6, 4]}]}',
            [[0, 0, 1, 0.1], [0, 0, 0.0167, 0.1]],
        ),
        ("objects.json", b'[{"bbox": [0, 0, 600, 4], "label": 3}]', [[0, 0, 1, 0.1]]),  # as far as the photo goes
        ("json", b'[{"bbox": [6, 4, 24, 16], "category_id": 3}]', [[0.1, 0.1, 0.5, 0.5]]),  # COCO: width and height
        ("boxes.npy", npy_bytes(np.float32([[6, 4, 60, 20, 1]])), [[0.1, 0.1, 1.0, 0.5]]),  # the last column is a label
        ("json", b'{"boxes": [[1, 2, 3]]}', []),
        ("json", b'{"boxes": [[1, 2, 3, 1e999]]}', []),
        ("boxes.npy", b"\x93NUMPY\x01\x00", []),
    ],
    ids=lambda value: str(value)[:24],
)
def test_boxes_are_shares_of_the_photo(tmp_path: Path, component: str, data: bytes, boxes: list[list[float]]) -> None:
    """The photo has 60 x 40 pixels. Only boxes of four finite numbers are drawn."""
    write_shards(tmp_path, [a_sample(1, **{component: data})], per_shard=1)
    assert data_of(page_of(tmp_path))["samples"][0]["boxes"] == boxes


def test_only_what_is_shown_is_read_of_indexed_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three samples take six range reads, one for each photo and each caption."""
    samples = [a_sample(number, txt=b"x") for number in range(40)]
    write_shards(tmp_path, samples, per_shard=10)
    sizes: list[int] = []
    read_range = LocalStore.read_range

    def ranging(store: LocalStore, name: str, *, start: int, size: int) -> bytes:
        sizes.append(size)
        return read_range(store, name, start=start, size=size)

    monkeypatch.setattr(LocalStore, "read_range", ranging)
    assert len(page_of(tmp_path, num=3).keys) == 3
    assert len(sizes) == 6


def test_page_is_no_larger_than_it_says(tmp_path: Path) -> None:
    """Photos and masks of noise, long names, many bad samples: the bound holds, and so does that of a picture."""
    noise, mask = (encode_photo("png", size=(400, 400), mode=mode, seed=1) for mode in ("RGB", "L"))
    boxes = json.dumps(np.random.default_rng(0).random((500, 4)).tolist()).encode()
    whole = {"png": noise, "seg.png": mask, "cls": b"1", "txt": b"<&>" * 900, "boxes.json": boxes}
    name = "<&'\"" * 20
    samples = [Sample(f"{name}{row:04d}", whole if row < 20 else {"png": b"", "txt": b""}) for row in range(500)]
    page = page_of(write_shards(tmp_path, samples, per_shard=500), num=20, keys=[one.key for one in samples[:20]])
    assert page.bad["photo"] == 480
    assert len(page.html.encode()) <= 20 * SAMPLE_BYTES + REST_BYTES
    for one in data_of(page)["samples"]:
        assert max(len(one["photo"]), len(one["mask"])) <= PICTURE_BYTES * 4 / 3 + 40
        assert len(json.dumps(one).replace("<", "123456")) <= SAMPLE_BYTES
