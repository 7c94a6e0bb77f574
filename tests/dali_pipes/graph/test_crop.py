"""Crop windows are those of torchvision."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchvision.transforms import RandomResizedCrop
from torchvision.transforms.functional import resize

from dali_pipes.graph.pipelines import center_crop_start, resized_shape
from dali_pipes.graph.random import CROP_TRIES, resized_crop

SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)


def windows(sizes: list[tuple[int, int]], uniforms: np.ndarray, **options: object) -> np.ndarray:
    height, width = (np.array(side, np.int32) for side in zip(*sizes, strict=True))
    return resized_crop(height, width, uniforms, **({"scale": SCALE, "ratio": RATIO} | options))


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 4000), st.integers(1, 4000)), min_size=1, max_size=8), st.integers(0, 2**32 - 1)
)
def test_resized_crop_lies_in_the_photo(sizes: list[tuple[int, int]], seed: int) -> None:
    """Whatever the photo's shape: a window of at least one pixel, inside it."""
    uniforms = np.random.default_rng(seed).random((len(sizes), 2 * CROP_TRIES + 2))
    for (height, width), (top, left, rows, columns) in zip(sizes, windows(sizes, uniforms).tolist(), strict=True):
        assert rows >= 1
        assert columns >= 1
        assert 0 <= top <= height - rows
        assert 0 <= left <= width - columns


def test_resized_crop_is_distributed_as_torchvisions() -> None:
    """Area share, ratio and place have torchvision's means and spreads: 4,000 draws of each for one photo."""
    height, width, count = 375, 500, 4000
    ours = windows([(height, width)] * count, np.random.default_rng(1).random((count, 22))).astype(float)
    torch.manual_seed(1)
    photo = torch.empty(3, height, width)
    theirs = np.array([RandomResizedCrop.get_params(photo, list(SCALE), list(RATIO)) for _ in range(count)], float)

    def features(drawn: np.ndarray) -> np.ndarray:
        top, left, rows, columns = drawn.T
        return np.stack([rows * columns / (height * width), np.log(columns / rows), top, left], axis=1)

    a, b = features(ours), features(theirs)
    error = np.sqrt((a.var(axis=0) + b.var(axis=0)) / count)
    assert (np.abs(a.mean(axis=0) - b.mean(axis=0)) < 4.5 * error).all()
    assert np.allclose(a.std(axis=0), b.std(axis=0), rtol=0.06)


@pytest.mark.parametrize(
    ("size", "ratio", "expected"),
    [
        ((100, 100), 2.0, [(0, 0, 50, 100), (50, 0, 50, 100)]),  # exactly as wide as the photo
        ((100, 100), 0.5, [(0, 0, 100, 50), (0, 50, 100, 50)]),  # exactly as high
    ],
)
def test_resized_crop_that_just_fits_is_placed_at_random(size: tuple, ratio: float, expected: list[tuple]) -> None:
    """Half of the photo's area, from one edge to the other: it is a try that fits, and not the centre."""
    uniforms = np.full((2, 2 * CROP_TRIES + 2), 0.5)
    uniforms[:, -2:] = [[0.0, 0.0], [0.999, 0.999]]
    assert windows([size] * 2, uniforms, scale=(0.5, 0.5), ratio=(ratio, ratio)).tolist() == list(map(list, expected))


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((10, 1000), (0, 493, 10, 13)),  # too wide for any try: the centre, of the widest ratio allowed
        ((1000, 10), (493, 0, 13, 10)),
    ],
)
def test_resized_crop_falls_back_to_the_centre_as_torchvision_does(size: tuple, expected: tuple) -> None:
    """A photo so narrow that no try fits."""
    uniforms = np.full((1, 22), 0.999)
    assert tuple(windows([size], uniforms, scale=(0.9, 1.0))[0].tolist()) == expected
    torch.manual_seed(0)
    assert RandomResizedCrop.get_params(torch.empty(3, *size), [0.9, 1.0], list(RATIO)) == expected


@given(st.integers(1, 5000), st.integers(1, 2000))
def test_center_crop_start_is_torchvisions(size: int, crop: int) -> None:
    """Rounding half to even where it cuts, down where it pads: `torchvision.transforms.functional.center_crop`."""
    expected = round((size - crop) / 2) if size > crop else -((crop - size) // 2)
    assert center_crop_start(np.array([size], np.int32), crop).tolist() == [expected]


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 60), st.integers(1, 60), st.integers(1, 40))
def test_resized_shape_is_torchvisions(height: int, width: int, shorter_side: int) -> None:
    """The longer side is rounded down."""
    expected = resize(torch.empty(1, height, width), [shorter_side]).shape[1:]
    found = resized_shape(np.array([[height, width]], np.int32), shorter_side)
    assert tuple(found[0].tolist()) == tuple(expected)
