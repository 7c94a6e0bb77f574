"""A mask of another size than its photo is a bad sample: crops of both about their own centres would not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import dali_pipes as dp
from tests import loaders
from tests.lazy import Lazy
from tests.loaders import substituting
from tests.shards import make_samples, mask_bytes, write_shards

fn, types = Lazy("nvidia.dali.fn"), Lazy("nvidia.dali.types")


def shards_with_one_wrong_mask(directory: Path, *, photo: str = "image.jpg", mask: str = "trimap.png") -> Path:
    """Four samples; the third one's mask is two columns wider than its photo."""
    samples = make_samples([(50, 40)] * 4)
    samples[2].components["trimap.png"] = mask_bytes(2, 52, 40)
    for sample in samples:
        sample.components[photo] = sample.components.pop("image.jpg")
        sample.components[mask] = sample.components.pop("trimap.png")
    return write_shards(directory, samples, per_shard=4)


def open_loader(shards: Path, graph: Any, **policy: Any) -> dp.Loader:
    return loaders.open_loader(shards, graph, shuffle=False, bad_samples=substituting(shards, **policy))


def cropped(photo: str, mask: str, *, how: str) -> Any:
    """A graph of the user's own, in which photo and mask share a random crop."""

    def graph(components: dp.Components, random: dp.Random) -> dict[str, Any]:
        start = components.array(lambda batch: (batch.uniforms("crop", 2) * 30).astype("int32"))

        def crop(name: str) -> Any:
            if how == "decoder":
                options = {"axes": (0, 1), "output_type": types.GRAY}
                return fn.decoders.image_slice(components[name], start, (8, 8), **options)
            pixels = fn.decoders.image(components[name], output_type=types.GRAY)
            return fn.crop(pixels, crop=(8, 8)) if how == "same_size" else fn.slice(pixels, start, (8, 8), axes=(0, 1))

        if how == "same_size":
            components.same_size(photo, mask)
        return {"image": crop(photo), "mask": crop(mask)}

    return graph


@pytest.mark.parametrize("how", ["segmentation", "decoder", "slice", "same_size"])
def test_a_mask_of_another_size_is_bad(tmp_path: Path, how: str) -> None:
    """In the built-in graph, and in the user's own where both share a crop; whatever the components are called."""
    photo, mask = ("photo", "mask") if how == "slice" else ("image.jpg", "trimap.png")
    shards = shards_with_one_wrong_mask(tmp_path, photo=photo, mask=mask)
    graph = dp.segmentation(crop=16) if how == "segmentation" else cropped(photo, mask, how=how)
    problem = f"has 40 x 52 pixels, '{photo}' 40 x 50"
    with open_loader(shards, graph) as loader:
        assert next(loader)[0]["key"] == ["s00000", "s00001", "s00001", "s00003"]
        assert [(bad.key, bad.component, bad.cause) for bad in loader.bad_samples] == [("s00002", mask, problem)]
    text = f"shard 's-000000.tar', key 's00002': component '{mask}' {problem}"
    with open_loader(shards, graph, on_error="raise") as loader, pytest.raises(dp.DecodeError, match=text):
        next(loader)
