"""Boxes and tokens: what is read of any bytes is finite, in bounds and on the photo, or the bytes are refused."""

import json
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from dali_pipes.graph.recipes.captions import pad_tokens, read_tokens
from dali_pipes.graph.recipes.detection import MAX_LABEL, check_boxes, move_boxes, read_boxes
from tests.builders import npy_bytes
from tests.fuzz.target import BrokenPromiseError, Target

HEIGHT, WIDTH, SIZE, LENGTH = 60, 80, 32, 8


class Annotations(Target):
    """Each input is read as JSON, as an array of boxes, and as an array of tokens."""

    name = "annotations"

    def seeds(self) -> Sequence[bytes]:
        boxes = np.array([[1, 2, 30, 40, 7], [0, 0, 80, 60, 0]])
        lists = {"boxes": boxes[:, :4].tolist(), "labels": boxes[:, 4].tolist()}
        annotations = [{"bbox": [1, 2, 29.5, 38], "category_id": 7}, {"bbox": [], "category_id": 1, "iscrowd": 1}]
        documents = [json.dumps(document).encode() for document in (lists, annotations)]
        return [
            *documents,
            npy_bytes(boxes.astype(np.float32)),
            npy_bytes(boxes.astype(">i2")),
            npy_bytes(np.arange(20)),
        ]

    def check(self, data: bytes) -> Literal["taken", "refused"]:
        array = np.frombuffer(data, np.uint8)
        are_read = [self._are_boxes(array, is_npy=is_npy) for is_npy in (False, True)]
        return "taken" if any([*are_read, self._are_tokens(array)]) else "refused"

    def _are_boxes(self, data: npt.NDArray[np.uint8], *, is_npy: bool) -> bool:
        try:
            rows = read_boxes(data, is_npy=is_npy, box_format=None)
            check_boxes(rows, height=HEIGHT, width=WIDTH)
        except ValueError:
            return False
        window: dict[str, Any] = {"start": (10, 20), "shape": (30, 40)}
        moved = move_boxes(rows, **window, size=SIZE, is_flipped=True, min_size=1)
        in_bounds = ((moved[:, :4] >= 0) & (moved[:, :4] <= SIZE)).all()
        if not in_bounds or not ((moved[:, 4] >= 0) & (moved[:, 4] <= MAX_LABEL)).all():
            raise BrokenPromiseError(f"boxes off the crop, or class ids out of range: {moved.tolist()}")
        return True

    def _are_tokens(self, data: npt.NDArray[np.uint8]) -> bool:
        try:
            ids = read_tokens(data)
        except ValueError:
            return False
        padded = pad_tokens(ids, length=LENGTH, padding=0, end=None)
        if padded.shape != (2, LENGTH) or padded.min() < 0 or padded[1].sum() != min(len(ids), LENGTH):
            raise BrokenPromiseError(f"tokens of another shape or sign: {padded.tolist()}")
        return True
