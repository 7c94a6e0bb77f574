"""A loader with aspect-ratio buckets: shapes, pixels, every sample once, resuming, and what is refused."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

import dali_pipes as dp
from tests import loaders
from tests.shards import Sample, image_bytes, make_samples, samples_and_shards, write_shards

# Area of 64 x 64 in steps of 16: heights and widths of the three buckets.
BUCKETS = dp.buckets(area=64 * 64, step=16, max_aspect=2)
SHAPES = [(48, 80), (64, 64), (80, 48)]
SIZES = [(60 + 37 * row % 90, 60 + 53 * row % 90) for row in range(58)]


samples, shards = samples_and_shards(SIZES, per_shard=9)


def open_loader(shards: Path, graph: Any = None, **options: Any) -> dp.Loader:
    usual = {"seed": 5, "select": dp.Select(buckets=BUCKETS), "outputs": dp.Outputs(keys=True, valid=True)}
    return loaders.open_loader(shards, graph or dp.bucketed(), **(usual | options))


def shape_of(width: int, height: int) -> tuple[int, int]:
    """The nearest bucket, in the logarithm of the aspect ratio."""
    return min(SHAPES, key=lambda shape: abs(math.log(height / width) - math.log(shape[0] / shape[1])))


def test_state_of_other_steps_is_refused(shards: Path) -> None:
    """Refused: another global batch size in mid-epoch, no buckets, or a position where no step ends."""
    with open_loader(shards) as loader:
        next(loader)
        state = loader.state_dict()
        assert (state["version"], state["group_size"]) == (6, 4)
        start = loader.delivery.state_at(3)
        with pytest.raises(dp.StateError, match="2 samples delivered, and no step of epoch 0 ends there"):
            loader.load_state_dict(state | {"delivered": 2})
    with pytest.raises(
        dp.StateError, match=r"with batch_size \* world_size 4, this loader has 6, .* pass a batch_size"
    ):
        open_loader(shards, batch_size=6, state=state)
    with open_loader(shards, batch_size=6, state=start) as loader:
        assert loader.epoch == 3, "at an epoch's start any batch size may follow"
    with pytest.raises(dp.StateError, match=r"the state has shapes=Buckets.*, this loader shapes=None; .*buckets="):
        open_loader(shards, dp.classification_eval(resize=32, crop=32), state=state, select=dp.Select())


def check_pixels(image: Any, photo: Image.Image) -> None:
    """The image is the largest cut about the photo's centre, as Pillow cuts and resizes it."""
    height, width = image.shape[:2]
    scale = min(photo.width / width, photo.height / height)
    columns, rows = width * scale, height * scale
    left, top = (photo.width - columns) / 2, (photo.height - rows) / 2
    cut = (left, top, left + columns, top + rows)
    expected = np.asarray(photo.resize((width, height), Image.Resampling.BILINEAR, box=cut), np.int32)
    # The cut is rounded to whole pixels, in photos of no more than 150.
    assert np.abs(expected - image).mean() < 6


def test_photo_of_a_phone_is_in_the_bucket_of_its_upright_shape(tmp_path: Path) -> None:
    """All eight orientations, of a wide and of a tall photo: shape and pixels are those of `exif_transpose`."""
    exif = Image.Exif()
    samples = []
    for row, sample in enumerate(make_samples([(150, 80), (70, 140)] * 8)):
        exif[0x0112] = row // 2 + 1
        photo = Image.open(io.BytesIO(sample.components["image.jpg"]))
        samples.append(Sample(f"k{row}", {"image.jpg": image_bytes(photo, "JPEG", exif=exif, quality=95)}))
    shards = write_shards(tmp_path, samples, per_shard=16)
    graph = dp.bucketed(place="centre", flip=0, dtype="uint8", layout="HWC")
    with open_loader(shards, graph, batch_size=1) as loader:
        batches = {batch["key"][0]: batch for (batch,) in loader}
    for sample in samples:
        upright = ImageOps.exif_transpose(Image.open(io.BytesIO(sample.components["image.jpg"])))
        (image,) = batches[sample.key]["image"].numpy()
        assert image.shape[:2] == shape_of(*upright.size)
        check_pixels(image, upright)


def test_what_cannot_be_is_refused(shards: Path) -> None:
    for options, text in (
        ({"select": dp.Select()}, r"the loader has no buckets; pass select=dali_pipes.Select\(buckets="),
        ({"shuffle": dp.Shuffle(slices=2)}, "buckets need slices=1, got 2"),
        ({"select": dp.Select(buckets=dp.buckets(area=4096, photo="cls"))}, "of 'cls' .* name a photo.*found: im"),
    ):
        with pytest.raises((ValueError, dp.DataError), match=text):
            open_loader(shards, **options)


@pytest.mark.parametrize(
    ("values", "error", "text"),
    [
        ({"area": 64 * 64, "step": 0}, ValueError, "step must be positive, got 0"),
        ({"area": 1023}, ValueError, r"area must be at least step \* step, 1024 pixels, got 1023"),
        ({"area": 4096, "max_aspect": "2"}, TypeError, "max_aspect must be a number, got '2'"),
        ({"area": 4096, "max_aspect": 0.5}, ValueError, "max_aspect must be a finite number from 1 on.* got 0.5"),
        ({"area": 4097**2, "step": 1, "max_aspect": 1}, ValueError, "has sides of more than 4096 steps of 1"),
        ({"area": 4096, "photo": 3}, TypeError, "photo must be the name of a component, or None, got 3"),
    ],
)
def test_description_of_buckets_is_checked(values: dict[str, Any], error: type[Exception], text: str) -> None:
    dp.buckets(area=4096**2, step=1, max_aspect=1)
    with pytest.raises(error, match=text):
        dp.buckets(**values)


@pytest.mark.gpu
def test_images_of_a_gpu_are_those_of_the_cpu(gpu: None, shards: Path) -> None:
    """The same shapes and samples; other decoders, so to a few grey levels."""
    graph = dp.bucketed(dtype="uint8")
    with open_loader(shards, graph) as cpu, open_loader(shards, graph, device="gpu") as other:
        for (expected,), (found,) in zip(cpu, other, strict=True):
            assert found["key"] == expected["key"]
            assert found["image"].device.type == "cuda"
            assert (found["image"].cpu().float() - expected["image"].float()).abs().mean() < 4


def test_number_of_samples_is_no_position_where_samples_are_repeated(shards: Path) -> None:
    """A trainer that is a batch behind, and counts rows, would lose that batch."""
    with open_loader(shards, last_batch_policy="FILL") as loader:
        next(loader)
        assert loader.state_dict()["delivered"] > 0
        with pytest.raises(ValueError, match="'FILL' repeats samples in mid-epoch; pass 'PARTIAL' or 'DROP'"):
            loader.state_dict(num_samples=4)


def test_samples_that_a_trainer_used_are_counted_without_what_drop_leaves_out(shards: Path) -> None:
    """``DROP`` leaves samples out at the end of every window; a trainer knows only of those that it had."""
    ranks = [
        open_loader(shards, shuffle=dp.Shuffle(window_bytes=200_000), last_batch_policy="DROP", rank=rank, world_size=2)
        for rank in range(2)
    ]
    used, found, expected = 0, [], []
    for step in zip(*ranks, strict=True):
        used += sum(int(batch["valid"].sum()) for (batch,) in step)
        expected.append(ranks[0].state_dict()["delivered"])
        found.append(ranks[0].state_dict(num_samples=used)["delivered"])
    assert found == expected
    assert used < expected[-1], "samples were left out before the last step"
    for loader in ranks:
        loader.close()
