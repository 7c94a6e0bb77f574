"""Tests of the recipes: the crops, and all loaders give the same photos as Pillow and torchvision."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import ExifTags, Image

from bench.compare.outputs import SAME_PIXELS, OutputError, Reference, compare_epoch, tolerance_of
from bench.loaders.protocol import PARTS, BenchBatch, LoaderOptions
from bench.loaders.recipe import choose_recipe, crop_of, crop_table, crops_of
from bench.loaders.registry import LOADERS, LoaderSpec, open_loader
from dali_pipes.store.urls import resolve_shards
from tests.bench.conftest import NUM_SAMPLES, loader_cases
from tests.lazy import Lazy
from tests.shards import Sample, mask_bytes, photo_bytes, write_shards

if TYPE_CHECKING:
    from dali_pipes.store.shard_set import ShardSet

torch = Lazy("torch")

ALWAYS = ("dali", "webloader", "dali-external", "synthetic")
"""These loaders are tested in every run. The other loaders are tested nightly."""


@pytest.fixture(scope="module", params=["classification", "evaluation", "encoded"])
def chosen(request: pytest.FixtureRequest, options: LoaderOptions) -> LoaderOptions:
    return replace(options, recipe=request.param, mask=None)


@pytest.fixture(scope="module")
def reference(pets: ShardSet, chosen: LoaderOptions) -> Iterator[Reference]:
    with Reference.open(pets, options=chosen) as opened:
        yield opened


def compare_two_epochs(name: str, shards: ShardSet, options: LoaderOptions, reference: Reference) -> BenchBatch:
    """Compare what the loader gives, and return a batch of it."""
    gives = LOADERS[name].gives
    with open_loader(name, shards, options=options) as loader:
        tolerance = tolerance_of(decode=loader.decode, device=loader.device, recipe=options.recipe)
        for _ in range(2):
            found = compare_epoch(loader.epoch(), reference, loader=name, tolerance=tolerance, gives=gives)
            assert found.num_samples == NUM_SAMPLES
            assert found.not_compared == tuple(sorted(PARTS[options.recipe] - gives))
        return next(iter(loader.epoch()))


def test_crops_are_those_of_earlier_records() -> None:
    """The 64 crops never change, so that records of different versions are comparable."""
    assert crop_table().shape == (64, 5)
    assert crop_table()[:2].tolist() == [[43, 36, 196, 162, 0], [144, 100, 94, 116, 0]]


@given(st.integers(0, 2**40), st.integers(1, 10_000), st.integers(1, 10_000))
def test_crop_lies_in_its_photo(num_bytes: int, height: int, width: int) -> None:
    """Of every size; one photo's crop is that of the photo among others."""
    crop = crop_of(num_bytes, height=height, width=width)
    assert 0 <= crop.top < crop.top + crop.height <= height
    assert 0 <= crop.left < crop.left + crop.width <= width
    among = crops_of(*(np.array([5, value, 9], np.int64) for value in (num_bytes, height, width)))
    assert among[1].tolist() == [*crop[:4], int(crop.is_flipped)]


@pytest.mark.parametrize("spec", loader_cases("local", "converted", always=ALWAYS))
def test_loader_makes_what_the_recipe_says(
    spec: LoaderSpec, pets: ShardSet, chosen: LoaderOptions, reference: Reference
) -> None:
    """The same crop of each photo, as torchvision makes it; or each file, unchanged. In every epoch; no mask."""
    if chosen.recipe == "encoded" and spec.decode not in (None, *LOADERS[spec.name].decodes[:1]):
        pytest.skip("nothing is decoded")
    batch = compare_two_epochs(spec.name, pets, spec.apply(chosen), reference)
    assert set(batch) & {"mask", "image", "encoded"} == {"encoded" if chosen.recipe == "encoded" else "image"}


@pytest.mark.parametrize("name", ["dali", "dali-external", "webloader:pil", "webloader:nvimgcodec", "spdl:turbo"])
@pytest.mark.parametrize("recipe", ["segmentation", "classification"])
def test_loader_gives_pixels_as_they_are(name: str, recipe: Any, pets: ShardSet, options: LoaderOptions) -> None:
    """The comparison normalises the uint8 images, and finds what Pillow and torchvision make."""
    spec, mask = LoaderSpec.parse(name), options.mask if recipe == "segmentation" else None
    own = spec.apply(replace(options, recipe=recipe, mask=mask, dtype="uint8"))
    gives = LOADERS[spec.name].gives - {"normalised"}
    with Reference.open(pets, options=own) as expected, open_loader(spec.name, pets, options=own) as loader:
        tolerance = tolerance_of(decode=loader.decode, device=loader.device, recipe=recipe)
        found = compare_epoch(loader.epoch(), expected, loader=name, tolerance=tolerance, gives=gives)
        assert found.num_samples == NUM_SAMPLES
        assert {batch["image"].dtype for batch in loader.epoch()} == {torch.uint8}


@pytest.mark.parametrize("name", ["dali", "dali-s3", pytest.param("webloader", marks=pytest.mark.nightly)])
def test_loader_hands_over_the_files_of_a_bucket(name: str, bucket_shards: ShardSet, options: LoaderOptions) -> None:
    encoded = replace(options, recipe="encoded", mask=None)
    with Reference.open(bucket_shards, options=encoded) as reference:
        compare_two_epochs(name, bucket_shards, encoded, reference)


def test_file_of_another_photo_is_found(pets: ShardSet, options: LoaderOptions) -> None:
    encoded = replace(options, recipe="encoded", mask=None)
    with Reference.open(pets, options=encoded) as reference, open_loader("dali", pets, options=encoded) as loader:
        batch: Any = next(loader.epoch())
        batch["encoded"] = batch["encoded"] ^ 1
        with pytest.raises(OutputError, match="the photo's file differs"):
            compare_epoch([batch], reference, loader="dali", tolerance=SAME_PIXELS)


@pytest.mark.parametrize(
    ("name", "recipe"), [("dali", "classification"), ("webloader", "classification"), ("dali", "segmentation")]
)
def test_photos_of_two_names_and_on_their_side_are_decoded_alike(
    name: str, recipe: Any, tmp_path: Path, options: LoaderOptions
) -> None:
    """Some photos are ``jpg``, some are ``jpeg``. No peer turns photos upright, so our loader does not, either."""
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    samples = [
        Sample(
            f"s{i}",
            {"cls": b"1", ("jpg", "jpeg")[i % 2]: photo_bytes(i, 90, 50, exif=exif), "seg.png": mask_bytes(i, 90, 50)},
        )
        for i in range(4)
    ]
    shards = resolve_shards(write_shards(tmp_path, samples, per_shard=2), endpoint=None)
    own = replace(options, batch_size=2, **choose_recipe(shards, recipe=recipe)._asdict())
    with Reference.open(shards, options=own) as expected, open_loader(name, shards, options=own) as loader:
        tolerance = tolerance_of(decode=loader.decode, device=loader.device, recipe=recipe)
        assert compare_epoch(loader.epoch(), expected, loader=name, tolerance=tolerance).num_samples == 4
