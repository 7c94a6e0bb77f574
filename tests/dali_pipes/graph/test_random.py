"""Random numbers of a graph stay within their bounds; crop windows are those of torchvision."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dali_pipes.order.randomness import Stream
from tests.dali_pipes.graph.draws import NUM, drawn
from tests.lazy import Lazy

torch, transforms = Lazy("torch"), Lazy("torchvision.transforms")
ours, pipelines = Lazy("dali_pipes.graph.random"), Lazy("dali_pipes.graph.pipelines")

SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)
NUM_UNIFORMS = 22


def test_uniform_never_reaches_its_upper_bound() -> None:
    """[low, high), in float32 too."""
    batch = SimpleNamespace(uniforms=lambda name, num: np.array([[0.0], [1 - 2**-32]]))
    low, high = drawn(batch).uniform(2.0, 3.0).tolist()
    assert low == 2.0
    assert math.nextafter(3.0, 0) > high > 2.99


def test_streams_are_named_by_kind_and_number() -> None:
    """`uniform/0`, `coin_flip/1`: a name that is given has the same numbers, and a change breaks users' runs."""
    random = drawn()
    found = [random.uniform(), random.coin_flip(0.3), random.uniform(stream="mine"), random.uniform()]
    expected = [
        Stream(5, 2, f"graph/{name}").uniforms(np.arange(NUM), 1)[:, 0]
        for name in ("uniform/0", "coin_flip/1", "mine", "uniform/3")
    ]
    for number in (0, 2, 3):
        assert np.allclose(found[number], expected[number], atol=1e-6)
    assert np.array_equal(found[1], expected[1] < 0.3)
    assert found[1].dtype == np.int32
    assert np.array_equal(drawn().uniform(stream="uniform/0"), found[0])


def windows(sizes: list[tuple[int, int]], uniforms: np.ndarray, **options: object) -> np.ndarray:
    height, width = (np.array(side, np.int32) for side in zip(*sizes, strict=True))
    return ours.resized_crop(height, width, uniforms, **({"scale": SCALE, "ratio": RATIO} | options))


def test_resized_crop_is_distributed_as_torchvisions() -> None:
    """Area share, ratio and place have torchvision's means and spreads: 4,000 draws of each for one photo."""
    height, width, count = 375, 500, 4000
    uniforms = np.random.default_rng(1).random((count, NUM_UNIFORMS))
    torch.manual_seed(1)
    photo = torch.empty(3, height, width)
    theirs = [transforms.RandomResizedCrop.get_params(photo, list(SCALE), list(RATIO)) for _ in range(count)]

    def features(drawn: np.ndarray) -> np.ndarray:
        top, left, rows, columns = drawn.astype(float).T
        return np.stack([rows * columns / (height * width), np.log(columns / rows), top, left], axis=1)

    a, b = features(windows([(height, width)] * count, uniforms)), features(np.array(theirs))
    error = np.sqrt((a.var(axis=0) + b.var(axis=0)) / count)
    assert (np.abs(a.mean(axis=0) - b.mean(axis=0)) < 4.5 * error).all()
    assert np.allclose(a.std(axis=0), b.std(axis=0), rtol=0.06)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((10, 1000), (0, 493, 10, 13)),  # too wide for any try: the centre, of the widest ratio allowed
        ((1000, 10), (493, 0, 13, 10)),
    ],
)
def test_resized_crop_falls_back_to_the_centre_as_torchvision_does(size: tuple, expected: tuple) -> None:
    """A photo so narrow that no try fits."""
    assert tuple(windows([size], np.full((1, NUM_UNIFORMS), 0.999), scale=(0.9, 1.0))[0].tolist()) == expected
    torch.manual_seed(0)
    crop = transforms.RandomResizedCrop.get_params(torch.empty(3, *size), [0.9, 1.0], list(RATIO))
    assert crop == expected


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 60), st.integers(1, 60), st.integers(1, 40))
def test_resized_shape_is_torchvisions(height: int, width: int, shorter_side: int) -> None:
    """The longer side is rounded down."""
    expected = transforms.functional.resize(torch.empty(1, height, width), [shorter_side]).shape[1:]
    found = pipelines.resized_shape(np.array([[height, width]], np.int32), shorter_side)
    assert tuple(found[0].tolist()) == tuple(expected)
