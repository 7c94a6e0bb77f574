"""A graph for detection: a photo and its boxes, cropped, resized and flipped together."""

from collections.abc import Sequence
from typing import Any, Literal, Unpack

import numpy as np
import numpy.typing as npt
from nvidia.dali import fn, types

from dali_pipes.arguments import as_integer, as_number, check_choice
from dali_pipes.arrays import Float64s, Int32s
from dali_pipes.formats.names import read_json
from dali_pipes.graph.definition import Graph
from dali_pipes.graph.inputs import Components
from dali_pipes.graph.parse import npy_array, shown
from dali_pipes.graph.pipelines import ImageForm, ImageOptions, Shape, check_crop, check_range
from dali_pipes.graph.random import Random

BoxFormat = Literal["xyxy", "xywh"]

SLACK = 1.0
"""Pixels by which a box may reach outside its photo: annotations are rounded. Such a box is cut at the photo's edge."""
MAX_LABEL = 2**24 - 2
"""The largest class id of a box: ids travel with the boxes as float32, plus 1."""


def detection(
    *,
    crop: int | tuple[int, int] = 512,
    scale: tuple[float, float] | None = (0.3, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
    flip: float = 0.5,
    boxes: str = "boxes.json",
    box_format: BoxFormat | None = None,
    max_boxes: int | None = None,
    min_size: float = 1.0,
    **image: Unpack[ImageOptions],
) -> Graph:
    """Resize a random crop of the photo to ``crop``, flip and normalise it, and give the boxes that are left on it.

    For given crops and flips, boxes and class ids are those of torchvision's ``v2.RandomResizedCrop``,
    ``v2.RandomHorizontalFlip``, ``v2.ClampBoundingBoxes`` and ``v2.SanitizeBoundingBoxes(min_size=min_size)``. For
    validation pass ``scale=None, flip=0``: then the whole photo is resized.

    Outputs:
        image: [B, 3, *crop], see `ImageOptions`. torchvision's detectors normalise by themselves: pass ``mean=(0,
            0, 0), std=(1, 1, 1)``.
        target: Without ``max_boxes``: a list of B dicts, as torchvision's detectors take them, on the CPU: ``"boxes"``
            float32 [N, 4] (left, top, right, bottom, in pixels of the image) and ``"labels"`` int64 [N].
        boxes: With ``max_boxes``: float32 [B, max_boxes, 4], on the loader's device; 0 behind the last box.
        box_label: With ``max_boxes``: int64 [B, max_boxes]; -1 behind the last box.
        num_boxes: With ``max_boxes``: int64 [B].

    A sample is bad if its boxes cannot be read, if a number is not finite, if a box ends before it begins or reaches
    more than one pixel outside its photo, or if it has more than ``max_boxes``. With ``missing="empty"``, a sample that
    lacks the component has no boxes.

    Args:
        crop: Height and width of the image, in pixels: two numbers, or one of a square.
        scale: Smallest and largest area of the crop, as a share of the photo's; ``None`` takes the whole photo.
        ratio: Smallest and largest width / height of the crop.
        flip: Probability of a horizontal flip.
        boxes: The component that holds the boxes, in pixels of the photo, of the upright one if photos are turned:
            JSON, ``{"boxes": [[left, top, right, bottom], ...], "labels": [3, ...]}`` or a list of COCO's annotations,
            ``[{"bbox": [left, top, width, height], "category_id": 3}, ...]``, without those with ``"iscrowd": 1``; or,
            if its name ends with ``npy``, an array of numbers [N, 5]: a box and its class id.
        box_format: ``"xyxy"`` (left, top, right, bottom) or ``"xywh"`` (left, top, width, height); ``None``: ``"xywh"``
            for COCO's annotations, else ``"xyxy"``.
        max_boxes: The most boxes of a sample; outputs are then tensors of one shape, on the loader's device.
        min_size: Boxes with a shorter side, in pixels of the image, are left out.
        **image: See `ImageOptions`.

    Raises:
        TypeError: If an argument has another type.
        ValueError: If an argument is not one of its values.
    """
    image_shape, form = check_crop(crop), ImageForm(**image)
    if scale is not None:
        check_range("scale", scale, most=1)
    check_range("ratio", ratio)
    if box_format is not None:
        check_choice("box_format", box_format, BoxFormat)
    if max_boxes is not None and as_integer("max_boxes", max_boxes) < 1:
        raise ValueError(f"max_boxes must be positive, got {max_boxes}")
    if not as_number("min_size", min_size) >= 0:
        raise ValueError(f"min_size must not be negative, got {min_size}")
    is_npy = boxes.split(".")[-1].lower() == "npy"

    def moved(data: npt.NDArray[np.uint8], size: Int32s, start: Int32s, shape: Int32s, mirror: np.int32) -> Float64s:
        rows = read_boxes(data, is_npy=is_npy, box_format=box_format)
        check_boxes(rows, height=int(size[0]), width=int(size[1]))
        if max_boxes is not None and len(rows) > max_boxes:
            raise ValueError(f"expected at most max_boxes={max_boxes} boxes, found {len(rows)}")
        window = {"start": start.tolist(), "shape": shape.tolist()}
        return move_boxes(rows, **window, size=image_shape, is_flipped=bool(mirror), min_size=min_size)

    def graph(components: Components, random: Random) -> dict[str, Any]:
        photo = form.photo_of(components, besides=boxes)
        size = components.array(photo.sizes)
        if scale is None:
            start, shape = components.array(lambda batch: np.zeros((len(batch), 2), np.int32)), size
        else:
            start, shape = photo.random_crop(random, scale=scale, ratio=ratio)
        mirror = random.coin_flip(flip, stream="flip")
        pixels = photo.decoded_crop(start, shape)
        outputs: dict[str, Any] = {"image": form.image(components, pixels, size=image_shape, mirror=mirror)}
        beside = (size, start, shape, mirror)
        if max_boxes is None:
            return outputs | {
                "target": components.listed(
                    boxes, lambda *found: _target(moved(*found)), beside=beside, empty=lambda: _target(np.zeros((0, 5)))
                )
            }
        # Class ids plus 1, so that 0 behind the last box means none.
        with_next_label = np.array([0, 0, 0, 0, 1], np.float32)
        rows = components.parsed(
            boxes,
            lambda *found: moved(*found).astype(np.float32) + with_next_label,
            beside=beside,
            ndim=2,
            empty=lambda: np.zeros((0, 5), np.float32),
        )
        padded = fn.pad(rows, axes=(0,), shape=(max_boxes,), fill_value=0)
        labels = fn.cast(padded[:, 4], dtype=types.INT64) - 1
        return outputs | {"boxes": padded[:, :4], "box_label": labels, "num_boxes": rows.shape()[0]}

    return graph


def _target(rows: Float64s) -> dict[str, Any]:
    import torch

    boxes, labels = rows[:, :4].astype(np.float32), rows[:, 4].astype(np.int64)
    return {"boxes": torch.from_numpy(boxes), "labels": torch.from_numpy(labels)}


def read_boxes(data: npt.NDArray[np.uint8], *, is_npy: bool, box_format: BoxFormat | None) -> Float64s:
    """Read boxes of bytes, as `detection` says: float64 [N, 5], left, top, right, bottom and class id."""
    is_coco = False
    if is_npy:
        array = npy_array(data)
        if array.ndim != 2 or array.shape[1] != 5 or array.dtype.kind not in "iuf":
            raise ValueError(
                f"expected numbers [N, 5] (a box and its class id in each row), found {array.dtype} {list(array.shape)}"
            )
        rows = array.astype(np.float64)
    else:
        document = read_json(bytes(data))
        is_coco = isinstance(document, list)
        rows = _rows_of(document)
    if not np.isfinite(rows).all():
        raise ValueError(f"expected finite numbers, found the box {shown(rows[~np.isfinite(rows).all(axis=1)][0])}")
    labels = rows[:, 4]
    if (wrong := labels[(labels != np.floor(labels)) | (labels < 0) | (labels > MAX_LABEL)]).size:
        raise ValueError(f"expected class ids in [0, {MAX_LABEL}], found {wrong[0]:g}")
    if (box_format or ("xywh" if is_coco else "xyxy")) == "xywh":
        with np.errstate(over="ignore"):  # what becomes infinite lies off the photo
            rows[:, 2:4] += rows[:, :2]
    return rows


def check_boxes(boxes: Float64s, *, height: int, width: int) -> None:
    """Check that boxes lie on their photo, and do not end before they begin; they may reach `SLACK` pixels outside."""
    left, top, right, bottom = boxes[:, :4].T
    if (wrong := np.flatnonzero((right < left) | (bottom < top))).size:
        raise ValueError(
            f"expected left <= right and top <= bottom, found {shown(boxes[wrong[0], :4])} (left, top, right, "
            "bottom); if these are left, top, width and height, pass box_format='xywh'"
        )
    if len(boxes) and 0 < boxes[:, :4].max() <= 1 < max(height, width):
        raise ValueError(
            f"expected boxes in pixels of the photo, found {shown(boxes[0, :4])}; if these are shares, multiply by "
            f"the photo's width ({width}) and height ({height})"
        )
    outside = (left < -SLACK) | (top < -SLACK) | (right > width + SLACK) | (bottom > height + SLACK)
    if (wrong := np.flatnonzero(outside)).size:
        raise ValueError(
            f"expected boxes on the photo of {height} x {width} pixels (height x width), found the box "
            f"{shown(boxes[wrong[0]])}"
        )


def move_boxes(
    boxes: Float64s, *, start: Sequence[int], shape: Sequence[int], size: Shape, is_flipped: bool, min_size: float
) -> Float64s:
    """Move boxes with their photo: cut out a crop, resize it to ``size``, rows and columns, and flip it.

    Boxes are cut at the crop's edges, and those with a side shorter than ``min_size`` are left out.

    >>> boxes = np.array([[10.0, 10, 30, 20, 7], [0, 0, 5, 5, 8]])
    >>> move_boxes(boxes, start=(10, 20), shape=(20, 20), size=(40, 80), is_flipped=False, min_size=1).tolist()
    [[0.0, 0.0, 40.0, 20.0, 7.0]]
    """
    moved = boxes.copy()
    for column, axis in ((0, 1), (1, 0)):
        inside = np.clip(boxes[:, column:4:2] - start[axis], 0, shape[axis])
        moved[:, column:4:2] = inside * (size[axis] / shape[axis])
    if is_flipped:
        moved[:, [0, 2]] = size[1] - moved[:, [2, 0]]
    sides = moved[:, 2:4] - moved[:, :2]
    return np.asarray(moved[(sides >= min_size).all(axis=1)], np.float64)


def _rows_of(document: Any) -> Float64s:
    try:
        if isinstance(document, list):
            # torchvision's own training leaves crowds out, too: their boxes hold many objects.
            pairs = [(found["bbox"], found["category_id"]) for found in document if not found.get("iscrowd")]
        else:
            pairs = list(zip(document["boxes"], document["labels"], strict=True))
    except (AttributeError, KeyError, TypeError, ValueError) as exc:
        raise ValueError(
            "expected a JSON object with lists of one length, 'boxes' and 'labels', or a list of objects with 'bbox' "
            f"and 'category_id', found {shown(document)}"
        ) from exc
    rows = [[*box, label] if isinstance(box, list) else [box] for box, label in pairs]
    for row in rows:
        # bool is a subclass of int, but [true, ...] is no box.
        if len(row) != 5 or not all(type(number) in (int, float) for number in row):
            raise ValueError(f"expected a box of four numbers and a class id, found {shown(row)}")
    try:
        return np.array(rows, np.float64).reshape(-1, 5)
    except OverflowError as exc:  # JSON has integers of any size
        raise ValueError("expected finite numbers, found an integer beyond the range of a float") from exc
