"""Photos with EXIF orientations, from a folder of files to a batch: upright as Pillow turns them, or as stored."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from nvidia.dali import fn, types
from PIL import Image

import dali_pipes as dp
from dali_pipes.errors import DataError, DecodeError
from dali_pipes.formats.manifest import Manifest, checksum
from dali_pipes.formats.names import index_name, manifest_name
from dali_pipes.formats.shard_index import ShardIndex
from tests.hostile_photos import undecodable
from tests.loaders import open_loader
from tests.shards import Sample, write_shards
from tests.turned_photos import (
    Pixels,
    exif_block,
    slope,
    stored_photo,
    turned_photo,
    upright,
    with_exif,
)

# Enough for the photos of a batch to be read together.
NUM = 40
GRAPHS: dict[str, Callable[..., Any]] = {
    "segmentation": lambda **options: dp.segmentation(crop=30, dtype="uint8", **options),
    "train": lambda **options: dp.classification_train(crop=24, dtype="uint8", **options),
    "eval": lambda **options: dp.classification_eval(resize=30, crop=24, dtype="uint8", **options),
}


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "gpu":
        request.getfixturevalue("gpu")
    return str(request.param)


def stored_pixels(number: int) -> Pixels:
    """Pixels of a size of their own, so that a batch has many."""
    return slope(40 + number % 7, 60 + number % 11)


def mask_of(pixels: Pixels) -> Pixels:
    return pixels[..., 0] // 8


def png(pixels: Pixels | Image.Image) -> bytes:
    return stored_photo(np.asarray(pixels), "PNG")


def turned_samples(format: str = "JPEG", *, mask: str = "upright") -> list[Sample]:
    """Photos of all orientations; each has a mask, drawn upright, or stored and turned by EXIF data of its own."""
    samples = []
    for number in range(NUM):
        pixels, orientation = stored_pixels(number), 1 + number % 8
        as_stored = turned_photo(mask_of(pixels), orientation, "PNG")
        components = {"cls": b"3", "jpg": turned_photo(pixels, orientation, format, **OPTIONS.get(format, {}))}
        components["png"] = as_stored if mask == "turned" else png(upright(as_stored))
        samples.append(Sample(f"{number:03d}", components))
    return samples


OPTIONS: dict[str, dict[str, Any]] = {"WEBP": {"lossless": False}}


def as_upright(samples: Sequence[Sample]) -> list[Sample]:
    """The same samples as Pillow sees them, as PNGs without EXIF data: they keep all pixels."""
    return [
        Sample(
            sample.key,
            {
                name: data if name == "cls" else png(upright(data).convert("RGB" if name == "jpg" else "L"))
                for name, data in sample.components.items()
            },
        )
        for sample in samples
    ]


def batch_of(shards: Path, graph: Any, *, device: str = "cpu", batch_size: int = NUM, **options: Any) -> dict[str, Any]:
    with dp.loader(shards, graph, batch_size=batch_size, seed=5, device=device, **options) as loader:
        (batch,) = next(loader)
        return {name: output.cpu() if isinstance(output, torch.Tensor) else output for name, output in batch.items()}


def assert_equal(found: dict[str, Any], expected: dict[str, Any], *, tolerance: int = 0) -> None:
    assert found.keys() == expected.keys()
    for name, output in found.items():
        if name == "image" and tolerance:
            assert (output.int() - expected[name].int()).abs().float().mean() < tolerance, name
        else:
            assert torch.equal(output, expected[name]), name


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("graph", GRAPHS)
def test_graphs_give_what_pillow_turns_upright(tmp_path: Path, graph: str, format: str, device: str) -> None:
    """All eight orientations, by default: crops, masks and random numbers as for photos that are stored upright."""
    samples = turned_samples(format)
    turned = write_shards(tmp_path / "turned", samples, per_shard=16)
    plain = write_shards(tmp_path / "plain", as_upright(samples), per_shard=16)
    found = batch_of(turned, GRAPHS[graph](), device=device)
    # On a GPU nvJPEG decodes, and its pixels differ by a few grey levels.
    assert_equal(found, batch_of(plain, GRAPHS[graph](), device=device), tolerance=0 if device == "cpu" else 4)
    if graph != "segmentation":  # whose masks are those of the upright photos
        stored = batch_of(turned, GRAPHS[graph](orient=False), device=device)["image"].int()
        assert (found["image"].int() - stored).abs().float().mean() > 10


def test_each_mask_is_turned_by_its_own_exif_data(tmp_path: Path, device: str) -> None:
    samples = turned_samples(mask="turned")
    turned = write_shards(tmp_path / "turned", samples, per_shard=16)
    plain = write_shards(tmp_path / "plain", as_upright(samples), per_shard=16)
    graph = GRAPHS["segmentation"](orient=True)
    assert_equal(batch_of(turned, graph, device=device), batch_of(plain, graph, device=device),
                 tolerance=0 if device == "cpu" else 4)  # fmt: skip


def test_buckets_are_planned_and_cut_upright(tmp_path: Path) -> None:
    """The column file has the sizes of the upright photos; ``orient=False`` cuts the stored ones to the same shapes."""
    samples = turned_samples()
    batches: dict[str, list[torch.Tensor]] = {}
    for name, made, orient in (
        ("turned", samples, None),
        ("plain", as_upright(samples), None),
        ("stored", samples, False),
    ):
        shards = write_shards(tmp_path / name, made, per_shard=16)
        with open_loader(
            shards,
            dp.bucketed(dtype="uint8", photo="jpg", orient=orient),
            batch_size=8,
            seed=5,
            select=dp.Select(buckets=dp.buckets(area=32 * 32, step=8, max_aspect=2, photo="jpg")),
        ) as loader:
            batches[name] = [batch["image"] for (batch,) in loader]
    assert {images.shape[1:] for images in batches["turned"]} == {(3, 24, 40), (3, 40, 24)}
    for turned, plain in zip(batches["turned"], batches["plain"], strict=True):
        assert torch.equal(turned, plain)
    assert not all(map(torch.equal, batches["turned"], batches["stored"]))


def with_boxes(samples: list[Sample]) -> list[Sample]:
    """The samples with a box and a caption each, in pixels of the upright photo."""
    box = b'{"boxes": [[3, 5, 30, 33]], "labels": [4]}'
    return [Sample(sample.key, sample.components | {"boxes.json": box, "txt": b"a"}) for sample in samples]


@pytest.mark.parametrize(
    "graph",
    [
        lambda **options: dp.detection(crop=24, boxes="boxes.json", max_boxes=2, **options),
        lambda **options: dp.detection(crop=24, boxes="boxes.json", max_boxes=2, scale=None, **options),
        lambda **options: dp.captions(crop=24, tokens=None, **options),
        lambda **options: dp.captions(crop=24, tokens=None, scale=None, **options),
        lambda **options: dp.multi_crop(sizes=(24, 16), num_crops=(1, 1), **options),
    ],
    ids=["detection", "detection-whole", "captions", "captions-centre", "multi-crop"],
)
def test_recipes_give_upright_photos(tmp_path: Path, graph: Callable[..., Any]) -> None:
    samples = turned_samples()
    options = {"photo": "jpg", "dtype": "uint8"}
    turned, plain = (
        batch_of(write_shards(tmp_path / name, with_boxes(made), per_shard=16), graph(**options))
        for name, made in (("turned", samples), ("plain", as_upright(samples)))
    )
    assert turned.keys() == plain.keys()
    for name, output in turned.items():
        assert torch.equal(output, plain[name]) if isinstance(output, torch.Tensor) else output == plain[name]
    stored = batch_of(tmp_path / "turned", graph(orient=False, **options))
    image = next(name for name in turned if "image" in name or "global" in name)
    assert not torch.equal(stored[image], turned[image])


def test_odd_exif_data_are_read_by_one_rule(tmp_path: Path) -> None:
    """DALI alone gives pixels of no orientation for the first: it decodes a copy with plain data."""
    pixels = slope()
    odd = [
        with_exif(stored_photo(pixels), exif_block(1), exif_block(8)),
        with_exif(stored_photo(pixels), exif_block(6, type=4, order=">")),
        with_exif(stored_photo(pixels, "WEBP"), exif_block(5)),
    ]
    expected = [stored_photo(pixels), turned_photo(pixels, 6), turned_photo(pixels, 5, "PNG")]
    samples, plain = (
        [Sample(f"{number:03d}", {"cls": b"1", "jpg": photos[number % 3]}) for number in range(NUM)]
        for photos in (odd, expected)
    )
    both = [write_shards(tmp_path / name, made, per_shard=20) for name, made in (("odd", samples), ("plain", plain))]
    for graph in ("train", "eval"):
        assert_equal(*(batch_of(shards, GRAPHS[graph]()) for shards in both))


def test_a_batch_with_a_bad_photo_is_repaired_upright(tmp_path: Path) -> None:
    """The other photos of its batch are as they would be without it, those with odd EXIF data as well."""
    samples = turned_samples()
    samples[3].components["jpg"] = with_exif(stored_photo(stored_pixels(3)), exif_block(4), exif_block(7))
    good = write_shards(tmp_path / "good", samples, per_shard=NUM)
    graph, options = GRAPHS["segmentation"](), {"shuffle": False}
    expected = batch_of(good, graph, **options)
    samples[9].components["jpg"] = undecodable(samples[9].components["jpg"])
    bad = write_shards(tmp_path / "bad", samples, per_shard=NUM)
    policy = dp.BadSamples(on_error="substitute", quarantine=tmp_path / "q.tsv")
    found = batch_of(bad, graph, bad_samples=policy, **options)
    others = [number for number in range(NUM) if number != 9]
    for name in expected:
        assert torch.equal(found[name][others], expected[name][others])
    assert (tmp_path / "q.tsv").read_text().count("009") == 1


def test_a_mask_of_the_stored_pixels_is_refused_with_the_way_out(tmp_path: Path) -> None:
    """Orientation 6 exchanges rows and columns; both as stored they fit."""
    pixels = slope()
    samples = [
        Sample("a", {"jpg": turned_photo(pixels, 6), "png": png(mask_of(pixels))}),
        Sample("b", {"jpg": turned_photo(pixels, 1), "png": png(mask_of(pixels))}),
    ]
    shards = write_shards(tmp_path, samples, per_shard=2)
    text = (
        "key 'a'.*component 'png' has 40 x 64 pixels, 'jpg' 64 x 40, both turned upright by their EXIF orientations; "
        r"as stored it fits, .*: give the mask the photo's orientation, or read both as stored \(orient=False\)"
    )
    with pytest.raises(DecodeError, match=text):
        batch_of(shards, dp.segmentation(crop=30), batch_size=2)
    stored = batch_of(shards, dp.segmentation(crop=30, dtype="uint8", orient=False), batch_size=2, shuffle=False)
    assert torch.equal(stored["image"][0], stored["image"][1])
    assert torch.equal(stored["mask"][0], stored["mask"][1])


def change_index(shards: Path, orientation: npt.NDArray[np.uint8] | None, turned: dict[str, int] | None) -> None:
    """Write other orientations into each shard index, and these counts into the manifest."""
    path = shards / manifest_name("s-")
    manifest = Manifest.from_bytes(path.read_bytes(), where="m")
    index_bytes, checksums = manifest.index_bytes.copy(), manifest.index_checksums.copy()
    for row, name in enumerate(manifest.names):
        file = shards / index_name(name)
        index = ShardIndex.from_bytes(file.read_bytes(), where="i")
        photos = {name: replace(photo, orientation=orientation) for name, photo in index.photos.items()}
        data = replace(index, photos=photos).to_bytes()
        file.write_bytes(data)
        index_bytes[row], checksums[row] = len(data), checksum(data)
    changed = replace(manifest, turned=turned, index_bytes=index_bytes, index_checksums=checksums)
    path.write_bytes(changed.to_bytes())


@pytest.mark.parametrize("num", [4, NUM])
def test_a_photo_that_is_turned_in_another_way_than_its_index_says_is_bad(tmp_path: Path, num: int) -> None:
    """The loader believes the photo's own bytes; also where the size is the same."""
    samples = [Sample(f"{row}", {"jpg": turned_photo(slope(), 6)}) for row in range(num)]
    shards = write_shards(tmp_path, samples, per_shard=num)
    change_index(shards, np.array([6] * (num - 1) + [8], np.uint8), {"jpg": num})
    with pytest.raises(
        DecodeError, match=f"key '{num - 1}': .* has EXIF orientation 6, its index says 8; index it anew"
    ):
        batch_of(shards, dp.classification_train(crop=24), batch_size=num)
    stored = batch_of(shards, dp.classification_train(crop=24, orient=False), batch_size=num)
    assert len(stored["image"]) == num


@pytest.mark.parametrize("is_sized_upright", [False, True])
def test_a_graph_that_mixes_stored_sizes_and_upright_pixels_is_refused(tmp_path: Path, is_sized_upright: bool) -> None:
    """Only where photos are turned: nothing else shows the fault."""

    def graph(components: dp.Components, random: dp.Random) -> dict[str, object]:
        start, shape = random.resized_crop("jpg", orient=is_sized_upright)
        photo = fn.decoders.image_slice(
            components["jpg"], start, shape, axes=(0, 1), output_type=types.RGB, adjust_orientation=not is_sized_upright
        )
        return {"image": fn.resize(photo, size=(8, 8))}

    turned = write_shards(tmp_path / "turned", turned_samples(), per_shard=NUM)
    with pytest.raises(DataError, match=r"asks for sizes or crops of .* photos 'jpg', .* 35 photos .* adjust_"):
        batch_of(turned, graph)
    plain = write_shards(tmp_path / "plain", as_upright(turned_samples()), per_shard=NUM)
    assert batch_of(plain, graph)["image"].shape == (NUM, 8, 8, 3)
