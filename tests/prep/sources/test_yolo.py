"""YOLO's layout: boxes in pixels of the upright photo, names of classes, and what is wrong with a line."""

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from dali_pipes.errors import DataError
from prep.sources.coco import BOXES
from prep.sources.detect import detect
from prep.sources.yolo import yolo
from tests.prep.commands.calls import json_of_prep
from tests.shards import photo_bytes

WIDTH, HEIGHT = 60, 40


def write_yolo(root: Path, *, names: str = "names: [cat, 'dog']\n", split: str = "train") -> Path:
    """Three photos: of two boxes, of a polygon, and without a label file; the second is turned by its EXIF data."""
    for folder in ("images", "labels"):
        (root / folder / split).mkdir(parents=True)
    for number in range(3):
        (root / "images" / split / f"{number}.jpg").write_bytes(photo_bytes(number, WIDTH, HEIGHT))
    turned = Image.new("RGB", (WIDTH, HEIGHT))
    turned.getexif()[0x0112] = 6
    turned.save(root / "images" / split / "1.jpg", exif=turned.getexif())
    (root / "labels" / split / "0.txt").write_text("1 0.5 0.5 0.5 0.25\n\n0 0.1 0.1 0.2 0.2\n")
    (root / "labels" / split / "1.txt").write_text("0 0.25 0.5 0.5 0.5 0.5 0.75\n")
    (root / "data.yaml").write_text(f"train: images/{split}\nnc: 2\n{names}")
    return root


def boxes_of(root: Path) -> dict[str, Any]:
    return {record.key: json.loads(record.components[BOXES]) for record in yolo(root).records}  # type: ignore[arg-type]


@pytest.mark.parametrize("names", ["names: [cat, 'dog']\n", "names:\n- cat\n- dog\n", 'names:\n  0: cat\n  1: "dog"\n'])
def test_boxes_are_in_pixels_of_the_upright_photo(tmp_path: Path, names: str) -> None:
    source = yolo(write_yolo(tmp_path, names=names))
    assert source.classes == {0: "cat", 1: "dog"}
    assert boxes_of(tmp_path) == {
        "0": {"boxes": [[15, 15, 45, 25], [0, 0, 12, 8]], "labels": [1, 0]},
        "1": {"boxes": [[10, 30, 20, 45]], "labels": [0]},  # shown as 40 x 60
        "2": {"boxes": [], "labels": []},
    }
    assert source.noted == ["images/train: 1 photos have no label file, and no boxes"]


def test_splits_become_data_sets_that_load(tmp_path: Path) -> None:
    root = write_yolo(tmp_path / "in")
    write_yolo(root / "x", split="val")
    for folder in ("images", "labels"):
        (root / "x" / folder / "val").rename(root / folder / "val")
    assert detect(str(root)).splits == ("train", "val")
    made = json_of_prep("make", root, tmp_path / "out")
    assert [one["num_samples"] for one in made["sets"]] == [3, 3]
    assert "dp.detection(scale=None, flip=0)" in made["python"]
    exec(compile(made["python"], "program", "exec"), {})


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("2 0.5 0.5 0.1 0.1", "line 1: expected CLASS X Y WIDTH HEIGHT, .* with a class that has a name, found '2 0.5"),
        ("0 0.5 0.5 0.1", "line 1: expected CLASS X Y"),
        ("cat 0.5 0.5 0.1 0.1", "line 1: expected CLASS X Y"),
        ("0 15 15 30 10", "line 1: the box is not in the photo: '0 15 15 30 10'"),
    ],
)
def test_lines_of_another_form_make_a_record_broken(tmp_path: Path, line: str, text: str) -> None:
    (write_yolo(tmp_path) / "labels" / "train" / "0.txt").write_text(line)
    (tmp_path / "labels" / "train" / "9.txt").touch()
    (tmp_path / "images" / "train" / "2.png").touch()
    source = yolo(tmp_path)
    assert [record.key for record in source.records] == ["1", "2"]
    with pytest.raises(DataError, match=text):
        raise DataError(*source.broken)
    why = "another photo has its label file, or its folder has none"
    assert source.skipped == ["labels/train/9.txt: no photo", f"images/train/2.png: {why}"]


def test_photos_in_folders_without_labels_are_named(tmp_path: Path) -> None:
    """A test split often has no labels: its photos are left out, and that is said."""
    write_yolo(tmp_path, names="names:\n  0: cat # tame\n  3: dog\n")
    (tmp_path / "images" / "test").mkdir()
    (tmp_path / "images" / "test" / "0.jpg").touch()
    (tmp_path / "images" / "9.jpg").touch()
    (tmp_path / "labels" / "train" / "0.txt").write_text("3 0.5 0.5 0.5 0.25\n")
    source = yolo(tmp_path)
    assert source.classes == {0: "cat", 3: "dog"}
    assert [line.partition(":")[0] for line in source.skipped] == ["images/9.jpg", "images/test/0.jpg"]


def test_classes_must_have_names(tmp_path: Path) -> None:
    write_yolo(tmp_path, names="")
    with pytest.raises(DataError, match=r"data.yaml' names no class: expected a list 'names'"):
        yolo(tmp_path)
