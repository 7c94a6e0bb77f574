"""Photos with captions: text as it is, tokens cut off or padded, and a mask."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image
from torchvision import transforms

import dali_pipes as dp
from dali_pipes.graph.recipes.captions import read_tokens
from tests.loaders import batches_of
from tests.shards import Sample, npy_bytes, photo_bytes, write_shards

LENGTH = 6
NUM_PHOTOS = 20


def tokens_of(number: int) -> list[int]:
    return [number + place for place in range(number % 10)]


def sample_of(number: int) -> Sample:
    dtype = ("<u2", ">i4", "<i8")[number % 3]
    components = {
        "jpg": photo_bytes(number, 90 + number, 120 - 3 * number),
        "txt": f"Größe {number}".encode(),
        "tokens.npy": npy_bytes(np.array(tokens_of(number), dtype)),
    }
    return Sample(f"c{number:03d}", components)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    samples = [sample_of(number) for number in range(NUM_PHOTOS)]
    return write_shards(tmp_path_factory.mktemp("captions"), samples, per_shard=6)


def test_tokens_are_cut_off_or_padded(shards: Path) -> None:
    """Of any dtype of integers and either byte order; a caption that is cut off ends with the end token."""
    num_samples = 0
    for batch in batches_of(shards, dp.captions(crop=16, length=LENGTH, padding=7, end=99)):
        assert batch["tokens"].dtype == batch["attention_mask"].dtype == torch.int64
        for row, key in enumerate(batch["key"]):
            ids = tokens_of(int(key[1:]))
            expected = [*ids[: LENGTH - 1], 99] if len(ids) > LENGTH else ids
            num = len(expected)
            assert batch["tokens"][row].tolist() == expected + [7] * (LENGTH - num)
            assert batch["attention_mask"][row].tolist() == [1] * num + [0] * (LENGTH - num)
            assert batch["text"][row] == f"Größe {int(key[1:])}"
            num_samples += 1
    assert num_samples == NUM_PHOTOS


@pytest.mark.parametrize(
    ("options", "names"),
    [({"text": None}, {"image", "tokens", "attention_mask"}), ({"tokens": None}, {"image", "text"})],
)
def test_text_or_tokens_may_be_left_out(shards: Path, options: Any, names: set[str]) -> None:
    batch, *_ = batches_of(shards, dp.captions(crop=16, **options))
    assert set(batch) - {"key"} == names


def test_validation_takes_the_middle(shards: Path) -> None:
    """The largest square about the centre, within a few grey levels of torchvision's."""
    graph = dp.captions(crop=32, scale=None, mean=(0, 0, 0), std=(1, 1, 1))
    for batch in batches_of(shards, graph):
        for image, key in zip(batch["image"], batch["key"], strict=True):
            photo = Image.open(io.BytesIO(sample_of(int(key[1:])).components["jpg"]))
            side = min(photo.size)
            top, left = (photo.height - side) // 2, (photo.width - side) // 2
            square = transforms.functional.resized_crop(photo, top, left, side, side, [32, 32])
            difference = (image - transforms.functional.to_tensor(square)).abs() * 255
            assert difference.mean() < 0.7, key
            assert difference.max() < 8, key


@pytest.mark.parametrize(
    ("array", "text"),
    [
        (np.zeros((2, 3), np.int64), r"expected token ids, integers \[N\], found int64 \[2, 3\]"),
        (np.zeros(3, np.float32), r"expected token ids, integers \[N\], found float32 \[3\]"),
        (np.array([1, -2]), r"expected token ids in \[0, 2\*\*63\), found -2"),
        (np.array([2**63], np.uint64), r"expected token ids in \[0, 2\*\*63\), found 9223372036854775808"),
    ],
)
def test_arrays_that_are_no_tokens_are_refused(array: npt.NDArray[Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        read_tokens(np.frombuffer(npy_bytes(array), np.uint8))


def test_sample_without_tokens_has_none(tmp_path: Path) -> None:
    without = {name: data for name, data in sample_of(2).components.items() if name != "tokens.npy"}
    shards = write_shards(tmp_path, [sample_of(1), Sample("d", without)], per_shard=2)
    options: dict[str, Any] = {"select": dp.Select(missing="empty"), "batch_size": 2}
    (batch,) = batches_of(shards, dp.captions(crop=16, length=3, padding=5), **options)
    row = batch["key"].index("d")
    assert batch["tokens"][row].tolist() == [5, 5, 5]
    assert batch["attention_mask"].sum(dim=1).tolist() == ([0, 1] if row == 0 else [1, 0])


@pytest.mark.parametrize(
    ("options", "text"),
    [({"length": 0}, "length must be positive, got 0"), ({"text": None, "tokens": None}, "text or tokens must name")],
)
def test_arguments_out_of_range_are_refused(options: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        dp.captions(**options)
