"""Global and local crops of one photo against torchvision, change by change."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import dali_pipes as dp
from tests.lazy import Lazy
from tests.loaders import batches_of
from tests.shards import Sample, photo_bytes, write_shards

torch, reference = Lazy("torch"), Lazy("torchvision.transforms.v2.functional")

SIZES = (64, 32)
NUM_PHOTOS = 40
OFF: dict[str, Any] = {"flip": 0, "jitter": 0, "grayscale": 0, "blur": (0, 0, 0), "solarize": 0}
PLAIN = OFF | {"sizes": SIZES, "num_crops": (2, 3), "dtype": "uint8"}
OUTPUTS = ("global_0", "global_1", "local_0", "local_1", "local_2")

Outputs = dict[str, dict[str, Any]]
"""For each key, the sample's row of each output."""


def photo_of(number: int) -> bytes:
    return photo_bytes(number, 150 + number, 130 - number)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    samples = [Sample(f"m{number:03d}", {"jpg": photo_of(number)}) for number in range(NUM_PHOTOS)]
    return write_shards(tmp_path_factory.mktemp("crops"), samples, per_shard=10)


@pytest.fixture(scope="module")
def plain(shards: Path) -> Outputs:
    """Crops without augmentations."""
    return by_key(shards, dp.multi_crop(**PLAIN))


def by_key(shards: Path, graph: Any) -> Outputs:
    return {
        key: {name: batch[name][row] for name in batch if name != "key"}
        for batch in batches_of(shards, graph)
        for row, key in enumerate(batch["key"])
    }


def numbers_of(make: Callable[[dp.Random], dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """A graph of random numbers alone: those of a stream are the same as in another graph."""

    def graph(components: dp.Components, random: dp.Random) -> dict[str, Any]:
        return {**make(random), "photo": components.bytes("jpg")}

    return graph


def test_crops_are_those_of_torchvision(shards: Path, plain: Outputs) -> None:
    """Away from their edges, where a resize takes a little of what lies beside the crop."""
    scales = {"global": (0.4, 1.0), "local": (0.05, 0.4)}

    def windows(random: dp.Random) -> dict[str, Any]:
        nodes = {}
        for name in OUTPUTS:
            crop = random.resized_crop("jpg", scale=scales[name.split("_")[0]], stream=f"{name}/crop")
            nodes[f"{name}/start"], nodes[f"{name}/shape"] = crop
        return nodes

    drawn = by_key(shards, numbers_of(windows))
    assert len(plain) == NUM_PHOTOS
    for key, outputs in plain.items():
        assert tuple(outputs) == OUTPUTS
        photo = torch.from_numpy(np.array(Image.open(io.BytesIO(photo_of(int(key[1:]))))))
        for name, pixels in outputs.items():
            size = SIZES[name.startswith("local")]
            assert pixels.shape == (3, size, size)
            window = [*drawn[key][f"{name}/start"].tolist(), *drawn[key][f"{name}/shape"].tolist()]
            expected = reference.resized_crop(photo.permute(2, 0, 1), *window, [size, size], antialias=True)
            difference = (pixels.float() - expected.float()).abs()
            assert difference.mean() < 1, (key, name, difference.mean())
            assert difference[:, 3:-3, 3:-3].max() < 8, (key, name)
        assert not torch.equal(outputs["local_0"], outputs["local_1"]), "each crop has numbers of its own"


def test_blur_is_torchvisions_gaussian(shards: Path, plain: Outputs) -> None:
    """And a crop that is not blurred has the pixels that it had."""

    def numbers(random: dp.Random) -> dict[str, Any]:
        blur = {f"{name}/blur": 0.1 if name == "global_1" else 0.5 for name in OUTPUTS}
        nodes = {stream: random.coin_flip(probability, stream=stream) for stream, probability in blur.items()}
        return nodes | {f"{name}/sigma": random.uniform(0.1, 2.0, stream=f"{name}/sigma") for name in OUTPUTS}

    drawn = by_key(shards, numbers_of(numbers))
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
    plain, solarized = (
        by_key(shards, dp.multi_crop(**PLAIN | {"num_crops": (3, 1), "solarize": share})) for share in (0, 0.5)
    )
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


@pytest.mark.parametrize(("change", "share"), [("flip", 0.5), ("jitter", 0.8), ("grayscale", 0.2)])
def test_each_change_has_its_probability(shards: Path, plain: Outputs, change: str, share: float) -> None:
    changed = by_key(shards, dp.multi_crop(**PLAIN | {change: share}))
    pairs = [(plain[key][name], changed[key][name]) for key in plain for name in OUTPUTS]
    differ = [not torch.equal(*pair) for pair in pairs]
    assert abs(np.mean(differ) - share) < 4 * np.sqrt(share * (1 - share) / len(differ))
    if change == "flip":
        assert [torch.equal(before.flip(-1), after) for before, after in pairs] == differ
