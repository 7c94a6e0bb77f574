"""The graphs against torchvision, photo by photo."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import dali_pipes as dp
from dali_pipes.order.randomness import Stream
from tests.lazy import Lazy
from tests.loaders import batches_of
from tests.shards import make_samples, photo_bytes, write_shards

torch, transforms = Lazy("torch"), Lazy("torchvision.transforms")

# Odd, even, smaller, larger, by one, by three, much; every pair of them as width and height.
SIDES = (1, 2, 93, 94, 95, 96, 97, 98, 99, 100, 101, 203)
CROP = 97


def normalised(*before: Any) -> Any:
    """These transforms of torchvision, then `ToTensor` and `Normalize`."""
    return transforms.Compose([*before, transforms.ToTensor(), transforms.Normalize(dp.IMAGENET_MEAN, dp.IMAGENET_STD)])


def opened(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data))


@pytest.mark.parametrize(
    ("layout", "dtype", "tolerance", "side"),
    [
        ("CHW", "float32", 1e-6, CROP),
        ("HWC", "float16", 2e-3, CROP),  # half a unit in the last place at 2.6, the largest normalised value
        ("HWC", "uint8", 1e-4, (CROP, CROP - 3)),
    ],
)
def test_segmentation_equals_torchvision_for_every_size(
    tmp_path: Path, layout: Any, dtype: Any, tolerance: float, side: Any
) -> None:
    """Crop offset, padding and normalisation are torchvision's, for every size; masks are equal."""
    samples = {s.key: s for s in make_samples([(w, h) for w in SIDES for h in SIDES])}
    shards = write_shards(tmp_path, list(samples.values()), per_shard=50)
    crop = transforms.CenterCrop(side)
    transform = transforms.Compose([crop, transforms.PILToTensor()]) if dtype == "uint8" else normalised(crop)
    seen = []
    for batch in batches_of(shards, dp.segmentation(crop=side, dtype=dtype, layout=layout), batch_size=16):
        assert batch["image"].dtype == getattr(torch, dtype)
        for i, key in enumerate(batch["key"]):
            components = samples[key].components
            image, mask = (
                batch[name][i] if layout == "CHW" else batch[name][i].permute(2, 0, 1) for name in ("image", "mask")
            )
            assert (image.float() - transform(opened(components["image.jpg"]))).abs().max() <= tolerance, key
            assert np.array_equal(mask[0], np.asarray(crop(opened(components["trimap.png"])))), key
            assert batch["label"][i] == int(components["cls"])
            seen.append(key)
    assert sorted(seen) == sorted(samples)


def test_classification_eval_equals_torchvision(tmp_path: Path) -> None:
    """The CPU's pixels are those of torchvision's v2 ``Resize`` of a uint8 tensor, to the bit as uint8."""
    samples = {s.key: s for s in make_samples([(300, 400), (401, 299), (150, 163), (700, 333), (256, 256)])}
    shards = write_shards(tmp_path, list(samples.values()), per_shard=5)
    v2 = Lazy("torchvision.transforms.v2")
    resize = [v2.PILToTensor(), v2.Resize(256), v2.CenterCrop(224)]
    for dtype, tolerance in (("uint8", 0), ("float32", 1e-6), ("float16", 1e-3)):
        graph = dp.classification_eval(mean=(0, 0, 0), std=(1, 1, 1), dtype=dtype)
        (batch,) = batches_of(shards, graph, batch_size=5)
        last = [] if dtype == "uint8" else [v2.ToDtype(torch.float32, scale=True)]
        for i, key in enumerate(batch["key"]):
            expected = v2.Compose([*resize, *last])(opened(samples[key].components["image.jpg"]))
            assert (batch["image"][i].float() - expected.float()).abs().max() <= tolerance, (key, dtype)


def test_crop_and_flip_are_drawn_from_streams_of_their_own(small_shards: Path) -> None:
    """Each is the documented function of seed, epoch, sample and stream: a change breaks users' runs."""
    from dali_pipes.graph.random import resized_crop

    seed, epoch, ordinals = 4, 1, np.arange(23)

    def images(flip: float) -> torch.Tensor:
        graph = dp.classification_train(crop=24, flip=flip, dtype="uint8")
        with dp.loader(small_shards, graph, batch_size=23, seed=seed, shuffle=False, device="cpu") as loader:
            loader.set_epoch(epoch)
            return next(loader)[0]["image"]

    unflipped, flipped, drawn = images(0), images(1), images(0.5)
    coins = Stream(seed, epoch, "graph/flip").uniforms(ordinals, 1)[:, 0] < 0.5
    assert 4 < coins.sum() < 19
    for i, coin in enumerate(coins):
        assert torch.equal(flipped[i], unflipped[i].flip(-1))
        assert torch.equal(drawn[i], (flipped if coin else unflipped)[i])
    # The crop that the stream gives is the part of the photo that is seen: its mean colour tells.
    numbers = Stream(seed, epoch, "graph/crop").uniforms(ordinals, 22)
    for i in range(23):
        photo = opened(photo_bytes(i, 40 + 7 * (i % 5), 33 + 5 * (i % 7)))
        size = [np.array([side], np.int32) for side in (photo.height, photo.width)]
        (window,) = resized_crop(*size, numbers[i : i + 1], scale=(0.08, 1.0), ratio=(3 / 4, 4 / 3)).tolist()
        row, column, rows, columns = window
        part = np.asarray(photo)[row : row + rows, column : column + columns]
        assert np.abs(part.mean(axis=(0, 1)) - unflipped[i].numpy().mean(axis=(1, 2))).max() < 4, i


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: dp.segmentation(crop=0), "crop must be positive, got 0"),
        (lambda: dp.segmentation(dtype="int8"), "dtype must be one of float32, float16, uint8, got 'int8'"),
        (lambda: dp.segmentation(mask_device="gpu"), "mask_device must be one of cpu, mixed, got 'gpu'"),
        (lambda: dp.classification_train(layout="NCHW"), "layout must be one of CHW, HWC, got 'NCHW'"),
        (lambda: dp.classification_eval(resize=0), "got crop=224 with resize=0"),
        (lambda: dp.classification_eval(crop=512), "got crop=512 with resize=256"),
        (lambda: dp.segmentation(crop=(16, 0)), r"crop must be positive, got \(16, 0\)"),
        (lambda: dp.segmentation(crop=(16, 24, 3)), "crop must be one number, or rows and columns, got"),
        (lambda: dp.segmentation(mean=(123, 117, 104)), "mean must be of pixels in 0..1, such as .* divide"),
        (lambda: dp.segmentation(mean=0.5), "mean must have three numbers, of red, green and blue, got 0.5"),
        (lambda: dp.segmentation(std=(0.2, 0, 0.2)), r"std must be of pixels in 0..1, such as"),
        (
            lambda: dp.classification_train(scale=(1.0, 0.1)),
            r"scale must be the smallest and the largest number, above",
        ),
        (lambda: dp.classification_train(scale=(0, 1)), r"above 0 and at most 1, got \(0, 1\)"),
        (lambda: dp.classification_train(ratio=(2, 0.5)), "ratio must be the smallest and the largest number"),
        (lambda: dp.detection(scale=0.5), "scale must be two numbers, the smallest and the largest, got 0.5"),
        (lambda: dp.captions(length=0), "length must be positive, got 0"),
        (lambda: dp.captions(text=None, tokens=None), "text or tokens must name"),
        (lambda: dp.detection(box_format="cxcywh"), "box_format must be one of xyxy, xywh, got 'cxcywh'"),
        (lambda: dp.detection(max_boxes=0), "max_boxes must be positive, got 0"),
        (lambda: dp.detection(min_size=-1), "min_size must not be negative, got -1"),
        (lambda: dp.mixing(dp.classification_train(), mixup=0), "mixup must be positive, got 0"),
        (lambda: dp.mixing(dp.classification_train(), mixup=None, cutmix=None), "mixup or cutmix must be a number"),
        (lambda: dp.multi_crop(num_crops=(0, 0)), "num_crops must be two numbers of crops"),
        (lambda: dp.multi_crop(jitter=1.5), r"jitter must be in \[0, 1\], got 1.5"),
        (lambda: dp.multi_crop(sizes=96), "sizes must have 2 entries, got"),
        (lambda: dp.multi_crop(scales=((0.4, 1),)), "scales must have 2 entries, got"),
    ],
)
def test_bad_graph_arguments_are_refused(make: Callable[[], object], text: str) -> None:
    """A bad argument is refused where it is given, not when a pipeline is built."""
    with pytest.raises((ValueError, TypeError), match=text):
        make()


def test_crops_that_are_not_square(small_shards: Path) -> None:
    """An evaluation's crop is a part of the square. A random crop shows the same part of the photo as a square one."""

    def images(graph: Any) -> Any:
        return torch.cat([batch["image"].float() for batch in batches_of(small_shards, graph, shuffle=False)])

    form: Any = {"photo": "image.jpg", "dtype": "uint8"}
    square = images(dp.classification_eval(resize=32, crop=24, **form))
    assert torch.equal(images(dp.classification_eval(resize=32, crop=(24, 16), **form)), square[..., 4:20])
    wide, square = (images(dp.classification_train(crop=crop, **form)) for crop in ((16, 32), 16))
    assert (torch.nn.functional.avg_pool2d(wide, (1, 2)) - square).abs().mean() < 3
    assert images(dp.captions(crop=(16, 32), scale=None, tokens=None, text="cls", **form)).shape[2:] == (16, 32)


def test_crop_may_be_given_as_torchvision_takes_it() -> None:
    from dali_pipes.graph.pipelines import check_crop

    assert [check_crop(crop) for crop in ((24, 32), [24, 32], np.int64(24))] == [(24, 32), (24, 32), (24, 24)]
