"""Worker processes for the loaders that decode in Python: how they start, how they open a shard, when they end."""

import contextlib
import functools
import io
import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from bench.loaders import ALL_PARTS, LoaderOptions
from bench.timing.processes import end_with_main
from dali_pipes.errors import PipesError
from dali_pipes.store.ais import AisStore
from dali_pipes.store.urls import open_store

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.utils.data import DataLoader

    from bench.loaders import Batch
    from dali_pipes.store.urls import ShardSet

__all__ = [
    "PREFETCH_FACTOR",
    "WorkerEpochs",
    "check_shared_memory",
    "end_with_main",
    "endpoint_of",
    "fitting_batch_size",
    "num_batches_shared",
    "open_stream",
    "opener_for_workers",
    "sample_bytes",
    "shard_urls",
    "worker_context",
    "worker_settings",
]

STREAM_BUFFER_BYTES = 1 << 20  # one read of the connection; tarfile asks for 10 KiB at a time
PREFETCH_FACTOR = 2  # batches ready a worker, torch's default; 94 MB each at 64 x 3 x 350 x 350
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 (where torch puts tensors that processes share)


def worker_context() -> ForkServerContext:
    """Start workers from a clean process that has the heavy modules loaded already.

    A plain fork would copy this process while DALI's or CUDA's threads may hold locks; a spawn would import torch in
    every worker, seconds that are no part of what is timed. The server starts once and ends with this process and its
    workers: each of them holds the pipe that it waits on, so they must end by themselves (see `end_with_main`).
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torchvision", "webdataset", "aistore", "bench.transforms"])
    return context


def endpoint_of(shards: "ShardSet") -> str | None:
    """Where the shards' cluster answers; ``None`` for local shards."""
    return shards.store.endpoint if isinstance(shards.store, AisStore) else None


def shard_urls(shards: "ShardSet") -> list[str]:
    """What WebDataset is given: paths, or URLs such as ``ais://pets/shuffled-000000.tar``."""
    return [shards.store.locate(name) for name in shards.names]


def opener_for_workers(shards: "ShardSet") -> Callable[[int], None]:
    """A ``worker_init_fn`` after which WebDataset reads buckets through the ``aistore`` SDK.

    WebDataset's own openers start a program for each shard, ``ais`` or ``curl``, which a fresh machine need not have.
    One GET a shard, read as a stream, redirect, token and TLS as everywhere else in this project. The worker also ends
    when the calling process does, however that ends.
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
            gopen_schemes[scheme] = functools.partial(_open_object, endpoint=endpoint)


def open_stream(url: str, *, endpoint: str | None) -> BinaryIO:
    """A shard's bytes, front to back: of a local path, or of a URL such as ``ais://pets/shuffled-000000.tar``."""
    if endpoint is None:
        return Path(url).open("rb")
    return cast("BinaryIO", _open_object(url, endpoint=endpoint))


def _open_object(url: str, mode: str = "rb", bufsize: int = -1, *, endpoint: str) -> io.BufferedReader:
    del bufsize
    assert mode == "rb", mode
    return io.BufferedReader(_ObjectStream(url, endpoint=endpoint), STREAM_BUFFER_BYTES)


def sample_bytes(options: LoaderOptions) -> int:
    """Bytes of one sample's tensors: float32 photo, uint8 mask, int64 label."""
    return options.crop**2 * (3 * 4 + 1) + 8


def check_shared_memory(num_samples: int, *, options: LoaderOptions) -> None:
    """Refuse what would end in a worker killed by SIGBUS: batches travel through shared memory.

    Args:
        num_samples: How many may be there at a time.
        options: For the size of one.

    Raises:
        PipesError: If less is free. A container gets 64 MiB, unless told otherwise.
    """
    needed, free = num_samples * sample_bytes(options), _free_shared_memory()
    if free < needed:
        raise PipesError(
            f"the workers hand over up to {num_samples} samples at a time in shared memory, "
            f"{needed >> 20} MiB, and {SHARED_MEMORY} has {free >> 20} MiB free; lower --batch-size, or give the "
            "container more: docker run --shm-size=2g"
        )


def worker_settings(shards: "ShardSet", *, options: LoaderOptions, num_workers: int, device: str) -> dict[str, Any]:
    """How every loader that is a torch ``DataLoader`` runs its workers: kept for all epochs, forked from one server.

    Raises:
        PipesError: If the batches in flight do not fit shared memory.
    """
    check_shared_memory(num_batches_shared(num_workers) * options.batch_size, options=options)
    return {
        "num_workers": num_workers,
        "multiprocessing_context": worker_context(),
        "worker_init_fn": opener_for_workers(shards),  # and ends with this process
        "persistent_workers": True,
        "prefetch_factor": PREFETCH_FACTOR,
        "pin_memory": device == "cuda",
    }


def fitting_batch_size(options: LoaderOptions, *, num_shards: int) -> int:
    """The batch size of ``options``, halved until the tuned loader's batches fit into shared memory; at least 1."""
    num_workers = min(options.num_threads, num_shards)
    fitting = _free_shared_memory() // (sample_bytes(options) * num_batches_shared(num_workers))
    batch_size = options.batch_size
    while batch_size > max(fitting, 1):
        batch_size //= 2
    return batch_size


def num_batches_shared(num_workers: int) -> int:
    """Batches that are in shared memory at a time: those prefetched, one in the making, one in use."""
    return num_workers * (PREFETCH_FACTOR + 1) + 1


def _free_shared_memory() -> int:
    status = os.statvfs(SHARED_MEMORY)
    return status.f_bavail * status.f_frsize


class _ObjectStream(io.RawIOBase):
    def __init__(self, url: str, *, endpoint: str) -> None:
        super().__init__()
        store, name = open_store(url, endpoint=endpoint)
        self._open = contextlib.ExitStack()
        self._body: Any = self._open.enter_context(store.open(name))

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return int(self._body.readinto(buffer))

    def close(self) -> None:
        if not self.closed:
            self._open.close()
        super().close()


class WorkerEpochs:
    """A `Loader` over batches that worker processes make.

    Args:
        batches: Iterated once an epoch.
        data_loader: What ``batches`` reads from; its workers end in `close`.
        num_workers: Its worker processes.
        decode: What they decode with.
        device: Where the training step wants its batches; pinned memory is used for ``cuda``.
        gives: The parts of a batch that ``batches`` have.
    """

    def __init__(
        self,
        batches: Any,
        *,
        data_loader: "DataLoader[Any]",
        num_workers: int,
        decode: str,
        device: str,
        gives: frozenset[str] = ALL_PARTS,
    ) -> None:
        self._batches = batches
        self._data_loader = data_loader
        self._epoch: Any = None
        self.num_workers = num_workers
        self.decode = decode
        self.device = device
        self.gives = gives

    def epoch(self) -> "Iterator[Batch]":
        self._leave_epoch()
        self._epoch = iter(self._batches)
        yield from self._epoch

    def close(self) -> None:
        """End the worker processes; may be called twice."""
        self._leave_epoch()
        # Workers that persist end with torch's iterator object, which whoever left an epoch early may still hold.
        iterator = getattr(self._data_loader, "_iterator", None)
        if iterator is not None:
            iterator._shutdown_workers()

    def _leave_epoch(self) -> None:
        if self._epoch is not None and hasattr(self._epoch, "close"):
            self._epoch.close()
        self._epoch = None
