"""Draws random numbers for many samples without a loader, and compares distributions."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dali_pipes.order.randomness import Stream

if TYPE_CHECKING:
    import dali_pipes as dp

NUM = 20_000


class Batch:
    """Samples 0 to `NUM` - 1 of an epoch, with the numbers of the real generator."""

    def uniforms(self, name: str, num: int) -> npt.NDArray[np.float64]:
        return Stream(5, 2, f"graph/{name}").uniforms(np.arange(NUM), num)


class _Components:
    """Components that compute an array at once."""

    def __init__(self, batch: Any) -> None:
        self._batch = batch

    def array(self, function: Callable[[Any], Any]) -> Any:
        return function(self._batch)


def drawn(batch: Any = None) -> dp.Random:
    """A graph's random numbers as arrays: one row for each of `NUM` samples, or of ``batch``."""
    import dali_pipes as dp

    return dp.Random(_Components(batch or Batch()))  # type: ignore[arg-type]


def distance(one: npt.ArrayLike, other: npt.ArrayLike) -> float:
    """The Kolmogorov-Smirnov statistic: the largest difference of two distribution functions, in units of its spread.

    Two samples of one distribution exceed 2.2 once in 8,000 times.
    """
    first, second = np.sort(np.ravel(one)), np.sort(np.ravel(other))
    both = np.concatenate([first, second])
    shares = [np.searchsorted(values, both, side="right") / len(values) for values in (first, second)]
    return float(np.abs(shares[0] - shares[1]).max() * np.sqrt(len(first) * len(second) / len(both)))


def deviation(counts: npt.NDArray[Any], expected: Any) -> float:
    """The chi-squared statistic of counts against expected counts."""
    return float(((counts - expected) ** 2 / expected).sum())
