"""Load with WebDataset, tuned by us.

These are the fastest settings that we found within the library's own interface. The workers, one for each core, kept
for all epochs, make whole batches: photos are decoded straight into a batch of uint8 pixels in shared memory
(`BatchDecoder`), which the main process normalises (`Normaliser`). Shards are shuffled and samples are not, because
dSort has shuffled the samples. Shards of a bucket are kept with ``cache_dir=`` in the directory for temporary files,
unless there is only one epoch (`LoaderOptions.keeps_shards`), whose first batch would come later: a shard is read only
when it is complete. The library names a kept shard by the last part of its URL, so shards with one name in several
folders are not kept.
"""

import contextlib
from collections.abc import Iterator

import webdataset

from bench.loaders.encoded import ShuffledNames, shard_urls
from bench.loaders.protocol import BenchLoader, LoaderOptions
from bench.loaders.transforms import BatchDecoder
from bench.loaders.workers import num_shard_workers, opened_workers, worker_settings
from bench.tools.folders import RunFolder
from dali_pipes.store.shard_set import ShardSet


@contextlib.contextmanager
def open_loader(shards: ShardSet, *, options: LoaderOptions) -> Iterator[BenchLoader]:
    """Open the tuned loader.

    The library gives each worker whole shards (``split_by_worker``), so each worker's last batch is short.
    """
    file_names = {name.rpartition("/")[2] for name in shards.names}
    keeps = options.keeps_shards and shards.store.directory is None and len(file_names) == len(shards.names)
    with RunFolder() as folder:
        dataset = webdataset.WebDataset(
            # Each of n workers gets every n-th shard of this list, the same ones in all epochs. The list is shuffled
            # once: if large and small shards alternate, one worker would otherwise get all large ones.
            list(ShuffledNames(shard_urls(shards), seed=options.seed)),
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
