"""WebDataset, tuned: the best that we know how to get out of the library, in its own terms.

Whole batches are made in the workers, so that the main process only receives them; one worker a core, each with one
torch thread (torch's own default in a worker), kept for all epochs; photos are decoded and normalised straight into a
batch in shared memory (`BatchDecoder`), the whole photo of each; shards, not samples, are shuffled, because dSort has
shuffled the samples.

Shards of a bucket are kept, ``cache_dir=``, in the directory for temporary files, unless there is but one epoch
(`LoaderOptions.keeps_shards`): the first epoch writes them there, those after it read files. A shard is read when it is
there in full, so the first batch comes later, by 0.3 to 1.5 s for shards of 29 MiB, 20 ms away, on two busy cores; CPU
time is the same. Each goes to a name of its worker's and is renamed when it is whole. In webdataset 1.0.2 its name
there is the last part of its URL, so shards of one name in several folders would be taken for each other
(``url_to_name=`` is not handed on): such are not kept, and fetched in each epoch.
"""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import webdataset

from bench.loaders import Loader, LoaderOptions
from bench.loaders.workers import WorkerEpochs, endpoint_of, shard_urls, worker_settings
from bench.timing.folders import RunFolder
from bench.transforms import BatchDecoder

if TYPE_CHECKING:
    from dali_pipes.store.urls import ShardSet

__all__ = ["open_loader"]


@contextlib.contextmanager
def open_loader(shards: "ShardSet", *, options: LoaderOptions) -> Iterator[Loader]:
    """The tuned loader.

    The library gives each worker whole shards: no more workers than shards are started, and each worker's last batch
    is short. ``split_by_worker`` deals the shards out, so every sample comes exactly once an epoch.
    """
    from bench.loaders.devices import delivery_device

    num_workers = min(options.num_threads, len(shards.names))
    device = delivery_device(options.device)
    with _cache_dir(shards, keeps_shards=options.keeps_shards) as cache_dir:
        dataset = webdataset.WebDataset(
            shard_urls(shards),
            # detshuffle: another order each epoch, the same in every run.
            shardshuffle=len(shards.names),
            detshuffle=True,
            seed=options.seed,
            cache_dir=cache_dir,
            # A worker with only empty shards is no error.
            empty_check=False,
        ).batched(options.batch_size, collation_fn=BatchDecoder(options))
        loader = webdataset.WebLoader(
            dataset,
            batch_size=None,
            **worker_settings(shards, options=options, num_workers=num_workers, device=device),
        )
        epochs = WorkerEpochs(
            loader, data_loader=loader.pipeline[0], num_workers=num_workers, decode=options.decode, device=device
        )
        try:
            yield epochs
        finally:
            epochs.close()


@contextlib.contextmanager
def _cache_dir(shards: "ShardSet", *, keeps_shards: bool) -> Iterator[str | None]:
    """Where the library is to keep shards while the loader is open; ``None``: nowhere."""
    file_names = {name.rpartition("/")[2] for name in shards.names}
    if not keeps_shards or endpoint_of(shards) is None or len(file_names) < len(shards.names):
        yield None
        return
    with RunFolder() as folder:
        yield str(folder.new())
