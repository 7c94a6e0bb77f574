"""A graph for detection: a photo and its boxes, cropped, resized and flipped together."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from nvidia.dali import fn, types

from dali_pipes.arguments import as_integer, as_number
from dali_pipes.graph.definition import Graph
from dali_pipes.graph.inputs import Components
from dali_pipes.graph.pipelines import IMAGENET_MEAN, IMAGENET_STD, Dtype, Layout, check_crop, decode_crop, normalised
from dali_pipes.graph.random import Random
from dali_pipes.graph.recipes.boxes import BoxFormat, Float64s, check_boxes, move_boxes, read_boxes

Int32s = npt.NDArray[np.int32]


def detection(
    *,
    crop: int | tuple[int, int] = 512,
    scale: tuple[float, float] | None = (0.3, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
    flip: float = 0.5,
    mean: Sequence[float] = IMAGENET_MEAN,
    std: Sequence[float] = IMAGENET_STD,
    dtype: Dtype = "float32",
    layout: Layout = "CHW",
    photo: str | None = None,
    orient: bool | None = None,
    boxes: str = "boxes.json",
    box_format: BoxFormat | None = None,
    max_boxes: int | None = None,
    min_size: float = 1.0,
) -> Graph:
    """Resize a random crop of the photo to ``crop``, flip and normalise it, and give the boxes that are left on it.

    For given crops and flips, boxes and class ids are those of torchvision's ``v2.RandomResizedCrop``,
    ``v2.RandomHorizontalFlip``, ``v2.ClampBoundingBoxes`` and ``v2.SanitizeBoundingBoxes(min_size=min_size)``. For
    validation pass ``scale=None, flip=0``: then the whole photo is resized.

    Outputs:
        image: ``dtype`` [B, 3, crop, crop] (``layout="CHW"``) or [B, crop, crop, 3] (``"HWC"``), on the loader's
            device: ``(pixel / 255 - mean) / std``, or with ``dtype="uint8"`` the pixels themselves. torchvision's
            detectors normalise by themselves: pass ``mean=(0, 0, 0), std=(1, 1, 1)``.
        target: Without ``max_boxes``: a list of B dicts, as torchvision's detectors take them, on the CPU: ``"boxes"``
            float32 [N, 4] (left, top, right, bottom, in pixels of the image) and ``"labels"`` int64 [N].
        boxes: With ``max_boxes``: float32 [B, max_boxes, 4], on the loader's device; 0 behind the last box.
        box_label: With ``max_boxes``: int64 [B, max_boxes]; -1 behind the last box.
        num_boxes: With ``max_boxes``: int64 [B].

    A sample is bad if its boxes cannot be read, if a number is not finite, if a box ends before it begins or reaches
    more than one pixel outside its photo, or if it has more than ``max_boxes``. With ``missing="empty"``, a sample that
    lacks the component has no boxes.

    Args:
        crop: Height and width of the image, in pixels: one number, or two equal ones.
        scale: Smallest and largest area of the crop, as a share of the photo's; ``None`` takes the whole photo.
        ratio: Smallest and largest width / height of the crop.
        flip: Probability of a horizontal flip.
        mean: Red, green, blue, of pixels in 0..1.
        std: Likewise.
        dtype: Of the image: ``"float32"``, ``"float16"`` or ``"uint8"``.
        layout: ``"CHW"`` or ``"HWC"``.
        photo: The component that holds the photo; ``None``: the only one, see `Components.photo`.
        orient: Turn each photo upright by its EXIF orientation, as Pillow's ``exif_transpose`` does; ``None``: if the
            data set knows the orientations, see `Components.orient`.
        boxes: The component that holds the boxes, in pixels of the photo, of the upright one if photos are turned:
            JSON, ``{"boxes": [[left, top, right, bottom], ...], "labels": [3, ...]}`` or a list of COCO's annotations,
            ``[{"bbox": [left, top, width, height], "category_id": 3}, ...]``, without those with ``"iscrowd": 1``; or,
            if its name ends with ``npy``, an array of numbers [N, 5]: a box and its class id.
        box_format: ``"xyxy"`` (left, top, right, bottom) or ``"xywh"`` (left, top, width, height); ``None``: ``"xywh"``
            for COCO's annotations, else ``"xyxy"``.
        max_boxes: The most boxes of a sample; outputs are then tensors of one shape, on the loader's device.
        min_size: Boxes with a shorter side, in pixels of the image, are left out.

    Raises:
        TypeError: If an argument has another type.
        ValueError: If ``crop`` is not positive or not square, ``dtype``, ``layout`` or ``box_format`` is not one of
            these, ``max_boxes`` is not positive, or ``min_size`` is negative.
    """
    crop = check_crop(crop=crop, dtype=dtype, layout=layout)
    if box_format not in (None, "xyxy", "xywh"):
        raise ValueError(f"box_format must be xyxy or xywh, got {box_format!r}")
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
        return move_boxes(rows, **window, size=crop, is_flipped=bool(mirror), min_size=min_size)

    def graph(components: Components, random: Random) -> dict[str, Any]:
        name = components.photo(photo, besides=boxes)
        upright = components.orient(orient)
        size_of = components.size(name, orient=upright)
        size = components.array(lambda batch: np.stack(size_of(batch), axis=1))
        if scale is None:
            start, shape = components.array(lambda batch: np.zeros((len(batch), 2), np.int32)), size
        else:
            start, shape = random.resized_crop(name, scale=scale, ratio=ratio, orient=upright, stream="crop")
        mirror = random.coin_flip(flip, stream="flip")
        pixels = decode_crop(components, name, start, shape, types.RGB, device=components.device, orient=upright)
        pixels = fn.resize(pixels, size=(crop, crop), interp_type=types.INTERP_LINEAR, antialias=True)
        image = normalised(pixels, crop, None, mirror=mirror, mean=mean, std=std, dtype=dtype, layout=layout)
        beside = (size, start, shape, mirror)
        if max_boxes is None:
            target = components.listed(boxes, lambda *found: _target(moved(*found)), beside=beside, empty=_no_boxes)
            return {"image": image, "target": target}
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
        return {"image": image, "boxes": padded[:, :4], "box_label": labels, "num_boxes": rows.shape()[0]}

    return graph


def _target(rows: Float64s) -> dict[str, Any]:
    import torch

    return {
        "boxes": torch.from_numpy(rows[:, :4].astype(np.float32)),
        "labels": torch.from_numpy(rows[:, 4].astype(np.int64)),
    }


def _no_boxes() -> dict[str, Any]:
    return _target(np.zeros((0, 5)))
