"""Run the worker processes of loaders that decode in Python: start them, open shards in them, end them."""

import functools
import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.loaders.encoded import endpoint_of, open_object
from bench.loaders.opening import delivery_device
from bench.loaders.registry import ALL_PARTS
from bench.tools.processes import end_with_main
from dali_pipes.errors import PipesError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.utils.data import DataLoader

    from bench.loaders.protocol import BenchBatch, LoaderOptions
    from dali_pipes.store.shard_set import ShardSet


PREFETCH_FACTOR = 2  # batches ready in each worker, torch's default; 94 MB each at 64 x 3 x 350 x 350
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 (where torch puts tensors that processes share)


def worker_context() -> ForkServerContext:
    """Start workers from a clean process that has loaded the heavy modules already.

    A plain fork would copy this process while threads of DALI or CUDA may hold locks. A spawn would import torch in
    every worker, which takes seconds that must not be timed. The server starts once, and ends with this process and its
    workers. Each worker holds the pipe that the server waits on, so workers must end by themselves (`end_with_main`).
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torchvision", "webdataset", "aistore", "bench.loaders.transforms"])
    return context


def opener_for_workers(shards: "ShardSet") -> Callable[[int], None]:
    """Return a ``worker_init_fn`` after which WebDataset reads buckets through the ``aistore`` SDK.

    WebDataset's own openers start a program for each shard, ``ais`` or ``curl``, which may not be installed. This one
    makes one GET for each shard and reads it as a stream, with the redirects, token and TLS that this project uses
    everywhere. The worker also ends when the calling process does, however that ends.
    """
    return functools.partial(_register_opener, endpoint=endpoint_of(shards), main_pid=os.getpid())


def _register_opener(worker: int, *, endpoint: str | None, main_pid: int) -> None:
    import webdataset
    from webdataset.gopen import gopen_schemes

    end_with_main(main_pid)
    del worker
    assert webdataset is not None
    if endpoint is not None:
        for scheme in ("ais", "s3", "gs", "az"):
            gopen_schemes[scheme] = functools.partial(open_object, endpoint=endpoint)


def num_shard_workers(shards: "ShardSet", options: "LoaderOptions") -> int:
    """The workers of a library that gives each of them whole shards: a worker without a shard has nothing to do."""
    return min(options.num_threads, len(shards.names))


def worker_settings(shards: "ShardSet", *, options: "LoaderOptions", num_workers: int) -> dict[str, Any]:
    """The arguments for workers of every peer that is a torch ``DataLoader``.

    Workers are forked from one server, and kept for all epochs. Each has one torch thread, torch's default in a worker.

    Raises:
        PipesError: If the batches in flight do not fit into shared memory.
    """
    check_shared_memory(_num_batches_shared(num_workers) * options.batch_size, options=options)
    return {
        "num_workers": num_workers,
        "multiprocessing_context": worker_context(),
        "worker_init_fn": opener_for_workers(shards),
        "persistent_workers": True,
        "prefetch_factor": PREFETCH_FACTOR,
        "pin_memory": delivery_device(options.device) == "cuda",
    }


def check_shared_memory(num_samples: int, *, options: "LoaderOptions") -> None:
    """Fail if batches do not fit into shared memory: a worker that finds it full is killed by SIGBUS.

    Args:
        num_samples: The most samples that are there at a time.
        options: For the size of one.

    Raises:
        PipesError: If less is free. A container gets 64 MiB by default.
    """
    needed, free = num_samples * _sample_bytes(options), _free_shared_memory()
    if free < needed:
        raise PipesError(
            f"the workers hand over up to {num_samples} samples at a time in shared memory, "
            f"{needed >> 20} MiB, and {SHARED_MEMORY} has {free >> 20} MiB free; lower --batch-size, or give the "
            "container more: docker run --shm-size=2g"
        )


def fitting_batch_size(options: "LoaderOptions", *, num_shards: int) -> int:
    """The batch size of ``options``, halved until webloader's batches fit into shared memory; at least 1."""
    num_batches = _num_batches_shared(min(options.num_threads, num_shards))
    fitting = _free_shared_memory() // (_sample_bytes(options) * num_batches)
    batch_size = options.batch_size
    while batch_size > max(fitting, 1):
        batch_size //= 2
    return batch_size


def _num_batches_shared(num_workers: int) -> int:
    """Batches in shared memory at a time: prefetched, one being made in each worker, and one in use."""
    return num_workers * (PREFETCH_FACTOR + 1) + 1


def _sample_bytes(options: "LoaderOptions") -> int:
    """Bytes of one sample's tensors: float32 photo, uint8 mask, int64 label."""
    return options.crop**2 * (3 * 4 + 1) + 8


def _free_shared_memory() -> int:
    status = os.statvfs(SHARED_MEMORY)
    return status.f_bavail * status.f_frsize


class WorkerEpochs:
    """A `BenchLoader` over the worker processes of a ``DataLoader``; `close` ends them.

    Args:
        data_loader: What the workers belong to.
        options: For decoder and device.
        batches: What is iterated once an epoch, if that is not ``data_loader`` itself.
    """

    gives = ALL_PARTS

    def __init__(self, data_loader: "DataLoader[Any]", *, options: "LoaderOptions", batches: Any = None) -> None:
        self._data_loader = data_loader
        self._batches = data_loader if batches is None else batches
        self._epoch: Any = None
        self.num_workers = data_loader.num_workers
        self.decode = options.decode
        self.device = delivery_device(options.device)

    def epoch(self) -> "Iterator[BenchBatch]":
        self._leave_epoch()
        self._epoch = iter(self._batches)
        yield from self._epoch

    def close(self) -> None:
        """End the worker processes; may be called twice."""
        self._leave_epoch()
        # Persistent workers end with torch's iterator object, which a caller that left an epoch early may still hold.
        iterator = getattr(self._data_loader, "_iterator", None)
        if iterator is not None:
            iterator._shutdown_workers()

    def _leave_epoch(self) -> None:
        if self._epoch is not None and hasattr(self._epoch, "close"):
            self._epoch.close()
        self._epoch = None
