"""Pascal VOC's layout: boxes from pixels that count from 1, class ids of its masks, splits, and what is wrong."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import dali_pipes as dp
from dali_pipes.errors import DataError
from prep.sources.coco import BOXES
from prep.sources.detect import detect
from prep.sources.voc import MASK, voc
from tests.prep.commands.calls import json_of_prep
from tests.shards import photo_bytes

WIDTH, HEIGHT = 60, 40


def xml_of(*boxes: tuple[str, int, int, int, int], width: int = WIDTH, height: int = HEIGHT) -> str:
    sides = ("xmin", "ymin", "xmax", "ymax")
    objects = "".join(
        f"<object><name>{name}</name><bndbox>"
        + "".join(f"<{side}>{value}</{side}>" for side, value in zip(sides, corners, strict=True))
        + "</bndbox></object>"
        for name, *corners in boxes
    )
    return f"<annotation><size><width>{width}</width><height>{height}</height></size>{objects}</annotation>"


def write_voc(root: Path, *, names: tuple[str, str] = ("dog", "cat")) -> Path:
    """Four photos: two in train, one of them with a mask, and two in val."""
    for folder in ("JPEGImages", "Annotations", "ImageSets/Main", "SegmentationClass"):
        (root / folder).mkdir(parents=True)
    for number in range(4):
        (root / "JPEGImages" / f"{number}.jpg").write_bytes(photo_bytes(number, WIDTH, HEIGHT))
        boxes = [(names[0], 1, 1, WIDTH, HEIGHT), (names[1], 11, 6, 20, 10)][: 2 - number % 2]
        (root / "Annotations" / f"{number}.xml").write_text(xml_of(*boxes))
    (root / "ImageSets/Main/train.txt").write_text("0\n1\n")
    (root / "ImageSets/Main/val.txt").write_text("2\n3\n")
    mask = Image.fromarray(np.full((HEIGHT, WIDTH), 12, np.uint8), "P")
    mask.putpalette([number for value in range(256) for number in (value, 0, 255 - value)])
    mask.save(root / "SegmentationClass" / "0.png")
    return root


@pytest.mark.parametrize(("names", "labels"), [(("dog", "cat"), [12, 8]), (("dog", "gnu"), [1, 2])])
def test_boxes_begin_at_zero_and_ids_are_those_of_the_masks(
    tmp_path: Path, names: tuple[str, str], labels: list[int]
) -> None:
    root = write_voc(tmp_path / "VOCdevkit/VOC2012", names=names)
    (root / "ImageSets/Main/val.txt").write_text("2\n")
    source = voc(tmp_path)
    assert [record.key for record in source.records] == ["train/0", "train/1", "val/2"]
    boxes = json.loads(source.records[0].components[BOXES])  # type: ignore[arg-type]
    assert boxes == {"boxes": [[0, 0, WIDTH, HEIGHT], [10, 5, 20, 10]], "labels": labels}
    assert [source.classes[label] for label in labels] == list(names)
    assert source.skipped == []
    assert source.noted == [
        "1 photos are in no list of ImageSets/Main: '3'",
        "1 of 3 photos have a mask in SegmentationClass",
    ]
    (tmp_path / "x.jpg").write_bytes(photo_bytes(9, WIDTH, HEIGHT))
    assert voc(tmp_path).skipped == ["x.jpg: it is in no folder of VOC's photos"]


def test_splits_become_data_sets_that_load_and_masks_keep_their_class_ids(tmp_path: Path) -> None:
    root = write_voc(tmp_path / "in")
    assert detect(str(root)).splits == ("train", "val")
    made = json_of_prep("make", root, tmp_path / "out")
    assert [one["num_samples"] for one in made["sets"]] == [2, 2]
    samples = dp.samples(f"{tmp_path}/out/train-")
    (mask,) = [samples[number][MASK] for number in range(2) if MASK in samples[number]]
    assert set(np.asarray(Image.open(io.BytesIO(mask))).flat) == {12}
    exec(compile(made["python"], "program", "exec"), {})


def test_photos_with_xml_beside_them(tmp_path: Path) -> None:
    """As Roboflow exports them. Records that cannot be right are broken, and the others are packed."""
    for split in ("train", "valid"):
        (tmp_path / split).mkdir()
        for number in range(2):
            (tmp_path / split / f"{number}.jpg").write_bytes(photo_bytes(number, WIDTH, HEIGHT))
            (tmp_path / split / f"{number}.xml").write_text(xml_of(("b", 1, 1, 9, 9)))
    (tmp_path / "train/2.xml").write_text(xml_of())
    for text, found in {
        "<annotation": "is not as VOC's are",
        xml_of(
            ("b", 1, 1, 9, 9), width=HEIGHT, height=WIDTH
        ): "is for a photo of 40 x 60 pixels, and '0.jpg' is shown w",
        "<annotation><object><name>b</name></object></annotation>": "has an object without a name or a bndbox",
    }.items():
        (tmp_path / "train/0.xml").write_text(text)
        source = voc(tmp_path)
        assert [record.key for record in source.records] == ["train/1", "valid/0", "valid/1"]
        assert source.skipped == ["train/2.xml: no photo"]
        assert len(source.broken) == 1
        assert found in source.broken[0]
    with pytest.raises(DataError, match="has not VOC's layout"):
        voc(Path(__file__).parent)


def test_masks_that_have_no_palette_are_packed_as_they_are(tmp_path: Path) -> None:
    """A file that is no image is packed, too; the check of masks names it."""
    root = write_voc(tmp_path / "VOC2012")
    (root / "ImageSets/Main/val.txt").write_text("2\n")
    Image.fromarray(np.full((HEIGHT, WIDTH), 12, np.uint8)).save(root / "SegmentationClass" / "1.png")
    (root / "SegmentationClass" / "2.png").write_bytes(b"no image")
    source = voc(tmp_path)
    masks = {record.key: record.components.get(MASK) for record in source.records}
    assert isinstance(masks.pop("train/0"), bytes)
    assert masks == {f"{split}/{n}": root / "SegmentationClass" / f"{n}.png" for split, n in (("train", 1), ("val", 2))}


def test_a_photo_without_objects_has_a_file_that_says_so(tmp_path: Path) -> None:
    """Without its file, nobody knows whether a photo has objects."""
    root = write_voc(tmp_path)
    (root / "Annotations" / "1.xml").write_text(xml_of())
    (root / "Annotations" / "2.xml").unlink()
    source = voc(tmp_path)
    assert [record.key for record in source.records] == ["train/0", "train/1", "val/3"]
    assert "1 photos have no boxes" in source.noted
    assert source.broken == ["val/2: no file '2.xml': whether '2.jpg' has objects is not known"]


def test_several_years_of_voc_are_several_data_sets(tmp_path: Path) -> None:
    for year in (2007, 2012):
        write_voc(tmp_path / f"VOC{year}")
    with pytest.raises(DataError, match=r"holds several data sets of VOC, '.*VOC2007', '.*VOC2012'; make each by its"):
        voc(tmp_path)
