"""Load with WebDataset, tuned: the fastest settings that we found within the library's own interface.

The workers make whole batches, so the main process only receives them. There is one worker for each core, with one
torch thread (torch's default in a worker), kept for all epochs. Each photo is decoded as a whole and normalised
straight into a batch in shared memory (`BatchDecoder`). Shards are shuffled and samples are not, because dSort has
shuffled the samples.

Shards of a bucket are kept with ``cache_dir=`` in the directory for temporary files, unless there is only one epoch
(`LoaderOptions.keeps_shards`): the first epoch writes them, later epochs read files. A shard is read only when it is
complete, so the first batch comes later, by 0.3 to 1.5 s for shards of 29 MiB that are 20 ms away, on two busy cores.
CPU time is the same. webdataset 1.0.2 writes each shard under a temporary name, and renames it when it is complete. The
final name is the last part of the shard's URL, so shards with one name in several folders would be confused
(``url_to_name=`` is not passed on). Such shards are not kept, but fetched in each epoch.
"""

import contextlib
from collections.abc import Iterator

import webdataset

from bench.loaders.encoded import shard_urls
from bench.loaders.protocol import BenchLoader, LoaderOptions
from bench.loaders.transforms import BatchDecoder
from bench.loaders.workers import WorkerEpochs, num_shard_workers, worker_settings
from bench.tools.folders import RunFolder
from dali_pipes.store.shard_set import ShardSet


@contextlib.contextmanager
def open_loader(shards: ShardSet, *, options: LoaderOptions) -> Iterator[BenchLoader]:
    """Every sample comes exactly once an epoch.

    The library gives each worker whole shards (``split_by_worker``), so each worker's last batch is short.
    """
    with contextlib.ExitStack() as stack:
        dataset = webdataset.WebDataset(
            shard_urls(shards),
            # detshuffle: each epoch has another order, which is the same in every run.
            shardshuffle=len(shards.names),
            detshuffle=True,
            seed=options.seed,
            cache_dir=str(stack.enter_context(RunFolder()).new()) if _keeps(shards, options) else None,
            # A worker may get only empty shards.
            empty_check=False,
        ).batched(options.batch_size, collation_fn=BatchDecoder(options))
        settings = worker_settings(shards, options=options, num_workers=num_shard_workers(shards, options))
        loader = webdataset.WebLoader(dataset, batch_size=None, **settings)
        yield stack.enter_context(contextlib.closing(WorkerEpochs(loader.pipeline[0], batches=loader, options=options)))


def _keeps(shards: ShardSet, options: LoaderOptions) -> bool:
    """Whether the library keeps the shards on this machine while the loader is open."""
    file_names = {name.rpartition("/")[2] for name in shards.names}
    return options.keeps_shards and shards.store.directory is None and len(file_names) == len(shards.names)
