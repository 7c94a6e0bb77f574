"""The page of a data set as a text: what it counts, lists and reads, how large it is. `tests/pages` opens it."""

import base64
import io
import json
import re
import zlib
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
from PIL import Image, ImageOps

from dali_pipes.store.local import LocalStore
from dali_pipes.store.urls import resolve_shards
from prep.inspect.contact_sheet import TILE
from prep.inspect.samples import ShowOptions
from prep.inspect.view_page import MAX_LISTED, PICTURE_BYTES, REST_BYTES, SAMPLE_BYTES, Page, view_page
from tests.builders import Sample, mask_bytes, npy_bytes, photo_bytes, write_shards
from tests.prep.commands.calls import call_prep
from tests.sources import encode_photo


def page_of(shards: Path, **options: Any) -> Page:
    return view_page(resolve_shards(shards, endpoint=None), ShowOptions(**{"num": 200} | options))


def data_of(page: Page | str) -> dict[str, Any]:
    html = page if isinstance(page, str) else page.html
    found = re.search(r'<script type="application/json" id="samples">(.*?)</script>', html)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


call = partial(call_prep, "view")


def npy(rows: list[list[float]]) -> bytes:
    return npy_bytes(np.array(rows, np.float32))


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
    (tmp_path / "s-classes.json").write_text(json.dumps({"0": "even", "1": "odd", "2": "none of them", "7": "seven"}))
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


def test_only_what_is_shown_is_read_of_indexed_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three samples: a photo, a mask and a caption of each. No shard is opened but for these ranges."""
    write_shards(
        tmp_path,
        [a_sample(number, **{"mask.png": mask_bytes(number, 60, 40), "txt": b"x"}) for number in range(40)],
        per_shard=10,
    )
    ranges, opened = [], []
    read_range, open_whole = LocalStore.read_range, LocalStore.open

    def ranging(store: LocalStore, name: str, *, start: int, size: int) -> bytes:
        ranges.append(name)
        return read_range(store, name, start=start, size=size)

    def opening(store: LocalStore, name: str) -> AbstractContextManager[BinaryIO]:
        opened.append(name)
        return open_whole(store, name)

    monkeypatch.setattr(LocalStore, "read_range", ranging)
    monkeypatch.setattr(LocalStore, "open", opening)
    page = page_of(tmp_path, num=3)
    assert len(page.keys) == 3
    assert len(ranges) == 9
    assert [name for name in opened if name.endswith(".tar")] == ranges


def test_samples_are_chosen_as_for_a_picture(small_shards: Path) -> None:
    assert page_of(small_shards, keys=["s00004", "s00001"]).keys == ["s00004", "s00001"]
    assert page_of(small_shards, labels=["1"]).num_matching == 5
    assert page_of(small_shards, num=5, seed=1).html == page_of(small_shards, num=5, seed=1).html
    assert page_of(small_shards, num=5, seed=1).keys != page_of(small_shards, num=5, seed=2).keys


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


def test_samples_without_photos_have_captions(tmp_path: Path) -> None:
    """Texts alone are a data set, too; without a label there is no class to filter by."""
    write_shards(
        tmp_path, [Sample("a", {"json": b'{"caption": "hello", "n": 1}'}), Sample("b", {"txt": b"x"})], per_shard=2
    )
    page = page_of(tmp_path)
    assert [one["caption"] for one in data_of(page)["samples"]] == ["hello", "x"]
    assert data_of(page)["classes"] == []
    assert "No sample has a label." in page.html


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
        ("boxes.npy", npy([[6, 4, 60, 20, 1]]), [[0.1, 0.1, 1.0, 0.5]]),  # with a label
        ("json", b'{"boxes": [[1, 2, 3]]}', []),
        ("json", b'{"boxes": [[1, 2, 3, 1e999]]}', []),
        ("boxes.json", b"[" * 100_000, []),
        ("boxes.npy", b"\x93NUMPY\x01\x00", []),
        ("boxes.npy", npy([[6, 4, 60, 20]]).replace(b"}", b"("), []),
        ("boxes.npy", b"PK\x03\x04, a zip file", []),
    ],
    ids=lambda value: str(value)[:24],
)
def test_boxes_are_shares_of_the_photo(tmp_path: Path, component: str, data: bytes, boxes: list[list[float]]) -> None:
    """The photo has 60 x 40 pixels. Only boxes of four finite numbers are drawn."""
    write_shards(tmp_path, [a_sample(1, **{component: data})], per_shard=1)
    assert data_of(page_of(tmp_path))["samples"][0]["boxes"] == boxes


def test_page_is_no_larger_than_it_says(tmp_path: Path) -> None:
    """Photos and masks of noise, long names, many bad samples: the bound holds, and so does that of a picture."""
    draw = np.random.default_rng(0)
    noise = encode_photo("png", size=(400, 400), seed=1)
    mask = encode_photo("png", size=(400, 400), mode="L", seed=2)
    boxes = json.dumps(draw.random((500, 4)).tolist()).encode()
    name = "<&'\"" * 20
    samples = [
        Sample(
            f"{name}{number:04d}",
            {"png": noise, "seg.png": mask, "cls": b"1", "txt": b"<&>" * 900, "boxes.json": boxes}
            if number < 20
            else {"png": b"", "txt": b""},
        )
        for number in range(500)
    ]
    page = page_of(
        write_shards(tmp_path, samples, per_shard=500), num=20, keys=[f"{name}{number:04d}" for number in range(20)]
    )
    assert page.bad["photo"] == 480
    assert page.html.count('is empty</td><td class="name">index') == MAX_LISTED
    assert len(page.html.encode()) <= 20 * SAMPLE_BYTES + REST_BYTES
    for one in data_of(page)["samples"]:
        assert len(one["photo"]) <= PICTURE_BYTES * 4 / 3 + 40
        assert len(one["mask"]) <= PICTURE_BYTES * 4 / 3 + 40
        assert len(json.dumps(one).replace("<", "123456")) <= SAMPLE_BYTES


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_photos_are_upright_as_pillow_turns_them(tmp_path: Path, orientation: int, kind: str) -> None:
    """Photo, mask, box and size are upright on the page, for all eight orientations."""
    corner = np.zeros((40, 60, 3), np.uint8)
    corner[:20, :30] = (250, 30, 30)
    corner[20:, :30] = (30, 30, 250)
    exif = Image.Exif()
    exif[274] = orientation
    stream = io.BytesIO()
    Image.fromarray(corner).save(stream, kind, exif=exif, **({"quality": 95} if kind == "JPEG" else {}))
    with Image.open(stream) as stored:
        upright = ImageOps.exif_transpose(stored).convert("RGB")
    width, height = upright.size
    mask = io.BytesIO()
    Image.fromarray(np.full((height, width), 2, np.uint8)).save(mask, "PNG")
    boxes = json.dumps([[0, 0, width / 2, height / 4]]).encode()
    parts = {"jpg": stream.getvalue(), "mask.png": mask.getvalue(), "boxes.json": boxes}
    (shown,) = data_of(page_of(write_shards(tmp_path, [Sample("a", parts)], per_shard=1)))["samples"]
    assert shown["size"] == [height, width]
    assert shown["boxes"] == [[0, 0, 0.5, 0.25]]
    assert shown["mask"]
    assert not shown["bad"]
    with Image.open(io.BytesIO(base64.b64decode(shown["photo"].partition(",")[2]))) as thumbnail:
        assert thumbnail.size == pytest.approx(
            (TILE * width / max(upright.size), TILE * height / max(upright.size)), abs=1
        )
        for across, down in ((0.2, 0.2), (0.8, 0.2), (0.2, 0.8), (0.8, 0.8)):
            found = thumbnail.getpixel((int(across * thumbnail.width), int(down * thumbnail.height)))
            expected = upright.getpixel((int(across * width), int(down * height)))
            assert found == pytest.approx(expected, abs=40)
