"""WebDataset as AIStore's tutorial has it: small batches from the workers, shuffled and batched anew in one process.

The design of https://aistore.nvidia.com/blog/2023/06/09/aisio-transforms-with-webdataset-pt-3, with its numbers (16,
1000) and its defaults; the crop, which the tutorial has the cluster do, is done in the workers, a sample at a time, out
of the whole photo. Nothing is kept of what was fetched.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import webdataset

from bench.loaders import Batch, Loader, LoaderOptions
from bench.loaders.devices import delivery_device
from bench.loaders.workers import WorkerEpochs, check_shared_memory, opener_for_workers, shard_urls, worker_context
from bench.transforms import mask_transform, photo_transform

if TYPE_CHECKING:
    from dali_pipes.store.urls import ShardSet

__all__ = ["open_loader"]

WORKER_BATCH_SIZE = 16
SHUFFLE_SAMPLES = 1000


@contextlib.contextmanager
def open_loader(shards: "ShardSet", *, options: LoaderOptions) -> Iterator[Loader]:
    """The tutorial's loader. It always decodes with Pillow, as ``decode("pil")`` does."""
    num_workers = min(options.num_threads, len(shards.names))
    # The samples in the shuffle buffer are views of the workers' batches, which stay in shared memory for them.
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
        num_workers=num_workers,
        multiprocessing_context=worker_context(),
        worker_init_fn=opener_for_workers(shards),
    )
    data_loader = loader.pipeline[0]
    batches = loader.unbatched().shuffle(SHUFFLE_SAMPLES).batched(options.batch_size).map(_as_batch)
    epochs = WorkerEpochs(
        batches,
        data_loader=data_loader,
        num_workers=num_workers,
        decode="pil",
        device=delivery_device(options.device),
    )
    try:
        yield epochs
    finally:
        epochs.close()


class _Transform:
    def __init__(self, options: LoaderOptions) -> None:
        self._names = (options.photo, options.mask)
        self._photo = photo_transform(options.crop)
        self._mask = mask_transform(options.crop)

    def __call__(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        photo, mask = (sample[name] for name in self._names)
        return {
            "image": self._photo(photo),
            # decode("pil") makes every image RGB; back to one channel, of the same values.
            "trimap": self._mask(mask.convert("L")),
            "label": sample["cls"],
            "key": sample["__key__"],
        }


def _as_batch(batch: Mapping[str, Any]) -> Batch:
    # The library collates numbers into a numpy array, and strings into a list or an array by their number.
    return {
        "image": batch["image"],
        "trimap": batch["trimap"],
        "label": torch.as_tensor(batch["label"], dtype=torch.int64),
        "key": [str(key) for key in batch["key"]],
    }
