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

from bench.loaders.encoded import shard_urls
from bench.loaders.protocol import BenchBatch, BenchLoader, LoaderOptions
from bench.loaders.transforms import mask_transform, photo_transform
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


def open_loader(shards: ShardSet, *, options: LoaderOptions) -> contextlib.AbstractContextManager[BenchLoader]:
    """Open the tutorial's loader, which always decodes with Pillow (``decode("pil")``)."""
    # Samples in the shuffle buffer are views of the workers' batches, which therefore stay in shared memory.
    check_shared_memory(SHUFFLE_SAMPLES, options=options)
    dataset = (
        webdataset.WebDataset(shard_urls(shards), shardshuffle=len(shards.names), seed=options.seed, empty_check=False)
        .decode("pil")
        .map(_Transform(options))
        .batched(WORKER_BATCH_SIZE)
    )
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


class _Transform:
    def __init__(self, options: LoaderOptions) -> None:
        self._names = (options.photo, options.mask)
        self._photo = photo_transform(options.crop)
        self._mask = mask_transform(options.crop)

    def __call__(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        photo, mask = (sample[name] for name in self._names)
        return {
            "image": self._photo(photo),
            # decode("pil") makes every image RGB: a mask's values in three equal channels. Make it one channel again.
            "trimap": self._mask(mask.convert("L")),
            "label": sample["cls"],
            "key": sample["__key__"],
        }


def _as_batch(batch: Mapping[str, Any]) -> BenchBatch:
    # The library collates numbers into a numpy array, and strings into a list or an array, depending on their number.
    return {
        "image": batch["image"],
        "trimap": batch["trimap"],
        "label": torch.as_tensor(batch["label"], dtype=torch.int64),
        "key": [str(key) for key in batch["key"]],
    }
