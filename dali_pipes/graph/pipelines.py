"""Graphs from encoded bytes to a model's inputs: four to use, to read and to copy; and steps that all graphs share.

Each function returns a graph, which runs inside a DALI pipeline definition, so it may use any ``fn.`` operator.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, TypeAlias, TypedDict, Unpack

import numpy as np
from nvidia.dali import fn, types

from dali_pipes.arguments import as_integer, as_number, check_choice, refuse_unknown
from dali_pipes.arrays import Float32s, Float64s, Int32s
from dali_pipes.graph.definition import Graph
from dali_pipes.graph.finish import FinishedOutput
from dali_pipes.graph.inputs import Components, DecoderDevice, bucket_shapes, once_a_batch
from dali_pipes.graph.random import Random
from dali_pipes.reader.batch import Batch

if TYPE_CHECKING:
    from torch import Tensor

IMAGENET_MEAN = (0.485, 0.456, 0.406)
"""Red, green, blue, of pixels in 0..1: the constants that torchvision's pretrained models were trained with."""
IMAGENET_STD = (0.229, 0.224, 0.225)

Dtype = Literal["float32", "float16", "uint8"]
Layout = Literal["CHW", "HWC"]
Place = Literal["random", "centre"]
Shape: TypeAlias = tuple[int, int]
"""Rows and columns."""

_DALI_DTYPES = {"float32": types.FLOAT, "float16": types.FLOAT16, "uint8": types.UINT8}


class ImageOptions(TypedDict, total=False):
    """Arguments that all graphs take by name: how an image is made of a photo's pixels.

    An image is ``dtype`` [B, 3, H, W] or, with ``layout="HWC"``, [B, H, W, 3], on the loader's device: ``(pixel / 255 -
    mean) / std``, or with ``dtype="uint8"`` the pixels themselves. Pixels outside the photo are 0 before that.
    """

    mean: Sequence[float]
    """Red, green, blue, of pixels in 0..1; by default `IMAGENET_MEAN`."""
    std: Sequence[float]
    """Red, green, blue, of pixels in 0..1; by default `IMAGENET_STD`."""
    dtype: Dtype
    """``"float32"`` (the default), ``"float16"`` or ``"uint8"``."""
    layout: Layout
    """``"CHW"`` (the default) or ``"HWC"``."""
    photo: str | None
    """The component that holds the photo; by default the only one, see `Components.photo`."""
    orient: bool | None
    """Turn each photo, and each mask by its own EXIF data, upright as Pillow's ``exif_transpose`` does. That is the
    default, see `Components.orient`."""


# Arguments of DALI's and torchvision's operators.
_INSTEAD = {
    "size": "pass crop= (and resize= to classification_eval)",
    "random_area": "pass scale=",
    "random_aspect_ratio": "pass ratio=",
    "mirror": "pass flip=",
    "device": "pass it to dali_pipes.loader",
}


@dataclass(frozen=True, kw_only=True)
class ImageForm:
    """The checked `ImageOptions` of a graph."""

    mean: Sequence[float] = IMAGENET_MEAN
    std: Sequence[float] = IMAGENET_STD
    dtype: Dtype = "float32"
    layout: Layout = "CHW"
    photo: str | None = None
    orient: bool | None = None

    def __new__(cls, **given: object) -> Self:
        refuse_unknown("the graph", given, [one.name for one in fields(cls)], instead=_INSTEAD)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        check_choice("dtype", self.dtype, Dtype)
        check_choice("layout", self.layout, Layout)
        _check_normalisation(self.mean, self.std)

    def factors(self) -> tuple[Float32s, Float32s]:
        """What is subtracted from pixels in 0..255, and the factors of the rest: float32 [3] each, or [1]."""
        mean, std = (np.asarray(values, np.float32) * np.float32(255) for values in (self.mean, self.std))
        return mean, np.float32(1) / std

    def photo_of(self, components: Components, *, besides: str | None = None) -> "PhotoInput":
        """The photo of a sample; ``besides`` is a component that holds something else, such as the mask."""
        return PhotoInput(components, components.photo(self.photo, besides=besides), components.orient(self.orient))

    def image(self, components: Components, pixels: Any, *, size: Any, mirror: Any = 0) -> Any:
        """Make the image of decoded pixels, see `image`."""
        if components.device == "cpu":
            return self.finished(pixels, size=size, mirror=mirror)
        return self.normalised(resized(pixels, size), mirror=mirror)

    def finished(
        self, pixels: Any, *, size: Any, crop: Shape | None = None, region: Any = None, mirror: Any = 0
    ) -> FinishedOutput:
        """Describe an image for the CPU to make of decoded pixels, see `FinishedOutput`."""
        return FinishedOutput(
            pixels=pixels,
            size=size,
            crop=crop,
            region=region,
            mirror=mirror,
            factors=self.factors(),
            dtype=np.dtype(self.dtype),
            is_chw=self.layout == "CHW",
        )

    def normalised(self, pixels: Any, *, crop: Shape | None = None, position: Any = None, mirror: Any = 0) -> Any:
        """Cut, flip and normalise by DALI's operator, for pixels of any number of channels."""
        means, stds = np.asarray(self.mean, np.float64) * 255, np.asarray(self.std, np.float64) * 255
        if self.dtype == "uint8":
            means, stds = np.zeros_like(means), np.ones_like(stds)
        arguments = {} if position is None else {"crop_pos_y": position[0], "crop_pos_x": position[1]}
        return fn.crop_mirror_normalize(
            pixels,
            **arguments,
            **({} if crop is None else {"crop": crop}),
            mirror=mirror,
            mean=means.tolist(),
            std=stds.tolist(),
            out_of_bounds_policy="pad",
            # A padding pixel is 0 before normalisation, but the operator does not normalise it.
            fill_values=(-means / stds).tolist(),
            dtype=_DALI_DTYPES[self.dtype],
            output_layout=self.layout,
        )


def _check_normalisation(mean: Sequence[float], std: Sequence[float]) -> None:
    for name, values in (("mean", mean), ("std", std)):
        if not isinstance(values, Sequence | np.ndarray) or len(values) not in (1, 3):
            raise ValueError(f"{name} must have three numbers, of red, green and blue, got {values!r}")
        if not all(0 <= as_number(name, value) <= 1 for value in values) or (name == "std" and 0 in values):
            raise ValueError(
                f"{name} must be of pixels in 0..1, such as {IMAGENET_MEAN if name == 'mean' else IMAGENET_STD}, "
                f"got {values!r}; divide what is of pixels in 0..255 by 255"
            )


class PhotoInput:
    """A photo or mask of each sample, and its size, upright if ``orient``."""

    def __init__(self, components: Components, name: str, orient: bool) -> None:
        self.components, self.name, self.orient = components, name, orient
        size_of = components.size(name, orient=orient)
        self.sizes: Callable[[Batch], Int32s] = once_a_batch(lambda batch: np.stack(size_of(batch), axis=1))
        """Computes heights and widths: int32 [B, 2]."""

    def decoded(self) -> Any:
        """The whole photo: uint8 [H, W, 3]."""
        device = self.components.device
        encoded = self.components[self.name]
        return fn.decoders.image(encoded, device=device, output_type=types.RGB, adjust_orientation=self.orient)

    def decoded_crop(
        self, start: Any, shape: Any, *, device: DecoderDevice | None = None, output_type: Any = types.RGB
    ) -> Any:
        """Decode only the crop with this start and shape (rows, columns)."""
        return fn.decoders.image_slice(
            self.components[self.name],
            start,
            shape,
            axes=(0, 1),
            device=device or self.components.device,
            output_type=output_type,
            adjust_orientation=self.orient,
        )

    def random_crop(self, random: Random, *, scale: tuple[float, float], ratio: tuple[float, float]) -> tuple[Any, Any]:
        """Draw the crop of training from the stream ``"crop"``: nodes of start and shape."""
        return random.resized_crop(self.name, scale=scale, ratio=ratio, orient=self.orient, stream="crop")

    def centre_crop(self, crop: Shape) -> tuple[Any, Any, Any]:
        """The part of the photo in a centre crop: nodes of start, shape (int32 [2]), and its position in the crop."""
        array, sizes = self.components.array, self.sizes
        start = array(lambda batch: np.maximum(center_crop_start(sizes(batch), crop), 0))
        shape = array(lambda batch: np.minimum(sizes(batch), crop).astype(np.int32))
        return start, shape, array(lambda batch: crop_position(np.minimum(sizes(batch), crop), crop))


def resized(pixels: Any, size: Any, **arguments: Any) -> Any:
    """Resize to ``size``, (rows, columns) or a node of them, by DALI's antialiased linear filter."""
    return fn.resize(pixels, size=size, interp_type=types.INTERP_LINEAR, antialias=True, **arguments)


def segmentation(
    *,
    crop: int | tuple[int, int] = 350,
    mask: str | None = None,
    mask_output: str = "mask",
    mask_device: DecoderDevice = "cpu",
    **image: Unpack[ImageOptions],
) -> Graph:
    """Cut or pad photo and mask to ``crop`` about the centre, normalise the photo, and give the label if there are any.

    On the CPU the images are within 1e-6 of torchvision's ``CenterCrop(crop) -> ToTensor -> Normalize``. On a GPU
    nvJPEG decodes, and its pixels differ by a few grey levels. A sample whose mask has another size than its photo is
    bad. A smaller photo is padded.

    Outputs:
        image: [B, 3, *crop], see `ImageOptions`.
        mask: uint8 [B, 1, *crop] or [B, *crop, 1]: the mask's values, 0 outside it.
        label: int64 [B]; only if the data set has labels.

    Args:
        crop: Height and width of image and mask, in pixels: two numbers, or one of a square.
        mask: The component that holds the mask; ``None``: the only one, see `Components.mask`.
        mask_output: Name of the mask among the outputs.
        mask_device: Where a GPU decodes the photos: ``"cpu"`` decodes the masks in DALI's CPU operators, and then
            copies their crops to the GPU; ``"mixed"`` leaves masks to the decoder that the photos have, too. The values
            are the same.
        **image: See `ImageOptions`.

    Raises:
        ValueError: If an argument is not one of its values.
    """
    shape, form = check_crop(crop), ImageForm(**image)
    check_choice("mask_device", mask_device, DecoderDevice)
    if not mask_output or mask_output in ("image", "label"):
        raise ValueError(f"mask_output must be a name other than 'image' and 'label', got {mask_output!r}")

    def graph(components: Components, random: Random) -> dict[str, Any]:
        photo = form.photo_of(components, besides=mask)
        ids = PhotoInput(components, components.mask(mask, photo=photo.name), photo.orient)
        components.same_size(photo.name, ids.name)
        # Only the crop is decoded; where the photo is smaller than it, crop_mirror_normalize pads it.
        start, part, position = photo.centre_crop(shape)
        image = form.normalised(photo.decoded_crop(start, part), crop=shape, position=position)
        # PNG is decoded on the CPU in every NVIDIA stack, and DALI runs one "mixed" operator at a time: photos would
        # wait for masks, and the JPEG engines with them.
        start, part, position = ids.centre_crop(shape)
        device = "cpu" if mask_device == "cpu" else components.device
        cut = components.on_device(ids.decoded_crop(start, part, device=device, output_type=types.GRAY))
        values = ImageForm(mean=(0,), std=(1,), dtype="uint8", layout=form.layout)
        outputs = {"image": image, mask_output: values.normalised(cut, crop=shape, position=position)}
        return outputs | label_output(components)

    return graph


def classification_train(
    *,
    crop: int | tuple[int, int] = 224,
    scale: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
    flip: float = 0.5,
    **image: Unpack[ImageOptions],
) -> Graph:
    """Resize a random crop of the photo to ``crop``, flip and normalise it, and give the label if there are any.

    The crop is drawn as torchvision's ``RandomResizedCrop`` draws it, from the sample's own random numbers. Only the
    crop is decoded.

    Outputs:
        image: [B, 3, *crop], see `ImageOptions`.
        label: int64 [B]; only if the data set has labels.

    Args:
        crop: Height and width of the image, in pixels: two numbers, or one of a square.
        scale: Smallest and largest area of the crop, as a share of the photo's.
        ratio: Smallest and largest width / height of the crop.
        flip: Probability of a horizontal flip.
        **image: See `ImageOptions`.

    Raises:
        ValueError: If an argument is not one of its values.
    """
    shape, form = check_crop(crop), ImageForm(**image)
    check_range("scale", scale, most=1)
    check_range("ratio", ratio)

    def graph(components: Components, random: Random) -> dict[str, Any]:
        photo = form.photo_of(components)
        pixels = photo.decoded_crop(*photo.random_crop(random, scale=scale, ratio=ratio))
        mirror = random.coin_flip(flip, stream="flip")
        return {"image": form.image(components, pixels, size=shape, mirror=mirror)} | label_output(components)

    return graph


def classification_eval(
    *, resize: int = 256, crop: int | tuple[int, int] = 224, **image: Unpack[ImageOptions]
) -> Graph:
    """Resize the photo's shorter side, cut it to ``crop`` about the centre, normalise it, and give the label if there
    are any.

    Sizes and offsets are those of torchvision's ``Resize(resize) -> CenterCrop(crop)``. On the CPU the pixels are those
    of its v2 functions, and only the region that the crop is made of is decoded. On a GPU DALI's antialiased linear
    filter resizes, and its pixels differ by a few grey levels.

    Outputs:
        image: [B, 3, *crop], see `ImageOptions`.
        label: int64 [B]; only if the data set has labels.

    Args:
        resize: Shorter side of the resized photo, in pixels. A smaller photo is enlarged.
        crop: Height and width of the image, in pixels: two numbers, or one of a square; at most ``resize``, so that the
            photo fills the image.
        **image: See `ImageOptions`.

    Raises:
        ValueError: If an argument is not one of its values.
    """
    shape, form = check_crop(crop), ImageForm(**image)
    resize = as_integer("resize", resize)
    if not max(shape) <= resize:
        raise ValueError(f"crop must not be larger than resize, got crop={crop} with resize={resize}")

    def graph(components: Components, random: Random) -> dict[str, Any]:
        photo = form.photo_of(components)
        shapes = once_a_batch(lambda batch: resized_shape(photo.sizes(batch), resize))
        size = components.array(lambda batch: shapes(batch).astype(np.float32))
        if components.device == "cpu":
            regions = once_a_batch(lambda batch: crop_regions(photo.sizes(batch), shapes(batch), shape))
            start = components.array(lambda batch: regions(batch).start)
            pixels = photo.decoded_crop(start, components.array(lambda batch: regions(batch).shape))
            region = components.array(lambda batch: np.stack(regions(batch), axis=1))
            image = form.finished(pixels, size=size, crop=shape, region=region)
        else:
            position = components.array(lambda batch: crop_position(shapes(batch), shape))
            image = form.normalised(resized(photo.decoded(), size), crop=shape, position=position)
        return {"image": image} | label_output(components)

    return graph


def bucketed(
    *, place: Place = "random", flip: float = 0.5, text: str | None = None, **image: Unpack[ImageOptions]
) -> Graph:
    """Cut each photo to the aspect ratio of its batch's bucket, resize it to the bucket's shape, flip and normalise it.

    For loaders with ``select=Select(buckets=dali_pipes.buckets(...))``; with the same ``photo`` as ``buckets``. The cut
    is the largest one of that aspect ratio, to whole pixels; only it is decoded. The plan groups upright photos: with
    ``orient=False`` turned ones do not fit their batch well.

    Outputs:
        image: [B, 3, H, W], see `ImageOptions`. H and W differ from batch to batch, and are the same on all ranks in a
            step.
        label: int64 [B]; only if the data set has labels.
        text: list of B str; only with ``text``.

    Args:
        place: ``"random"``: each place of the cut is as probable, by the sample's own random numbers; ``"centre"``.
        flip: Probability of a horizontal flip; 0 for evaluation.
        text: A component with text in UTF-8, such as ``"txt"``, that is delivered as it is.
        **image: See `ImageOptions`.

    Raises:
        ValueError: If an argument is not one of its values; when the loader is opened: if it has no buckets.
    """
    form = ImageForm(**image)
    check_choice("place", place, Place)

    def graph(components: Components, random: Random) -> dict[str, Any]:
        photo = form.photo_of(components)

        @once_a_batch
        def crop(batch: Batch) -> Int32s:
            places = batch.uniforms("crop", 2) if place == "random" else None
            return covering_crop(photo.sizes(batch), bucket_shapes(batch), places)

        start = components.array(lambda batch: crop(batch)[:, :2])
        shape = components.array(lambda batch: crop(batch)[:, 2:])
        size = components.array(lambda batch: bucket_shapes(batch).astype(np.float32))
        mirror = random.coin_flip(flip, stream="flip")
        outputs = {"image": form.image(components, photo.decoded_crop(start, shape), size=size, mirror=mirror)}
        outputs |= label_output(components)
        return outputs if text is None else outputs | {"text": components.text(text)}

    return graph


def image(
    components: Components,
    pixels: Any,
    *,
    size: tuple[int, int],
    mirror: Any = 0,
    mean: Sequence[float] = IMAGENET_MEAN,
    std: Sequence[float] = IMAGENET_STD,
    dtype: Dtype = "float32",
    layout: Layout = "CHW",
) -> Any:
    """Resize decoded pixels to ``size``, flip and normalise them: an output of a graph, not an input of operators.

    On a GPU DALI's operators do it. On the CPU it is done photo by photo, in less time than DALI's operators take, and
    the resize gives torchvision's pixels.

    Args:
        components: The graph's first argument.
        pixels: A node of uint8 [H, W, 3].
        size: Rows and columns of the image.
        mirror: Whether each sample is flipped horizontally: a node such as ``random.coin_flip(0.5)``.
        mean: See `ImageOptions`, as for ``std``, ``dtype`` and ``layout``.
        std: Likewise.
        dtype: Likewise.
        layout: Likewise.

    Raises:
        ValueError: If an argument is not one of its values.
    """
    form = ImageForm(mean=mean, std=std, dtype=dtype, layout=layout)
    return form.image(components, pixels, size=check_crop(size), mirror=mirror)


def normalise(
    images: "Tensor",
    *,
    mean: Sequence[float] = IMAGENET_MEAN,
    std: Sequence[float] = IMAGENET_STD,
    layout: Layout = "CHW",
) -> "Tensor":
    """Normalise uint8 images of a graph on the model's side: the loader then makes and moves a quarter of the bytes.

    The result equals, bit for bit, the images that a graph which resizes makes on the CPU with ``dtype="float32"``. A
    compiled model may call the function.

    Args:
        images: uint8 [B, 3, H, W], or with ``layout="HWC"`` [B, H, W, 3], on any device.
        mean: See `ImageOptions`, as for ``std``.
        std: Likewise.
        layout: That of ``images``.

    Returns:
        float32 [B, 3, H, W] on the device of ``images``; of HWC images in the memory format ``torch.channels_last``.

    Raises:
        ValueError: If ``images`` are not of the ``layout``, or ``mean`` or ``std`` are wrong.
    """
    import torch

    _check_normalisation(mean, std)
    if images.ndim != 4 or images.shape[1 if layout == "CHW" else 3] != 3:
        raise ValueError(f"images must be [B, 3, H, W], or [B, H, W, 3] with layout='HWC', got {[*images.shape]}")
    # A GPU fills these tensors itself. A copy from the host would wait for all earlier work of the stream.
    means, stds = (
        torch.stack([torch.full((1, 1), value, dtype=torch.float32, device=images.device) for value in values]) * 255
        for values in (mean, std)
    )
    return ((images if layout == "CHW" else images.permute(0, 3, 1, 2)) - means) * (1 / stds)


def label_output(components: Components) -> dict[str, Any]:
    """The output of the label; a data set without labels has none."""
    return {"label": components.label} if components.has_labels else {}


def check_crop(crop: int | Shape) -> Shape:
    """Check the argument ``crop``, and return rows and columns; one number is the side of a square."""
    sides = crop if isinstance(crop, tuple | list) else (crop, crop)
    if len(sides) != 2:
        raise TypeError(f"crop must be one number, or rows and columns, got {crop}")
    rows, columns = (as_integer("crop", side) for side in sides)
    if min(rows, columns) < 1:
        raise ValueError(f"crop must be positive, got {crop}")
    return rows, columns


def check_range(name: str, given: object, *, most: float = float("inf")) -> None:
    """Refuse what are not two numbers, the smaller one first, above 0 and at most ``most``."""
    if not isinstance(given, Sequence) or len(given) != 2:
        raise ValueError(f"{name} must be two numbers, the smallest and the largest, got {given!r}")
    low, high = (as_number(name, number) for number in given)
    if not 0 < low <= high <= most:
        limit = f" and at most {most:g}" if most < float("inf") else ""
        raise ValueError(f"{name} must be the smallest and the largest number, above 0{limit}, got {given!r}")


def center_crop_start(size: Int32s, crop: int | Shape) -> Int32s:
    """Compute the start of torchvision's ``CenterCrop``: halves round to even; it is negative where a photo is padded.

    >>> center_crop_start(np.array([350, 351, 353, 355, 349, 347]), 350).tolist()
    [0, 0, 2, 2, 0, -1]
    """
    slack = size.astype(np.int32) - np.asarray(crop, np.int32)
    larger = np.rint(slack / 2).astype(np.int32)
    return np.where(slack > 0, larger, -(-slack // 2)).astype(np.int32)


def crop_position(sizes: Int32s, crop: Shape) -> Float32s:
    """Compute a centre crop as DALI's ``crop_pos_y, crop_pos_x``, the start as a share of the slack: float32 [B, 2]."""
    slack = sizes - np.asarray(crop, np.int32)
    start = center_crop_start(sizes, crop)
    return (start / np.where(slack == 0, 1, slack)).astype(np.float32)


def resized_shape(sizes: Int32s, shorter_side: int) -> Int32s:
    """Compute the shapes that torchvision's ``Resize(shorter_side)`` gives: int32 [B, 2] (rows, columns).

    The longer side is rounded down to whole pixels.

    >>> resized_shape(np.array([[200, 301], [301, 200]]), 100).tolist()
    [[100, 150], [150, 100]]
    """
    sizes = sizes.astype(np.int64)
    shortest = sizes.min(axis=1, keepdims=True)
    return np.where(sizes == shortest, shorter_side, shorter_side * sizes // np.maximum(shortest, 1)).astype(np.int32)


class CropRegions(NamedTuple):
    """The regions of photos from which centre crops of the resized photos are made; each int32 [B, 2]."""

    photo: Int32s
    """Rows and columns of the photo."""
    start: Int32s
    """First row and column of the region."""
    shape: Int32s
    """Rows and columns of the region."""
    crop_start: Int32s
    """First row and column of the crop in the resized photo."""


def crop_regions(sizes: Int32s, resized: Int32s, crop: Shape) -> CropRegions:
    """Compute the regions from which an antialiased linear resize makes centre crops.

    ``sizes`` and ``resized`` are int32 [B, 2], rows and columns before and after the resize. A pixel of the result
    depends on the pixels within ``sizes / resized`` of its centre. If a photo is not made smaller, its region is the
    whole photo.

    >>> [array.tolist() for array in crop_regions(np.array([[300, 600]]), np.array([[100, 200]]), (80, 80))]
    [[[300, 600]], [[28, 178]], [[244, 244]], [[10, 60]]]
    """
    crop_start, scale = center_crop_start(resized, crop), sizes / resized
    start, end = np.floor(scale * (crop_start - 0.5)), np.ceil(scale * (crop_start + crop + 0.5))
    is_smaller = sizes.min(axis=1, keepdims=True) > resized.min(axis=1, keepdims=True)
    start = np.where(is_smaller, np.maximum(start, 0), 0).astype(np.int32)
    end = np.where(is_smaller, np.minimum(end, sizes), sizes).astype(np.int32)
    return CropRegions(sizes, start, end - start, crop_start)


def covering_crop(sizes: Int32s, shape: Int32s, uniforms: Float64s | None) -> Int32s:
    """Compute the largest crops with the aspect ratios of ``shape``, rounded to whole pixels.

    ``sizes`` and ``shape`` are int32 [B, 2], rows and columns of the photo and of the resized crop. ``uniforms``,
    float64 [B, 2] in [0, 1), say the place; ``None``: the centre.

    Returns:
        int32 [B, 4]: start row, start column, rows, columns.

    >>> covering_crop(np.array([[300, 500]]), np.array([[100, 100]]), None).tolist()
    [[0, 100, 300, 300]]
    """
    size = sizes.astype(np.int64)
    rows, columns = shape[:, 0].astype(np.int64), shape[:, 1].astype(np.int64)
    # The shape fits the photo's width if the photo is the taller of the two, else its height.
    is_taller = size[:, 0] * columns > size[:, 1] * rows
    scaled = np.where(is_taller, np.rint(size[:, 1] * rows / columns), np.rint(size[:, 0] * columns / rows))
    crop = size.copy()
    crop[np.arange(len(size)), np.where(is_taller, 0, 1)] = np.maximum(scaled, 1).astype(np.int64)
    crop = np.minimum(crop, size)
    slack = size - crop
    start = slack // 2 if uniforms is None else np.floor(uniforms * (slack + 1)).astype(np.int64)
    return np.concatenate([start, crop], axis=1).astype(np.int32)
