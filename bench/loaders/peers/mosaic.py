"""Load MDS shards, converted from shards, with Mosaic Streaming's ``StreamingDataset`` and ``StreamingDataLoader``.

Settings, for mosaicml-streaming 0.13 (documentation): shards as large as the others', not compressed, no hashes;
``shuffle`` with the default ``py1e``, the recommended algorithm ("Shuffling"), in blocks of two shards, so that the
first batch does not need all of them; the data set is told the batch size too, and workers, one for each core, are kept
for all epochs, because they start slowly ("FAQs and Tips"). Each photo is decoded where the batch is made
(``collate_fn``), straight into the batch in shared memory. The MDS shards lie in a local directory, with no remote
("Shard Retrieval"). ``mosaic-s3`` has the library's defaults for a remote: ``predownload`` of eight batches, no
``cache_limit``, so that the first epoch downloads each MDS shard once into ``local``, in memory as our cache, and later
epochs read files.
"""

import atexit
import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

from streaming import MDSWriter, StreamingDataLoader, StreamingDataset
from streaming.base.constant import BARRIER_FILELOCK, CACHE_FILELOCK, SHM_TO_CLEAN

from bench.loaders.encoded import KEY, checked_fields, samples_of
from bench.loaders.protocol import BenchLoader, LoaderOptions
from bench.loaders.workers import SHARED_MEMORY, open_data_loader
from bench.tools.folders import RunFolder
from dali_pipes.store.shard_set import ShardSet
from prep.inspect.indexed_set import IndexedSet


def prepare(shards: ShardSet, *, directory: Path) -> None:
    """Write each sample as a row of MDS: the key, and the unchanged bytes of each component.

    One process copies the samples, because two are not faster on one disk.
    """
    with contextlib.ExitStack() as stack:
        writer: MDSWriter | None = None
        fields: list[str] = []
        for where, sample in samples_of(shards):
            if writer is None:
                fields = list(sample)
                columns = {field: "str" if field == KEY else "bytes" for field in fields}
                num_bytes = IndexedSet(shards).manifest.total_bytes // len(shards.names)
                writer = stack.enter_context(MDSWriter(out=str(directory), columns=columns, size_limit=num_bytes))
            writer.write(checked_fields(sample, fields, shard=where))


@contextlib.contextmanager
def open_loader(shards: ShardSet, *, options: LoaderOptions, place: str) -> Iterator[BenchLoader]:
    """Open the MDS shards in the directory ``place``, or at that ``s3://`` address; they are downloaded from there."""
    with RunFolder(SHARED_MEMORY) as folder:
        local, remote = (str(folder.new()), place) if "://" in place else (place, None)
        with _opened(shards, options=options, local=local, remote=remote) as loader:
            yield loader


@contextlib.contextmanager
def _opened(shards: ShardSet, *, options: LoaderOptions, local: str, remote: str | None) -> Iterator[BenchLoader]:
    with _alone():
        dataset = StreamingDataset(
            local=local,
            remote=remote,
            shuffle=True,
            shuffle_seed=options.seed,
            batch_size=options.batch_size,
        )
    dataset.shuffle_block_size = 2 * int(dataset.samples_per_shard.max())
    try:
        with open_data_loader(dataset, shards, options=options, loader_class=StreamingDataLoader) as loader:
            yield loader
    finally:
        with _alone():
            _release(dataset)


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Admit one rank of this machine at a time, because a data set takes the first free names in shared memory."""
    lock = os.open(tempfile.gettempdir(), os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _release(dataset: Any) -> None:
    """Free the shared memory and the lock files of a data set whose workers have ended.

    The library frees them by name when the process exits, when another process may own that name.
    """
    owned = [
        dataset._locals_shm,
        dataset._shared_barrier._arr.shm,
        dataset._next_epoch.arr.shm,
        dataset._cache_usage.arr.shm,
        dataset._shard_states.shm,
        dataset._shard_access_times.shm,
    ]
    for memory in owned:
        atexit.unregister(memory.cleanup)
        memory.cleanup()
    prefix = f"{dataset._shm_prefix_int:06}"
    # Workers that were ended in the middle of an epoch leave these.
    for name in SHM_TO_CLEAN:
        with contextlib.suppress(FileNotFoundError):
            left = SharedMemory(f"{prefix}_{name}")
            left.close()
            left.unlink()
    for name in (BARRIER_FILELOCK, CACHE_FILELOCK):
        (Path(tempfile.gettempdir()) / f"{prefix}_{name}").unlink(missing_ok=True)
