"""Shards converted to LitData's chunks to batches, by its ``StreamingDataset`` and ``StreamingDataLoader``.

Settings, of litdata 0.2.76 (README): chunks of 64 MB, not compressed ("What chunk_bytes should I use?"); ``shuffle``,
and ``drop_last`` off, so that every sample comes; one worker a core ("Pause, resume": ``os.cpu_count()``), kept for
all epochs; decoding where the batch is made (``collate_fn``), straight into it in shared memory, which its hook for
single samples (``transform``) cannot, the whole photo of each. A local directory is mapped in place, not copied into a
cache ("POSIX-fast", which is on by itself). The photo stays the bytes that it was: LitData's own JPEG field is decoded
by torchvision too, or by Pillow where there is EXIF, whose orientation it applies and the other loaders do not.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from litdata import StreamingDataLoader, StreamingDataset

from bench.loaders import Loader, LoaderOptions, Prepared, available_cores
from bench.loaders.workers import WorkerEpochs, endpoint_of, shard_urls, worker_settings
from bench.transforms import BatchDecoder
from dali_pipes.errors import PipesError

if TYPE_CHECKING:
    from dali_pipes.store.urls import ShardSet

__all__ = ["open_loader", "prepare"]

ERROR_LINES = 5


def prepare(shards: "ShardSet", *, directory: Path) -> Prepared:
    """Each sample as a dict: the key, and each component's bytes as they are in the shard. One process a core.

    Raises:
        PipesError: If ``litdata.optimize`` fails, as it does where samples have different components.
    """
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="dali-pipes-litdata-") as scratch:
        job = {
            "urls": shard_urls(shards),
            "endpoint": endpoint_of(shards),
            "directory": str(directory),
            "scratch": scratch,
            "num_workers": available_cores(),
        }
        command = [sys.executable, "-m", "bench.loaders._litdata_optimize"]
        done = subprocess.run(command, input=json.dumps(job), capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        # Our own errors come as one line of the trace of a worker.
        reasons = [line.partition(": ")[2] for line in lines if line.startswith(f"{PipesError.__module__}.")]
        ended = f"litdata.optimize of '{shards.url}' failed; it ended with:\n{os.linesep.join(lines[-ERROR_LINES:])}"
        raise PipesError(reasons[0] if reasons else ended)
    return Prepared.of(directory, started=started)


@contextlib.contextmanager
def open_loader(shards: "ShardSet", *, options: LoaderOptions, prepared: Prepared) -> Iterator[Loader]:
    """The data set in worker processes; every sample exactly once an epoch."""
    from bench.loaders.devices import delivery_device

    device = delivery_device(options.device)
    loader = StreamingDataLoader(
        _Samples(Path(prepared.url), options),
        batch_size=options.batch_size,
        collate_fn=BatchDecoder(options),
        **worker_settings(shards, options=options, num_workers=options.num_threads, device=device),
    )
    num_workers: int = loader.num_workers  # fewer than asked for where memory is short
    epochs = WorkerEpochs(loader, data_loader=loader, num_workers=num_workers, decode=options.decode, device=device)
    try:
        yield epochs
    finally:
        epochs.close()


class _Samples(StreamingDataset):  # type: ignore[misc]  # not installed where types are checked
    """Encoded samples; iterated once an epoch by each worker."""

    def __init__(self, directory: Path, options: LoaderOptions) -> None:
        super().__init__(
            input_dir=str(directory),
            shuffle=True,
            drop_last=False,
            seed=options.seed,
        )
        self._begun = 0

    def __iter__(self) -> Any:
        # A worker that is kept learns of a new epoch only when it has come to the end of the last one: after one that
        # was left early some have and some have not, and each would deal the samples out for an epoch of its own.
        self._begun += 1
        self.set_epoch(self._begun)
        return super().__iter__()
