"""Load ArrayRecord files, converted from shards, with Grain's ``MapDataset`` and its worker processes.

Settings, for grain 0.2.18 (documentation and tutorials of its repository): ArrayRecord with ``group_size:1``, for
random access ("Reading ArrayRecord Files"); ``seed().shuffle().batch().repeat()``, a global shuffle that is drawn anew
in each epoch; ``mp_prefetch`` with one process for each core, and as many batches ready in each as `worker_settings`
has. The processes live for all epochs, because the data set repeats itself; so they read ahead into the next epoch.
Each photo is decoded as a whole where the batch is made (``batch_fn``), straight into Grain's own shared memory, and
reaches this process without a copy. ``ReadOptions(num_threads=0)``: a batch is made by the process itself. By default
16 threads in each process would make 16 batches at a time and keep 500, which is 47 GB of the default recipe.

Grain spawns its processes, which then import torch; that takes seconds, and a cold turn includes it.
"""

import contextlib
import functools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grain
import msgspec
import numpy as np
import numpy.typing as npt
import torch
from absl import flags
from array_record.python.array_record_module import ArrayRecordWriter
from grain.multiprocessing import SharedMemoryArray
from torch import Tensor

from bench.loaders.encoded import encoded_samples, open_stream, shard_urls
from bench.loaders.protocol import BenchBatch, BenchLoader, LoaderOptions, Prepared
from bench.loaders.transforms import BatchDecoder
from bench.loaders.workers import PREFETCH_FACTOR, check_workers_memory
from bench.tools.processes import end_with_main
from dali_pipes.store.shard_set import ShardSet

_SUFFIX = ".array_record"


def prepare(shards: ShardSet, *, directory: Path) -> None:
    """Write each shard as an ArrayRecord file; a record is a sample in msgpack, with the unchanged bytes.

    Raises:
        DataError: If a shard is not a complete tar.
    """
    for row, url in enumerate(shard_urls(shards)):
        writer = ArrayRecordWriter(str(directory / f"{row:06d}{_SUFFIX}"), "group_size:1")
        try:
            with open_stream(url, endpoint=shards.store.endpoint) as stream:
                for sample in encoded_samples(stream, shard=url):
                    writer.write(msgspec.msgpack.encode(sample))
        finally:
            writer.close()


def open_loader(
    shards: ShardSet, *, options: LoaderOptions, prepared: Prepared
) -> contextlib.AbstractContextManager[BenchLoader]:
    """Every sample comes exactly once an epoch, in a global order.

    Raises:
        PipesError: If the batches in flight do not fit into shared memory.
    """
    check_workers_memory(options.num_threads, options=options)
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()  # Grain reads its own flags, and this program has none
    return contextlib.closing(_GrainEpochs(sorted(map(str, Path(prepared.url).glob(f"*{_SUFFIX}"))), options))


class _GrainEpochs:
    def __init__(self, paths: Sequence[str], options: LoaderOptions) -> None:
        self._batches = (
            grain.MapDataset.source(grain.sources.ArrayRecordDataSource(paths))
            .seed(options.seed)
            .shuffle()
            .batch(options.batch_size, batch_fn=_BatchMaker(options))
        )
        self._running: Any = None
        self._num_left = 0  # batches of the epoch that has begun
        self.num_workers = options.num_threads
        self.decode = options.decode
        self.device = options.delivery_device

    def epoch(self) -> Iterator[BenchBatch]:
        if self._running is None:
            self._running = self._start()
        running = self._running
        # An epoch that was left early is drawn to its end: that is quicker than starting new processes.
        for _ in range(self._num_left):
            next(running)
        self._num_left = len(self._batches)
        while self._num_left:
            parts = next(running)
            self._num_left -= 1
            yield _as_batch(parts)

    def close(self) -> None:
        """End the processes; may be called twice."""
        if self._running is not None:
            self._running.close()
        self._running = None

    def _start(self) -> Any:
        # Prefetching of single elements is off: an element is a batch.
        batches = self._batches.repeat().to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
        processes = grain.MultiprocessingOptions(num_workers=self.num_workers, per_worker_buffer_size=PREFETCH_FACTOR)
        start_worker = functools.partial(_start_worker, main_pid=os.getpid())
        return iter(batches.mp_prefetch(processes, worker_init_fn=start_worker))


def _start_worker(worker: int, num_workers: int, *, main_pid: int) -> None:
    del worker, num_workers
    torch.set_num_threads(1)  # as in a worker of a DataLoader
    end_with_main(main_pid)


class _BatchMaker:
    """A callable from records to a batch whose tensors lie in Grain's shared memory; can be pickled."""

    def __init__(self, options: LoaderOptions) -> None:
        self._options = options

    def __call__(self, records: Sequence[bytes]) -> dict[str, npt.NDArray[Any]]:
        arrays: list[npt.NDArray[Any]] = []

        def new_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            arrays.append(SharedMemoryArray(shape, torch.empty(0, dtype=dtype).numpy().dtype))
            return torch.from_numpy(arrays[-1])

        decode = BatchDecoder(self._options, new_tensor=new_tensor)
        batch = decode([msgspec.msgpack.decode(record) for record in records])
        shared = {array.ctypes.data: array for array in arrays}
        return {
            name: shared.get(part.data_ptr(), part.numpy()) if isinstance(part, Tensor) else np.array(part)
            for name, part in batch.items()
        }


def _as_batch(parts: dict[str, npt.NDArray[Any]]) -> BenchBatch:
    tensors = {name: torch.from_numpy(part) for name, part in parts.items() if name != "key"}
    return {**tensors, "key": parts["key"].tolist()}  # type: ignore[typeddict-item]  # names of a BenchBatch
