"""What the comparison finds, by planting it."""

from __future__ import annotations

import contextlib
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image

from bench.compare.outputs import SAME_PIXELS, OutputError, Reference, Tolerance, compare_epoch
from bench.loaders.protocol import ALL_PARTS, PARTS, BenchBatch, LoaderOptions
from bench.loaders.transforms import IMAGENET_MEAN, IMAGENET_STD
from dali_pipes.errors import DataError
from dali_pipes.store.urls import resolve_shards
from tests.lazy import Lazy

if TYPE_CHECKING:
    from dali_pipes.store.shard_set import ShardSet

torch = Lazy("torch")

KEY = "animals/pet_003"


@pytest.fixture(scope="module")
def reference(shards: ShardSet, options: LoaderOptions) -> Iterator[Reference]:
    with Reference.open(shards, options=options) as opened:
        yield opened


@pytest.fixture
def epoch(reference: Reference) -> list[BenchBatch]:
    """A right epoch, in batches of 4; tests spoil it."""
    keys = sorted(reference.keys)
    batches: list[BenchBatch] = []
    for start in range(0, len(keys), 4):
        rows = [reference.sample(key) for key in keys[start : start + 4]]
        batches.append(
            {
                "image": torch.stack([row["image"] for row in rows]),
                "mask": torch.stack([row["mask"] for row in rows]),
                "label": torch.tensor([row["label"] for row in rows]),
                "key": [row["key"] for row in rows],
            }
        )
    return batches


def compare(epoch: list[BenchBatch], reference: Reference) -> None:
    compare_epoch(epoch, reference, loader="dali", tolerance=SAME_PIXELS)


def test_compare_right_epoch_passes(epoch: list[BenchBatch], reference: Reference) -> None:
    found = compare_epoch(epoch, reference, loader="dali", tolerance=SAME_PIXELS)
    assert (found.loader, found.num_samples, found.max_photo_difference) == ("dali", 22, 0.0)


def spoilt(part: str, at: tuple[int, ...], change: float) -> Any:
    """Change one value of pet_003, the fourth sample of the first batch."""

    def spoil(epoch: Any) -> Any:
        epoch[0][part][3][at] += change
        return epoch

    return spoil


def with_keys(*keys: str) -> Any:
    """Replace keys of the first batch."""

    def spoil(epoch: Any) -> Any:
        epoch[0]["key"][: len(keys)] = keys
        return epoch

    return spoil


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (spoilt("label", (), 1), f"loader 'dali', key '{KEY}': label differs: expected 4, found 5"),
        (spoilt("mask", (0, 30, 31), 77), f"key '{KEY}': 1 mask pixels differ"),
        (  # one level of 255: 1 / 255 / 0.225 of the normalised blue channel
            spoilt("image", (2, 10, 20), 1 / 255 / 0.225),
            rf"key '{KEY}': photo differs .* by up to 0\.0174 .* expected at most 1e-06",
        ),
        (spoilt("image", (0, 0, 0), torch.nan), f"key '{KEY}': photo differs"),
        (lambda epoch: epoch[1:], "18 of 22 keys came .* missing: .*'animals/pet_002' and 1 more"),
        (lambda epoch: [*epoch, epoch[0]], "key 'animals/pet_000': comes twice in one epoch"),
        (with_keys("plants/oak"), "key 'plants/oak': is not in the shards"),
        (with_keys("animals/pet_001", "animals/pet_000"), r"key 'animals/pet_00[01]'"),  # swapped
    ],
)
def test_compare_finds_what_is_wrong(spoil: Any, message: str, epoch: list[BenchBatch], reference: Reference) -> None:
    with pytest.raises(OutputError, match=message):
        compare(spoil(epoch), reference)


@pytest.mark.parametrize(
    ("tolerance", "is_close"),
    [
        (Tolerance(max_abs=0.6, mean_abs=1e-4), True),  # one of 12,288 values: the mean is 4e-5
        (Tolerance(max_abs=0.4, mean_abs=1e-4), False),
        (Tolerance(max_abs=0.6, mean_abs=1e-5), False),
    ],
)
def test_compare_takes_both_bounds_of_the_tolerance(
    epoch: list[BenchBatch], reference: Reference, tolerance: Tolerance, is_close: bool
) -> None:
    shifted = epoch[0]["image"][3].view(-1)
    shifted[int(shifted.abs().argmin())] += 0.5
    with contextlib.nullcontext() if is_close else pytest.raises(OutputError, match="photo differs"):
        compare_epoch(epoch, reference, loader="dali", tolerance=tolerance)


def test_compare_wrong_dtype_or_length_is_named(epoch: list[BenchBatch], reference: Reference) -> None:
    """Tensors of another type or size are differences, not errors of torch."""
    batch = epoch[0]
    for spoilt, message in (
        ({**batch, "label": batch["label"].int()}, r"labels must be int64 \[4\], found torch.int32 \[4\]"),
        ({**batch, "label": batch["label"][:, None]}, r"labels must be int64 \[4\], found torch.int64 \[4, 1\]"),
        ({**batch, "image": batch["image"].half()}, "image must be torch.float32"),
        ({**batch, "image": batch["image"][:3]}, "a batch of 4 keys has {'image': 3} rows"),
        ({**batch, "mask": batch["mask"][..., :-1]}, "mask must be torch.uint8"),
        (without(epoch, "mask")[0], "a batch must have image, key, label, mask, found image, key, label"),
    ):
        with pytest.raises(OutputError, match=message):
            compare([spoilt], reference)  # type: ignore[list-item]


def without(epoch: list[BenchBatch], *parts: str) -> Any:
    return [{name: value for name, value in batch.items() if name not in parts} for batch in epoch]


@pytest.mark.parametrize("lacking", [("mask",), ("image", "mask")])
def test_compare_loader_of_fewer_parts_is_compared_in_the_rest(
    lacking: tuple[str, ...], epoch: list[BenchBatch], reference: Reference
) -> None:
    """What a peer cannot do is marked; what it can do is still held against the shards. No photo has no difference."""
    gives = ALL_PARTS - set(lacking) - ({"normalised"} if "image" in lacking else set())
    partial = without(epoch, *lacking)
    found = compare_epoch(partial, reference, loader="peer", tolerance=SAME_PIXELS, gives=gives)
    assert found.not_compared == tuple(sorted(PARTS["segmentation"] - gives))
    assert found.max_photo_difference == found.mean_photo_difference == (None if "image" in lacking else 0.0)
    partial[0]["label"][3] += 1
    with pytest.raises(OutputError, match=f"loader 'peer', key '{KEY}': label differs: expected 4, found 5"):
        compare_epoch(partial, reference, loader="peer", tolerance=SAME_PIXELS, gives=gives)


def test_compare_photos_that_are_not_normalised(epoch: list[BenchBatch], reference: Reference) -> None:
    """Bytes as they were decoded: normalised here, then compared; one level off is found."""
    gives = ALL_PARTS - {"normalised"}
    mean, std = (torch.tensor(values)[:, None, None] for values in (IMAGENET_MEAN, IMAGENET_STD))
    plain: Any = [{**batch, "image": ((batch["image"] * std + mean) * 255).round().byte()} for batch in epoch]
    found = compare_epoch(plain, reference, loader="peer", tolerance=SAME_PIXELS, gives=gives)
    assert found.not_compared == ("normalised",)
    plain[0]["image"][3, 2, 10, 20] ^= 1
    with pytest.raises(OutputError, match=r"photo differs .* by up to 0\.0174"):
        compare_epoch(plain, reference, loader="peer", tolerance=SAME_PIXELS, gives=gives)
    with pytest.raises(OutputError, match=r"not normalised must be torch\.uint8, found torch\.float32"):
        compare_epoch(epoch, reference, loader="peer", tolerance=SAME_PIXELS, gives=gives)


def test_compare_loader_of_nothing_is_counted(epoch: list[BenchBatch], reference: Reference) -> None:
    """`synthetic` is timed over as many samples as the others."""
    other: Any = [{**batch, "key": ["any"] * len(batch["key"])} for batch in epoch]
    found = compare_epoch(other, reference, loader="synthetic", tolerance=SAME_PIXELS, gives=frozenset())
    assert (found.num_samples, found.not_compared) == (22, ("image", "key", "label", "mask", "normalised"))
    with pytest.raises(OutputError, match="loader 'synthetic': 18 samples came in one epoch, expected 22"):
        compare_epoch(other[1:], reference, loader="synthetic", tolerance=SAME_PIXELS, gives=frozenset())


def test_reference_of_shards_that_cannot_be_compared_is_refused(
    shards: ShardSet, tmp_path: Path, options: LoaderOptions
) -> None:
    """A key in two shards; issue 3: no tar, and one that was cut off, end in an error that names the shard."""
    whole = Path(shards.store.locate(shards.names[0])).read_bytes()
    for data, message in (
        ({"a-0.tar": b"no tar" * 500}, r"shard '.*/a-0\.tar' is "),
        ({"a-0.tar": whole[:5000]}, r"shard '.*/a-0\.tar' is "),
        ({"a-0.tar": whole, "a-1.tar": whole}, "key 'animals/pet_000' comes twice"),
    ):
        for name, content in data.items():
            (tmp_path / name).write_bytes(content)
        with (
            pytest.raises(DataError, match=message),
            Reference.open(resolve_shards(tmp_path, endpoint=None), options=options),
        ):
            pass


def test_reference_equals_arithmetic_by_hand(reference: Reference, shards: ShardSet) -> None:
    """The reference itself, against numpy: pet_004 is grey, 65 rows of 67, cut at row 0 and column 2."""
    archive = tarfile.open(shards.store.locate("pets-000001.tar"))  # noqa: SIM115
    with archive, Image.open(archive.extractfile("animals/pet_004.image.jpg")) as image:  # type: ignore[arg-type]
        assert (image.mode, image.size) == ("L", (67, 65))
        pixels = np.asarray(image.convert("RGB"), np.float32)
    top, left = (round((side - 64) / 2) for side in pixels.shape[:2])
    window = pixels[top : top + 64, left : left + 64].transpose(2, 0, 1) / np.float32(255)
    mean = np.array([0.485, 0.456, 0.406], np.float32)[:, None, None]
    std = np.array([0.229, 0.224, 0.225], np.float32)[:, None, None]
    assert np.array_equal(reference.sample("animals/pet_004")["image"].numpy(), (window - mean) / std)
