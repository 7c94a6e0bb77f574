"""Load with WebDataset as AIStore's tutorial does: small batches from workers, shuffled and batched in one process.

It follows https://aistore.nvidia.com/blog/2023/06/09/aisio-transforms-with-webdataset-pt-3, with its numbers (16, 1000)
and its defaults. In the tutorial the cluster crops; here the workers decode the whole photo and crop it, one sample at
a time. Fetched bytes are not kept.
"""

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import webdataset

from bench.loaders.encoded import components_of, shard_urls
from bench.loaders.protocol import BenchBatch, BenchLoader, LoaderOptions
from bench.loaders.recipe import crop_of
from bench.loaders.transforms import cropped_photo, encoded_batch, mask_transform, normalised_tensor, photo_transform
from bench.loaders.workers import (
    WorkerEpochs,
    check_shared_memory,
    num_shard_workers,
    opener_for_workers,
    worker_context,
)
from dali_pipes.store.shard_set import ShardSet

WORKER_BATCH_SIZE = 16
SHUFFLE_SAMPLES = 1000
NUM_BYTES = "__bytes__"
"""Component -> the size of its file."""


def open_loader(shards: ShardSet, *, options: LoaderOptions) -> contextlib.AbstractContextManager[BenchLoader]:
    """Open the tutorial's loader, which always decodes with Pillow (``decode("pil")``)."""
    # Samples in the shuffle buffer are views of the workers' batches, which therefore stay in shared memory.
    check_shared_memory(SHUFFLE_SAMPLES, options=options)
    dataset = webdataset.WebDataset(
        shard_urls(shards), shardshuffle=len(shards.names), seed=options.seed, empty_check=False
    ).map(_with_crop_number)
    if options.recipe != "encoded":
        dataset = dataset.decode("pil")
    dataset = dataset.map(_Transform(options)).batched(WORKER_BATCH_SIZE)
    loader = webdataset.WebLoader(
        dataset,
        batch_size=None,
        num_workers=num_shard_workers(shards, options),
        multiprocessing_context=worker_context(),
        worker_init_fn=opener_for_workers(shards),
    )
    data_loader = loader.pipeline[0]
    batches = loader.unbatched().shuffle(SHUFFLE_SAMPLES).batched(options.batch_size).map(_as_batch)
    return contextlib.closing(WorkerEpochs(data_loader, batches=batches, options=replace(options, decode="pil")))


def _with_crop_number(sample: dict[str, Any]) -> dict[str, Any]:
    """Keep the size of each file, which the classification recipe's crop follows from: decoding drops it."""
    # The library does not decode names that begin with an underscore.
    return sample | {NUM_BYTES: {name: len(data) for name, data in sample.items() if isinstance(data, bytes)}}


class _Transform:
    def __init__(self, options: LoaderOptions) -> None:
        self._options = options
        self._photo = photo_transform(options.crop)
        self._mask = mask_transform(options.crop)

    def __call__(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        if self._options.recipe == "encoded":
            photo, _, label, key = components_of(sample, self._options)
            return {"encoded": photo, "label": label, "key": key}
        if self._options.mask is None:
            return {"image": self._cropped(sample), "label": sample["cls"], "key": sample["__key__"]}
        photo, mask = (_first(sample, name)[1] for name in (self._options.photo, self._options.mask))
        return {
            "image": self._photo(photo),
            # decode("pil") makes every image RGB: a mask's values in three equal channels. Make it one channel again.
            "mask": self._mask(mask.convert("L")),
            "label": sample["cls"],
            "key": sample["__key__"],
        }

    def _cropped(self, sample: Mapping[str, Any]) -> torch.Tensor:
        name, photo = _first(sample, self._options.photo)
        crop = crop_of(sample[NUM_BYTES][name], height=photo.height, width=photo.width)
        return normalised_tensor(cropped_photo(photo, crop, self._options.crop))


def _first(sample: Mapping[str, Any], names: str) -> tuple[str, Any]:
    """Name and content of the first component that the sample has, of alternatives such as ``jpg;jpeg``."""
    return next((name, sample[name]) for name in names.split(";") if name in sample)


def _as_batch(batch: Mapping[str, Any]) -> BenchBatch:
    if "encoded" in batch:
        rows = zip(batch["encoded"], batch["label"], batch["key"], strict=True)
        return encoded_batch([(photo, None, int(label), str(key)) for photo, label, key in rows])
    # The library collates numbers into a numpy array, and strings into a list or an array, depending on their number.
    made: BenchBatch = {
        "image": batch["image"],
        "label": torch.as_tensor(batch["label"], dtype=torch.int64),
        "key": [str(key) for key in batch["key"]],
    }
    return {**made, "mask": batch["mask"]} if "mask" in batch else made
