"""Graphs from encoded bytes to a model's inputs: three to use, to read and to copy.

Each function returns a graph: a function of a sample's components and random numbers that returns outputs by name. A
graph runs inside a DALI pipeline definition, so it may use any ``fn.`` operator.
"""

from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
from nvidia.dali import fn, types

from dali_pipes.arguments import as_integer
from dali_pipes.graph.crop import center_crop_start, crop_position, resized_shape
from dali_pipes.graph.definition import Graph
from dali_pipes.graph.inputs import Components, DecoderDevice, once_a_batch
from dali_pipes.graph.random import Random
from dali_pipes.reader.batch import Batch

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
    mask_device: DecoderDevice = "cpu",
) -> Graph:
    """Cut or pad photo and mask to ``crop`` about the centre, normalise the photo, and give the label.

    All outputs are on the loader's device.

    Outputs:
        image: ``dtype`` [B, 3, crop, crop] (``layout="CHW"``) or [B, crop, crop, 3] (``"HWC"``): ``(pixel / 255 - mean)
            / std``, or with ``dtype="uint8"`` the pixels themselves. Pixels outside the photo are 0 before that. On the
            CPU the values are within 1e-6 of torchvision's ``CenterCrop(crop) -> ToTensor -> Normalize``. On a GPU
            nvJPEG decodes, and its pixels differ by a few grey levels.
        trimap: uint8 [B, 1, crop, crop] or [B, crop, crop, 1]: the mask's values, 0 outside it.
        label: int64 [B].

    A sample whose mask has another size than its photo is bad.

    EXIF orientation is not applied to photo or mask; torchvision's and WebDataset's readers do not apply it either.

    Args:
        crop: Height and width of image and trimap, in pixels.
        mean: Red, green, blue, of pixels in 0..1.
        std: Likewise.
        dtype: Of the image: ``"float32"``, ``"float16"`` or ``"uint8"``.
        layout: ``"CHW"`` or ``"HWC"``.
        photo: The component that holds the photo.
        mask: The component that holds the mask.
        mask_device: Where a GPU decodes the photos: ``"cpu"`` decodes the masks in DALI's CPU operators, and then
            copies their crops to the GPU; ``"mixed"`` leaves masks to the decoder that the photos have, too. The values
            are the same. Where no GPU decodes, it changes nothing.

    Raises:
        ValueError: If ``crop`` is not positive, or ``dtype``, ``layout`` or ``mask_device`` is not one of these.
    """
    _check(crop=crop, dtype=dtype, layout=layout)
    if mask_device not in get_args(DecoderDevice):
        raise ValueError(f"mask_device must be one of {', '.join(get_args(DecoderDevice))}, got {mask_device!r}")

    def graph(components: Components, random: Random) -> dict[str, Any]:
        components.same_size(photo, mask)
        # Only the crop is decoded; where the photo is smaller than it, crop_mirror_normalize pads it.
        start, shape, position = _centre_crop(components, photo, crop)
        pixels = _decode_crop(components, photo, start, shape, types.RGB, device=components.device)
        image = _normalised(pixels, crop, position, mean=mean, std=std, dtype=dtype, layout=layout)
        # PNG is decoded on the CPU in every NVIDIA stack, and DALI runs one "mixed" operator at a time: photos would
        # wait for masks, and the JPEG engines with them.
        start, shape, position = _centre_crop(components, mask, crop)
        device = "cpu" if mask_device == "cpu" else components.device
        ids = components.on_device(_decode_crop(components, mask, start, shape, types.GRAY, device=device))
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
    """Resize a random crop of the photo to ``crop``, flip and normalise it, and give the label.

    The crop is drawn as torchvision's ``RandomResizedCrop`` draws it, from the sample's own random numbers. Only the
    crop is decoded.

    All outputs are on the loader's device.

    Outputs:
        image: ``dtype`` [B, 3, crop, crop] (``layout="CHW"``) or [B, crop, crop, 3] (``"HWC"``): ``(pixel / 255 - mean)
            / std``, or with ``dtype="uint8"`` the pixels themselves.
        label: int64 [B].

    Args:
        crop: Height and width of the image, in pixels.
        scale: Smallest and largest area of the crop, as a share of the photo's.
        ratio: Smallest and largest width / height of the crop.
        flip: Probability of a horizontal flip.
        mean: Red, green, blue, of pixels in 0..1.
        std: Likewise.
        dtype: Of the image: ``"float32"``, ``"float16"`` or ``"uint8"``.
        layout: ``"CHW"`` or ``"HWC"``.
        photo: The component that holds the photo.

    Raises:
        ValueError: If ``crop`` is not positive, or ``dtype`` or ``layout`` is not one of these.
    """
    _check(crop=crop, dtype=dtype, layout=layout)

    def graph(components: Components, random: Random) -> dict[str, Any]:
        start, shape = random.resized_crop(photo, scale=scale, ratio=ratio, stream="crop")
        pixels = _decode_crop(components, photo, start, shape, types.RGB, device=components.device)
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
    """Resize the photo's shorter side, cut it to ``crop`` about the centre, normalise it, and give the label.

    Sizes and offsets are those of torchvision's ``Resize(resize) -> CenterCrop(crop)``. The resampling is DALI's
    antialiased linear filter, within a few grey levels of Pillow's.

    All outputs are on the loader's device.

    Outputs:
        image: ``dtype`` [B, 3, crop, crop] (``layout="CHW"``) or [B, crop, crop, 3] (``"HWC"``): ``(pixel / 255 - mean)
            / std``, or with ``dtype="uint8"`` the pixels themselves. Pixels outside the photo are 0 before that.
        label: int64 [B].

    Args:
        resize: Shorter side of the resized photo, in pixels.
        crop: Height and width of the image, in pixels.
        mean: Red, green, blue, of pixels in 0..1.
        std: Likewise.
        dtype: Of the image: ``"float32"``, ``"float16"`` or ``"uint8"``.
        layout: ``"CHW"`` or ``"HWC"``.
        photo: The component that holds the photo.

    Raises:
        ValueError: If ``resize`` or ``crop`` is not positive, or ``dtype`` or ``layout`` is not one of these.
    """
    _check(crop=crop, dtype=dtype, layout=layout)
    if as_integer("resize", resize) < 1:
        raise ValueError(f"resize must be positive, got {resize}")

    def graph(components: Components, random: Random) -> dict[str, Any]:
        size_of = components.size(photo)

        @once_a_batch
        def resized(batch: Batch) -> Int32s:
            return resized_shape(*size_of(batch), resize)

        pixels = fn.decoders.image(
            components[photo], device=components.device, output_type=types.RGB, adjust_orientation=False
        )
        size = components.array(lambda batch: resized(batch).astype(np.float32))
        pixels = fn.resize(pixels, size=size, interp_type=types.INTERP_LINEAR, antialias=True)
        position = components.array(lambda batch: crop_position(resized(batch), crop))
        image = _normalised(pixels, crop, position, mean=mean, std=std, dtype=dtype, layout=layout)
        return {"image": image, "label": components.label}

    return graph


def _centre_crop(components: Components, photo: str, crop: int) -> tuple[Any, Any, Any]:
    """Compute the part of the photo in a centre crop: start, shape (int32 [2]), and its position in the crop."""
    size_of = components.size(photo)

    @once_a_batch
    def sizes(batch: Batch) -> Int32s:
        return np.stack(size_of(batch), axis=1)  # [B, (height, width)]

    start = components.array(lambda batch: np.maximum(center_crop_start(sizes(batch), crop), 0))
    shape = components.array(lambda batch: np.minimum(sizes(batch), crop).astype(np.int32))
    position = components.array(lambda batch: crop_position(np.minimum(sizes(batch), crop), crop))
    return start, shape, position


def _decode_crop(
    components: Components, component: str, start: Any, shape: Any, output_type: Any, *, device: DecoderDevice
) -> Any:
    """Decode only the crop with this start and shape (rows, columns)."""
    return fn.decoders.image_slice(
        components[component],
        start,
        shape,
        axes=(0, 1),
        device=device,
        output_type=output_type,
        # Crops are computed from the sizes of the stored photos.
        adjust_orientation=False,
    )


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
        # A padding pixel is 0 before normalisation, but the operator does not normalise it.
        fill_values=(-means / stds).tolist(),
        dtype=_DALI_DTYPES[dtype],
        output_layout=layout,
    )


def _check(*, crop: int, dtype: str, layout: str) -> None:
    if as_integer("crop", crop) < 1:
        raise ValueError(f"crop must be positive, got {crop}")
    if dtype not in _DALI_DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(_DALI_DTYPES)}, got {dtype!r}")
    if layout not in ("CHW", "HWC"):
        raise ValueError(f"layout must be CHW or HWC, got {layout!r}")
