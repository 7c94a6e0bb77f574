"""The windows that random crops draw, and what arrays of a graph may be."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchvision.transforms import RandomResizedCrop

import dali_pipes as dp
from dali_pipes.pipelines import center_crop_start
from dali_pipes.seam import CROP_TRIES, resized_crop

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


@pytest.mark.parametrize(
    ("array", "text"),
    [
        (lambda batch: batch.ordinals.astype(np.float64), r"dtype one of float32, .*got float64 \[1\]"),
        (lambda batch: batch.ordinals.tolist(), "got list; convert it"),
        (lambda batch: np.zeros(3, np.float32), r"one row for each of 1 samples, .*got float32 \[3\]"),
    ],
)
def test_array_that_dali_cannot_take_is_refused_when_it_is_built(small_shards: Path, array, text: str) -> None:
    """What it must be, what it is, and how to make it so."""

    def graph(components: dp.Components, random: dp.Random) -> dict[str, object]:
        return {"bytes": components["cls"], "array": components.array(array)}

    with pytest.raises(TypeError, match=text):
        dp.loader(small_shards, graph, batch_size=5, device="cpu")


def test_array_may_look_at_keys(small_shards: Path) -> None:
    """The function is tried on a real sample when the pipeline is built, so natural code works."""

    def graph(components: dp.Components, random: dp.Random) -> dict[str, object]:
        lengths = components.array(lambda batch: np.array([len(key) for key in batch.keys]))
        return {"bytes": components["cls"], "length": lengths}

    with dp.loader(small_shards, graph, batch_size=5, device="cpu") as loader:
        assert next(loader)[0]["length"].tolist() == [6] * 5


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


def test_outputs_of_different_shapes_are_refused_by_name(small_shards: Path) -> None:
    """A graph that neither crops nor resizes: the output and what to do, not a complaint about the samples."""

    def graph(components: dp.Components, random: dp.Random) -> dict[str, object]:
        from nvidia.dali import fn

        return {"photo": fn.decoders.image(components["image.jpg"], device=components.device)}

    text = "output 'photo' of the graph has samples of different shapes"
    with dp.loader(small_shards, graph, batch_size=5, device="cpu") as loader, pytest.raises(ValueError, match=text):
        next(loader)


def test_component_without_a_size_in_the_index_is_refused(tmp_path: Path) -> None:
    """A JPEG under a name that is no photo's: its height and width are not in the index, so no crop can be computed."""
    from tests.conftest import Sample, photo_bytes, write_shards

    samples = [Sample("a", {"img": photo_bytes(0, 20, 20), "cls": b"1"})]
    shards = write_shards(tmp_path, samples, per_shard=1)
    with pytest.raises(dp.DataError, match="key 'a': component 'img' has no height and width in the index"):
        dp.loader(shards, dp.classification_eval(resize=16, crop=16, photo="img"), batch_size=1, device="cpu")


def test_output_named_key_is_refused_with_keys(small_shards: Path) -> None:
    """Two things of one name in a batch."""

    def graph(components: dp.Components, random: dp.Random) -> dict[str, object]:
        return {"key": components.label, "bytes": components["cls"]}

    with pytest.raises(ValueError, match="with_keys adds 'key', which is an output of the graph already"):
        dp.loader(small_shards, graph, batch_size=5, device="cpu", with_keys=True)
