"""What the peers that decode in Python make of encoded samples: whole batches, held against the reference."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, default_collate

from bench.loaders.protocol import LoaderOptions
from bench.loaders.transforms import BatchDecoder, SampleDecoder
from bench.loaders.workers import worker_context
from dali_pipes.errors import DataError
from tests.bench.conftest import NUM_SAMPLES, samples


def encoded() -> list[dict[str, Any]]:
    """Sizes below, at and above the crop, odd and even; one photo is grey."""
    return [{"__key__": sample.key, **sample.components} for sample in samples()]


@pytest.mark.parametrize("decode", ["pil", "turbo"])
def test_batch_decoder_makes_what_the_reference_makes(
    decode: str, options: LoaderOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masks, labels and keys the same, photos but for rounding; padding too, in memory that was used before."""
    monkeypatch.setattr("bench.loaders.transforms._new_tensor", lambda shape, dtype: torch.full(shape, 7, dtype=dtype))
    batch = BatchDecoder(replace(options, decode=decode))(encoded())
    expected = default_collate([SampleDecoder(options)(sample) for sample in encoded()])
    assert batch["key"] == expected["key"]
    assert torch.equal(batch["label"], expected["label"])
    assert batch["label"].dtype == torch.int64
    assert torch.equal(batch["mask"], expected["mask"])
    for key, image, wanted in zip(batch["key"], batch["image"], expected["image"], strict=True):
        torch.testing.assert_close(image, wanted, rtol=0, atol=1e-6, msg=key)


class IsShared:
    """What a worker's collate function sees of its own batch."""

    def __init__(self, options: LoaderOptions) -> None:
        self._decode = BatchDecoder(options)

    def __call__(self, batch: Sequence[dict[str, Any]]) -> list[bool]:
        made = self._decode(batch)
        return [made["image"].is_shared(), made["mask"].is_shared()]


def test_batch_decoder_in_a_worker_fills_shared_memory(options: LoaderOptions) -> None:
    """As default_collate does: else a batch would be copied there when it is handed over."""
    loader: DataLoader[dict[str, Any]] = DataLoader(
        encoded(),  # type: ignore[arg-type]  # a list is a data set
        batch_size=NUM_SAMPLES,
        collate_fn=IsShared(options),
        num_workers=1,
        multiprocessing_context=worker_context(),
    )
    assert list(loader) == [[True, True]]
    assert IsShared(options)(encoded()) == [False, False]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"trimap.png": None}, r"key 'animals/pet_001': no component 'trimap\.png' \(found: cls, image\.jpg\)"),
        ({"cls": b"cat"}, "key 'animals/pet_001': cls must be a number, got b'cat'"),
    ],
)
def test_batch_decoder_names_the_sample_that_it_cannot_take(
    change: dict[str, bytes | None], message: str, options: LoaderOptions
) -> None:
    """One of a batch of many."""
    batch = encoded()
    batch[1] = {name: data for name, data in (batch[1] | change).items() if data is not None}
    with pytest.raises(DataError, match=message):
        BatchDecoder(options)(batch)
