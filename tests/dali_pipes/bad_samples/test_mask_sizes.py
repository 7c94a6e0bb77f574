"""A mask of another size than its photo is a bad sample: crops of both about their own centres would not fit."""

from pathlib import Path
from typing import Any

import pytest
from nvidia.dali import fn, types

import dali_pipes as dp
from tests import loaders
from tests.loaders import substituting
from tests.shards import Sample, make_samples, write_shards

OTHER = Sample("", make_samples([(52, 40)])[0].components)
PROBLEM = "has 40 x 52 pixels, '{}' 40 x 50"


def shards_with_one_wrong_mask(directory: Path, *, names: tuple[str, str] = ("image.jpg", "trimap.png")) -> Path:
    samples = []
    for number, sample in enumerate(make_samples([(50, 40)] * 4)):
        mask = (OTHER if number == 2 else sample).components["trimap.png"]
        samples.append(Sample(sample.key, {"cls": b"1", names[0]: sample.components["image.jpg"], names[1]: mask}))
    return write_shards(directory, samples, per_shard=4)


def open_loader(shards: Path, graph: Any, **policy: Any) -> dp.Loader:
    return loaders.open_loader(shards, graph, shuffle=False, bad_samples=substituting(shards, **policy))


def cropped(photo: str, mask: str, *, how: str) -> Any:
    """A graph of the user's own, in which photo and mask share a random crop."""

    def graph(components: dp.Components, random: dp.Random) -> dict[str, Any]:
        if how == "same_size":
            components.same_size(photo, mask)
            outputs = [fn.decoders.image(components[name], output_type=types.GRAY) for name in (photo, mask)]
            return {"image": fn.crop(outputs[0], crop=(8, 8)), "mask": fn.crop(outputs[1], crop=(8, 8))}
        start = components.array(lambda batch: (batch.uniforms("crop", 2) * 30).astype("int32"))
        if how == "decoder":
            outputs = [
                fn.decoders.image_slice(components[name], start, (8, 8), axes=(0, 1), output_type=types.GRAY)
                for name in (photo, mask)
            ]
        else:
            outputs = [
                fn.slice(fn.decoders.image(components[name], output_type=types.GRAY), start, (8, 8), axes=(0, 1))
                for name in (photo, mask)
            ]
        return {"image": outputs[0], "mask": outputs[1]}

    return graph


@pytest.mark.parametrize("how", ["segmentation", "decoder", "slice", "same_size", "other names"])
def test_a_mask_of_another_size_is_bad(tmp_path: Path, how: str) -> None:
    """In the built-in graph, and in the user's own where both share a crop; whatever the components are called."""
    names = ("photo", "mask") if how == "other names" else ("image.jpg", "trimap.png")
    shards = shards_with_one_wrong_mask(tmp_path, names=names)
    graph = (
        dp.segmentation(crop=16) if how == "segmentation" else cropped(*names, how=how.replace("other names", "slice"))
    )
    problem = PROBLEM.format(names[0])
    with open_loader(shards, graph) as loader:
        assert next(loader)[0]["key"] == ["s00000", "s00001", "s00001", "s00003"]
        assert [(bad.key, bad.component, bad.cause) for bad in loader.bad_samples] == [("s00002", names[1], problem)]
    text = f"shard 's-000000.tar', key 's00002': component '{names[1]}' {problem}"
    with open_loader(shards, graph, on_error="raise") as loader, pytest.raises(dp.DecodeError, match=text):
        next(loader)


def test_photos_with_crops_of_their_own_may_differ(tmp_path: Path) -> None:
    """Two cameras: each photo is cropped by its own numbers, and both crops have one shape."""
    shards = shards_with_one_wrong_mask(tmp_path)

    def graph(components: dp.Components, random: dp.Random) -> dict[str, Any]:
        shape = components.array(lambda batch: (batch.uniforms("shape", 2) * 0 + 8).astype("int32"))
        outputs = {}
        for name in ("image.jpg", "trimap.png"):
            start = components.array(lambda batch, name=name: (batch.uniforms(name, 2) * 30).astype("int32"))
            pixels = fn.decoders.image_slice(components[name], start, shape, axes=(0, 1), output_type=types.GRAY)
            outputs[name] = fn.crop_mirror_normalize(pixels, mirror=random.coin_flip(stream="both"))
        return outputs

    with open_loader(shards, graph, on_error="raise") as loader:
        assert len(next(loader)[0]["key"]) == 4


def test_a_lacking_mask_has_no_size(tmp_path: Path) -> None:
    """With ``missing="empty"`` the mask is one black pixel, and the sample is good."""
    samples = make_samples([(50, 40)] * 4)
    without = {name: data for name, data in samples[1].components.items() if name != "trimap.png"}
    write_shards(tmp_path, [samples[0], Sample("s00001", without), *samples[2:]], per_shard=4)
    with dp.loader(
        tmp_path, dp.segmentation(crop=16), batch_size=4, device="cpu", select=dp.Select(missing="empty")
    ) as loader:
        assert next(loader)[0]["mask"].shape == (4, 1, 16, 16)
