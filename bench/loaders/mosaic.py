"""Shards converted to MDS to batches, by Mosaic Streaming's ``StreamingDataset`` and its ``StreamingDataLoader``.

Settings, of mosaicml-streaming 0.13 (documentation): shards of 64 MiB, not compressed, no hashes ("Basic Dataset
Conversion", the writer's defaults); ``shuffle`` with the default ``py1e``, the recommended algorithm ("Shuffling"); the
batch size told to the data set too, and workers kept for all epochs, which start slowly otherwise ("FAQs and Tips");
one worker a core; decoding where the batch is made (``collate_fn``), straight into it in shared memory, not in
``__getitem__`` of a subclass, as in the how-to guide for CIFAR10; the whole photo of each. The MDS shards lie in a
local directory, with no remote ("Shard Retrieval"), so nothing is downloaded or evicted.
"""

import atexit
import contextlib
import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streaming import MDSWriter, StreamingDataLoader, StreamingDataset
from streaming.base.constant import BARRIER_FILELOCK, CACHE_FILELOCK, SHM_TO_CLEAN

from bench.loaders import Loader, LoaderOptions, Prepared
from bench.loaders._samples import KEY, checked_fields, encoded_samples
from bench.loaders.workers import WorkerEpochs, worker_settings
from bench.transforms import BatchDecoder

if TYPE_CHECKING:
    from dali_pipes.store.urls import ShardSet

__all__ = ["open_loader", "prepare"]


def prepare(shards: "ShardSet", *, directory: Path) -> Prepared:
    """Each sample as a row of MDS: the key, and each component's bytes as they are in the shard.

    One process: it copies, and a disk is no faster with two.

    Raises:
        DataError: If samples have different components.
    """
    started = time.perf_counter()
    with contextlib.ExitStack() as stack:
        writer: MDSWriter | None = None
        fields: list[str] = []
        for name in shards.names:
            where = shards.store.locate(name)
            with shards.store.open(name) as stream:
                for sample in encoded_samples(stream, shard=where):
                    if writer is None:
                        fields = list(sample)
                        columns = {field: "str" if field == KEY else "bytes" for field in fields}
                        writer = stack.enter_context(MDSWriter(out=str(directory), columns=columns))
                    writer.write(checked_fields(sample, fields, shard=where))
    return Prepared.of(directory, started=started)


@contextlib.contextmanager
def open_loader(shards: "ShardSet", *, options: LoaderOptions, prepared: Prepared) -> Iterator[Loader]:
    """The data set in worker processes; every sample exactly once an epoch."""
    from bench.loaders.devices import delivery_device

    num_workers = options.num_threads
    device = delivery_device(options.device)
    with _alone():
        dataset = StreamingDataset(
            local=prepared.url, shuffle=True, shuffle_seed=options.seed, batch_size=options.batch_size
        )
    try:
        loader = StreamingDataLoader(
            dataset,
            batch_size=options.batch_size,
            collate_fn=BatchDecoder(options),
            **worker_settings(shards, options=options, num_workers=num_workers, device=device),
        )
        epochs = WorkerEpochs(loader, data_loader=loader, num_workers=num_workers, decode=options.decode, device=device)
        try:
            yield epochs
        finally:
            epochs.close()
    finally:
        with _alone():
            _release(dataset)


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """One rank of this machine at a time: a data set takes the first names in shared memory that it finds free."""
    lock = os.open(tempfile.gettempdir(), os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _release(dataset: Any) -> None:
    """Free the shared memory and the lock files of a data set whose workers have ended.

    The library does so when the process exits, by name; by then another process may have taken that, so it must not.
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
    # What workers made that were ended in mid-epoch.
    for name in SHM_TO_CLEAN:
        with contextlib.suppress(FileNotFoundError):
            left = SharedMemory(f"{prefix}_{name}")
            left.close()
            left.unlink()
    for name in (BARRIER_FILELOCK, CACHE_FILELOCK):
        (Path(tempfile.gettempdir()) / f"{prefix}_{name}").unlink(missing_ok=True)
