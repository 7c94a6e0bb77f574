"""Load LitData's chunks, converted from shards, with its ``StreamingDataset`` and ``StreamingDataLoader``.

Settings, for litdata 0.2.76 (README): chunks of 64 MB, not compressed ("What chunk_bytes should I use?"); ``shuffle``,
and no ``drop_last``, so that every sample comes; one worker for each core ("Pause, resume": ``os.cpu_count()``), kept
for all epochs. Each photo is decoded as a whole where the batch is made (``collate_fn``), straight into the batch in
shared memory, which the library's hook for single samples (``transform``) cannot do. A local directory is mapped in
place and not copied into a cache ("POSIX-fast", on by default). The photo keeps its bytes: LitData's own JPEG field is
decoded by torchvision too, or by Pillow if there is EXIF, whose orientation it applies and the other loaders do not.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from litdata import StreamingDataLoader, StreamingDataset

from bench.loaders.encoded import endpoint_of, shard_urls
from bench.loaders.protocol import BenchLoader, LoaderOptions, Prepared
from bench.loaders.transforms import BatchDecoder
from bench.loaders.workers import WorkerEpochs, worker_settings
from bench.tools.environment import available_cores
from dali_pipes.errors import PipesError

if TYPE_CHECKING:
    from dali_pipes.store.shard_set import ShardSet


ERROR_LINES = 5


def prepare(shards: "ShardSet", *, directory: Path) -> None:
    """Write each sample as a dict of the key and each component's bytes. Runs a process on each core.

    Raises:
        PipesError: If ``litdata.optimize`` fails, as it does if samples have different components.
    """
    with tempfile.TemporaryDirectory(prefix="dali-pipes-litdata-") as scratch:
        job = {
            "urls": shard_urls(shards),
            "endpoint": endpoint_of(shards),
            "directory": str(directory),
            "scratch": scratch,
            "num_workers": available_cores(),
        }
        command = [sys.executable, "-m", "bench.loaders.peers.litdata_optimize"]
        done = subprocess.run(command, input=json.dumps(job), capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        # Our own errors are one line of a worker's traceback.
        reasons = [line.partition(": ")[2] for line in lines if line.startswith(f"{PipesError.__module__}.")]
        ended = f"litdata.optimize of '{shards.url}' failed; it ended with:\n{os.linesep.join(lines[-ERROR_LINES:])}"
        raise PipesError(reasons[0] if reasons else ended)


def open_loader(
    shards: "ShardSet", *, options: LoaderOptions, prepared: Prepared
) -> contextlib.AbstractContextManager[BenchLoader]:
    """The data set in worker processes, fewer of them if memory is short; every sample comes exactly once an epoch."""
    loader = StreamingDataLoader(
        _ChunkSamples(Path(prepared.url), options),
        batch_size=options.batch_size,
        collate_fn=BatchDecoder(options),
        **worker_settings(shards, options=options, num_workers=options.num_threads),
    )
    return contextlib.closing(WorkerEpochs(loader, options=options))


class _ChunkSamples(StreamingDataset):  # type: ignore[misc]  # not installed where types are checked
    """Encoded samples; iterated once an epoch by each worker."""

    def __init__(self, directory: Path, options: LoaderOptions) -> None:
        super().__init__(input_dir=str(directory), shuffle=True, drop_last=False, seed=options.seed)
        self._begun = 0

    def __iter__(self) -> Any:
        # A persistent worker learns of a new epoch only at the end of the last one. After an epoch that was left early
        # some workers have reached it and some have not, and each would deal the samples out for another epoch.
        self._begun += 1
        self.set_epoch(self._begun)
        return super().__iter__()
