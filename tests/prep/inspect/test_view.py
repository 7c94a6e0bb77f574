"""Contact sheets of samples that are known by their colours; and the page of a data set as a text.

`tests/pages` opens the page.
"""

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
from PIL import Image

from dali_pipes.errors import DataError, StoreError
from dali_pipes.store.cluster.ais import AisStore
from dali_pipes.store.local import LocalStore
from dali_pipes.store.urls import resolve_shards
from prep.index import index_shards
from prep.inspect.contact_sheet import (
    CELL_GAP,
    HEADER,
    MARGIN,
    MASK_COLOURS,
    TILE,
    TILE_GAP,
    Sheet,
    draw_sheet,
    overlaid,
)
from prep.inspect.samples import ChosenSamples, ShowOptions
from prep.inspect.view_page import MAX_LISTED, PICTURE_BYTES, REST_BYTES, SAMPLE_BYTES, Page, view_page
from tests.prep.commands.calls import call_prep
from tests.shards import Sample, encode_photo, image_bytes, mask_bytes, npy_bytes, photo_bytes, write_shards, write_tar
from tests.turned_photos import ORIENTATIONS, turned_photo, upright

COLOURS = [(200, 30, 30), (30, 200, 30), (30, 30, 200), (200, 200, 30), (30, 200, 200), (200, 30, 200)]


def plain(colour: tuple[int, int, int], *, width: int = 60, height: int = 40) -> bytes:
    return image_bytes(np.full((height, width, 3), colour, np.uint8), "BMP")


@pytest.fixture(scope="session")
def coloured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six samples of one colour each, classes 1, 2, 3, 1, 2, 3; masks of one value each, 1 to 3."""
    directory = tmp_path_factory.mktemp("coloured")
    (directory / "s-classes.json").write_text(json.dumps({"1": "cat", "2": "dog", "3": "cow"}))
    samples = [
        Sample(
            f"k{i}",
            {
                "bmp": plain(colour),
                "cls": str(i % 3 + 1).encode(),
                "mask.png": image_bytes(np.full((40, 60), i % 3 + 1, np.uint8)),
            },
        )
        for i, colour in enumerate(COLOURS)
    ]
    return write_shards(directory, samples, per_shard=2)


def draw(shards: Path, **options: object) -> Sheet:
    return draw_sheet(resolve_shards(shards, endpoint=None), ShowOptions(**{"num": 24} | options))  # type: ignore[arg-type]


call = partial(call_prep, "view")


def centre(sheet: Sheet, number: int, *, of_mask: bool = False) -> tuple[int, int, int]:
    """The colour in the middle of a cell's photo, or of the photo with its mask."""
    left = MARGIN + number * (2 * TILE + TILE_GAP + CELL_GAP) + of_mask * (TILE + TILE_GAP)
    found = sheet.picture.getpixel((left + TILE // 2, MARGIN + HEADER + TILE // 2))
    assert isinstance(found, tuple)
    return found  # type: ignore[return-value]


def test_samples_stand_in_the_order_of_their_keys(coloured: Path) -> None:
    """Photo at the left, photo with its mask's colour at the right."""
    sheet = draw(coloured, keys=["k4", "k0", "k2"])
    assert sheet.keys == ["k4", "k0", "k2"]
    assert [centre(sheet, number) for number in range(3)] == [COLOURS[4], COLOURS[0], COLOURS[2]]
    over = overlaid(np.full((1, 1, 3), COLOURS[4], np.uint8), np.full((1, 1), 2, np.uint8))[0, 0]
    assert centre(sheet, 0, of_mask=True) == tuple(over.tolist()) != COLOURS[4]


def test_a_seed_draws_the_same_samples(coloured: Path) -> None:
    """And another seed others; more than there are draws all."""
    first, again = draw(coloured, num=3, seed=5), draw(coloured, num=3, seed=5)
    assert first.keys == again.keys
    assert first.picture.tobytes() == again.picture.tobytes()
    assert len({tuple(draw(coloured, num=3, seed=seed).keys) for seed in range(6)}) > 1
    assert draw(coloured, num=99).keys == [f"k{i}" for i in range(6)]


def test_samples_of_some_classes(coloured: Path) -> None:
    """By id or by name."""
    sheet = draw(coloured, labels=["cow", "1"])
    assert (sheet.keys, sheet.num_matching) == (["k0", "k2", "k3", "k5"], 4)


def test_shards_without_an_index_and_a_bucket(coloured: Path, bucket: AisStore, node: str) -> None:
    """The same picture, but for the URL in its title."""
    bucket.create()
    for path in coloured.glob("*.tar"):
        bucket.upload(path.name, path)
    shards = resolve_shards(f"{bucket.url}/s-", endpoint=node)
    unindexed = draw_sheet(shards, ShowOptions(num=4)).picture
    index_shards(shards)
    assert draw_sheet(shards, ShowOptions(num=4)).picture.tobytes() == unindexed.tobytes()


def test_photo_keeps_its_shape(tmp_path: Path) -> None:
    """A wide photo has paper above and below it; one of a pixel is enlarged."""
    sizes = {"a": (400, 20), "b": (60, 40), "c": (1, 1)}
    samples = [Sample(key, {"bmp": plain((9, 9, 9), width=w, height=h)}) for key, (w, h) in sizes.items()]
    picture = draw(write_shards(tmp_path, samples, per_shard=3)).picture

    def colours(y: int) -> list[bool]:
        columns = (MARGIN + n * (TILE + CELL_GAP) + TILE // 2 for n in range(3))
        return [picture.getpixel((x, MARGIN + HEADER + y)) == (9, 9, 9) for x in columns]

    assert colours(2) == [False, False, True]
    assert colours(TILE // 2) == [True, True, True]


def test_samples_that_cannot_be_shown_whole_are_drawn_all_the_same(tmp_path: Path) -> None:
    """Photos that cannot be decoded are gray and told; masks that do not fit, or are missing, are left out."""
    mask = image_bytes(np.ones((60, 40), np.uint8))
    samples = [
        Sample("a", {"jpg": photo_bytes(1, 40, 30)[:-2]}),
        Sample("b", {"bmp": plain((9, 9, 9)), "mask.png": mask}),
        Sample("c", {"txt": b"x"}),
    ]
    write_shards(tmp_path, samples, per_shard=3)
    result = call(tmp_path, tmp_path / "out.png", "--json")
    answer = json.loads(result.stdout)
    told = "shard 's-000000.tar', key 'a', component 'jpg': is cut off: it has no end-of-image marker"
    assert (result.exit_code, answer["keys"], answer["undecodable"]) == (0, ["a", "b", "c"], [told])
    assert told in call(tmp_path, tmp_path / "out.png").stderr


def test_large_masks_keep_their_values(tmp_path: Path) -> None:
    """Made smaller, a mask has no value that it did not have: 2 is not what lies between 1 and 3."""
    mask = np.ones((500, 333), np.uint8)
    mask[:, 100:] = 3
    sample = Sample("a", {"bmp": plain((9, 9, 9), width=333, height=500), "mask.png": image_bytes(mask)})
    shards = resolve_shards(write_shards(tmp_path, [sample], per_shard=1), endpoint=None)
    (shown,) = ChosenSamples(shards, ShowOptions(num=1), show_progress=False).read(side=TILE)
    assert shown.mask is not None
    assert np.unique(shown.mask).tolist() == [1, 3]


def test_colours_of_masks() -> None:
    """Each value has one, the same in every sheet, and the background none."""
    assert len({tuple(colour) for colour in MASK_COLOURS.tolist()}) > 250
    photo = np.full((1, 3, 3), 100, np.uint8)
    over = overlaid(photo, np.array([[0, 7, 255]], np.uint8))[0].tolist()
    assert over[0] == [100, 100, 100]
    for value, found in ((7, over[1]), (255, over[2])):
        assert found == pytest.approx(0.55 * 100 + 0.45 * MASK_COLOURS[value], abs=1)


# The command


def test_command_writes_a_picture(coloured: Path, tmp_path: Path) -> None:
    out = tmp_path / "sheet.png"
    result = call(coloured, out, "--num", "2", "--seed", "3")
    with Image.open(out) as picture:
        assert result.stdout == f"drew 2 samples of 6, {picture.width} x {picture.height} pixels -> {out}\n"
    answer = json.loads(call(coloured, tmp_path / "sheet.jpg", "--keys", "k1,k0", "--json").stdout)
    assert (answer["keys"], answer["num_matching"], answer["undecodable"]) == (["k1", "k0"], 2, [])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("out.txt", "expected a page's name, .html, or a picture's name, .png, .jpg or .webp, got 'out.txt'"),
        ("nowhere/out.png", "no directory 'nowhere'; make it"),
        ("", "name the file to write, such as -o page.html"),
        ("a.png --quarantine bad.tsv", "--quarantine is for a page: name one, -o page.html"),
        ("out.png --num 1001", "1001 is not in the range"),
        ("out.png --keys ,", "expected keys such as 'cat/1,cat/7', got ','"),
        ("out.png --keys k1 --where-label 1", "--keys and --where-label exclude each other"),
    ],
)
def test_misuse_says_what_was_expected(coloured: Path, arguments: str, text: str) -> None:
    result = call(coloured, *arguments.split())
    assert result.exit_code == 2
    assert text in result.output


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"keys": ["k1", "zebra"]}, "no sample of '.*s-' has key 'zebra'"),
        ({"labels": ["bird"]}, r"no class 'bird' in '.*s-' \(found: 'cat', 'cow', 'dog'\)"),
        ({"labels": ["7"]}, "no sample of '.*s-' is of class 7"),
        ({"labels": ["9" * 20]}, "no class '9{20}' in '.*s-'"),
        ({"photo": "jpg"}, r"shard 's-00000\d.tar', key 'k\d': no component 'jpg' to show \(found: bmp, cls"),
        ({"mask": "seg.png"}, "no component 'seg.png' to show"),
    ],
)
def test_what_is_not_there_is_named(coloured: Path, options: dict[str, object], text: str) -> None:
    with pytest.raises(DataError, match=text):
        draw(coloured, **options)


def test_sets_without_a_class_table_or_samples(tmp_path: Path) -> None:
    write_shards(tmp_path / "texts", [Sample("a", {"txt": b"x", "cls": b"1"})], per_shard=1)
    with pytest.raises(DataError, match=r"no class 'cat' in .*: the set has no class table, name the id"):
        draw(tmp_path / "texts", labels=["cat"])
    with pytest.raises(StoreError, match="no such directory"):
        draw(tmp_path / "nowhere" / "s-")
    write_tar(tmp_path / "empty-0.tar", [])
    with pytest.raises(DataError, match=r"'.*empty-' holds no sample to show"):
        draw(tmp_path / "empty-")


# The page: what it counts, lists and reads, how large it is


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
        ("boxes.npy", npy_bytes(np.float32([[6, 4, 60, 20, 1]])), [[0.1, 0.1, 1.0, 0.5]]),  # with a label
        ("json", b'{"boxes": [[1, 2, 3]]}', []),
        ("json", b'{"boxes": [[1, 2, 3, 1e999]]}', []),
        ("boxes.json", b"[" * 100_000, []),
        ("boxes.npy", b"\x93NUMPY\x01\x00", []),
        ("boxes.npy", npy_bytes(np.float32([[6, 4, 60, 20]])).replace(b"}", b"("), []),
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
    shards = write_shards(tmp_path, samples, per_shard=500)
    page = page_of(shards, num=20, keys=[sample.key for sample in samples[:20]])
    assert page.bad["photo"] == 480
    assert page.html.count('is empty</td><td class="name">index') == MAX_LISTED
    assert len(page.html.encode()) <= 20 * SAMPLE_BYTES + REST_BYTES
    for one in data_of(page)["samples"]:
        assert len(one["photo"]) <= PICTURE_BYTES * 4 / 3 + 40
        assert len(one["mask"]) <= PICTURE_BYTES * 4 / 3 + 40
        assert len(json.dumps(one).replace("<", "123456")) <= SAMPLE_BYTES


@pytest.mark.parametrize(("orientation", "kind"), [*((one, "JPEG") for one in ORIENTATIONS), (6, "PNG")])
def test_photos_are_upright_as_pillow_turns_them(tmp_path: Path, orientation: int, kind: str) -> None:
    """Photo, mask, box and size are upright on the page, for all eight orientations."""
    corner = np.zeros((40, 60, 3), np.uint8)
    corner[:20, :30] = (250, 30, 30)
    corner[20:, :30] = (30, 30, 250)
    photo = turned_photo(corner, orientation, kind)
    expected = upright(photo).convert("RGB")
    width, height = expected.size
    boxes = json.dumps([[0, 0, width / 2, height / 4]]).encode()
    parts = {"jpg": photo, "mask.png": image_bytes(np.full((height, width), 2, np.uint8)), "boxes.json": boxes}
    (shown,) = data_of(page_of(write_shards(tmp_path, [Sample("a", parts)], per_shard=1)))["samples"]
    assert (shown["size"], shown["boxes"]) == ([height, width], [[0, 0, 0.5, 0.25]])
    assert shown["mask"]
    assert not shown["bad"]
    with Image.open(io.BytesIO(base64.b64decode(shown["photo"].partition(",")[2]))) as thumbnail:
        largest = max(expected.size)
        assert thumbnail.size == pytest.approx((TILE * width / largest, TILE * height / largest), abs=1)
        for across, down in ((0.2, 0.2), (0.8, 0.2), (0.2, 0.8), (0.8, 0.8)):
            found = thumbnail.getpixel((int(across * thumbnail.width), int(down * thumbnail.height)))
            assert found == pytest.approx(expected.getpixel((int(across * width), int(down * height))), abs=40)
