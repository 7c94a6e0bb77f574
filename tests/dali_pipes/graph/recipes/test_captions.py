"""Photos with captions: text as it is, tokens cut off or padded, and a mask."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import dali_pipes as dp
from tests.lazy import Lazy
from tests.loaders import batches_of
from tests.shards import Sample, npy_bytes, photo_bytes, write_shards

torch, functional = Lazy("torch"), Lazy("torchvision.transforms.functional")
captions = Lazy("dali_pipes.graph.recipes.captions")

LENGTH = 6
NUM_PHOTOS = 20


def tokens_of(number: int) -> list[int]:
    return [number + place for place in range(number % 10)]


def sample_of(number: int) -> Sample:
    components = {
        "jpg": photo_bytes(number, 90 + number, 120 - 3 * number),
        "txt": f"Größe {number}".encode(),
        "tokens.npy": npy_bytes(np.array(tokens_of(number), ("<u2", ">i4", "<i8")[number % 3])),
    }
    return Sample(f"c{number:03d}", components)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards whose last sample has no tokens."""
    samples = [sample_of(number) for number in range(NUM_PHOTOS)]
    del samples[-1].components["tokens.npy"]
    return write_shards(tmp_path_factory.mktemp("captions"), samples, per_shard=6)


def test_tokens_are_cut_off_or_padded(shards: Path) -> None:
    """Of any dtype of integers and either byte order; a caption that is cut off ends with the end token."""
    graph = dp.captions(crop=16, length=LENGTH, padding=7, end=99)
    num_samples = 0
    for batch in batches_of(shards, graph, select=dp.Select(missing="empty")):
        assert set(batch) == {"image", "text", "tokens", "attention_mask", "key"}
        assert batch["tokens"].dtype == batch["attention_mask"].dtype == torch.int64
        for row, key in enumerate(batch["key"]):
            number = int(key[1:])
            ids = tokens_of(number) if number < NUM_PHOTOS - 1 else []
            expected = [*ids[: LENGTH - 1], 99] if len(ids) > LENGTH else ids
            num = len(expected)
            assert batch["tokens"][row].tolist() == expected + [7] * (LENGTH - num)
            assert batch["attention_mask"][row].tolist() == [1] * num + [0] * (LENGTH - num)
            assert batch["text"][row] == f"Größe {number}"
            num_samples += 1
    assert num_samples == NUM_PHOTOS
    without_text, *_ = batches_of(shards, dp.captions(crop=16, text=None), select=dp.Select(missing="empty"))
    assert set(without_text) == {"image", "tokens", "attention_mask", "key"}


def test_validation_takes_the_middle(shards: Path) -> None:
    """The largest square about the centre, within a few grey levels of torchvision's."""
    graph = dp.captions(crop=32, scale=None, mean=(0, 0, 0), std=(1, 1, 1), tokens=None)
    for batch in batches_of(shards, graph):
        assert set(batch) == {"image", "text", "key"}
        for image, key in zip(batch["image"], batch["key"], strict=True):
            photo = Image.open(io.BytesIO(sample_of(int(key[1:])).components["jpg"]))
            side = min(photo.size)
            top, left = (photo.height - side) // 2, (photo.width - side) // 2
            square = functional.resized_crop(photo, top, left, side, side, [32, 32])
            difference = (image - functional.to_tensor(square)).abs() * 255
            assert difference.mean() < 0.7, key
            assert difference.max() < 8, key


def test_arrays_that_are_no_tokens_are_refused() -> None:
    for array, text in (
        (np.zeros(3, np.float32), r"expected token ids, integers \[N\], found float32 \[3\]"),
        (np.array([1, -2]), r"expected token ids in \[0, 2\*\*63\), found -2"),
    ):
        with pytest.raises(ValueError, match=text):
            captions.read_tokens(np.frombuffer(npy_bytes(array), np.uint8))
