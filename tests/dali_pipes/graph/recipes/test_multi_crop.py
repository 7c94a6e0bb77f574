"""Global and local crops of one photo against torchvision, change by change."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms.v2 import functional as reference

import dali_pipes as dp
from tests.loaders import batches_of
from tests.shards import Sample, photo_bytes, write_shards

SIZES = (64, 32)
NUM_PHOTOS = 40
PLAIN: dict[str, Any] = {
    "sizes": SIZES,
    "num_crops": (2, 3),
    "flip": 0,
    "jitter": 0,
    "grayscale": 0,
    "blur": (0, 0, 0),
    "solarize": 0,
    "dtype": "uint8",
}
OUTPUTS = ("global_0", "global_1", "local_0", "local_1", "local_2")


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    samples = [
        Sample(f"m{number:03d}", {"jpg": photo_bytes(number, 150 + number, 130 - number)})
        for number in range(NUM_PHOTOS)
    ]
    return write_shards(tmp_path_factory.mktemp("crops"), samples, per_shard=10)


def by_key(shards: Path, graph: Any, **options: Any) -> dict[str, dict[str, Any]]:
    """Each sample's outputs by name."""
    return {
        key: {name: batch[name][row] for name in batch if name != "key"}
        for batch in batches_of(shards, graph, **options)
        for row, key in enumerate(batch["key"])
    }


def numbers_of(make: Callable[[dp.Random], dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """A graph of random numbers alone: those of a stream are the same as in another graph."""

    def graph(components: dp.Components, random: dp.Random) -> dict[str, Any]:
        return {
            **make(random),
            "bytes": components.array(lambda batch: batch.ordinals),
            "photo": components.bytes("jpg"),
        }

    return graph


def test_crops_are_those_of_torchvision(shards: Path) -> None:
    """Away from their edges, where a resize takes a little of what lies beside the crop."""
    scales = {"global": (0.4, 1.0), "local": (0.05, 0.4)}

    def windows(random: dp.Random) -> dict[str, Any]:
        return {
            f"{name}/{part}": node
            for name in OUTPUTS
            for part, node in zip(
                ("start", "shape"),
                random.resized_crop("jpg", scale=scales[name.split("_")[0]], stream=f"{name}/crop"),
                strict=True,
            )
        }

    drawn = by_key(shards, numbers_of(windows))
    found = by_key(shards, dp.multi_crop(**PLAIN))
    assert len(found) == NUM_PHOTOS
    for key, outputs in found.items():
        assert tuple(outputs) == OUTPUTS
        number = int(key[1:])
        photo = torch.from_numpy(np.array(Image.open(io.BytesIO(photo_bytes(number, 150 + number, 130 - number)))))
        for name, pixels in outputs.items():
            size = SIZES[name.startswith("local")]
            assert pixels.shape == (3, size, size)
            window = [*drawn[key][f"{name}/start"].tolist(), *drawn[key][f"{name}/shape"].tolist()]
            expected = reference.resized_crop(photo.permute(2, 0, 1), *window, [size, size], antialias=True)
            difference = (pixels.float() - expected.float()).abs()
            assert difference.mean() < 1, (key, name, difference.mean())
            assert difference[:, 3:-3, 3:-3].max() < 8, (key, name)
        assert not torch.equal(outputs["local_0"], outputs["local_1"]), "each crop has numbers of its own"


def test_blur_is_torchvisions_gaussian(shards: Path) -> None:
    """And a crop that is not blurred has the pixels that it had."""

    def numbers(random: dp.Random) -> dict[str, Any]:
        return {
            f"{name}/{kind}": node
            for name in OUTPUTS
            for kind, node in (
                ("blur", random.coin_flip(0.1 if name == "global_1" else 0.5, stream=f"{name}/blur")),
                ("sigma", random.uniform(0.1, 2.0, stream=f"{name}/sigma")),
            )
        }

    drawn = by_key(shards, numbers_of(numbers))
    plain = by_key(shards, dp.multi_crop(**PLAIN))
    blurred = by_key(shards, dp.multi_crop(**PLAIN | {"blur": (1.0, 0.1, 0.5)}))
    num_blurred = dict.fromkeys(OUTPUTS, 0)
    for key, outputs in blurred.items():
        for name, pixels in outputs.items():
            expected = plain[key][name]
            if name == "global_0" or drawn[key][f"{name}/blur"]:
                sigma = float(drawn[key][f"{name}/sigma"])
                num_taps = 2 * int(np.ceil(3 * sigma)) + 1
                expected = reference.gaussian_blur(expected, [num_taps, num_taps], [sigma, sigma])
                num_blurred[name] += 1
            assert (pixels.int() - expected.int()).abs().max() <= 1, (key, name)
    assert num_blurred["global_0"] == NUM_PHOTOS
    assert 0 < num_blurred["global_1"] < 12
    assert all(8 < num_blurred[f"local_{number}"] < 32 for number in range(3))


def test_solarized_crops_are_torchvisions(shards: Path) -> None:
    """All global crops but the first, and no local one."""
    plain = by_key(shards, dp.multi_crop(**PLAIN | {"num_crops": (3, 1)}))
    solarized = by_key(shards, dp.multi_crop(**PLAIN | {"num_crops": (3, 1), "solarize": 0.5}))
    num_solarized = {"global_1": 0, "global_2": 0}
    for key, outputs in solarized.items():
        for name, pixels in outputs.items():
            before = plain[key][name]
            if name in num_solarized and not torch.equal(pixels, before):
                assert torch.equal(pixels, reference.solarize(before, 128)), (key, name)
                num_solarized[name] += 1
            else:
                assert torch.equal(pixels, before), (key, name)
    assert all(8 < number < 32 for number in num_solarized.values())


@pytest.mark.parametrize(
    ("options", "share"), [({"flip": 0.5}, 0.5), ({"jitter": 0.8}, 0.8), ({"grayscale": 0.2}, 0.2)]
)
def test_each_change_has_its_probability(shards: Path, options: dict[str, float], share: float) -> None:
    plain = by_key(shards, dp.multi_crop(**PLAIN))
    changed = by_key(shards, dp.multi_crop(**PLAIN | options))
    differ = [not torch.equal(plain[key][name], changed[key][name]) for key in plain for name in OUTPUTS]
    assert abs(np.mean(differ) - share) < 4 * np.sqrt(share * (1 - share) / len(differ))
    if "flip" in options:
        mirrored = [torch.equal(plain[key][name].flip(-1), changed[key][name]) for key in plain for name in OUTPUTS]
        assert mirrored == differ


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_crops": (0, 0)}, "num_crops must be two numbers of crops"),
        ({"num_crops": (2, -1)}, "num_crops must be two numbers of crops"),
        ({"sizes": (224, 0)}, "crop must be positive"),
        ({"jitter": 1.5}, r"jitter must be in \[0, 1\], got 1.5"),
        ({"blur": (1, 1, -1)}, r"blur must be in \[0, 1\], got -1"),
    ],
)
def test_arguments_out_of_range_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        dp.multi_crop(**options)


@pytest.mark.parametrize(
    "options", [{"sizes": 96}, {"num_crops": (2, 8, 1)}, {"blur": (1, 1)}, {"scales": ((0.4, 1),)}]
)
def test_arguments_of_another_length_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=f"{next(iter(options))} must have [23] entries, got"):
        dp.multi_crop(**options)
