"""Photos with EXIF orientations, from a folder of files to a batch: upright as Pillow turns them, or as stored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import dali_pipes as dp
from dali_pipes.data_set import indexing
from dali_pipes.errors import DataError, DecodeError
from dali_pipes.formats.orientation import Orientation
from tests.hostile_photos import undecodable
from tests.lazy import Lazy
from tests.loaders import substituting
from tests.shards import Sample, write_shards
from tests.turned_photos import Pixels, exif_block, slope, stored_photo, turned_photo, upright, with_exif

if TYPE_CHECKING:
    from PIL import Image

torch, fn, types = Lazy("torch"), Lazy("nvidia.dali.fn"), Lazy("nvidia.dali.types")

# Enough for the photos of a batch to be read together.
NUM = 40
GRAPHS: dict[str, Callable[..., Any]] = {
    "segmentation": lambda **options: dp.segmentation(crop=30, **options),
    "train": lambda **options: dp.classification_train(crop=24, **options),
    "eval": lambda **options: dp.classification_eval(resize=30, crop=24, **options),
    "detection": lambda **options: dp.detection(crop=24, max_boxes=2, **options),
    "captions": lambda **options: dp.captions(crop=24, tokens=None, **options),
    "multi-crop": lambda **options: dp.multi_crop(sizes=(24, 16), num_crops=(1, 1), **options),
}


def graph_of(name: str, **options: Any) -> Any:
    return GRAPHS[name](dtype="uint8", photo="jpg", **options)


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
    """Photos of all orientations, each with a box, a caption and a mask. The mask is stored upright or turned."""
    samples = []
    for number in range(NUM):
        pixels, orientation = stored_pixels(number), 1 + number % 8
        as_stored = turned_photo(mask_of(pixels), orientation, "PNG")
        options = {"lossless": False} if format == "WEBP" else {}
        components = {
            "cls": b"3",
            "txt": b"a",
            "boxes.json": b'{"boxes": [[3, 5, 30, 33]], "labels": [4]}',
            "jpg": turned_photo(pixels, orientation, format, **options),
            "png": as_stored if mask == "turned" else png(upright(as_stored)),
        }
        samples.append(Sample(f"{number:03d}", components))
    return samples


def as_upright(samples: Sequence[Sample]) -> list[Sample]:
    """The same samples as Pillow sees them, as PNGs without EXIF data: they keep all pixels."""
    seen = {"jpg": "RGB", "png": "L"}
    return [
        Sample(s.key, s.components | {name: png(upright(s.components[name]).convert(seen[name])) for name in seen})
        for s in samples
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
            assert torch.equal(output, expected[name]) if torch.is_tensor(output) else output == expected[name], name


@pytest.mark.parametrize(
    ("graph", "format"), [*((name, "JPEG") for name in GRAPHS), ("train", "PNG"), ("segmentation", "WEBP")]
)
def test_graphs_give_what_pillow_turns_upright(tmp_path: Path, graph: str, format: str, device: str) -> None:
    """All eight orientations, by default: crops, masks and random numbers as for photos that are stored upright."""
    samples = turned_samples(format)
    turned = write_shards(tmp_path / "turned", samples, per_shard=16)
    plain = write_shards(tmp_path / "plain", as_upright(samples), per_shard=16)
    found = batch_of(turned, graph_of(graph), device=device)
    # On a GPU nvJPEG decodes, and its pixels differ by a few grey levels.
    assert_equal(found, batch_of(plain, graph_of(graph), device=device), tolerance=0 if device == "cpu" else 4)
    if graph != "segmentation":  # whose masks are those of the upright photos
        stored = batch_of(turned, graph_of(graph, orient=False), device=device)
        image = "global_0" if graph == "multi-crop" else "image"
        assert (found[image].int() - stored[image].int()).abs().float().mean() > 10


def test_each_mask_is_turned_by_its_own_exif_data(tmp_path: Path) -> None:
    samples = turned_samples(mask="turned")
    turned = write_shards(tmp_path / "turned", samples, per_shard=16)
    plain = write_shards(tmp_path / "plain", as_upright(samples), per_shard=16)
    assert_equal(*(batch_of(shards, graph_of("segmentation")) for shards in (turned, plain)))


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
        assert_equal(*(batch_of(shards, graph_of(graph)) for shards in both))


def test_a_batch_with_a_bad_photo_is_repaired_upright(tmp_path: Path) -> None:
    """The other photos of its batch are as they would be without it, those with odd EXIF data as well."""
    samples = turned_samples()
    samples[3].components["jpg"] = with_exif(stored_photo(stored_pixels(3)), exif_block(4), exif_block(7))
    good = write_shards(tmp_path / "good", samples, per_shard=NUM)
    graph, options = graph_of("segmentation"), {"shuffle": False}
    expected = batch_of(good, graph, **options)
    samples[9].components["jpg"] = undecodable(samples[9].components["jpg"])
    bad = write_shards(tmp_path / "bad", samples, per_shard=NUM)
    found = batch_of(bad, graph, bad_samples=substituting(tmp_path), **options)
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


@pytest.mark.parametrize("num", [4, NUM])
def test_a_photo_that_is_turned_in_another_way_than_its_index_says_is_bad(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num: int
) -> None:
    """The loader believes the photo's own bytes; also where the size is the same."""
    samples = [Sample(f"{row}", {"jpg": turned_photo(slope(), 6)}) for row in range(num)]
    said = iter([6] * (num - 1) + [8])
    monkeypatch.setattr(indexing, "read_orientation", lambda data, format: Orientation(next(said), True))
    shards = write_shards(tmp_path, samples, per_shard=num)
    text = f"key '{num - 1}': .* has EXIF orientation 6, its index says 8; index it anew"
    with pytest.raises(DecodeError, match=text):
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
