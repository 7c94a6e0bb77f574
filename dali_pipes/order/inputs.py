"""The checked inputs of an order besides the manifest and the selection: seed, epoch, a few options; and buckets.

Buckets are pure arithmetic on heights and widths, with correctly rounded float64 divisions only: the same on every
machine.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from dali_pipes.arguments import as_bool, as_integer, as_number
from dali_pipes.arrays import Int64s

BucketIds = npt.NDArray[np.uint16]

# Heights and widths that are tried. A set has at most twice as many shapes.
MAX_MULTIPLES = 1 << 12


@dataclass(frozen=True, kw_only=True)
class Buckets:
    """Aspect-ratio buckets: each batch has photos of one bucket, at its shape. Made by `buckets`."""

    area: int
    step: int = 32
    max_aspect: float = 2.0
    photo: str | None = None

    def __post_init__(self) -> None:
        for name in ("area", "step"):
            object.__setattr__(self, name, as_integer(name, getattr(self, name)))
        object.__setattr__(self, "max_aspect", as_number("max_aspect", self.max_aspect))
        if self.photo is not None and not isinstance(self.photo, str):
            raise TypeError(f"photo must be the name of a component, or None, got {self.photo!r}")
        if self.step < 1:
            raise ValueError(f"step must be positive, got {self.step}")
        if not (math.isfinite(self.max_aspect) and self.max_aspect >= 1):
            raise ValueError(
                f"max_aspect must be a finite number from 1 on, the longer side by the shorter, got {self.max_aspect}"
            )
        if self.area < self.step**2:
            raise ValueError(
                f"area must be at least step * step, {self.step**2} pixels, got {self.area}; pass a smaller step"
            )
        if math.isqrt(int(self.area * self.max_aspect)) > self.step * MAX_MULTIPLES:
            raise ValueError(
                f"area={self.area} has sides of more than {MAX_MULTIPLES} steps of {self.step}; pass a larger step"
            )

    @cached_property
    def shapes(self) -> Int64s:
        """int64 [buckets, 2]: height and width of each bucket's photos, the widest first.

        For each width that is a multiple of ``step`` the height is the largest multiple with at most ``area`` pixels,
        as in NovelAI's buckets ("NovelAI Improvements on Stable Diffusion", 2022); likewise for each height, so that
        the set is the same for turned photos; and the largest square. Shapes beyond ``max_aspect`` are left out. The
        multi-aspect training of SDXL (Podell et al., 2023, section 2.3) has such a set, with ``area`` 1024 * 1024 and
        ``step`` 64.

        >>> Buckets(area=256 * 256, step=32, max_aspect=2).shapes.tolist()
        [[192, 320], [224, 288], [256, 256], [288, 224], [320, 192]]
        """
        step, square = self.step, math.isqrt(self.area) // self.step * self.step
        found = {(square, square)}
        for side in range(step, math.isqrt(int(self.area * self.max_aspect)) + 1, step):
            other = self.area // side // step * step
            if other and max(side, other) <= self.max_aspect * min(side, other):
                found |= {(side, other), (other, side)}
        by_aspect = sorted(found, key=lambda shape: (shape[0] / shape[1], shape))
        return np.array(by_aspect, np.int64)

    def of(self, heights: npt.NDArray[Any], widths: npt.NDArray[Any]) -> BucketIds:
        """Find the bucket of each photo, the nearest in the logarithm of the aspect ratio: uint16 [N].

        The limit between two neighbours is the geometric mean of their aspect ratios; a photo on it belongs to the
        wider one. A photo without a size, 0 x 0, counts as square.

        >>> Buckets(area=256 * 256).of(np.array([300, 500, 0]), np.array([400, 200, 0])).tolist()
        [1, 4, 2]
        """
        aspects = self.shapes[:, 0] / self.shapes[:, 1]
        known = (heights > 0) & (widths > 0)
        rows = np.where(known, heights, 1).astype(np.float64)
        columns = np.where(known, widths, 1).astype(np.float64)
        # Squared, so that no root or logarithm is rounded in one way here and in another there.
        limits = aspects[:-1] * aspects[1:]
        ratios = rows / columns
        return np.searchsorted(limits, ratios * ratios, side="left").astype(np.uint16)

    def cover(self, heights: npt.NDArray[Any], widths: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        """Compute the share of each photo's pixels that stays when its bucket's shape is cut from it: float64 [N].

        >>> Buckets(area=256 * 256).cover(np.array([300]), np.array([400])).round(3).tolist()
        [0.964]
        """
        shapes = self.shapes[self.of(heights, widths)]
        ratio = (heights / np.maximum(widths, 1)) / (shapes[:, 0] / shapes[:, 1])
        known = (heights > 0) & (widths > 0)
        return np.where(known, np.minimum(ratio, 1 / np.where(known, ratio, 1)), 1.0)


def buckets(*, area: int, step: int = 32, max_aspect: float = 2.0, photo: str | None = None) -> Buckets:
    """Describe aspect-ratio buckets, for ``Select(buckets=...)``: each batch has photos of one shape.

    Args:
        area: The largest number of pixels of a shape. All shapes have about as many.
        step: Heights and widths are multiples of it: those that the model needs, such as 32 or its patch size.
        max_aspect: The largest ratio of the longer side to the shorter. A longer photo is in the outermost bucket,
            and loses more at its ends.
        photo: The component whose heights and widths count, as the graph names it; ``None``: the sample's only photo.

    Raises:
        TypeError, ValueError: If a value is impossible.

    >>> len(buckets(area=256 * 256, step=32, max_aspect=2).shapes)
    5
    """
    return Buckets(area=area, step=step, max_aspect=max_aspect, photo=photo)


@dataclass(frozen=True, kw_only=True)
class OrderInputs:
    """Everything that the order depends on beside the manifest and the selection."""

    seed: int = 0
    epoch: int = 0
    shuffle: bool = True
    """``False``: the manifest's order, which depends neither on the seed nor on the windows."""
    shuffle_window: int | Literal["all"] = "all"
    """Bytes of shards that are shuffled together; ``"all"``: the whole slice, an exact global shuffle. Each data set
    has its own windows."""
    num_slices: int = 1
    """Parts of the shard list; each node stages one or more. Each step takes as many samples from every slice."""
    epoch_samples: int | None = None
    """Samples of an epoch, over all ranks. The next epoch continues where this one stopped, pass after pass. ``None``:
    an epoch is a pass."""
    weights: tuple[float, ...] | None = None
    """Proportions of several data sets in an epoch; ``None``: in proportion to their numbers of samples."""
    shapes: Buckets | None = None
    """How photos are grouped into batches; ``None``: batches have any photos, as the order gives them."""

    def __post_init__(self) -> None:
        for name in ("seed", "epoch", "num_slices", "epoch_samples", "shuffle_window"):
            if (value := getattr(self, name)) not in (None, "all"):
                object.__setattr__(self, name, as_integer(name, value))
        object.__setattr__(self, "shuffle", as_bool("shuffle", self.shuffle))
        if self.epoch < 0:
            raise ValueError(f"epoch must not be negative, got {self.epoch}")
        if self.num_slices < 1:
            raise ValueError(f"slices must be positive, got {self.num_slices}")
        if self.shuffle_window != "all" and self.shuffle_window < 1:
            raise ValueError(f"window_bytes must be 'all' or a positive number of bytes, got {self.shuffle_window!r}")
        if self.epoch_samples is not None and (self.epoch_samples < 1 or self.epoch_samples % self.num_slices):
            raise ValueError(
                f"epoch_samples must be a positive multiple of slices, got {self.epoch_samples} and {self.num_slices}"
            )
        if self.shapes is not None and self.num_slices > 1:
            raise ValueError(
                f"buckets need slices=1, got {self.num_slices}: each slice has other photos, so steps could not take "
                "as many groups from every slice; leave slices out, or Select(buckets=)"
            )
        if self.weights is not None and not all(math.isfinite(weight) and weight > 0 for weight in self.weights):
            raise ValueError(f"weights must be a tuple of positive numbers, got {self.weights!r}")
