"""Change the colours of decoded photos as torchvision's ``ColorJitter`` does, in an order that is each sample's own."""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from nvidia.dali import fn, math, types

from dali_pipes.arguments import as_number
from dali_pipes.arrays import Float32s, Float64s, Int64s
from dali_pipes.graph.inputs import Components, once_a_batch
from dali_pipes.reader.batch import Batch

Range = tuple[float, float]

BRIGHTNESS, CONTRAST, SATURATION, HUE = range(4)
OPERATIONS = ("brightness", "contrast", "saturation", "hue")
NUM_UNIFORMS = 2 * len(OPERATIONS) + 1
"""Of each sample: a number for each factor and for each place in the order, and one for the probability."""

# torchvision's weights of red, green and blue in grey (ITU-R BT.601, to three or four places).
_GREY = (0.2989, 0.587, 0.114)
_NEUTRAL = np.array([1, 1, 1, 0], np.float64)
_ORDERS = np.array(list(itertools.permutations(range(4))))  # [order, place]


class ColorJitter:
    """Brightness, contrast, saturation and hue that were drawn for each sample; call it with decoded photos.

    Call it with several nodes, and they all get the same change.
    """

    def __init__(
        self, components: Components, uniforms: Callable[[Batch], Float64s], ranges: Sequence[Range | None], p: float
    ) -> None:
        self._components = components
        self.draw = once_a_batch(lambda batch: draw(uniforms(batch), ranges, p))
        """Computes factors and orders of a batch, see `draw`."""
        self._kinds, self._uses = slots([operation for operation in range(4) if ranges[operation] is not None])

    def __call__(self, pixels: Any) -> Any:
        """Change photos: a node of uint8 [H, W, 3], RGB, on either device, to another such node.

        Each operation rounds its result to whole grey levels.
        """
        array = self._components.array
        factors = array(self._slot_factors)
        on_device = factors.gpu() if pixels.device == "gpu" else factors
        for number, kind in enumerate(self._kinds):
            if kind == "light":
                pixels = _light(pixels, factors[number], self._uses_contrast(number))
            elif kind == "saturation":
                pixels = fn.coord_transform(pixels, M=array(partial(self._matrices, number)), dtype=types.UINT8)
            else:
                pixels = _hue(pixels, on_device[number])
        return pixels

    def _slot_factors(self, batch: Batch) -> Float32s:
        """Compute each slot's factor, float32 [B, slot]: that of its operation, or one that changes nothing."""
        drawn, orders = self.draw(batch)
        uses = self._uses[orders]  # [B, slot]
        factors = np.take_along_axis(drawn, np.maximum(uses, 0), axis=1)
        neutral = np.array([0 if kind == "hue" else 1 for kind in self._kinds])
        return np.where(uses >= 0, factors, neutral).astype(np.float32)

    def _uses_contrast(self, slot: int) -> Any | None:
        """A node of float32 scalars, 1 where the slot is for a contrast; ``None`` if it never is."""
        uses = self._uses[:, slot] == CONTRAST  # [order]
        if not uses.any():
            return None
        return self._components.array(lambda batch: uses[self.draw(batch)[1]].astype(np.float32))

    def _matrices(self, slot: int, batch: Batch) -> Float32s:
        """Compute matrices that mix each pixel with its grey: float32 [B, 3, 3]."""
        factor = self._slot_factors(batch)[:, slot, None, None]
        return np.asarray(factor * np.eye(3) + (1 - factor) * np.array(_GREY), np.float32)


def jitter_range(name: str, value: float | Sequence[float] | None) -> Range | None:
    """Check one argument of `Random.color_jitter`, and return the range of its factors; ``None`` changes nothing."""
    if value is None:
        return None
    is_hue = name == "hue"
    if isinstance(value, Sequence):
        if len(value) != 2:
            raise TypeError(f"{name} must be a number or a pair of numbers, got {value!r}")
        low, high = (as_number(name, limit) for limit in value)
    else:
        width = as_number(name, value)
        if width < 0:
            raise ValueError(f"{name} must not be negative, got {value!r}")
        low, high = (-width, width) if is_hue else (max(0.0, 1 - width), 1 + width)
    least, most = (-0.5, 0.5) if is_hue else (0.0, float("inf"))
    if not (least <= low <= high <= most and high < float("inf")):
        limits = "-0.5 <= low <= high <= 0.5" if is_hue else "0 <= low <= high"
        raise ValueError(f"{name} must be a range with {limits}, got {value!r}")
    neutral = 0.0 if is_hue else 1.0
    return None if low == high == neutral else (low, high)


def draw(uniforms: Float64s, ranges: Sequence[Range | None], p: float) -> tuple[Float64s, Int64s]:
    """Draw the factors and the orders of a batch from uniform numbers, float64 [B, NUM_UNIFORMS].

    The factors are float64 [B, 4], of brightness, contrast, saturation and hue; 1, 1, 1, 0 change nothing. The order of
    each sample is a number among the 24, int64 [B].
    """
    factors = np.tile(_NEUTRAL, (len(uniforms), 1))
    for operation, limits in enumerate(ranges):
        if limits is not None:
            factors[:, operation] = limits[0] + (limits[1] - limits[0]) * uniforms[:, operation]
    factors[uniforms[:, -1] >= p] = _NEUTRAL
    # Of uniform numbers, every order of their sizes is as likely.
    places = np.argsort(uniforms[:, 4:8], axis=1, kind="stable")  # [B, place]: the operation there
    return factors, np.argmax((places[:, None] == _ORDERS).all(axis=2), axis=1)


def slots(operations: Sequence[int]) -> tuple[tuple[str, ...], Int64s]:
    """Arrange operators that run one after the other, so that each sample's own order of operations uses some of them.

    A saturation can come before or after the hue, so there are two operators for it, and a sample uses one of them.
    Brightness and contrast (``"light"``) may come before, between and after these, in either order.

    Returns:
        The kinds of the slots in the order in which they run; and int64 [order, slot], the operation for which an order
        uses the slot, -1 if it does not use it.

    >>> slots([BRIGHTNESS, SATURATION])[0]
    ('light', 'saturation', 'light')
    """
    num_lights = sum(operation in operations for operation in (BRIGHTNESS, CONTRAST))
    heavy = [operation for operation in (SATURATION, HUE) if operation in operations]
    if len(heavy) == 2:
        heavy.append(SATURATION)
    kinds = ["light"] * num_lights
    for operation in heavy:
        kinds += [OPERATIONS[operation], *["light"] * num_lights]
    uses = np.full((len(_ORDERS), len(kinds)), -1, np.int64)
    for row, order in zip(uses, _ORDERS.tolist(), strict=True):
        slot = 0
        for operation in order:
            if operation in operations:
                kind = "light" if operation in (BRIGHTNESS, CONTRAST) else OPERATIONS[operation]
                slot = next(number for number in range(slot, len(kinds)) if kinds[number] == kind)
                row[slot] = operation
                slot += 1
    return tuple(kinds), uses


def _light(pixels: Any, factor: Any, uses_contrast: Any | None) -> Any:
    """Mix photos with black, or for a contrast with the mean of their grey; ``factor`` is the photo's own part."""
    if uses_contrast is None:
        return fn.brightness_contrast(pixels, brightness=factor)
    grey = fn.reductions.mean(fn.color_space_conversion(pixels, image_type=types.RGB, output_type=types.GRAY))
    if pixels.device != "gpu":
        return fn.brightness_contrast(pixels, contrast=factor, contrast_center=grey * uses_contrast)
    # On a GPU an operator's arguments must be on the CPU, but the mean is not.
    factor, uses_contrast = factor.gpu(), uses_contrast.gpu()
    return _grey_levels(pixels * factor + grey * uses_contrast * (1.0 - factor))


def _hue(pixels: Any, shift: Any) -> Any:
    """Turn the hue by ``shift``, in turns, in HSV. (DALI's own ``fn.hue`` turns it in YIQ, which gives other colours.)

    Alvy Ray Smith, "Color Gamut Transform Pairs", SIGGRAPH 1978; with the hue in sixths of a turn, each channel is the
    lowest one plus the difference of highest and lowest times a trapezoid wave of the hue.
    """
    red, green, blue = (fn.cast(pixels[:, :, channel : channel + 1], dtype=types.FLOAT) for channel in range(3))
    highest_other, lowest_other = math.max(green, blue), math.min(green, blue)
    high, low = math.max(red, highest_other), math.min(red, lowest_other)
    chroma = high - low
    # Times the chroma, a wave of the hue that is 2 at red and -1 at cyan, without a mask for each of its six parts: how
    # far red is above the lowest channel, plus what it exceeds both others by, minus what it falls short of them.
    wave = (red + high) - (highest_other + lowest_other)
    side = (green >= blue) * 2.0 - 1.0
    hue = side * (2.0 - wave / math.max(chroma, 1.0)) + shift * 6.0
    hue = hue - math.floor(hue * (1 / 6)) * 6.0
    waves = (math.abs(hue - 3.0) - 1.0, 2.0 - math.abs(hue - 2.0), 2.0 - math.abs(hue - 4.0))
    return fn.cat(*(_grey_levels(low + chroma * math.clamp(wave, 0.0, 1.0)) for wave in waves), axis=2)


def _grey_levels(values: Any) -> Any:
    """Round to whole numbers in 0..255: the operator rounds and saturates."""
    return fn.cast(values, dtype=types.UINT8)
