"""Graphs from encoded bytes to what a model takes: three to use, to read and to copy.

Each function returns a graph: a function of a sample's components and its random numbers that returns named outputs. It
runs inside a DALI pipeline definition, so any ``fn.`` operator may stand in it.
"""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from nvidia.dali import fn, types

from dali_pipes.graph.inputs import Components, Graph, Random, once_a_batch
from dali_pipes.reader.samples import Batch

__all__ = [
    "IMAGENET_MEAN",
    "IMAGENET_STD",
    "center_crop_start",
    "classification_eval",
    "classification_train",
    "segmentation",
]

IMAGENET_MEAN = (0.485, 0.456, 0.406)
"""Red, green, blue, of pixels in 0..1: the constants that torchvision's pretrained models were trained with."""
IMAGENET_STD = (0.229, 0.224, 0.225)

Dtype = Literal["float32", "float16", "uint8"]
Layout = Literal["CHW", "HWC"]
Int32s = npt.NDArray[np.int32]

_DALI_DTYPES = {"float32": types.FLOAT, "float16": types.FLOAT16, "uint8": types.UINT8}


def segmentation(
    *,
    crop: int = 350,
    mean: Sequence[float] = IMAGENET_MEAN,
    std: Sequence[float] = IMAGENET_STD,
    dtype: Dtype = "float32",
    layout: Layout = "CHW",
    photo: str = "image.jpg",
    mask: str = "trimap.png",
) -> Graph:
    """Photo and mask, cut or padded to ``crop`` about the centre, the photo normalised; and the label.

    Outputs:
        image: ``dtype`` [B, 3, crop, crop] (``layout="CHW"``) or [B, crop, crop, 3]: ``(pixel / 255 - mean) / std``,
        pixels
            outside the photo being 0 before that, on the CPU within 1e-6 of torchvision's
            ``CenterCrop(crop) -> ToTensor -> Normalize``; on a GPU nvJPEG decodes, whose pixels are others by some grey
            levels. With ``dtype="uint8"`` the pixels as they are.
        trimap: uint8 [B, 1, crop, crop] or [B, crop, crop, 1]: the mask's values, 0 outside it.
        label: int64 [B].

    EXIF orientation is not applied, to photo or mask, as torchvision's and WebDataset's readers do not.
    """
    _check(crop=crop, dtype=dtype, layout=layout)

    def graph(components: Components, random: Random) -> dict[str, Any]:
        start, shape, position = _centre_window(components, photo, crop)
        # Only the window is decoded; where the photo is smaller, crop_mirror_normalize pads it.
        pixels = fn.decoders.image_slice(
            components[photo],
            start,
            shape,
            axes=(0, 1),
            device=components.device,
            output_type=types.RGB,
            adjust_orientation=False,
        )
        image = _normalised(pixels, crop, position, mean=mean, std=std, dtype=dtype, layout=layout)
        start, shape, position = _centre_window(components, mask, crop)
        # PNG is decoded on the CPU in every NVIDIA stack; "mixed" adds the copy to the GPU.
        ids = fn.decoders.image_slice(
            components[mask],
            start,
            shape,
            axes=(0, 1),
            device=components.device,
            output_type=types.GRAY,
            adjust_orientation=False,
        )
        trimap = _normalised(ids, crop, position, mean=(0,), std=(1,), dtype="uint8", layout=layout)
        return {"image": image, "trimap": trimap, "label": components.label}

    return graph


def classification_train(
    *,
    crop: int = 224,
    scale: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
    flip: float = 0.5,
    mean: Sequence[float] = IMAGENET_MEAN,
    std: Sequence[float] = IMAGENET_STD,
    dtype: Dtype = "float32",
    layout: Layout = "CHW",
    photo: str = "image.jpg",
) -> Graph:
    """A random window of the photo resized to ``crop``, flipped with probability ``flip``, normalised; and the label.

    The window is drawn as torchvision's ``RandomResizedCrop`` draws it, from the sample's own random numbers, and
    decoding starts with it: pixels outside are never made.

    Outputs:
        image: ``dtype`` [B, 3, crop, crop] or [B, crop, crop, 3].
        label: int64 [B].
    """
    _check(crop=crop, dtype=dtype, layout=layout)

    def graph(components: Components, random: Random) -> dict[str, Any]:
        start, shape = random.resized_crop(photo, scale=scale, ratio=ratio, stream="crop")
        pixels = fn.decoders.image_slice(
            components[photo],
            start,
            shape,
            axes=(0, 1),
            device=components.device,
            output_type=types.RGB,
            adjust_orientation=False,
        )
        pixels = fn.resize(pixels, size=(crop, crop), interp_type=types.INTERP_LINEAR, antialias=True)
        mirror = random.coin_flip(flip, stream="flip")
        image = _normalised(pixels, crop, None, mirror=mirror, mean=mean, std=std, dtype=dtype, layout=layout)
        return {"image": image, "label": components.label}

    return graph


def classification_eval(
    *,
    resize: int = 256,
    crop: int = 224,
    mean: Sequence[float] = IMAGENET_MEAN,
    std: Sequence[float] = IMAGENET_STD,
    dtype: Dtype = "float32",
    layout: Layout = "CHW",
    photo: str = "image.jpg",
) -> Graph:
    """The photo with its shorter side resized to ``resize``, cut to ``crop`` about the centre, normalised; and the
    label.

    Sizes and offsets are those of torchvision's ``Resize(resize) -> CenterCrop(crop)``; the resampling is DALI's
    antialiased linear filter, within a few grey levels of Pillow's.

    Outputs:
        image: ``dtype`` [B, 3, crop, crop] or [B, crop, crop, 3].
        label: int64 [B].
    """
    _check(crop=crop, dtype=dtype, layout=layout)
    if resize < 1:
        raise ValueError(f"resize must be positive, got {resize}")

    def graph(components: Components, random: Random) -> dict[str, Any]:
        size_of = components.size(photo)

        @once_a_batch
        def resized(batch: Batch) -> Int32s:
            height, width = size_of(batch)
            shorter, longer = np.minimum(height, width), np.maximum(height, width)
            # As torchvision: the longer side is cut off to whole pixels.
            other = (resize * longer.astype(np.int64) // np.maximum(shorter, 1)).astype(np.int32)
            rows = np.where(height <= width, resize, other)
            columns = np.where(height <= width, other, resize)
            return np.stack([rows, columns], axis=1).astype(np.int32)

        def position(batch: Batch) -> npt.NDArray[np.float32]:
            return _crop_position(resized(batch), crop)

        pixels = fn.decoders.image(
            components[photo], device=components.device, output_type=types.RGB, adjust_orientation=False
        )
        size = components.array(lambda batch: resized(batch).astype(np.float32))
        pixels = fn.resize(pixels, size=size, interp_type=types.INTERP_LINEAR, antialias=True)
        image = _normalised(pixels, crop, components.array(position), mean=mean, std=std, dtype=dtype, layout=layout)
        return {"image": image, "label": components.label}

    return graph


def center_crop_start(size: Int32s, crop: int) -> Int32s:
    """Where torchvision's ``CenterCrop`` starts; negative where it pads.

    A larger photo starts at ``round(slack / 2)``, halves to even; a smaller one is padded by ``(crop - size) // 2``
    first.

    >>> center_crop_start(np.array([350, 351, 353, 355, 349, 347]), 350).tolist()
    [0, 0, 2, 2, 0, -1]
    """
    slack = size.astype(np.int32) - crop
    larger = np.rint(slack / 2).astype(np.int32)
    return np.where(slack > 0, larger, -(-slack // 2)).astype(np.int32)


def _centre_window(components: Components, photo: str, crop: int) -> tuple[Any, Any, Any]:
    """The part of the photo that a centre crop shows: start, shape (int32 [2]), and where it goes in the crop."""
    size_of = components.size(photo)

    @once_a_batch
    def sizes(batch: Batch) -> Int32s:
        return np.stack(size_of(batch), axis=1)  # [B, (height, width)]

    start = components.array(lambda batch: np.maximum(center_crop_start(sizes(batch), crop), 0))
    shape = components.array(lambda batch: np.minimum(sizes(batch), crop).astype(np.int32))
    position = components.array(lambda batch: _crop_position(np.minimum(sizes(batch), crop), crop))
    return start, shape, position


def _crop_position(sizes: Int32s, crop: int) -> npt.NDArray[np.float32]:
    """DALI's ``crop_pos_y, crop_pos_x`` for a centre crop: the start as a share of the slack: float32 [B, 2]."""
    slack = sizes - crop
    start = center_crop_start(sizes, crop)
    return (start / np.where(slack == 0, 1, slack)).astype(np.float32)


def _normalised(
    pixels: Any,
    crop: int,
    position: Any | None,
    *,
    mean: Sequence[float],
    std: Sequence[float],
    dtype: Dtype,
    layout: Layout,
    mirror: Any = 0,
) -> Any:
    means, stds = np.asarray(mean, np.float64), np.asarray(std, np.float64)
    if dtype == "uint8":
        means, stds = np.zeros_like(means), np.ones_like(stds)
    else:
        means, stds = means * 255, stds * 255
    place = {} if position is None else {"crop_pos_y": position[0], "crop_pos_x": position[1]}
    return fn.crop_mirror_normalize(
        pixels,
        crop=(crop, crop),
        **place,
        mirror=mirror,
        mean=means.tolist(),
        std=stds.tolist(),
        out_of_bounds_policy="pad",
        # Padding is a pixel of 0, and is not normalised by the operator.
        fill_values=(-means / stds).tolist(),
        dtype=_DALI_DTYPES[dtype],
        output_layout=layout,
    )


def _check(*, crop: int, dtype: str, layout: str) -> None:
    if crop < 1:
        raise ValueError(f"crop must be positive, got {crop}")
    if dtype not in _DALI_DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(_DALI_DTYPES)}, got {dtype!r}")
    if layout not in ("CHW", "HWC"):
        raise ValueError(f"layout must be CHW or HWC, got {layout!r}")
