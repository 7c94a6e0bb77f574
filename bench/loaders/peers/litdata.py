"""Load LitData's chunks, converted from shards, with its ``StreamingDataset`` and ``StreamingDataLoader``.

Settings, for litdata 0.2.76 (README): chunks as large as the shards, not compressed (if two workers share a larger
chunk, the library reads the whole chunk again and again); ``shuffle``, and no ``drop_last``, so that every sample
comes; one worker for each core ("Pause, resume": ``os.cpu_count()``), kept for all epochs. Each photo is decoded
where the batch is made (``collate_fn``), straight into the batch in shared memory. A local directory is mapped in place
("POSIX-fast", on by default). The photo keeps its bytes: LitData's own JPEG field applies EXIF's orientation, which the
other loaders do not. ``litdata-s3`` has the library's defaults for a bucket (README, "Stream from the cloud"): chunks
are downloaded ahead into ``cache_dir``, in memory as our cache, and stay there while they fit into ``max_cache_size``.
"""

import contextlib
import functools
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import litdata
from litdata import StreamingDataLoader, StreamingDataset
from litdata.streaming import downloader

from bench.loaders.encoded import EncodedSample, checked_fields, encoded_samples, open_stream, shard_urls
from bench.loaders.protocol import BenchLoader, LoaderOptions
from bench.loaders.workers import SHARED_MEMORY, open_data_loader, run_apart
from bench.tools.environment import available_cores
from bench.tools.folders import RunFolder
from dali_pipes.store.shard_set import ShardSet
from prep.inspect.indexed_set import IndexedSet

# Its fast client, obstore, gets these options and no others: without this one it refuses a server without TLS, and the
# environment cannot allow it. Workers import this module with the data set's class.
downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = "true"


def prepare(shards: ShardSet, *, directory: Path) -> None:
    """Write each sample as a dict of the key and each component's bytes; `_optimize` does it in a new process."""
    with tempfile.TemporaryDirectory(prefix="dali-pipes-litdata-") as scratch:
        num_samples = -(-IndexedSet(shards).manifest.num_samples // len(shards.names))
        where = {"urls": shard_urls(shards), "endpoint": shards.store.endpoint, "directory": str(directory)}
        job = {**where, "chunk_size": max(1, num_samples)}
        run_apart(
            "bench.loaders.peers.litdata",
            json.dumps(job),
            failed=f"litdata.optimize of '{shards.url}' failed",
            DATA_OPTIMIZER_CACHE_FOLDER=f"{scratch}/chunks",
            DATA_OPTIMIZER_DATA_CACHE_FOLDER=f"{scratch}/data",
        )


@contextlib.contextmanager
def open_loader(shards: ShardSet, *, options: LoaderOptions, place: str) -> Iterator[BenchLoader]:
    """Every sample comes exactly once an epoch."""
    with RunFolder(SHARED_MEMORY) as folder:
        samples = _ChunkSamples(place, options, cache_dir=str(folder.new()) if "://" in place else None)
        with open_data_loader(samples, shards, options=options, loader_class=StreamingDataLoader) as loader:
            yield loader


class _ChunkSamples(StreamingDataset):  # type: ignore[misc]  # not installed where types are checked
    """Encoded samples; iterated once an epoch by each worker.

    Args:
        place: A directory, or the ``s3://`` address of chunks, which are downloaded to ``cache_dir``.
    """

    def __init__(self, place: str, options: LoaderOptions, *, cache_dir: str | None) -> None:
        super().__init__(input_dir=place, cache_dir=cache_dir, shuffle=True, drop_last=False, seed=options.seed)
        self._begun = 0

    def __iter__(self) -> Any:
        # A persistent worker counts epochs by itself, at the end of each. If an epoch is left early, only some workers
        # reach its end, and then the workers would divide the samples of different epochs.
        self._begun += 1
        self.set_epoch(self._begun)
        return super().__iter__()


def _optimize() -> None:
    """Write the chunks of the job that `prepare` sends to standard input, with a process on each core.

    `optimize` changes how its process starts all later processes, and copies what it has imported into its workers
    unless they are forked. So it runs in a new process, which has loaded neither DALI nor CUDA.
    """
    job = json.load(sys.stdin)
    urls, endpoint = job["urls"], job["endpoint"]
    # Not read before the fork: a process whose parent has used a cloud cannot use it.
    first_fields = functools.cache(lambda: list(next(_samples(urls[0], endpoint=endpoint))))

    def read(row: int) -> Iterator[EncodedSample]:
        fields = first_fields()
        for sample in _samples(urls[row], endpoint=endpoint):
            yield checked_fields(sample, fields, shard=urls[row])

    litdata.optimize(
        fn=read,
        # Rows and not paths: paths would be copied before they are read.
        inputs=list(range(len(urls))),
        output_dir=job["directory"],
        chunk_size=job["chunk_size"],
        num_workers=min(available_cores(), len(urls)),
        start_method="fork",
        verbose=False,
    )


def _samples(url: str, *, endpoint: str | None) -> Iterator[EncodedSample]:
    with open_stream(url, endpoint=endpoint) as stream:
        yield from encoded_samples(stream, shard=url)


if __name__ == "__main__":
    _optimize()
