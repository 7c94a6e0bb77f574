"""The set of shapes and the shape of each photo, against a loop with logarithms."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dali_pipes.order.inputs import Buckets, buckets


@st.composite
def described(draw: st.DrawFn) -> Buckets:
    step = draw(st.integers(1, 64))
    return buckets(
        area=draw(st.integers(step**2, 64 * step**2)), step=step, max_aspect=draw(st.floats(1, 5).map(float))
    )


@settings(max_examples=80, deadline=None)
@given(described())
def test_shapes_fill_the_area_as_far_as_they_can(of: Buckets) -> None:
    """Multiples of the step, never more pixels than the area, the largest for their width or height; turned, too."""
    shapes = [tuple(shape) for shape in of.shapes.tolist()]
    assert len(set(shapes)) == len(shapes)
    assert sorted(shapes, key=lambda shape: shape[0] / shape[1]) == shapes
    assert set(shapes) == {(width, height) for height, width in shapes}
    side = math.isqrt(of.area) // of.step * of.step
    assert (side, side) in shapes
    for height, width in shapes:
        assert height % of.step == width % of.step == 0
        assert 0 < height * width <= of.area
        assert max(height, width) <= of.max_aspect * min(height, width)
        by_width = (height + of.step) * width > of.area
        by_height = height * (width + of.step) > of.area
        assert by_width or by_height or height == width


@settings(max_examples=80, deadline=None)
@given(described(), st.lists(st.tuples(st.integers(1, 9000), st.integers(1, 9000)), min_size=1, max_size=40))
def test_bucket_is_the_nearest_in_the_logarithm_of_the_aspect(of: Buckets, sizes: list[tuple[int, int]]) -> None:
    """As near as any other, to the rounding of the test's own logarithms; the share that stays is that of the cut."""
    heights, widths = np.array(sizes).T
    from dali_pipes.graph.pipelines import covering_crop

    found = of.of(heights, widths)
    assert found.dtype == np.uint16
    shares = of.cover(heights, widths)
    crops = covering_crop(np.array(sizes), of.shapes[found], None)
    for row, (height, width) in enumerate(sizes):
        away = [abs(math.log(height / width) - math.log(rows / columns)) for rows, columns in of.shapes]
        assert away[found[row]] <= min(away) + 1e-9
        rows, columns = crops[row, 2:]
        assert math.isclose(shares[row], math.exp(-away[found[row]]), rel_tol=1e-9)
        assert abs(rows * columns - shares[row] * height * width) <= max(height, width)


def test_photo_on_a_limit_is_in_the_wider_bucket() -> None:
    """1 to 1 and 4 to 1: the limit is 2 to 1, exactly."""
    of = buckets(area=4 * 32 * 32, step=32, max_aspect=4)
    vars(of)["shapes"] = np.array([[32, 128], [64, 64], [128, 32]])
    assert of.of(np.array([200, 201, 100, 100]), np.array([100, 100, 200, 201])).tolist() == [1, 2, 0, 0]


def test_shape_at_the_largest_aspect_is_one() -> None:
    assert buckets(area=2 * 64 * 64, step=64, max_aspect=2).shapes.tolist() == [[64, 128], [64, 64], [128, 64]]


def test_photo_without_a_size_is_square() -> None:
    of = buckets(area=64 * 64, step=16)
    assert of.shapes[of.of(np.array([0, 0, 9]), np.array([0, 9, 0]))].tolist() == [[64, 64]] * 3
    assert of.cover(np.array([0, 64]), np.array([0, 32])).tolist() == pytest.approx([1, 0.5 / 0.6])
