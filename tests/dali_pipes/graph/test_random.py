"""A graph's random numbers have torchvision's distributions, and equal numbers give equal pixels."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from dali_pipes.order.randomness import Stream
from tests.dali_pipes.graph.draws import NUM, Batch, deviation, distance, drawn
from tests.lazy import Lazy
from tests.loaders import batches_of
from tests.shards import Sample, image_bytes, photo_bytes, write_shards

if TYPE_CHECKING:
    import dali_pipes as dp

torch, transforms, v2 = (Lazy(name) for name in ("torch", "torchvision.transforms", "torchvision.transforms.v2"))
reference = Lazy("torchvision.transforms.v2.functional")
fn, types, color = Lazy("nvidia.dali.fn"), Lazy("nvidia.dali.types"), Lazy("dali_pipes.graph.color")
ours, pipelines = Lazy("dali_pipes.graph.random"), Lazy("dali_pipes.graph.pipelines")

SIDE = 48
NUM_PHOTOS = 32
NUM_OF_TORCHVISION = 4000
SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)
NUM_UNIFORMS = 22


def of_torchvision(transform: Any, *names: str, size: int = SIDE) -> npt.NDArray[np.float64]:
    """Parameters that torchvision draws with a fixed seed, float64 [N, name]."""
    torch.manual_seed(11)
    image = [torch.zeros(3, size, size)]
    drawn = [transform.make_params(image) for _ in range(NUM_OF_TORCHVISION)]
    return np.array([[float(one[name]) for name in names] for one in drawn])


def test_numbers_are_drawn_as_torch_draws_them() -> None:
    """Normal numbers, beta numbers and angles have the same distributions."""
    torch.manual_seed(3)
    for mean, std in ((0.0, 1.0), (-3.0, 0.25), (5.0, 0.0)):
        assert distance(drawn().normal(mean, std), mean + std * torch.randn(NUM)) < 2.2
    for shapes in ((1.0, 1.0), (0.2, 0.2), (8.0, 8.0), (0.5, 3.0)):
        expected = torch.distributions.Beta(*torch.tensor(shapes, dtype=torch.float64)).sample((NUM,))
        assert distance(drawn().beta(*shapes), expected.float()) < 2.2, shapes
    for degrees in (30, (-5, 90)):
        assert distance(drawn().rotation(degrees), of_torchvision(v2.RandomRotation(degrees), "angle")) < 2.2


def test_beta_of_the_smallest_shapes_stays_a_number() -> None:
    """Most Gamma numbers of these shapes are too small for a float; their logarithms are not."""
    found = drawn().beta(1e-4, 1e-4)
    assert np.isfinite(found).all()
    assert abs((found > 0.5).mean() - 0.5) < 4 / np.sqrt(4 * NUM)


def test_choice_follows_its_probabilities() -> None:
    found = drawn().choice([90, 0, 180, 270], probabilities=[5, 1, 0, 4])
    counts = np.array([(found == value).sum() for value in (90, 0, 180, 270)])
    assert counts[2] == 0
    assert deviation(counts[[0, 1, 3]], np.array([0.5, 0.1, 0.4]) * NUM) < 18.4  # 99.99 %, 2 degrees of freedom
    assert [drawn().choice(values).dtype for values in ([3, 4], [0.5, 1])] == [np.int32, np.float32]


@pytest.mark.parametrize(
    ("scale", "ratio"),
    [
        ((0.02, 0.33), (0.3, 3.3)),
        ((0.7, 1.0), (0.2, 5.0)),  # most tries do not fit, and some images are not erased at all
    ],
)
def test_erasing_is_drawn_as_torchvision_draws_it(scale: tuple[float, float], ratio: tuple[float, float]) -> None:
    start, shape = drawn().erasing(SIDE, SIDE, probability=1.0, scale=scale, ratio=ratio)
    expected = of_torchvision(v2.RandomErasing(p=1.0, scale=scale, ratio=ratio), "i", "j", "h", "w")
    # If torchvision erases nothing, it returns a rectangle of the whole image and no value.
    is_erased = expected[:, 2] < SIDE
    assert distance(shape[:, 0] > 0, is_erased) < 2.2
    found = np.concatenate([start, shape], axis=1)[shape[:, 0] > 0]
    for column in range(4):
        assert distance(found[:, column], expected[is_erased, column]) < 2.2, "ijhw"[column]
    assert distance(found[:, 2] * found[:, 3], expected[is_erased, 2] * expected[is_erased, 3]) < 2.2
    assert (found[:, :2] + found[:, 2:] <= SIDE).all()


JITTER = {"brightness": 0.4, "contrast": (0.5, 1.2), "saturation": 1.5, "hue": 0.2}


def test_color_jitter_is_drawn_as_torchvision_draws_it() -> None:
    """The factors and the order of the four operations have its distributions, and are independent."""
    draws = drawn().color_jitter(**JITTER).draw(Batch())
    names = [f"{operation}_factor" for operation in color.OPERATIONS]
    expected = of_torchvision(v2.ColorJitter(**JITTER), *names)
    for number, name in enumerate(names):
        assert distance(draws[0][:, number], expected[:, number]) < 2.2, name
    counts = np.bincount(draws[1], minlength=24)
    assert deviation(counts, NUM / 24) < 59  # 23 degrees of freedom, 99.99 %
    table = np.corrcoef(np.concatenate([draws[0], color._ORDERS[draws[1]]], axis=1).T)
    assert np.abs(table[:4, 4:]).max() < 4 / np.sqrt(NUM), "the order does not depend on the factors"
    assert np.abs(table[:4, :4] - np.eye(4)).max() < 4 / np.sqrt(NUM)


def test_uniform_never_reaches_its_upper_bound() -> None:
    """Numbers are in [low, high), in float32 too."""
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
        ((10, 1000), (0, 493, 10, 13)),  # no try fits: a centre crop of the widest allowed ratio
        ((1000, 10), (493, 0, 13, 10)),
    ],
)
def test_resized_crop_falls_back_to_the_centre_as_torchvision_does(size: tuple, expected: tuple) -> None:
    """The photo is so wide or so narrow that no try fits."""
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


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda random: random.resized_crop("jpg", ratio=(0, 1)), "ratio must be a range of positive numbers"),
        (lambda random: random.resized_crop("jpg", scale=(-1, 1)), "scale must be a range of shares from 0 on"),
        (lambda random: random.normal(0, -1), "std must not be negative, got -1"),
        (lambda random: random.normal(float("nan")), "mean must be a finite number in float32, got nan"),
        (lambda random: random.uniform(1, 0), "low must not be larger than high, got 1.0 and 0.0"),
        (lambda random: random.choice([0, 2**31]), r"values must be in \[-2147483648, 2147483647\], got 2147483648"),
        (lambda random: random.beta(0, 1), "alpha must be positive, got 0"),
        (lambda random: random.beta(1, float("nan")), "beta must be positive, got nan"),
        (lambda random: random.choice([]), "values must have at least one entry"),
        (lambda random: random.choice(3, probabilities=[1, 2]), "a number for each of 3 values"),
        (lambda random: random.choice(2, probabilities=[1, -1]), "none negative"),
        (lambda random: random.rotation(-3), "degrees must be a positive number"),
        (lambda random: random.erasing(0, 3), "height and width must be positive"),
        (lambda random: random.erasing(3, 3, scale=(0.5, 2)), r"scale must be a range in \[0, 1\]"),
        (lambda random: random.erasing(3, 3, ratio=(0, 2)), "ratio must be a range of positive numbers"),
        (lambda random: random.erasing(3, 3, probability=2), r"probability must be in \[0, 1\]"),
        (lambda random: random.color_jitter(brightness=-1), "brightness must not be negative"),
        (lambda random: random.color_jitter(contrast=(2, 1)), "contrast must be a range with 0 <= low <= high"),
        (lambda random: random.color_jitter(hue=0.6), "hue must be a range with -0.5 <= low <= high <= 0.5"),
        (lambda random: random.color_jitter(saturation=True), "must be a number"),
        (lambda random: random.rotation((1, 2, 3)), "must be a number"),
    ],
)
def test_arguments_out_of_range_are_refused(call: Callable[[dp.Random], Any], text: str) -> None:
    with pytest.raises((ValueError, TypeError), match=text):
        call(drawn())


# --- pixels -----------------------------------------------------------------------------------------------------------


def png_bytes(number: int) -> bytes:
    """A photo that both decoders decode to the same pixels: from a JPEG, of noise, or of one grey level."""
    draw = np.random.default_rng(number)
    if number % 8 == 7:
        pixels = np.full((SIDE, SIDE, 3), 9 * number % 256, np.uint8)
    elif number % 8 == 6:
        pixels = draw.integers(0, 256, (SIDE, SIDE, 3), np.uint8)
    else:
        pixels = np.asarray(Image.open(io.BytesIO(photo_bytes(number, SIDE, SIDE))))
    return image_bytes(pixels)


@pytest.fixture(scope="module")
def png_shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    samples = [Sample(f"p{number:03d}", {"png": png_bytes(number)}) for number in range(NUM_PHOTOS)]
    return write_shards(tmp_path_factory.mktemp("png"), samples, per_shard=8)


def photo_of(key: str) -> torch.Tensor:
    """The photo's pixels, uint8 [3, H, W]."""
    pixels = np.array(Image.open(io.BytesIO(png_bytes(int(key[1:])))).convert("RGB"))
    return torch.from_numpy(pixels).permute(2, 0, 1)


def decoded(components: dp.Components) -> Any:
    return fn.decoders.image(components["png"], device="cpu", output_type=types.RGB)


# Each of the first rows has one operation, up to its limits.
RANGES: list[dict[str, Any]] = [
    {"brightness": (0, 2)},
    {"contrast": (0, 2)},
    {"saturation": (0, 2)},
    {"hue": 0.5},
    {"brightness": 0.4, "contrast": 0.4, "saturation": 0.4},
    {"brightness": 0.4, "contrast": 0.4, "saturation": 0.2, "hue": 0.1},
]


def jittered(ranges: dict[str, Any], *, device: str) -> Callable[..., dict[str, Any]]:
    def graph(components: dp.Components, random: dp.Random) -> dict[str, Any]:
        jitter = random.color_jitter(**ranges)
        pixels = decoded(components)
        return {
            "image": jitter(pixels.gpu() if device == "gpu" else pixels),
            "factors": components.array(lambda batch: jitter.draw(batch)[0].astype(np.float32)),
            "order": components.array(lambda batch: jitter.draw(batch)[1]),
        }

    return graph


@pytest.mark.parametrize("device", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("ranges", RANGES, ids=lambda ranges: "+".join(ranges))
def test_jittered_pixels_are_torchvisions(
    request: pytest.FixtureRequest, png_shards: Path, ranges: dict[str, Any], device: str
) -> None:
    """Both use the sample's own factors and order. torchvision computes in float32, so that it rounds nothing.

    On a GPU, contrast uses other operators.
    """
    if device == "gpu":
        request.getfixturevalue("gpu")
    num_photos = 0
    for batch in batches_of(png_shards, jittered(ranges, device=device), device=device):
        for row, key in enumerate(batch["key"]):
            expected = photo_of(key).float() / 255
            for operation in color._ORDERS[int(batch["order"][row])]:
                if color.OPERATIONS[operation] in ranges:
                    adjust = getattr(reference, f"adjust_{color.OPERATIONS[operation]}")
                    expected = adjust(expected, float(batch["factors"][row, operation]))
            difference = (batch["image"][row].cpu().permute(2, 0, 1).float() - 255 * expected).abs()
            # Each operation, and contrast's grey, rounds by up to half a grey level. Later operations may double that.
            assert difference.mean() < 0.51 * len(ranges), (key, difference.mean())
            assert difference.max() < (0.6 if len(ranges) == 1 else 7), (key, difference.max())
            num_photos += 1
    assert num_photos == NUM_PHOTOS
