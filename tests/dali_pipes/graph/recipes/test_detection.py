"""Boxes that are cropped, resized and flipped with their photo, against torchvision's ``v2`` transforms."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import dali_pipes as dp
from tests.lazy import Lazy
from tests.loaders import batches_of, substituting
from tests.shards import Sample, npy_bytes, photo_bytes, write_shards

torch, v2, tv_tensors = Lazy("torch"), Lazy("torchvision.transforms.v2"), Lazy("torchvision.tv_tensors")
detection = Lazy("dali_pipes.graph.recipes.detection")

CROP = 96
SIZES = [(60 + 31 * (number % 5), 200 - 23 * (number % 7)) for number in range(30)]


def boxes_of(number: int) -> npt.NDArray[np.float64]:
    """None to nine boxes and their class ids, float64 [N, 5]: some thin, some at the photo's edges, one past them."""
    width, height = SIZES[number]
    draw = np.random.default_rng(number)
    corners = np.sort(draw.uniform(0, 1, (number % 10, 2, 2)), axis=1) * (width, height)  # [N, corner, (x, y)]
    boxes = corners.reshape(-1, 4)
    boxes[::4, 2] = boxes[::4, 0] + 0.8
    boxes[1::4, 2:] = (width, height)
    boxes[2::4, :2] = -0.4
    return np.concatenate([boxes, draw.integers(0, 90, (len(boxes), 1))], axis=1)


def sample_of(number: int) -> Sample:
    """A photo with the same boxes in each format; the COCO file also has a crowd."""
    boxes = boxes_of(number)
    lists = {"boxes": boxes[:, :4].tolist(), "labels": boxes[:, 4].astype(int).tolist()}
    annotations = [
        {"bbox": [left, top, right - left, bottom - top], "category_id": int(label), "iscrowd": 0}
        for left, top, right, bottom, label in boxes.tolist()
    ]
    annotations.append({"bbox": [0, 0, 9, 9], "category_id": 1, "iscrowd": 1})
    files = {"boxes.json": json.dumps(lists).encode(), "coco.json": json.dumps(annotations).encode()}
    photo = photo_bytes(number, *SIZES[number])
    return Sample(f"d{number:03d}", {"jpg": photo, "boxes.npy": npy_bytes(boxes), **files})


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shards(tmp_path_factory.mktemp("boxes"), list(map(sample_of, range(len(SIZES)))), per_shard=8)


def with_window(graph: Any, *, scale: tuple[float, float] | None) -> Callable[..., dict[str, Any]]:
    """The graph, and the crop and the flip that it drew: a stream has the same numbers when it is opened again."""

    def wrapped(components: dp.Components, random: dp.Random) -> dict[str, Any]:
        outputs = dict(graph(components, random))
        if scale is not None:
            outputs["start"], outputs["shape"] = random.resized_crop("jpg", scale=scale, stream="crop")
        return outputs | {"mirror": random.coin_flip(0.5, stream="flip")}

    return wrapped


def moved_by_torchvision(number: int, batch: dict[str, Any], row: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Boxes, float32 [N, 4], and class ids for the crop and the flip of the batch's row."""
    width, height = SIZES[number]
    rows = boxes_of(number)
    corners = torch.from_numpy(rows[:, :4]).float().reshape(-1, 4)
    boxes = tv_tensors.BoundingBoxes(corners, format="XYXY", canvas_size=(height, width))
    if "start" in batch:
        window = batch["start"][row].tolist() + batch["shape"][row].tolist()
        boxes = v2.functional.resized_crop(boxes, *window, [CROP, CROP])
    else:
        boxes = v2.functional.resize(boxes, [CROP, CROP])
    if batch["mirror"][row]:
        boxes = v2.functional.horizontal_flip(boxes)
    # Rounding puts some 1e-5 pixels outside, and a box that is outside at all is left out.
    boxes = v2.functional.clamp_bounding_boxes(boxes)
    target = v2.SanitizeBoundingBoxes(min_size=1)({"boxes": boxes, "labels": torch.from_numpy(rows[:, 4]).long()})
    return target["boxes"].as_subclass(torch.Tensor), target["labels"]


def targets_of(batch: dict[str, Any]) -> list[dict[str, torch.Tensor]]:
    """The target of each sample; padded boxes lose their padding, which is checked first."""
    if "target" in batch:
        return list(batch["target"])
    targets = []
    for boxes, labels, num in zip(batch["boxes"], batch["box_label"], batch["num_boxes"].tolist(), strict=True):
        assert boxes.shape == (12, 4)
        assert not boxes[num:].any()
        assert (labels[num:] == -1).all()
        targets.append({"boxes": boxes[:num], "labels": labels[:num]})
    return targets


@pytest.mark.parametrize(
    ("component", "scale", "max_boxes"),
    [("boxes.json", (0.1, 0.6), None), ("coco.json", None, 12), ("boxes.npy", (0.1, 0.6), 12)],
)
def test_boxes_are_those_of_torchvision(shards: Path, component: str, scale: Any, max_boxes: int | None) -> None:
    """In every format, boxes agree within 1e-4 pixels, and the loader leaves out the same boxes."""
    graph = with_window(dp.detection(crop=CROP, boxes=component, scale=scale, max_boxes=max_boxes), scale=scale)
    num_left = num_flipped = 0
    for batch in batches_of(shards, graph):
        assert batch["image"].shape[1:] == (3, CROP, CROP)
        for row, (key, target) in enumerate(zip(batch["key"], targets_of(batch), strict=True)):
            boxes, labels = moved_by_torchvision(int(key[1:]), batch, row)
            assert torch.equal(target["labels"], labels), key
            torch.testing.assert_close(target["boxes"], boxes, atol=1e-4, rtol=0, msg=key)
            num_left += len(boxes)
            num_flipped += int(batch["mirror"][row])
    assert 0 < num_flipped < len(SIZES)
    assert 30 < num_left < sum(len(boxes_of(number)) for number in range(len(SIZES)))


@pytest.mark.parametrize(
    ("document", "text"),
    [
        ({"boxes": [[1, 1, 9, float("nan")]], "labels": [1]}, "expected finite numbers, found the box"),
        ({"boxes": [[1, 1, 9, 10**400]], "labels": [1]}, "found an integer beyond the range of a float"),
        ({"boxes": [[9, 1, 1, 9]], "labels": [1]}, r"expected left <= right .*pass box_format='xywh'"),
        ({"boxes": [[1, 1, 42.1, 9]], "labels": [1]}, r"expected boxes on the photo of 30 x 40 pixels \(height x wid"),
        ({"boxes": [[0.1, 0.2, 0.8, 1]], "labels": [1]}, r"boxes in pixels of .* shares, .* width \(40\)"),
        ({"boxes": [[1, 1, 4]], "labels": [1]}, "expected a box of four numbers and a class id, found"),
        ({"boxes": [[1, 1, 4, 4]], "labels": ["cat"]}, "expected a box of four numbers and a class id, found"),
        ({"boxes": [[1, 1, 4, 4]], "labels": [-1]}, r"expected class ids in \[0, \d+\], found -1"),
        ({"boxes": [[1, 1, 4, 4]], "labels": []}, "with lists of one length, 'boxes' and 'labels'"),
        ("boxes", "with lists of one length, 'boxes' and 'labels'"),
        ([{"bbox": [1, 2, 3, 4]}], "a list of objects with 'bbox' and 'category_id'"),
        ([[1, 2, 3, 4]], "a list of objects with 'bbox' and 'category_id'"),
        (np.zeros((3, 4), np.float32), r"expected numbers \[N, 5\] .* found float32 \[3, 4\]"),
        (np.full((1, 5), np.nan, np.float32), "expected finite numbers, found the box"),
        (np.array([["a"] * 5]), r"expected numbers \[N, 5\] .* found <U1 \[1, 5\]"),
    ],
)
def test_boxes_that_are_none_are_refused(document: Any, text: str) -> None:
    is_npy = isinstance(document, np.ndarray)
    data = np.frombuffer(npy_bytes(document) if is_npy else json.dumps(document).encode(), np.uint8)
    with pytest.raises(ValueError, match=text):
        detection.check_boxes(detection.read_boxes(data, is_npy=is_npy, box_format=None), height=30, width=40)


def with_boxes(directory: Path, *documents: bytes | None) -> Path:
    """A shard of samples ``b0``, ... of 40 x 30 pixels with these boxes; ``None`` omits the component."""
    samples = [
        Sample(f"b{number}", {"jpg": photo_bytes(number, 40, 30)} | ({"boxes.json": data} if data else {}))
        for number, data in enumerate(documents)
    ]
    return write_shards(directory, samples, per_shard=len(samples))


GOOD = b'{"boxes": [[0, 0, 40, 30]], "labels": [3]}'


def test_sample_of_bad_boxes_is_bad(tmp_path: Path) -> None:
    """The error names shard, key and component. On request, another sample replaces the bad one."""
    shards = with_boxes(tmp_path, GOOD, GOOD, b'{"boxes": [[9, 1, 1, 9]], "labels": [1]}', GOOD)
    with pytest.raises(dp.DecodeError, match=r"(?s)b2.*boxes.json.*expected left <= right"):
        batches_of(shards, dp.detection(crop=16))
    (batch,) = batches_of(shards, dp.detection(crop=16), batch_size=4, bad_samples=substituting(tmp_path))
    assert "b2" not in batch["key"]
    assert [len(target["boxes"]) for target in batch["target"]] == [1] * 4


def test_more_boxes_than_there_is_room_for_make_a_sample_bad(shards: Path) -> None:
    """No box is dropped without a word, even if few of them would be left on the crop."""
    with pytest.raises(dp.DecodeError, match=r"expected at most max_boxes=3 boxes, found [4-9]"):
        batches_of(shards, dp.detection(crop=CROP, max_boxes=3))


@pytest.mark.parametrize("max_boxes", [None, 4])
def test_sample_without_the_component_has_no_boxes(tmp_path: Path, max_boxes: int | None) -> None:
    """Where it may be missing; elsewhere the graph is refused."""
    shards = with_boxes(tmp_path, GOOD, None)
    graph = dp.detection(crop=16, scale=None, flip=0, max_boxes=max_boxes)
    options = {"batch_size": 2, "shuffle": False}
    (batch,) = batches_of(shards, graph, select=dp.Select(missing="empty"), **options)
    if max_boxes is None:
        assert [target["boxes"].tolist() for target in batch["target"]] == [[[0, 0, 16, 16]], []]
    else:
        assert batch["num_boxes"].tolist() == [1, 0]
    with pytest.raises(dp.DataError, match=r"boxes\.json"):
        batches_of(shards, graph, **options)


@pytest.mark.gpu
def test_padded_boxes_on_a_gpu_are_those_of_the_cpu(gpu: None, shards: Path) -> None:
    graph = dp.detection(crop=CROP, max_boxes=12)
    for one, other in zip(batches_of(shards, graph), batches_of(shards, graph, device="auto"), strict=True):
        for name in ("boxes", "box_label", "num_boxes"):
            assert other[name].is_cuda
            assert torch.equal(one[name], other[name].cpu())
