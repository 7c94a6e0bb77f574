"""A graph for self-supervision by several crops of each photo, large and small ones, as DINO takes them."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Unpack

from nvidia.dali import fn, math, types

from dali_pipes.arguments import as_integer, as_number
from dali_pipes.graph.definition import Graph
from dali_pipes.graph.inputs import Components
from dali_pipes.graph.pipelines import ImageForm, ImageOptions, Shape, check_crop, check_range, resized
from dali_pipes.graph.random import Random

# Of a blur, in pixels: DINO's, and one that changes no pixel.
_SIGMAS = (0.1, 2.0)
_NO_SIGMA = 0.01


class _Kind(NamedTuple):
    size: Shape
    scale: tuple[float, float]
    blur: float
    solarize: float


def multi_crop(
    *,
    num_crops: tuple[int, int] = (2, 8),
    sizes: tuple[int, int] = (224, 96),
    scales: tuple[tuple[float, float], tuple[float, float]] = ((0.4, 1.0), (0.05, 0.4)),
    flip: float = 0.5,
    jitter: float = 0.8,
    grayscale: float = 0.2,
    blur: tuple[float, float, float] = (1.0, 0.1, 0.5),
    solarize: float = 0.2,
    **image: Unpack[ImageOptions],
) -> Graph:
    """Decode each photo once, and make several random crops of it, global and local ones, each with its own changes.

    The defaults are those of DINO (M. Caron and others, "Emerging Properties in Self-Supervised Vision Transformers",
    2021): two global and eight local crops, flipped, with other colours, blurred, and some solarised. Each crop has
    random numbers of its own, which belong to the sample.

    Crops are drawn as torchvision's ``RandomResizedCrop`` draws them. They are cut out of the decoded photo while it is
    resized, so the pixels at a crop's edge take a little of what lies beside it.

    Outputs:
        global_0, global_1, ...: [B, 3, size, size], see `ImageOptions`.
        local_0, local_1, ...: Likewise.

    Args:
        num_crops: Number of global and of local crops.
        sizes: Height and width of a global and of a local crop, in pixels.
        scales: Smallest and largest area of a global and of a local crop, as a share of the photo's.
        flip: Probability of a horizontal flip.
        jitter: Probability of `Random.color_jitter` with ``brightness=0.4, contrast=0.4, saturation=0.2, hue=0.1``.
        grayscale: Probability of a grey crop.
        blur: Probability of a Gaussian blur of 0.1 to 2 pixels, of the first global crop, the other global crops and
            the local ones.
        solarize: Probability that values of 128 or more are inverted, of the global crops but the first.
        **image: See `ImageOptions`.

    Raises:
        TypeError: If an argument has another type.
        ValueError: If there are no crops, or an argument is not one of its values.
    """
    pairs = {"num_crops": (num_crops, 2), "sizes": (sizes, 2), "scales": (scales, 2), "blur": (blur, 3)}
    for name, (given, length) in pairs.items():
        if not isinstance(given, Sequence) or len(given) != length:
            raise TypeError(f"{name} must have {length} entries, got {given!r}")
    num_global, num_local = (as_integer("num_crops", number) for number in num_crops)
    if min(num_global, num_local) < 0 or num_global + num_local == 0:
        raise ValueError(f"num_crops must be two numbers of crops, one of them positive, got {num_crops!r}")
    form, (global_size, local_size) = ImageForm(**image), map(check_crop, sizes)
    for scale in scales:
        check_range("scales", scale, most=1)
    probabilities = {"flip": [flip], "jitter": [jitter], "grayscale": [grayscale], "solarize": [solarize], "blur": blur}
    for name, values in probabilities.items():
        if wrong := [value for value in values if not 0 <= as_number(name, value) <= 1]:
            raise ValueError(f"{name} must be in [0, 1], got {wrong[0]}")
    first = _Kind(global_size, scales[0], blur[0], 0.0)
    others = _Kind(global_size, scales[0], blur[1], solarize)
    local = _Kind(local_size, scales[1], blur[2], 0.0)
    kinds = {f"global_{number}": others if number else first for number in range(num_global)}
    kinds |= {f"local_{number}": local for number in range(num_local)}

    def graph(components: Components, random: Random) -> dict[str, Any]:
        photo = form.photo_of(components)
        whole = photo.decoded()  # a decoder for each crop would read the photo's bytes ten times
        outputs = {}
        for output, kind in kinds.items():
            start, shape = random.resized_crop(
                photo.name, scale=kind.scale, orient=photo.orient, stream=f"{output}/crop"
            )
            first = fn.cast(start, dtype=types.FLOAT)
            pixels = resized(whole, kind.size, roi_start=first, roi_end=first + shape)
            pixels = _changed(pixels, kind, components, random, stream=output, jitter=jitter, grayscale=grayscale)
            mirror = random.coin_flip(flip, stream=f"{output}/flip")
            outputs[output] = form.normalised(pixels, crop=kind.size, mirror=mirror)
        return outputs

    return graph


def _changed(
    pixels: Any, kind: _Kind, components: Components, random: Random, *, stream: str, jitter: float, grayscale: float
) -> Any:
    """Change the colours of a crop, blur it and solarise it, in this order; leave out what never happens."""
    if jitter:
        changes = {"brightness": 0.4, "contrast": 0.4, "saturation": 0.2, "hue": 0.1}
        pixels = random.color_jitter(**changes, probability=jitter, stream=f"{stream}/jitter")(pixels)
    if grayscale:
        pixels = random.color_jitter(saturation=(0, 0), probability=grayscale, stream=f"{stream}/grayscale")(pixels)
    if kind.blur:
        is_blurred = random.coin_flip(kind.blur, stream=f"{stream}/blur")
        sigma = random.uniform(*_SIGMAS, stream=f"{stream}/sigma")
        pixels = fn.gaussian_blur(pixels, sigma=is_blurred * sigma + (1 - is_blurred) * _NO_SIGMA)
    if kind.solarize:
        is_solarized = components.on_device(random.coin_flip(kind.solarize, stream=f"{stream}/solarize"))
        inverted = (pixels >= 128) * is_solarized * 255
        pixels = fn.cast(math.abs(fn.cast(pixels, dtype=types.INT32) - inverted), dtype=types.UINT8)
    return pixels
