"""A mask of another size than its photo is a bad sample: crops of both about their own centres would not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import dali_pipes as dp
from tests.lazy import Lazy
from tests.loaders import open_loader, substituting
from tests.shards import make_samples, mask_bytes, write_shards

fn, types = Lazy("nvidia.dali.fn"), Lazy("nvidia.dali.types")


def cropped(components: dp.Components, random: dp.Random) -> dict[str, Any]:
    """A graph of the user's own, in which photo and mask share a random crop."""
    start = components.array(lambda batch: (batch.uniforms("crop", 2) * 30).astype("int32"))

    def crop(name: str) -> Any:
        pixels = fn.decoders.image(components[name], output_type=types.GRAY)
        return fn.slice(pixels, start, (8, 8), axes=(0, 1))

    return {"image": crop("image.jpg"), "mask": crop("trimap.png")}


def same_size(components: dp.Components, random: dp.Random) -> dict[str, Any]:
    """Crop photo and mask separately; the user declares that both have the same size."""
    components.same_size("image.jpg", "trimap.png")
    pixels = (fn.decoders.image(components[name], output_type=types.GRAY) for name in ("image.jpg", "trimap.png"))
    return dict(zip(("image", "mask"), (fn.crop(one, crop=(8, 8)) for one in pixels), strict=True))


@pytest.mark.parametrize("graph", [None, cropped, same_size])
def test_a_mask_of_another_size_is_bad(tmp_path: Path, graph: Any) -> None:
    """The third mask is two columns wider than its photo, in the built-in graph and in a user's two graphs."""
    samples = make_samples([(50, 40)] * 4)
    samples[2].components["trimap.png"] = mask_bytes(2, 52, 40)
    shards = write_shards(tmp_path, samples, per_shard=4)
    problem = "has 40 x 52 pixels, 'image.jpg' 40 x 50"
    with open_loader(shards, graph, shuffle=False, bad_samples=substituting(shards)) as loader:
        assert next(loader)[0]["key"] == ["s00000", "s00001", "s00001", "s00003"]
        assert [(bad.key, bad.component, bad.cause) for bad in loader.bad_samples] == [
            ("s00002", "trimap.png", problem)
        ]
    text = f"shard 's-000000.tar', key 's00002': component 'trimap.png' {problem}"
    raising = substituting(shards, on_error="raise")
    opened = open_loader(shards, graph, shuffle=False, bad_samples=raising)
    with opened as loader, pytest.raises(dp.DecodeError, match=text):
        next(loader)
