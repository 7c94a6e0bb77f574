"""A graph for batches of one shape each, whose height and width differ from batch to batch."""

from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np
from nvidia.dali import fn, types

from dali_pipes.arguments import as_number
from dali_pipes.graph.crop import Int32s, covering_crop
from dali_pipes.graph.definition import Graph
from dali_pipes.graph.inputs import Components, bucket_shapes, once_a_batch
from dali_pipes.graph.pipelines import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    Dtype,
    Layout,
    check_output,
    decode_crop,
    label_output,
    normalised,
)
from dali_pipes.graph.random import Random
from dali_pipes.reader.batch import Batch

Place = Literal["random", "centre"]


def bucketed(
    *,
    place: Place = "random",
    flip: float = 0.5,
    mean: Sequence[float] = IMAGENET_MEAN,
    std: Sequence[float] = IMAGENET_STD,
    dtype: Dtype = "float32",
    layout: Layout = "CHW",
    photo: str | None = None,
    orient: bool | None = None,
    text: str | None = None,
) -> Graph:
    """Cut each photo to the aspect ratio of its batch's bucket, resize it to the bucket's shape, flip and normalise it.

    For loaders with ``select=Select(buckets=dali_pipes.buckets(...))``. The cut is the largest one of that aspect
    ratio, to whole pixels; only it is decoded. It is what covers the shape when the photo is resized until it just
    covers it.

    Tensors are on the loader's device. H and W differ from batch to batch, and are the same on all ranks in a step.

    Outputs:
        image: ``dtype`` [B, 3, H, W] (``layout="CHW"``) or [B, H, W, 3] (``"HWC"``): ``(pixel / 255 - mean) / std``, or
            with ``dtype="uint8"`` the pixels themselves.
        label: int64 [B]; only if the data set has labels.
        text: list of B str; only with ``text``.

    Args:
        place: ``"random"``: each place of the cut is as probable, by the sample's own random numbers; ``"centre"``.
        flip: Probability of a horizontal flip; 0 for evaluation.
        mean: Red, green, blue, of pixels in 0..1.
        std: Likewise.
        dtype: Of the image: ``"float32"``, ``"float16"`` or ``"uint8"``.
        layout: ``"CHW"`` or ``"HWC"``.
        photo: The component that holds the photo, the same as that of ``buckets``; ``None``: the only one.
        orient: Turn each photo upright by its EXIF orientation; ``None``: if the data set knows the orientations, see
            `Components.orient`. The plan groups upright photos; with ``False`` turned ones do not fit their batch well.
        text: A component with text in UTF-8, such as ``"txt"``, that is delivered as it is.

    Raises:
        ValueError: If ``place``, ``dtype`` or ``layout`` is not one of these, or ``flip`` is not in [0, 1]; when the
            loader is opened: if it has no buckets.
    """
    check_output(dtype=dtype, layout=layout)
    if place not in get_args(Place):
        raise ValueError(f"place must be one of {', '.join(get_args(Place))}, got {place!r}")
    if not 0 <= as_number("flip", flip) <= 1:
        raise ValueError(f"flip must be in [0, 1], got {flip}")

    def graph(components: Components, random: Random) -> dict[str, Any]:
        name = components.photo(photo)
        upright = components.orient(orient)
        size_of = components.size(name, orient=upright)

        @once_a_batch
        def crop(batch: Batch) -> Int32s:
            shapes = bucket_shapes(batch)
            places = batch.uniforms("crop", 2) if place == "random" else None
            return covering_crop(*size_of(batch), shapes, places)

        start = components.array(lambda batch: crop(batch)[:, :2])
        shape = components.array(lambda batch: crop(batch)[:, 2:])
        pixels = decode_crop(components, name, start, shape, types.RGB, device=components.device, orient=upright)
        size = components.array(lambda batch: bucket_shapes(batch).astype(np.float32))
        pixels = fn.resize(pixels, size=size, interp_type=types.INTERP_LINEAR, antialias=True)
        mirror = random.coin_flip(flip, stream="flip")
        image = normalised(pixels, None, None, mirror=mirror, mean=mean, std=std, dtype=dtype, layout=layout)
        outputs = {"image": image} | label_output(components)
        return outputs if text is None else outputs | {"text": components.text(text)}

    return graph
