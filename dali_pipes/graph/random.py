"""Random numbers that belong to the sample, as inputs of the decode pipeline.

Each is made of the sample's own uniform numbers. numpy guarantees that its raw integers stay the same, but not its
distributions; so these are written out here.
"""

import math
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any

import numpy as np
import numpy.typing as npt

from dali_pipes.arguments import as_integer, as_number
from dali_pipes.arrays import Float32s, Float64s, Int32s
from dali_pipes.graph import color
from dali_pipes.graph.inputs import Components, once_a_batch
from dali_pipes.reader.batch import Batch

CROP_TRIES = 10
"""After this number of tries torchvision's RandomResizedCrop takes the centre, and its RandomErasing erases nothing."""
GAMMA_TRIES = 8
"""Each try is taken with a probability over 0.95; if none is, once in about 4e10, the draw is the mode's neighbour."""
GAMMA_UNIFORMS = 3 * GAMMA_TRIES + 1


class Random:
    """Random numbers that belong to the sample; the second argument of a graph.

    A sample's numbers are a function of ``(seed, epoch, ordinal, occurrence, stream)``: they are the same with another
    batch size, with another number of ranks and in a resumed run. (On a GPU the same numbers do not always give the
    same pixels to the last bit, see `dali_pipes.tuning`.) Each call has a stream of its own, named by the call's kind
    and number. Pass ``stream=`` to name it, so that it stays the same when calls are added before this one.

    An argument that is out of its range is a `ValueError`, one of another type a `TypeError`.
    """

    def __init__(self, components: Components) -> None:
        self._components = components
        self._num_streams = 0

    def uniform(self, low: float = 0.0, high: float = 1.0, *, stream: str | None = None) -> Any:
        """Draw numbers uniform in ``[low, high)``: a node of float32 scalars."""
        low, high = _float32("low", low), _float32("high", high)
        if low > high:
            raise ValueError(f"low must not be larger than high, got {low} and {high}")
        return self._drawn("uniform", stream, 1, _uniforms(low, high))

    def coin_flip(self, probability: float = 0.5, *, stream: str | None = None) -> Any:
        """Draw 1 with this probability, else 0: a node of int32 scalars, as ``mirror=`` takes it."""
        probability = _probability(probability)
        return self._drawn("coin_flip", stream, 1, lambda drawn: (drawn[:, 0] < probability).astype(np.int32))

    def resized_crop(
        self,
        component: str,
        *,
        scale: tuple[float, float] = (0.08, 1.0),
        ratio: tuple[float, float] = (3 / 4, 4 / 3),
        orient: bool = False,
        stream: str | None = None,
    ) -> tuple[Any, Any]:
        """Draw a random crop of a photo as torchvision's ``RandomResizedCrop`` does, for `fn.decoders.image_slice`.

        ``scale`` is the smallest and largest share of the photo's area, ``ratio`` the smallest and largest width /
        height. With ``orient`` it lies in the upright photo, see `Components.orient`; by default in the stored one.

        Returns:
            Nodes of the crop's start and of its shape, each int32 [2] (rows, columns) in pixels.
        """
        if not all(0 <= share < float("inf") for share in scale):
            raise ValueError(f"scale must be a range of shares from 0 on, got {scale!r}")
        if not all(0 < limit < float("inf") for limit in ratio):
            raise ValueError(f"ratio must be a range of positive numbers, got {ratio!r}")
        name = self._stream_name("resized_crop", stream)
        size = self._components.size(component, orient=orient)

        def crop(batch: Batch) -> Int32s:
            height, width = size(batch)
            return resized_crop(height, width, batch.uniforms(name, 2 * CROP_TRIES + 2), scale=scale, ratio=ratio)

        return self._start_and_shape(crop)

    def normal(self, mean: float = 0.0, std: float = 1.0, *, stream: str | None = None) -> Any:
        """Draw normal numbers: a node of float32 scalars."""
        mean, std = _float32("mean", mean), _float32("std", std)
        if std < 0:
            raise ValueError(f"std must not be negative, got {std}")
        return self._drawn("normal", stream, 2, lambda drawn: (mean + std * normals(drawn)).astype(np.float32))

    def beta(self, alpha: float, beta: float, *, stream: str | None = None) -> Any:
        """Draw numbers of the Beta distribution, in [0, 1]: a node of float32 scalars."""
        for argument, value in (("alpha", alpha), ("beta", beta)):
            if not 0 < as_number(argument, value) < float("inf"):
                raise ValueError(f"{argument} must be positive, got {value}")

        def draw(drawn: Float64s) -> Float32s:
            return betas(drawn, alpha=alpha, beta=beta).astype(np.float32)

        return self._drawn("beta", stream, 2 * GAMMA_UNIFORMS, draw)

    def choice(
        self,
        values: int | Sequence[float],
        *,
        probabilities: Sequence[float] | None = None,
        stream: str | None = None,
    ) -> Any:
        """Draw one of some numbers for each sample: a node of int32 scalars, or float32 if a value is a float.

        Of ``values``, an integer n means 0 to n - 1. Without ``probabilities``, one for each value, all are as likely;
        they are divided by their sum.
        """
        given = values if isinstance(values, Sequence) else range(as_integer("values", values))
        if not given:
            raise ValueError(f"values must have at least one entry, got {values!r}")
        numbers = [_float32("a value", value) for value in given]
        weights = np.ones(len(numbers)) if probabilities is None else np.asarray(probabilities, np.float64)
        if weights.shape != (len(numbers),) or not (np.isfinite(weights) & (weights >= 0)).all() or not weights.any():
            raise ValueError(
                f"probabilities must have a number for each of {len(numbers)} values, none negative and one positive, "
                f"got {probabilities!r}"
            )
        # A float of numpy is seldom one of Python.
        are_whole = all(isinstance(value, Integral) for value in given)
        limits = np.iinfo(np.int32)
        if are_whole and (wrong := [value for value in numbers if not limits.min <= value <= limits.max]):
            raise ValueError(f"values must be in [{limits.min}, {limits.max}], got {wrong[0]:.0f}; or pass floats")
        table = np.array(numbers).astype(np.int32 if are_whole else np.float32)
        # The last edge is 1, so that rounding leaves no gap below it; an entry of probability 0 is never taken.
        edges = (np.cumsum(weights) / weights.sum())[: np.flatnonzero(weights)[-1]]
        return self._drawn("choice", stream, 1, lambda drawn: table[np.searchsorted(edges, drawn[:, 0], side="right")])

    def rotation(self, degrees: float | tuple[float, float], *, stream: str | None = None) -> Any:
        """Draw an angle as torchvision's ``RandomRotation`` does: a node of float32 scalars, in degrees,
        counter-clockwise. ``degrees`` is the largest angle in both directions, or the smallest and the largest.

        ``fn.rotate(photo, angle=angle, keep_size=True, fill_value=0)`` turns a photo; with ``interp_type=INTERP_NN``,
        and the same node, its mask.
        """
        if isinstance(degrees, Sequence):
            if len(degrees) != 2:
                raise TypeError(f"degrees must be a number or a pair of numbers, got {degrees!r}")
            low, high = (_float32("degrees", limit) for limit in degrees)
        else:
            high = _float32("degrees", degrees)
            low = -high
        if not low <= high:
            raise ValueError(f"degrees must be a positive number, or a smallest and a largest angle, got {degrees!r}")
        return self._drawn("rotation", stream, 1, _uniforms(low, high))

    def erasing(
        self,
        height: int,
        width: int,
        *,
        probability: float = 0.5,
        scale: tuple[float, float] = (0.02, 0.33),
        ratio: tuple[float, float] = (0.3, 3.3),
        stream: str | None = None,
    ) -> tuple[Any, Any]:
        """Draw a rectangle to erase as torchvision's ``RandomErasing`` does, in images of ``height`` and ``width``.

        ``fn.erase(image, anchor=start, shape=shape, axis_names="HW", fill_value=0)`` erases it. torchvision's
        ``value="random"``, another number for each pixel, has no counterpart here. With ``1 - probability`` it is
        empty. ``scale`` is the smallest and largest share of the image's area, ``ratio`` of height / width.

        Returns:
            Nodes of the rectangle's start and of its shape, each float32 [2] (row, column) in pixels, as `fn.erase`
            takes them.
        """
        rows, columns = as_integer("height", height), as_integer("width", width)
        if rows < 1 or columns < 1:
            raise ValueError(f"height and width must be positive, got {rows} and {columns}")
        if not 0 <= scale[0] <= scale[1] <= 1:
            raise ValueError(f"scale must be a range in [0, 1], got {scale!r}")
        if not 0 < ratio[0] <= ratio[1]:
            raise ValueError(f"ratio must be a range of positive numbers, got {ratio!r}")
        probability = _probability(probability)
        name = self._stream_name("erasing", stream)

        def rectangle(batch: Batch) -> Float32s:
            uniforms = batch.uniforms(name, 2 * CROP_TRIES + 3)
            drawn = erased_rectangle(rows, columns, uniforms, probability=probability, scale=scale, ratio=ratio)
            return drawn.astype(np.float32)

        return self._start_and_shape(rectangle)

    def color_jitter(
        self,
        *,
        brightness: float | tuple[float, float] | None = None,
        contrast: float | tuple[float, float] | None = None,
        saturation: float | tuple[float, float] | None = None,
        hue: float | tuple[float, float] | None = None,
        probability: float = 1.0,
        stream: str | None = None,
    ) -> color.ColorJitter:
        """Draw changes of colour as torchvision's ``ColorJitter`` does, in an order of the four that is random, too.

        Call the result with decoded photos, uint8 [H, W, 3]: ``photo = random.color_jitter(brightness=0.4)(photo)``.
        Pixels are within a few grey levels of those of torchvision's ``adjust_brightness`` and so on; the hue is turned
        in HSV, as there. On a CPU the hue takes most of the time; without ``hue=`` the others are fast.

        Args:
            brightness: x for factors in ``[max(0, 1 - x), 1 + x]``, or the smallest and the largest factor.
            contrast: Likewise.
            saturation: Likewise. ``(0, 0)`` makes grey photos: with a ``probability``, torchvision's
                ``RandomGrayscale``.
            hue: x for turns in ``[-x, x]``, or the smallest and the largest turn, in ``[-0.5, 0.5]``.
            probability: Of any change, as in ``RandomApply([ColorJitter(...)], p=probability)``.
            stream: Name of the stream.
        """
        given = zip(color.OPERATIONS, (brightness, contrast, saturation, hue), strict=True)
        ranges = [color.jitter_range(operation, value) for operation, value in given]
        name = self._stream_name("color_jitter", stream)
        probability = _probability(probability)
        return color.ColorJitter(
            self._components, lambda batch: batch.uniforms(name, color.NUM_UNIFORMS), ranges, probability
        )

    def _drawn(self, kind: str, stream: str | None, num: int, function: Callable[[Float64s], npt.NDArray[Any]]) -> Any:
        """A node of what ``function`` makes of ``num`` uniform numbers of each sample, float64 [B, num]."""
        name = self._stream_name(kind, stream)
        return self._components.array(lambda batch: function(batch.uniforms(name, num)))

    def _start_and_shape(self, function: Callable[[Batch], npt.NDArray[Any]]) -> tuple[Any, Any]:
        rectangle = once_a_batch(function)
        return (
            self._components.array(lambda batch: rectangle(batch)[:, :2]),
            self._components.array(lambda batch: rectangle(batch)[:, 2:]),
        )

    def _stream_name(self, kind: str, stream: str | None) -> str:
        self._num_streams += 1
        return stream if stream is not None else f"{kind}/{self._num_streams - 1}"


def resized_crop(
    height: Int32s, width: Int32s, uniforms: Float64s, *, scale: tuple[float, float], ratio: tuple[float, float]
) -> Int32s:
    """Draw crops as torchvision's ``RandomResizedCrop.get_params`` does, from given uniform numbers.

    The first try that fits into the photo (height and width int32 [B]) is placed uniformly. If no try fits, the crop is
    the centre, with the nearest ratio that is allowed. ``uniforms`` is float64 [B, 22] in [0, 1).

    Returns:
        int32 [B, 4]: start row, start column, rows, columns.
    """
    area = (height.astype(np.float64) * width)[:, None]  # [B, try]
    columns, rows = _tried_sides(area, uniforms, scale=scale, ratio=ratio)
    fits = (columns > 0) & (columns <= width[:, None]) & (rows > 0) & (rows <= height[:, None])
    pick = np.argmax(fits, axis=1)[:, None]
    drawn_rows, drawn_columns = (np.take_along_axis(drawn, pick, axis=1)[:, 0] for drawn in (rows, columns))
    whole_rows = np.where(width < ratio[0] * height, np.rint(width / ratio[0]), height).astype(np.int32)
    whole_columns = np.where(width > ratio[1] * height, np.rint(height * ratio[1]), width).astype(np.int32)
    any_fits = np.asarray(fits.any(axis=1))
    final_rows = np.where(any_fits, drawn_rows, whole_rows)
    final_columns = np.where(any_fits, drawn_columns, whole_columns)
    place = np.where(any_fits[:, None], uniforms[:, -2:], 0.5)
    slack = np.stack([height - final_rows, width - final_columns], axis=1)
    # A drawn crop can start at each of slack + 1 places with equal chance; the centre starts at slack // 2.
    start = np.where(any_fits[:, None], np.floor(place * (slack + 1)), slack // 2).astype(np.int32)
    return np.concatenate([start, np.stack([final_rows, final_columns], axis=1)], axis=1).astype(np.int32)


def erased_rectangle(
    height: int,
    width: int,
    uniforms: Float64s,
    *,
    probability: float,
    scale: tuple[float, float],
    ratio: tuple[float, float],
) -> Int32s:
    """Draw rectangles as torchvision's ``RandomErasing`` does, from given uniform numbers.

    The first try whose sides are both shorter than the image's is placed uniformly. If no try fits, or with ``1 -
    probability``, the rectangle is empty. ``uniforms`` is float64 [B, 23] in [0, 1).

    Returns:
        int32 [B, 4]: start row, start column, rows, columns.
    """
    rows, columns = _tried_sides(height * width, uniforms, scale=scale, ratio=ratio)
    fits = (rows < height) & (columns < width)
    pick = np.argmax(fits, axis=1)[:, None]
    is_erased = fits.any(axis=1) & (uniforms[:, -1] < probability)
    shape = np.concatenate([np.take_along_axis(side, pick, axis=1) for side in (rows, columns)], axis=1)
    shape = np.where(is_erased[:, None], shape, 0)
    start = np.floor(uniforms[:, -3:-1] * (np.array([height, width]) - shape + 1))
    return np.concatenate([start, shape], axis=1).astype(np.int32)


def _tried_sides(
    area: Float64s | int, uniforms: Float64s, *, scale: tuple[float, float], ratio: tuple[float, float]
) -> tuple[Int32s, Int32s]:
    """Draw ten rectangles for each sample: a share of ``area``, uniform in ``scale``, and a ratio of the two sides,
    log-uniform in ``ratio``. The sides are int32 [B, try].
    """
    tries = uniforms[:, : 2 * CROP_TRIES].reshape(len(uniforms), CROP_TRIES, 2)
    target = area * (scale[0] + (scale[1] - scale[0]) * tries[:, :, 0])
    aspect = np.exp(math.log(ratio[0]) + (math.log(ratio[1]) - math.log(ratio[0])) * tries[:, :, 1])
    return np.rint(np.sqrt(target * aspect)).astype(np.int32), np.rint(np.sqrt(target / aspect)).astype(np.int32)


def normals(uniforms: Float64s) -> Float64s:
    """Make standard normal numbers of pairs of uniform ones: float64 [N, 2] in [0, 1) -> float64 [N].

    G. E. P. Box, M. E. Muller, "A Note on the Generation of Random Normal Deviates", 1958. The uniform numbers are
    multiples of 2**-32, so no result is beyond 6.7.

    >>> normals(np.array([[0.5, 0.0], [0.5, 0.5], [0.0, 0.3]])).round(3).tolist()
    [1.177, -1.177, 0.0]
    """
    radius = np.sqrt(-2 * np.log1p(-uniforms[:, 0]))
    # Adding 0 makes 0 of -0.
    return np.asarray(radius * np.cos(2 * np.pi * uniforms[:, 1]) + 0.0, np.float64)


def betas(uniforms: Float64s, *, alpha: float, beta: float) -> Float64s:
    """Make numbers of Beta(alpha, beta) of uniform ones: float64 [N, 2 * GAMMA_UNIFORMS] -> float64 [N] in [0, 1]."""
    # X / (X + Y) of two Gamma numbers.
    first = log_gammas(uniforms[:, :GAMMA_UNIFORMS], alpha)
    second = log_gammas(uniforms[:, GAMMA_UNIFORMS:], beta)
    with np.errstate(over="ignore"):  # exp may become infinite, and the result 0
        return np.asarray(1 / (1 + np.exp(second - first)), np.float64)


def log_gammas(uniforms: Float64s, shape: float) -> Float64s:
    """Make logarithms of Gamma(shape, 1) numbers of uniform ones: float64 [N, GAMMA_UNIFORMS] -> float64 [N].

    They are logarithms because with a small shape most Gamma numbers are below the smallest float.

    G. Marsaglia, W. W. Tsang, "A Simple Method for Generating Gamma Variables", 2000: of a normal number x and
    ``v = (1 + x / sqrt(9 d))**3`` with ``d = shape - 1/3``, ``d v`` is taken with a probability that depends on x. A
    shape below 1 is drawn with ``shape + 1``, times ``U**(1 / shape)``.
    """
    tries = uniforms[:, :-1].reshape(-1, GAMMA_TRIES, 3)  # [N, try, (two for x, one for the choice)]
    d = (shape if shape >= 1 else shape + 1) - 1 / 3
    x = normals(tries[..., :2].reshape(-1, 2)).reshape(-1, GAMMA_TRIES)
    v = (1 + x / np.sqrt(9 * d)) ** 3
    log_v = np.log(np.where(v > 0, v, 1))
    is_taken = (v > 0) & (np.log1p(-tries[..., 2]) < x**2 / 2 + d - d * v + d * log_v)
    first = np.argmax(is_taken, axis=1)[:, None]
    logs = np.log(d) + np.take_along_axis(log_v, first, axis=1)[:, 0]
    if shape < 1:
        logs = logs + np.log1p(-uniforms[:, -1]) / shape
    return np.asarray(logs, np.float64)


def _uniforms(low: float, high: float) -> Callable[[Float64s], Float32s]:
    # The largest float32 below high: rounding to float32 could reach it.
    last = np.nextafter(np.float32(high), np.float32(low))
    return lambda drawn: np.minimum((low + (high - low) * drawn[:, 0]).astype(np.float32), last)


def _float32(name: str, value: object) -> float:
    number = as_number(name, value)
    if not abs(number) <= np.finfo(np.float32).max:
        raise ValueError(f"{name} must be a finite number in float32, got {value!r}")
    return number


def _probability(probability: float) -> float:
    if not 0 <= as_number("probability", probability) <= 1:
        raise ValueError(f"probability must be in [0, 1], got {probability}")
    return probability
