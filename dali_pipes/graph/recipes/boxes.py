"""Read the boxes of a sample, check them, and move them with their photo, as torchvision's ``v2`` transforms do."""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from dali_pipes.formats.json_texts import read_json
from dali_pipes.graph.parse import npy_array

BoxFormat = Literal["xyxy", "xywh"]
Float64s = npt.NDArray[np.float64]

SLACK = 1.0
"""Pixels by which a box may reach outside its photo: annotations are rounded. Such a box is cut at the photo's edge."""
MAX_LABEL = 2**24 - 2
"""The largest class id of a box: ids travel with the boxes as float32, plus 1."""


def read_boxes(data: npt.NDArray[np.uint8], *, is_npy: bool, box_format: BoxFormat | None) -> Float64s:
    """Read boxes of bytes: float64 [N, 5], left, top, right, bottom and class id.

    Args:
        data: uint8 [bytes]: a ``.npy`` file of numbers [N, 5], or a JSON document: ``{"boxes": [[left, top, right,
            bottom], ...], "labels": [3, ...]}``, or annotations as COCO has them, ``[{"bbox": [left, top, width,
            height], "category_id": 3}, ...]``, of which those with ``"iscrowd": 1`` are left out.
        is_npy: Whether it is a ``.npy`` file.
        box_format: ``"xywh"``: left, top, width and height; ``None``: that for annotations as COCO has them, else
            ``"xyxy"``.

    Raises:
        ValueError: If it is something else.
    """
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
        rows = _rows_of_annotations(document) if is_coco else _rows_of_lists(document)
    if not np.isfinite(rows).all():
        raise ValueError(f"expected finite numbers, found the box {_shown(rows[~np.isfinite(rows).all(axis=1)][0])}")
    labels = rows[:, 4]
    if (wrong := labels[(labels != np.floor(labels)) | (labels < 0) | (labels > MAX_LABEL)]).size:
        raise ValueError(f"expected class ids in [0, {MAX_LABEL}], found {wrong[0]:g}")
    if (box_format or ("xywh" if is_coco else "xyxy")) == "xywh":
        with np.errstate(over="ignore"):  # what becomes infinite lies off the photo
            rows[:, 2:4] += rows[:, :2]
    return rows


def check_boxes(boxes: Float64s, *, height: int, width: int) -> None:
    """Check that boxes lie on their photo; they may reach `SLACK` pixels outside it.

    Raises:
        ValueError: If one does not, or ends before it begins.
    """
    left, top, right, bottom = boxes[:, :4].T
    if (wrong := np.flatnonzero((right < left) | (bottom < top))).size:
        raise ValueError(
            f"expected left <= right and top <= bottom, found {_shown(boxes[wrong[0], :4])} (left, top, right, "
            "bottom); box_format= says how the four numbers are read: 'xyxy', or 'xywh' for left, top, width and height"
        )
    outside = (left < -SLACK) | (top < -SLACK) | (right > width + SLACK) | (bottom > height + SLACK)
    if (wrong := np.flatnonzero(outside)).size:
        raise ValueError(
            f"expected boxes on the photo of {height} x {width} pixels (height x width), found the box "
            f"{_shown(boxes[wrong[0]])}"
        )


def move_boxes(
    boxes: Float64s, *, start: Sequence[int], shape: Sequence[int], size: int, is_flipped: bool, min_size: float
) -> Float64s:
    """Move boxes with their photo: cut out a crop, resize it to ``size`` x ``size`` pixels, and flip it.

    As torchvision's ``resized_crop``, ``horizontal_flip`` and ``SanitizeBoundingBoxes(min_size)`` move them: boxes are
    cut at the crop's edges, and those with a side shorter than ``min_size`` are left out, with their class ids.

    Args:
        boxes: float64 [N, 5]: left, top, right, bottom, class id.
        start: Row and column at which the crop starts.
        shape: Its rows and columns.
        size: Height and width of the result.
        is_flipped: Whether left and right change places.
        min_size: Shortest side, in pixels of the result.

    >>> boxes = np.array([[10.0, 10, 30, 20, 7], [0, 0, 5, 5, 8]])
    >>> move_boxes(boxes, start=(10, 20), shape=(20, 20), size=40, is_flipped=False, min_size=1).tolist()
    [[0.0, 0.0, 20.0, 20.0, 7.0]]
    """
    moved = boxes.copy()
    for column, edge, length in ((0, start[1], shape[1]), (1, start[0], shape[0])):
        moved[:, column:4:2] = np.clip(boxes[:, column:4:2] - edge, 0, length) * (size / length)
    if is_flipped:
        moved[:, [0, 2]] = size - moved[:, [2, 0]]
    sides = moved[:, 2:4] - moved[:, :2]
    return np.asarray(moved[(sides >= min_size).all(axis=1)], np.float64)


def _rows_of_lists(document: Any) -> Float64s:
    if not isinstance(document, dict) or not {"boxes", "labels"} <= document.keys():
        raise ValueError(
            "expected a JSON object with 'boxes' and 'labels', or a list of objects with 'bbox' and 'category_id', "
            f"found {_shown(document)}"
        )
    boxes, labels = document["boxes"], document["labels"]
    if not isinstance(boxes, list) or not isinstance(labels, list) or len(boxes) != len(labels):
        raise ValueError(
            f"expected lists of one length, 'boxes' and 'labels', found {_shown(boxes)} and {_shown(labels)}"
        )
    return _rows(zip(boxes, labels, strict=True))


def _rows_of_annotations(annotations: list[Any]) -> Float64s:
    for annotation in annotations:
        if not isinstance(annotation, dict) or not {"bbox", "category_id"} <= annotation.keys():
            raise ValueError(f"expected objects with 'bbox' and 'category_id', found {_shown(annotation)}")
    # torchvision's own training leaves crowds out, too: their boxes hold many objects.
    return _rows((one["bbox"], one["category_id"]) for one in annotations if not one.get("iscrowd"))


def _rows(pairs: Any) -> Float64s:
    rows = [[*box, label] if isinstance(box, list) else [box] for box, label in pairs]
    for row in rows:
        # bool is a subclass of int, but [true, ...] is no box.
        if len(row) != 5 or not all(type(number) in (int, float) for number in row):
            raise ValueError(f"expected a box of four numbers and a class id, found {_shown(row)}")
    try:
        return np.array(rows, np.float64).reshape(-1, 5)
    except OverflowError as exc:  # JSON has integers of any size
        raise ValueError("expected finite numbers, found an integer beyond the range of a float") from exc


def _shown(found: Any) -> str:
    text = repr(found.tolist() if isinstance(found, np.ndarray) else found)
    return text if len(text) <= 80 else f"{text[:80]}..."
