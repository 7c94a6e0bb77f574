"""The random numbers of a graph against torchvision's: drawn alike, and equal pixels for equal numbers."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from tests.dali_pipes.graph.draws import NUM, Batch, deviation, distance, drawn
from tests.lazy import Lazy
from tests.loaders import batches_of
from tests.shards import Sample, image_bytes, photo_bytes, write_shards

if TYPE_CHECKING:
    import dali_pipes as dp

torch, v2 = Lazy("torch"), Lazy("torchvision.transforms.v2")
reference = Lazy("torchvision.transforms.v2.functional")
fn, types, color = Lazy("nvidia.dali.fn"), Lazy("nvidia.dali.types"), Lazy("dali_pipes.graph.color")

SIDE = 48
NUM_PHOTOS = 32
NUM_OF_TORCHVISION = 4000


def of_torchvision(transform: Any, *names: str, size: int = SIDE) -> npt.NDArray[np.float64]:
    """Parameters that torchvision drew, float64 [N, name]; a fixed seed."""
    torch.manual_seed(11)
    image = [torch.zeros(3, size, size)]
    drawn = [transform.make_params(image) for _ in range(NUM_OF_TORCHVISION)]
    return np.array([[float(one[name]) for name in names] for one in drawn])


def test_normal_numbers() -> None:
    torch.manual_seed(3)
    for mean, std in ((0.0, 1.0), (-3.0, 0.25), (5.0, 0.0)):
        found = drawn().normal(mean, std)
        assert found.dtype == np.float32
        assert distance(found, mean + std * torch.randn(NUM)) < 2.2
        assert np.isfinite(found).all()


def test_beta_numbers() -> None:
    torch.manual_seed(4)
    for shapes in ((1.0, 1.0), (0.2, 0.2), (0.05, 0.05), (8.0, 8.0), (0.5, 3.0)):
        found = drawn().beta(*shapes)
        expected = torch.distributions.Beta(*torch.tensor(shapes, dtype=torch.float64)).sample((NUM,))
        assert distance(found, expected.float()) < 2.2, shapes
        assert found.min() >= 0
        assert found.max() <= 1


def test_beta_of_the_smallest_shapes_stays_a_number() -> None:
    """Most of its Gamma numbers are below the smallest float: their logarithms are not."""
    found = drawn().beta(1e-4, 1e-4)
    assert np.isfinite(found).all()
    assert abs((found > 0.5).mean() - 0.5) < 4 / np.sqrt(4 * NUM)


def test_rotation_is_drawn_as_torchvision_draws_it() -> None:
    for degrees in (30, (-5, 90)):
        assert distance(drawn().rotation(degrees), of_torchvision(v2.RandomRotation(degrees), "angle")) < 2.2


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
    # torchvision's sign that nothing is erased is a rectangle of the whole image and no value.
    is_erased = expected[:, 2] < SIDE
    assert distance(shape[:, 0] > 0, is_erased) < 2.2
    found = np.concatenate([start, shape], axis=1)[shape[:, 0] > 0]
    for column in range(4):
        assert distance(found[:, column], expected[is_erased, column]) < 2.2, "ijhw"[column]
    assert distance(found[:, 2] * found[:, 3], expected[is_erased, 2] * expected[is_erased, 3]) < 2.2
    assert (found[:, :2] + found[:, 2:] <= SIDE).all()


JITTER = {"brightness": 0.4, "contrast": (0.5, 1.2), "saturation": 1.5, "hue": 0.2}


def test_color_jitter_is_drawn_as_torchvision_draws_it() -> None:
    """Factors, and the order of the four; each number independent of the others."""
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
    ],
)
def test_arguments_out_of_range_are_refused(call: Callable[[dp.Random], Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        call(drawn())


def test_ranges_that_are_none_are_refused() -> None:
    for value in ("much", (1, 2, 3), True):
        with pytest.raises(TypeError, match="must be a number"):
            drawn().rotation(value)
        with pytest.raises(TypeError, match="must be a number"):
            drawn().color_jitter(saturation=value)


# --- pixels -----------------------------------------------------------------------------------------------------------


def png_bytes(number: int) -> bytes:
    """Photos that both decoders decode to the same pixels: of a JPEG, of noise, and of one grey level."""
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
    """uint8 [3, H, W]."""
    pixels = np.array(Image.open(io.BytesIO(png_bytes(int(key[1:])))).convert("RGB"))
    return torch.from_numpy(pixels).permute(2, 0, 1)


def decoded(components: dp.Components) -> Any:
    return fn.decoders.image(components["png"], device="cpu", output_type=types.RGB)


# The first rows have one operation each, at its limits, too.
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
    """For the sample's own factors and order; torchvision computes in float32, so that it rounds nothing.

    The operators of a contrast are others on a GPU.
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
            # Each operation rounds to half a grey level, a contrast's grey too, and those after it may double that.
            assert difference.mean() < 0.51 * len(ranges), (key, difference.mean())
            assert difference.max() < (0.6 if len(ranges) == 1 else 7), (key, difference.max())
            num_photos += 1
    assert num_photos == NUM_PHOTOS
