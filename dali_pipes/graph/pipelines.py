"""Graphs from encoded bytes to a model's inputs: four to use, to read and to copy.

Each function returns a graph: a function of a sample's components and random numbers that returns outputs by name. A
graph runs inside a DALI pipeline definition, so it may use any ``fn.`` operator.
"""

from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np
from nvidia.dali import fn, types

from dali_pipes.arguments import as_integer, as_number
from dali_pipes.graph.crop import Int32s, center_crop_start, covering_crop, crop_position, resized_shape
from dali_pipes.graph.definition import Graph
from dali_pipes.graph.inputs import Components, DecoderDevice, bucket_shapes, once_a_batch
from dali_pipes.graph.random import Random
from dali_pipes.reader.batch import Batch

IMAGENET_MEAN = (0.485, 0.456, 0.406)
"""Red, green, blue, of pixels in 0..1: the constants that torchvision's pretrained models were trained with."""
IMAGENET_STD = (0.229, 0.224, 0.225)

Dtype = Literal["float32", "float16", "uint8"]
Layout = Literal["CHW", "HWC"]
Place = Literal["random", "centre"]

_DALI_DTYPES = {"float32": types.FLOAT, "float16": types.FLOAT16, "uint8": types.UINT8}


def segmentation(
    *,
    crop: int | tuple[int, int] = 350,
    mean: Sequence[float] = IMAGENET_MEAN,
    std: Sequence[float] = IMAGENET_STD,
    dtype: Dtype = "float32",
    layout: Layout = "CHW",
    photo: str | None = None,
    mask: str | None = None,
    mask_output: str = "mask",
    mask_device: DecoderDevice = "cpu",
    orient: bool | None = None,
) -> Graph:
    """Cut or pad photo and mask to ``crop`` about the centre, normalise the photo, and give the label if there are any.

    All outputs are on the loader's device.

    Outputs:
        image: ``dtype`` [B, 3, crop, crop] (``layout="CHW"``) or [B, crop, crop, 3] (``"HWC"``): ``(pixel / 255 - mean)
            / std``, or with ``dtype="uint8"`` the pixels themselves. Pixels outside the photo are 0 before that. On the
            CPU the values are within 1e-6 of torchvision's ``CenterCrop(crop) -> ToTensor -> Normalize``. On a GPU
            nvJPEG decodes, and its pixels differ by a few grey levels.
        mask: uint8 [B, 1, crop, crop] or [B, crop, crop, 1]: the mask's values, 0 outside it.
            ``mask_output`` gives another name.
        label: int64 [B]; only if the data set has labels.

    A sample whose mask has another size than its photo is bad; with ``orient`` the upright sizes count.

    Args:
        crop: Height and width of image and mask, in pixels: one number, or two equal ones. A photo that is smaller is
            padded, see ``image``.
        mean: Red, green, blue, of pixels in 0..1.
        std: Likewise.
        dtype: Of the image: ``"float32"``, ``"float16"`` or ``"uint8"``.
        layout: ``"CHW"`` or ``"HWC"``.
        photo: The component that holds the photo; ``None``: the only one, see `Components.photo`.
        mask: The component that holds the mask; ``None``: the only one, see `Components.mask`.
        mask_output: Name of the mask among the outputs.
        mask_device: Where a GPU decodes the photos: ``"cpu"`` decodes the masks in DALI's CPU operators, and then
            copies their crops to the GPU; ``"mixed"`` leaves masks to the decoder that the photos have, too. The values
            are the same. Where no GPU decodes, it changes nothing.
        orient: Turn each photo upright by its EXIF orientation, as Pillow's ``exif_transpose`` does, and each mask by
            its own; ``None``: if the data set knows the orientations, see `Components.orient`.

    Raises:
        ValueError: If ``crop`` is not positive or not square, ``dtype``, ``layout`` or ``mask_device`` is not one of
            these, or ``mask_output`` is the name of another output.
    """
    crop = check_crop(crop=crop, dtype=dtype, layout=layout)
    if mask_device not in get_args(DecoderDevice):
        raise ValueError(f"mask_device must be one of {', '.join(get_args(DecoderDevice))}, got {mask_device!r}")
    if not mask_output or mask_output in ("image", "label"):
        raise ValueError(f"mask_output must be a name other than 'image' and 'label', got {mask_output!r}")

    def graph(components: Components, random: Random) -> dict[str, Any]:
        photo_name = components.photo(photo, besides=mask)
        mask_name = components.mask(mask, photo=photo_name)
        components.same_size(photo_name, mask_name)
        upright = components.orient(orient)
        # Only the crop is decoded; where the photo is smaller than it, crop_mirror_normalize pads it.
        start, shape, position = _centre_crop(components, photo_name, crop, orient=upright)
        pixels = decode_crop(components, photo_name, start, shape, types.RGB, device=components.device, orient=upright)
        image = normalised(pixels, crop, position, mean=mean, std=std, dtype=dtype, layout=layout)
        # PNG is decoded on the CPU in every NVIDIA stack, and DALI runs one "mixed" operator at a time: photos would
        # wait for masks, and the JPEG engines with them.
        start, shape, position = _centre_crop(components, mask_name, crop, orient=upright)
        device = "cpu" if mask_device == "cpu" else components.device
        ids = decode_crop(components, mask_name, start, shape, types.GRAY, device=device, orient=upright)
        values = normalised(
            components.on_device(ids), crop, position, mean=(0,), std=(1,), dtype="uint8", layout=layout
        )
        return {"image": image, mask_output: values} | label_output(components)

    return graph


def classification_train(
    *,
    crop: int | tuple[int, int] = 224,
    scale: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
    flip: float = 0.5,
    mean: Sequence[float] = IMAGENET_MEAN,
    std: Sequence[float] = IMAGENET_STD,
    dtype: Dtype = "float32",
    layout: Layout = "CHW",
    photo: str | None = None,
    orient: bool | None = None,
) -> Graph:
    """Resize a random crop of the photo to ``crop``, flip and normalise it, and give the label if there are any.

    The crop is drawn as torchvision's ``RandomResizedCrop`` draws it, from the sample's own random numbers. Only the
    crop is decoded.

    All outputs are on the loader's device.

    Outputs:
        image: ``dtype`` [B, 3, crop, crop] (``layout="CHW"``) or [B, crop, crop, 3] (``"HWC"``): ``(pixel / 255 - mean)
            / std``, or with ``dtype="uint8"`` the pixels themselves.
        label: int64 [B]; only if the data set has labels.

    Args:
        crop: Height and width of the image, in pixels: one number, or two equal ones.
        scale: Smallest and largest area of the crop, as a share of the photo's.
        ratio: Smallest and largest width / height of the crop.
        flip: Probability of a horizontal flip.
        mean: Red, green, blue, of pixels in 0..1.
        std: Likewise.
        dtype: Of the image: ``"float32"``, ``"float16"`` or ``"uint8"``.
        layout: ``"CHW"`` or ``"HWC"``.
        photo: The component that holds the photo; ``None``: the only one, see `Components.photo`.
        orient: Turn each photo upright by its EXIF orientation, as Pillow's ``exif_transpose`` does; ``None``: if the
            data set knows the orientations, see `Components.orient`.

    Raises:
        ValueError: If ``crop`` is not positive or not square, or ``dtype`` or ``layout`` is not one of these.
    """
    crop = check_crop(crop=crop, dtype=dtype, layout=layout)

    def graph(components: Components, random: Random) -> dict[str, Any]:
        name = components.photo(photo)
        upright = components.orient(orient)
        start, shape = random.resized_crop(name, scale=scale, ratio=ratio, orient=upright, stream="crop")
        pixels = decode_crop(components, name, start, shape, types.RGB, device=components.device, orient=upright)
        pixels = fn.resize(pixels, size=(crop, crop), interp_type=types.INTERP_LINEAR, antialias=True)
        mirror = random.coin_flip(flip, stream="flip")
        image = normalised(pixels, crop, None, mirror=mirror, mean=mean, std=std, dtype=dtype, layout=layout)
        return {"image": image} | label_output(components)

    return graph


def classification_eval(
    *,
    resize: int = 256,
    crop: int | tuple[int, int] = 224,
    mean: Sequence[float] = IMAGENET_MEAN,
    std: Sequence[float] = IMAGENET_STD,
    dtype: Dtype = "float32",
    layout: Layout = "CHW",
    photo: str | None = None,
    orient: bool | None = None,
) -> Graph:
    """Resize the photo's shorter side, cut it to ``crop`` about the centre, normalise it, and give the label if there
    are any.

    Sizes and offsets are those of torchvision's ``Resize(resize) -> CenterCrop(crop)``. The resampling is DALI's
    antialiased linear filter, within a few grey levels of Pillow's.

    All outputs are on the loader's device.

    Outputs:
        image: ``dtype`` [B, 3, crop, crop] (``layout="CHW"``) or [B, crop, crop, 3] (``"HWC"``): ``(pixel / 255 - mean)
            / std``, or with ``dtype="uint8"`` the pixels themselves.
        label: int64 [B]; only if the data set has labels.

    Args:
        resize: Shorter side of the resized photo, in pixels. A smaller photo is enlarged.
        crop: Height and width of the image, in pixels: one number, or two equal ones; at most ``resize``, so that the
            photo fills the image.
        mean: Red, green, blue, of pixels in 0..1.
        std: Likewise.
        dtype: Of the image: ``"float32"``, ``"float16"`` or ``"uint8"``.
        layout: ``"CHW"`` or ``"HWC"``.
        photo: The component that holds the photo; ``None``: the only one, see `Components.photo`.
        orient: Turn each photo upright by its EXIF orientation, as Pillow's ``exif_transpose`` does; ``None``: if the
            data set knows the orientations, see `Components.orient`.

    Raises:
        ValueError: If ``resize`` or ``crop`` is not positive, ``crop`` is not square or larger than ``resize``, or
            ``dtype`` or ``layout`` is not one of these.
    """
    crop = check_crop(crop=crop, dtype=dtype, layout=layout)
    if np.ndim(resize):
        raise TypeError(
            f"resize must be one number, the shorter side of the resized photo, got {resize!r}, which would change its "
            "proportions; for that copy the graph"
        )
    resize = as_integer("resize", resize)
    if resize < 1:
        raise ValueError(f"resize must be positive, got {resize}")
    if crop > resize:
        raise ValueError(
            f"crop must not be larger than resize, got crop={crop} with resize={resize}: the rest would be black; pass "
            f"resize={crop} or more"
        )

    def graph(components: Components, random: Random) -> dict[str, Any]:
        name = components.photo(photo)
        upright = components.orient(orient)
        size_of = components.size(name, orient=upright)

        @once_a_batch
        def resized(batch: Batch) -> Int32s:
            return resized_shape(*size_of(batch), resize)

        pixels = fn.decoders.image(
            components[name], device=components.device, output_type=types.RGB, adjust_orientation=upright
        )
        size = components.array(lambda batch: resized(batch).astype(np.float32))
        pixels = fn.resize(pixels, size=size, interp_type=types.INTERP_LINEAR, antialias=True)
        position = components.array(lambda batch: crop_position(resized(batch), crop))
        image = normalised(pixels, crop, position, mean=mean, std=std, dtype=dtype, layout=layout)
        return {"image": image} | label_output(components)

    return graph


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


def label_output(components: Components) -> dict[str, Any]:
    """Return the output of the label; a data set without labels has none."""
    return {"label": components.label} if components.has_labels else {}


def _centre_crop(components: Components, photo: str, crop: int, *, orient: bool) -> tuple[Any, Any, Any]:
    """Compute the part of the photo in a centre crop: start, shape (int32 [2]), and its position in the crop."""
    size_of = components.size(photo, orient=orient)

    @once_a_batch
    def sizes(batch: Batch) -> Int32s:
        return np.stack(size_of(batch), axis=1)  # [B, (height, width)]

    start = components.array(lambda batch: np.maximum(center_crop_start(sizes(batch), crop), 0))
    shape = components.array(lambda batch: np.minimum(sizes(batch), crop).astype(np.int32))
    position = components.array(lambda batch: crop_position(np.minimum(sizes(batch), crop), crop))
    return start, shape, position


def decode_crop(
    components: Components,
    component: str,
    start: Any,
    shape: Any,
    output_type: Any,
    *,
    device: DecoderDevice,
    orient: bool = False,
) -> Any:
    """Decode only the crop with this start and shape (rows, columns), of the upright photo if ``orient``."""
    return fn.decoders.image_slice(
        components[component],
        start,
        shape,
        axes=(0, 1),
        device=device,
        output_type=output_type,
        adjust_orientation=orient,
    )


def normalised(
    pixels: Any,
    crop: int | None,
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
    crop_arguments = {} if position is None else {"crop_pos_y": position[0], "crop_pos_x": position[1]}
    if crop is not None:
        crop_arguments["crop"] = (crop, crop)
    return fn.crop_mirror_normalize(
        pixels,
        **crop_arguments,
        mirror=mirror,
        mean=means.tolist(),
        std=stds.tolist(),
        out_of_bounds_policy="pad",
        # A padding pixel is 0 before normalisation, but the operator does not normalise it.
        fill_values=(-means / stds).tolist(),
        dtype=_DALI_DTYPES[dtype],
        output_layout=layout,
    )


def check_crop(*, crop: int | tuple[int, int], dtype: str, layout: str) -> int:
    """Check arguments that all graphs have, and return the side of the crop."""
    if isinstance(crop, tuple | list) and len(crop) == 2:
        if crop[0] != crop[1]:
            raise ValueError(
                f"crop must be square, one number or two equal ones, got {crop!r}; for others copy the graph"
            )
        crop = crop[0]
    side = as_integer("crop", crop)
    if side < 1:
        raise ValueError(f"crop must be positive, got {side}")
    check_output(dtype=dtype, layout=layout)
    return side


def check_output(*, dtype: str, layout: str) -> None:
    """Check arguments of the image that all graphs have."""
    if dtype not in _DALI_DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(_DALI_DTYPES)}, got {dtype!r}")
    if layout not in ("CHW", "HWC"):
        raise ValueError(f"layout must be CHW or HWC, got {layout!r}")
