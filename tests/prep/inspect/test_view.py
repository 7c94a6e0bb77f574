"""Contact sheets of samples that are known by their colours."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dali_pipes.errors import DataError, StoreError
from dali_pipes.store.cluster.ais import AisStore
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
from tests.builders import Sample, image_bytes, photo_bytes, write_shards, write_tar
from tests.prep.commands.calls import call_prep

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


@pytest.mark.parametrize(
    ("labels", "keys"), [(["2"], ["k1", "k4"]), (["dog"], ["k1", "k4"]), (["cow", "1"], ["k0", "k2", "k3", "k5"])]
)
def test_samples_of_some_classes(coloured: Path, labels: list[str], keys: list[str]) -> None:
    """By id or by name."""
    sheet = draw(coloured, labels=labels)
    assert (sheet.keys, sheet.num_matching) == (keys, len(keys))


def test_shards_without_an_index_and_a_bucket(coloured: Path, bucket: AisStore, node: str, tmp_path: Path) -> None:
    """The same picture, but for the URL in its title."""
    bucket.create()
    for path in coloured.glob("*.tar"):
        bucket.upload(path.name, path)
    shards = resolve_shards(f"{bucket.url}/s-", endpoint=node)
    pictures = [draw_sheet(shards, ShowOptions(num=4)).picture]
    index_shards(shards)
    pictures.append(draw_sheet(shards, ShowOptions(num=4)).picture)
    assert pictures[0].tobytes() == pictures[1].tobytes()


def test_photo_keeps_its_shape(tmp_path: Path) -> None:
    """A wide photo has paper above and below it; one of a pixel is enlarged."""
    samples = [Sample("a", {"bmp": plain((9, 9, 9), width=400, height=20)}), Sample("b", {"bmp": plain((9, 9, 9))})]
    samples.append(Sample("c", {"bmp": plain((9, 9, 9), width=1, height=1)}))
    write_shards(tmp_path, samples, per_shard=3)
    picture = draw(tmp_path).picture
    top = [picture.getpixel((MARGIN + n * (TILE + CELL_GAP) + TILE // 2, MARGIN + HEADER + 2)) for n in range(3)]
    assert [colour == (9, 9, 9) for colour in top] == [False, False, True]
    middle = [
        picture.getpixel((MARGIN + n * (TILE + CELL_GAP) + TILE // 2, MARGIN + HEADER + TILE // 2)) for n in range(3)
    ]
    assert middle == [(9, 9, 9)] * 3


def test_photo_that_cannot_be_decoded_is_a_gray_field(tmp_path: Path) -> None:
    """And it is told which."""
    samples = [Sample("a", {"jpg": photo_bytes(1, 40, 30)[:-2]}), Sample("b", {"jpg": photo_bytes(1, 40, 30)})]
    write_shards(tmp_path, samples, per_shard=2)
    sheet = draw(tmp_path)
    assert sheet.keys == ["a", "b"]
    assert sheet.undecodable == [
        "shard 's-000000.tar', key 'a', component 'jpg': is cut off: it has no end-of-image marker"
    ]
    result = call(tmp_path, tmp_path / "out.png")
    assert result.exit_code == 0
    assert "key 'a', component 'jpg': is cut off" in result.stderr


def test_large_masks_keep_their_values(tmp_path: Path) -> None:
    """Made smaller, a mask has no value that it did not have: 2 is not what lies between 1 and 3."""
    mask = np.ones((500, 333), np.uint8)
    mask[:, 100:] = 3
    sample = Sample("a", {"bmp": plain((9, 9, 9), width=333, height=500), "mask.png": image_bytes(mask)})
    shards = resolve_shards(write_shards(tmp_path, [sample], per_shard=1), endpoint=None)
    (shown,) = ChosenSamples(shards, ShowOptions(num=1), show_progress=False).read(side=TILE)
    assert shown.mask is not None
    assert np.unique(shown.mask).tolist() == [1, 3]


def test_masks_of_another_shape_and_samples_without_a_photo_are_drawn_all_the_same(tmp_path: Path) -> None:
    """Samples whose mask does not fit the photo, or that have a text in its place, are shown without the overlay."""
    mask = image_bytes(np.ones((60, 40), np.uint8))
    samples = [Sample("a", {"bmp": plain((9, 9, 9)), "mask.png": mask}), Sample("b", {"txt": b"x"})]
    write_shards(tmp_path, samples, per_shard=2)
    sheet = draw(tmp_path)
    assert (sheet.keys, sheet.undecodable) == (["a", "b"], [])


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
        (["out.txt"], "expected a page's name, .html, or a picture's name, .png, .jpg or .webp, got 'out.txt'"),
        (["nowhere/out.png"], "no directory 'nowhere'; make it"),
        ([], "name the file to write, such as -o page.html"),
        (["a.png", "--quarantine", "bad.tsv"], "--quarantine is for a page: name one, -o page.html"),
        (["out.png", "--num", "1001"], "1001 is not in the range"),
        (["out.png", "--keys", ","], "expected keys such as 'cat/1,cat/7', got ','"),
        (["out.png", "--keys", "k1", "--where-label", "1"], "--keys and --where-label exclude each other"),
    ],
)
def test_misuse_says_what_was_expected(coloured: Path, arguments: list[str], text: str) -> None:
    result = call(coloured, *arguments)
    assert result.exit_code == 2
    assert text in result.output


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"keys": ["k1", "zebra"]}, DataError, "no sample of '.*s-' has key 'zebra'"),
        ({"labels": ["bird"]}, DataError, r"no class 'bird' in '.*s-' \(found: 'cat', 'cow', 'dog'\)"),
        ({"labels": ["7"]}, DataError, "no sample of '.*s-' is of class 7"),
        ({"labels": ["9" * 20]}, DataError, "no class '9{20}' in '.*s-'"),
        (
            {"photo": "jpg"},
            DataError,
            r"shard 's-00000\d.tar', key 'k\d': no component 'jpg' to show \(found: bmp, cls",
        ),
        ({"mask": "seg.png"}, DataError, "no component 'seg.png' to show"),
    ],
)
def test_what_is_not_there_is_named(
    coloured: Path, options: dict[str, object], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
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
