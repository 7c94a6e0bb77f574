"""Run the worker processes of loaders that decode in Python: start them, open shards in them, end them."""

import contextlib
import functools
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from bench.loaders.encoded import open_object
from bench.loaders.protocol import BenchBatch, BenchLoader, LoaderOptions
from bench.tools.processes import end_with_main
from dali_pipes.errors import PipesError
from dali_pipes.store.shard_set import ShardSet

PREFETCH_FACTOR = 2  # batches ready in each worker, torch's default; 24 MB each at 64 x 3 x 350 x 350
ERROR_LINES = 5
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 (where torch puts tensors that processes share)


def worker_context() -> ForkServerContext:
    """Return a context that forks workers from a clean process, which has loaded the heavy modules already.

    A plain fork would copy this process while threads of DALI or CUDA may hold locks; a spawn would import torch in
    every worker, on the clock. Each worker holds the pipe on which the server waits for its end, so workers must end by
    themselves (`end_with_main`).
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torchvision", "webdataset", "aistore", "bench.loaders.transforms"])
    return context


def opener_for_workers(shards: ShardSet) -> Callable[[int], None]:
    """Return a ``worker_init_fn`` after which WebDataset reads buckets through this project's stores.

    WebDataset's own openers start a program for each shard, ``ais`` or ``curl``, which may not be installed. This one
    makes one GET for each shard and reads it as a stream. The worker also ends when the calling process ends, for any
    reason.
    """
    return functools.partial(
        _register_opener,
        endpoint=shards.store.endpoint,
        is_bucket=shards.store.directory is None,
        main_pid=os.getpid(),
        # The server that workers are forked from has the variables of the time when it started.
        environment=dict(os.environ),
    )


def _register_opener(
    worker: int, *, endpoint: str | None, is_bucket: bool, main_pid: int, environment: Mapping[str, str]
) -> None:
    import webdataset  # noqa: F401 (first, because its parts import each other)
    from webdataset.gopen import gopen_schemes

    os.environ.update(environment)
    end_with_main(main_pid)
    if is_bucket:
        for scheme in ("ais", "s3", "gs", "az", "https", "http"):
            gopen_schemes[scheme] = functools.partial(open_object, endpoint=endpoint)


def num_shard_workers(shards: ShardSet, options: LoaderOptions) -> int:
    """The number of workers if each gets whole shards: at most one for each shard."""
    return min(options.num_threads, len(shards.names))


def worker_settings(shards: ShardSet, *, options: LoaderOptions, num_workers: int) -> dict[str, Any]:
    """Return the worker arguments of every peer that is a torch ``DataLoader``.

    Workers are forked from one server, and live for all epochs. Each has one torch thread, torch's default in a worker.
    """
    check_shared_memory(num_batches_shared(num_workers) * options.batch_size, options=options)
    return {
        "num_workers": num_workers,
        "multiprocessing_context": worker_context(),
        "worker_init_fn": opener_for_workers(shards),
        "persistent_workers": True,
        "prefetch_factor": PREFETCH_FACTOR,
        "pin_memory": options.delivery_device == "cuda",
    }


def check_shared_memory(num_samples: int, *, options: LoaderOptions) -> None:
    """Refuse to start if ``num_samples`` samples do not fit into shared memory: SIGBUS kills a worker that fills it.

    A container gets 64 MiB by default.
    """
    needed, free = num_samples * _sample_bytes(options), _free_shared_memory()
    if free < needed:
        raise PipesError(
            f"the workers hand over up to {num_samples} samples at a time in shared memory, "
            f"{needed >> 20} MiB, but {SHARED_MEMORY} has {free >> 20} MiB free; lower --batch-size, or give the "
            "container more: docker run --shm-size=2g"
        )


def num_batches_shared(num_workers: int) -> int:
    """Batches in shared memory at a time: prefetched ones, one in the making in each worker, and one in use."""
    return num_workers * (PREFETCH_FACTOR + 1) + 1


def fitting_batch_size(options: LoaderOptions, *, num_shards: int) -> int:
    """Halve the batch size of ``options`` until webloader's batches fit into shared memory; at least 1."""
    num_batches = num_batches_shared(min(options.num_threads, num_shards))
    fitting = _free_shared_memory() // (_sample_bytes(options) * num_batches)
    batch_size = options.batch_size
    while batch_size > max(fitting, 1):
        batch_size //= 2
    return batch_size


def _sample_bytes(options: LoaderOptions) -> int:
    """Bytes of one sample's tensors in a worker: uint8 photo, uint8 mask if there is one, int64 label."""
    return options.crop**2 * (3 + (options.mask is not None)) + 8


def _free_shared_memory() -> int:
    status = os.statvfs(SHARED_MEMORY)
    return status.f_bavail * status.f_frsize


def run_apart(module: str, given: str, *, failed: str, **environment: str) -> None:
    """Run a peer's module as a program, for a library that forks: the program has loaded neither DALI nor CUDA.

    It reads ``given`` from standard input; the error is ``failed`` with the program's last lines.
    """
    done = subprocess.run(  # noqa: S603 (our own interpreter and module)
        [sys.executable, "-m", module],
        input=given,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )
    if done.returncode:
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        raise PipesError("\n".join([f"{failed}; it ended with:", *lines[-ERROR_LINES:]]))


@contextlib.contextmanager
def open_data_loader(
    dataset: Any,
    shards: ShardSet,
    *,
    options: LoaderOptions,
    loader_class: type[Any] | None = None,
    num_workers: int | None = None,
) -> Iterator[BenchLoader]:
    """Open a peer that is a torch ``DataLoader`` over encoded samples; its workers make whole batches."""
    from torch.utils.data import DataLoader

    from bench.loaders.transforms import BatchDecoder

    loader = (loader_class or DataLoader)(
        dataset,
        batch_size=options.batch_size,
        collate_fn=BatchDecoder(options),
        **worker_settings(shards, options=options, num_workers=num_workers or options.num_threads),
    )
    with opened_workers(loader, options=options) as opened:
        yield opened


@contextlib.contextmanager
def opened_workers(data_loader: Any, *, options: LoaderOptions, batches: Any = None) -> Iterator[BenchLoader]:
    """Yield the loader over a ``DataLoader``, whose worker processes end with it.

    ``batches`` is iterated once an epoch in place of ``data_loader``.
    """
    import torch

    from bench.loaders.transforms import Normaliser

    source, normalise = data_loader if batches is None else batches, Normaliser(options)

    def epoch() -> Iterator[BenchBatch]:
        for batch in source:
            yield normalise(batch)

    loader = BenchLoader(epoch, options=options, num_workers=data_loader.num_workers)
    num_torch_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the workers have the cores
    try:
        yield loader
    finally:
        torch.set_num_threads(num_torch_threads)
        loader.close()
        # Persistent workers end with torch's iterator, which a caller that left an epoch early may still hold.
        iterator = getattr(data_loader, "_iterator", None)
        if iterator is not None:
            iterator._shutdown_workers()
