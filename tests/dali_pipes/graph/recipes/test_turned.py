"""Photos with EXIF orientations in the graphs for other tasks: crops and boxes are those of the upright photos."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dali_pipes as dp
from tests.builders import Sample, write_shards
from tests.turned_photos import slope, stored_photo, turned_photo, upright

NUM = 24
GRAPHS: dict[str, Callable[..., Any]] = {
    "detection": lambda **options: dp.detection(crop=24, max_boxes=2, dtype="uint8", **options),
    "captions": lambda **options: dp.captions(crop=24, tokens=None, dtype="uint8", **options),
    "captions_eval": lambda **options: dp.captions(crop=24, tokens=None, scale=None, dtype="uint8", **options),
    "multi_crop": lambda **options: dp.multi_crop(sizes=(24, 12), num_crops=(1, 1), dtype="uint8", **options),
}


def samples_of(number: int) -> tuple[Sample, Sample]:
    """A photo that is stored turned, and the same one upright; their box is a bright rectangle of the upright photo."""
    pixels = slope(40 + number % 7, 60 + number % 11) // 2
    pixels[12:24, 20:50] = 255
    photo = turned_photo(pixels, 1 + number % 8, "PNG")
    seen = np.asarray(upright(photo).convert("RGB"))
    rows, columns = np.nonzero((seen == 255).all(axis=2))
    box = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
    others = {
        "boxes.json": json.dumps({"boxes": [[int(side) for side in box]], "labels": [3]}).encode(),
        "txt": b"a rectangle",
    }
    key = f"{number:03d}"
    return Sample(key, {"png": photo} | others), Sample(key, {"png": stored_photo(seen, "PNG")} | others)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Shards of turned photos and of upright ones."""
    pairs = [samples_of(number) for number in range(NUM)]
    folder = tmp_path_factory.mktemp("turned")
    turned = write_shards(folder / "turned", [pair[0] for pair in pairs], per_shard=9)
    return turned, write_shards(folder / "upright", [pair[1] for pair in pairs], per_shard=9)


def batch_of(shards: Path, graph: Any) -> dict[str, Any]:
    with dp.loader(shards, graph, batch_size=NUM, seed=5, device="cpu") as loader:
        return dict(next(loader)[0])


@pytest.mark.parametrize("graph", GRAPHS)
def test_turned_photos_are_as_upright_ones(folders: tuple[Path, Path], graph: str) -> None:
    """By default, all eight orientations: the same crops, boxes and pixels."""
    turned, plain = (batch_of(folder, GRAPHS[graph]()) for folder in folders)
    for name, output in turned.items():
        assert output == plain[name] if isinstance(output, list) else torch.equal(output, plain[name]), name
    if graph != "detection":  # whose boxes are those of the upright photos
        stored = batch_of(folders[0], GRAPHS[graph](orient=False))
        assert not any(torch.equal(stored[name], turned[name]) for name in turned if name != "text")


def test_boxes_lie_on_the_turned_photo(folders: tuple[Path, Path]) -> None:
    batch = batch_of(folders[0], dp.detection(crop=64, scale=None, mean=(0, 0, 0), std=(1, 1, 1)))
    for image, target in zip(batch["image"], batch["target"], strict=True):
        bright = torch.nonzero((image > 0.75).all(dim=0))
        (left, top, right, bottom) = target["boxes"][0].tolist()
        low, high = bright.amin(dim=0).tolist(), (bright.amax(dim=0) + 1).tolist()
        assert np.abs(np.array([low[1], low[0], high[1], high[0]]) - [left, top, right, bottom]).max() <= 1.5


def test_boxes_of_a_photo_that_stays_turned_are_bad_where_they_do_not_fit(folders: tuple[Path, Path]) -> None:
    """Upright boxes on photos as stored: some lie outside, and the error says so."""
    with pytest.raises(dp.DecodeError, match="expected boxes on the photo of"):
        batch_of(folders[0], dp.detection(crop=24, scale=None, orient=False))
