"""COCO's layout: every photo with its boxes, in each split; what does not fit is named."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dali_pipes as dp
from dali_pipes.cli import main
from dali_pipes.errors import DataError
from prep.sources.coco import BOXES, coco
from prep.sources.detect import detect
from tests.loaders import open_loader
from tests.shards import photo_bytes

CATEGORIES = [{"id": 1, "name": "cat"}, {"id": 18, "name": "dog"}]
WIDTH, HEIGHT = 60, 40


def write_split(root: Path, split: str, numbers: range) -> dict[str, list[list[float]]]:
    """Photos of a split and its file; returns key -> boxes as the graph gives them, with the class id."""
    truth, annotations = {}, []
    (root / "annotations").mkdir(parents=True, exist_ok=True)
    (root / "images" / split).mkdir(parents=True)
    for number in numbers:
        (root / "images" / split / f"{number:03}.jpg").write_bytes(photo_bytes(number, WIDTH, HEIGHT))
        boxes = [[4.0 * i, 2.0 * number, 10.0, 6.0] for i in range(number % 3)]
        for i, box in enumerate(boxes):
            annotations.append(
                {"id": 100 * number + i, "image_id": number, "bbox": box, "category_id": 18 if i else 1, "iscrowd": 0}
            )
        truth[f"{split}/{number:03}"] = [[x, y, x + w, y + h, 18 if i else 1] for i, (x, y, w, h) in enumerate(boxes)]
    document = {
        "info": {"year": 2026},
        "images": [{"id": n, "file_name": f"{n:03}.jpg", "width": WIDTH, "height": HEIGHT} for n in numbers],
        "annotations": annotations,
        "categories": CATEGORIES,
    }
    (root / "annotations" / f"instances_{split}.json").write_text(json.dumps(document))
    (root / "annotations" / f"captions_{split}.json").write_text(json.dumps({"images": [], "annotations": []}))
    return truth


def test_made_data_sets_have_every_box(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By `prep make`, whose program runs; its detection graph gives the boxes that were written."""
    root, shards = tmp_path / "coco", tmp_path / "shards"
    truth = {
        split: write_split(root, split, numbers) for split, numbers in (("train", range(9)), ("val", range(9, 13)))
    }
    assert main(["prep", "make", str(root), f"{shards}/"]) == 0
    said = capsys.readouterr()
    assert "is photos with boxes, by 'instances_train.json', 'instances_val.json', splits 'train', 'val'" in said.err
    assert "3 photos have no boxes, and an empty list" in said.err
    done = subprocess.run([sys.executable, "-c", said.out], capture_output=True, text=True, check=True)
    assert "samples: 9, batches: 1" in done.stdout
    whole = {"scale": None, "flip": 0, "crop": (HEIGHT, WIDTH), "min_size": 0}
    for split, expected in truth.items():
        with open_loader(f"{shards}/{split}-", dp.detection(**whole)) as loader:
            assert loader.parts.inputs.manifest.classes == {1: "cat", 18: "dog"}
            found = {
                key: [
                    [*box, label]
                    for box, label in zip(target["boxes"].tolist(), target["labels"].tolist(), strict=True)
                ]
                for batch in loader.as_dicts()
                for key, target in zip(batch["key"], batch["target"], strict=True)
            }
        assert found == expected


def test_photos_beside_the_file_and_what_is_left_out(tmp_path: Path) -> None:
    """As Roboflow exports them; a photo that is missing, and one that nothing lists, are named."""
    write_split(tmp_path / "a", "train", range(4))
    (tmp_path / "a" / "images" / "train").rename(tmp_path / "train")
    (tmp_path / "a" / "annotations" / "instances_train.json").rename(tmp_path / "train" / "_annotations.coco.json")
    (tmp_path / "train" / "003.jpg").rename(tmp_path / "train" / "x.jpg")
    assert detect(str(tmp_path)).kind == "coco"
    source = coco(tmp_path)
    assert [record.key for record in source.records] == ["000", "001", "002"]
    assert json.loads(source.records[1].components[BOXES]) == [{"bbox": [0, 2, 10, 6], "category_id": 1}]  # type: ignore[arg-type]
    assert [line.partition(":")[0] for line in (*source.broken, *source.skipped)] == ["003.jpg", "train/x.jpg"]


def test_boxes_that_do_not_lie_on_their_photo_make_it_broken(tmp_path: Path) -> None:
    """For instance if ``bbox`` holds the right and the bottom edge: loaders would refuse it, or train on it."""
    write_split(tmp_path, "train", range(4))
    path = tmp_path / "annotations" / "instances_train.json"
    document = json.loads(path.read_text())
    for number, box in ((0, [1, 1, -5, 5]), (1, [50, 20, 59, 30])):
        document["annotations"][number]["bbox"] = box
    path.write_text(json.dumps(document))
    source = coco(tmp_path)
    assert [line.partition(":")[0] for line in source.broken] == ["001", "002"]
    assert "001: the box [1, 1, -5, 5] is not on the photo of 60 x 40 pixels; COCO's boxes are left" in source.broken[0]
    assert (len(source.records), source.skipped) == (2, [])


def change(name: str, number: int, **fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda document: document[name][number].update(fields)


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (change("images", 0, file_name=3), "entry 0 of 'images' has no 'file_name' as COCO's have, got {'id': 0"),
        (change("images", 0, file_name="../a.jpg"), "lists the photo '../a.jpg'; expected a path below"),
        (change("annotations", 0, image_id=77), "annotation 100 is of image 77, which the file does not list"),
        (change("annotations", 0, category_id=7), "annotation 100 is of category 7, which the file does not list"),
        (change("annotations", 0, bbox=[1, 2, 3]), r"annotation 100 has the bbox \[1, 2, 3\], not four numbers"),
        (change("images", 0, id=1), "two images have the same id"),
        (lambda document: document["images"].clear(), "annotation 100 is of image 1, which the file does not list"),
        (
            lambda document: [one.update(file_name="n.jpg") for one in document["images"]],
            "such as 'n.jpg', which are in",
        ),
    ],
)
def test_files_that_are_not_as_cocos_are_errors(tmp_path: Path, edit: Any, text: str) -> None:
    write_split(tmp_path, "train", range(4))
    path = tmp_path / "annotations" / "instances_train.json"
    document = json.loads(path.read_text())
    edit(document)
    path.write_text(json.dumps(document))
    with pytest.raises(DataError, match=text):
        coco(tmp_path)


def test_files_that_are_cut_or_contradict_each_other_are_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no file of COCO; looked for "):
        coco(tmp_path)
    for split in ("train", "val"):
        write_split(tmp_path, split, range(2))
    path = tmp_path / "annotations" / "instances_val.json"
    document = json.loads(path.read_text())
    document["categories"][1]["name"] = "wolf"
    path.write_text(json.dumps(document))
    with pytest.raises(DataError, match=r"instances_val.json': category 18 is 'wolf', and 'dog' in another file"):
        coco(tmp_path)
    path.write_text(path.read_text()[:-1])
    with pytest.raises(DataError, match=r"instances_val.json' is no JSON: "):
        coco(tmp_path)
    path.write_text(json.dumps({"images": [], "info": "x" * (1 << 20)}))  # too long to be known by its first part
    with pytest.raises(DataError, match=r"instances_val.json' is no file of COCO: it has no list 'annotations'"):
        coco(tmp_path)


def test_boxes_are_kept_if_the_file_gives_no_sizes(tmp_path: Path) -> None:
    """A loader compares the boxes with the photos themselves."""
    write_split(tmp_path, "train", range(4))
    path = tmp_path / "annotations" / "instances_train.json"
    document = json.loads(path.read_text())
    for image in document["images"]:
        del image["width"]
    path.write_text(json.dumps(document))
    source = coco(tmp_path)
    assert source.broken == []
    assert [len(json.loads(record.components[BOXES])) for record in source.records] == [0, 1, 2, 0]  # type: ignore[arg-type]
