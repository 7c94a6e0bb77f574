"""Load LitData's chunks, converted from shards, with its ``StreamingDataset`` and ``StreamingDataLoader``.

Settings, for litdata 0.2.76 (README): chunks of 64 MB, not compressed ("What chunk_bytes should I use?"); ``shuffle``,
and no ``drop_last``, so that every sample comes; one worker for each core ("Pause, resume": ``os.cpu_count()``), kept
for all epochs. Each photo is decoded as a whole where the batch is made (``collate_fn``), straight into the batch in
shared memory, which the library's hook for single samples (``transform``) cannot do. A local directory is mapped in
place and not copied into a cache ("POSIX-fast", on by default). The photo keeps its bytes: LitData's own JPEG field is
decoded by torchvision too, or by Pillow if there is EXIF, whose orientation it applies and the other loaders do not.
"""

import contextlib
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import litdata
from litdata import StreamingDataLoader, StreamingDataset

from bench.loaders.encoded import EncodedSample, checked_fields, encoded_samples, open_stream, shard_urls
from bench.loaders.protocol import BenchLoader, LoaderOptions, Prepared
from bench.loaders.workers import open_data_loader
from bench.tools.environment import available_cores
from dali_pipes.errors import PipesError
from dali_pipes.store.shard_set import ShardSet

CHUNK_BYTES = "64MB"  # the README's, "What chunk_bytes should I use?"
ERROR_LINES = 5


def prepare(shards: ShardSet, *, directory: Path) -> None:
    """Write each sample as a dict of the key and each component's bytes; `_optimize` does it in a new process.

    Raises:
        PipesError: If ``litdata.optimize`` fails, for example because samples have different components.
    """
    with tempfile.TemporaryDirectory(prefix="dali-pipes-litdata-") as scratch:
        job = {"urls": shard_urls(shards), "endpoint": shards.store.endpoint, "directory": str(directory)}
        done = subprocess.run(
            [sys.executable, "-m", "bench.loaders.peers.litdata"],
            input=json.dumps(job),
            capture_output=True,
            text=True,
            check=False,
            env={
                **os.environ,
                "DATA_OPTIMIZER_CACHE_FOLDER": f"{scratch}/chunks",
                "DATA_OPTIMIZER_DATA_CACHE_FOLDER": f"{scratch}/data",
            },
        )
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        # An error of this project is one line of a worker's traceback.
        reasons = [line.partition(": ")[2] for line in lines if line.startswith(f"{PipesError.__module__}.")]
        ended = f"litdata.optimize of '{shards.url}' failed; it ended with:\n{os.linesep.join(lines[-ERROR_LINES:])}"
        raise PipesError(reasons[0] if reasons else ended)


def open_loader(
    shards: ShardSet, *, options: LoaderOptions, prepared: Prepared
) -> contextlib.AbstractContextManager[BenchLoader]:
    """Every sample comes exactly once an epoch."""
    samples = ChunkSamples(prepared.url, options)
    return open_data_loader(samples, shards, options=options, loader_class=StreamingDataLoader)


class ChunkSamples(StreamingDataset):  # type: ignore[misc]  # not installed where types are checked
    """Encoded samples; iterated once an epoch by each worker.

    Args:
        place: A directory, or the ``s3://`` address of chunks, which are downloaded to ``cache_dir``.
    """

    def __init__(self, place: str, options: LoaderOptions, *, cache_dir: str | None = None) -> None:
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

    `optimize` changes how its process starts all later processes. It starts its workers with everything that the caller
    has imported, unless they are forked. So it runs in a new process, which may change such settings, and which can
    fork workers because it has loaded neither DALI nor CUDA.
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
        chunk_bytes=CHUNK_BYTES,
        num_workers=min(available_cores(), len(urls)),
        start_method="fork",
        verbose=False,
    )


def _samples(url: str, *, endpoint: str | None) -> Iterator[EncodedSample]:
    with open_stream(url, endpoint=endpoint) as stream:
        yield from encoded_samples(stream, shard=url)


if __name__ == "__main__":
    _optimize()
