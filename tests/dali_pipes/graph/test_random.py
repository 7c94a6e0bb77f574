"""Random numbers of a graph stay within their bounds."""

import math

import numpy as np

import dali_pipes as dp


def test_uniform_never_reaches_its_upper_bound() -> None:
    """[low, high), in float32 too."""

    class Always:
        def array(self, function):
            class Batch:
                def uniforms(self, name: str, num: int) -> np.ndarray:
                    return np.array([[0.0], [1 - 2**-32]])

            return function(Batch())

    drawn = dp.Random(Always()).uniform(2.0, 3.0)
    assert drawn.tolist()[0] == 2.0
    assert math.nextafter(3.0, 0) > drawn.tolist()[1] > 2.99
