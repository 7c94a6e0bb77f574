"""Load with WebDataset: tuned by us, and as AIStore's tutorial does.

``webloader`` has the fastest settings that we found within the library's own interface. The workers, one for each core,
kept for all epochs, make whole batches. Each photo is decoded as a whole and normalised straight into a batch in shared
memory (`BatchDecoder`). Shards are shuffled and samples are not, because dSort has shuffled the samples. Shards of a
bucket are kept with ``cache_dir=`` in the directory for temporary files, unless there is only one epoch
(`LoaderOptions.keeps_shards`), whose first batch would come later: a shard is read only when it is complete. The
library names a kept shard by the last part of its URL, so shards with one name in several folders are not kept.

``webloader-tutorial`` follows https://aistore.nvidia.com/blog/2023/06/09/aisio-transforms-with-webdataset-pt-3, with
its numbers (16, 1000) and its defaults: small batches from workers, shuffled and batched in one process. In the
tutorial the cluster crops; here the workers decode the whole photo and crop it, one sample at a time.
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import webdataset

from bench.loaders.encoded import components_of, shard_urls
from bench.loaders.protocol import BenchBatch, BenchLoader, LoaderOptions
from bench.loaders.recipe import crop_of
from bench.loaders.transforms import (
    BatchDecoder,
    cropped_photo,
    encoded_batch,
    mask_transform,
    normalised_tensor,
    photo_transform,
)
from bench.loaders.workers import (
    check_shared_memory,
    num_shard_workers,
    opened_workers,
    opener_for_workers,
    worker_context,
    worker_settings,
)
from bench.tools.folders import RunFolder
from dali_pipes.store.shard_set import ShardSet

WORKER_BATCH_SIZE = 16
SHUFFLE_SAMPLES = 1000
NUM_BYTES = "__bytes__"
"""Component -> the size of its file."""


@contextlib.contextmanager
def open_loader(shards: ShardSet, *, options: LoaderOptions) -> Iterator[BenchLoader]:
    """Open the tuned loader.

    The library gives each worker whole shards (``split_by_worker``), so each worker's last batch is short.
    """
    file_names = {name.rpartition("/")[2] for name in shards.names}
    keeps = options.keeps_shards and shards.store.directory is None and len(file_names) == len(shards.names)
    with RunFolder() as folder:
        dataset = webdataset.WebDataset(
            shard_urls(shards),
            # detshuffle: each epoch has another order, which is the same in every run.
            shardshuffle=len(shards.names),
            detshuffle=True,
            seed=options.seed,
            cache_dir=str(folder.new()) if keeps else None,
            # A worker may get only empty shards.
            empty_check=False,
        ).batched(options.batch_size, collation_fn=BatchDecoder(options))
        settings = worker_settings(shards, options=options, num_workers=num_shard_workers(shards, options))
        loader = webdataset.WebLoader(dataset, batch_size=None, **settings)
        with opened_workers(loader.pipeline[0], batches=loader, options=options) as opened:
            yield opened


def open_tutorial(shards: ShardSet, *, options: LoaderOptions) -> contextlib.AbstractContextManager[BenchLoader]:
    # Samples in the shuffle buffer are views of the workers' batches, which therefore stay in shared memory.
    check_shared_memory(SHUFFLE_SAMPLES, options=options)
    dataset = webdataset.WebDataset(
        shard_urls(shards), shardshuffle=len(shards.names), seed=options.seed, empty_check=False
    ).map(_with_sizes)
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
    return opened_workers(data_loader, batches=batches, options=replace(options, decode="pil"))


def _with_sizes(sample: dict[str, Any]) -> dict[str, Any]:
    """Keep the size of each file, which the classification recipe's crop follows from: decoding drops it."""
    # The library does not decode names that begin with an underscore.
    return sample | {NUM_BYTES: {name: len(data) for name, data in sample.items() if isinstance(data, bytes)}}


class _Transform:
    def __init__(self, options: LoaderOptions) -> None:
        self._options = options
        self._photo, self._mask = photo_transform(options.crop), mask_transform(options.crop)

    def __call__(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        options = self._options
        if options.recipe == "encoded":
            encoded, _, label, key = components_of(sample, options)
            return {"encoded": encoded, "label": label, "key": key}
        made = {"label": sample["cls"], "key": sample["__key__"]}
        name, photo = _first(sample, options.photo)
        if options.mask is None:
            crop = crop_of(sample[NUM_BYTES][name], height=photo.height, width=photo.width)
            return {"image": normalised_tensor(cropped_photo(photo, crop, options.crop)), **made}
        # decode("pil") makes every image RGB: a mask's values in three equal channels. Make it one channel again.
        mask = self._mask(_first(sample, options.mask)[1].convert("L"))
        return {"image": self._photo(photo), "mask": mask, **made}


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
