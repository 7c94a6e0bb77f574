"""What the comparison finds, by planting it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from bench.compare.outputs import SAME_PIXELS, OutputError, Reference, compare_epoch
from bench.loaders.protocol import ALL_PARTS, BenchBatch, LoaderOptions
from bench.loaders.transforms import IMAGENET_MEAN, IMAGENET_STD
from dali_pipes.errors import DataError
from dali_pipes.store.urls import resolve_shards
from tests.lazy import Lazy

if TYPE_CHECKING:
    from dali_pipes.store.shard_set import ShardSet

torch = Lazy("torch")

KEY = "animals/pet_003"


@pytest.fixture(scope="module")
def reference(pets: ShardSet, options: LoaderOptions) -> Iterator[Reference]:
    with Reference.open(pets, options=options) as opened:
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


def test_reference_of_a_key_in_two_shards_is_refused(pets: ShardSet, tmp_path: Path, options: LoaderOptions) -> None:
    for name in ("a-0.tar", "a-1.tar"):
        (tmp_path / name).write_bytes(Path(pets.store.locate(pets.names[0])).read_bytes())
    found = resolve_shards(tmp_path, endpoint=None)
    with pytest.raises(DataError, match="key 'animals/pet_000' comes twice"), Reference.open(found, options=options):
        pass
