"""Load shards from a directory with Megatron Energon: ``CrudeWebdataset``, a task encoder, and ``get_loader``.

Settings, for megatron-energon 7.4 (documentation, "Crude Datasets" and "Data Loading"): the index of ``energon
prepare`` beside the shards, which are linked and not copied; no decoder for single samples, because each photo is
decoded as a whole where the batch is made (``TaskEncoder.batch``), straight into the batch in shared memory; one worker
for each core, which the library forks and keeps for all epochs. ``repeat=False``, so that every sample comes exactly
once an epoch. The buffer of samples is left out, as in `webloader`, because dSort has shuffled the samples.
"""

import contextlib
import functools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron.energon import (
    Cooker,
    CrudeWebdataset,
    TaskEncoder,
    WorkerConfig,
    get_loader,
    get_train_dataset,
    stateless,
)

from bench.loaders.protocol import BenchBatch, BenchLoader, LoaderOptions, Prepared
from bench.loaders.transforms import BatchDecoder
from bench.loaders.workers import WorkerEpochs, check_shared_memory, num_batches_shared, run_apart
from bench.tools.environment import available_cores
from dali_pipes.store.shard_set import ShardSet

_DATASET = "__module__: megatron.energon\n__class__: CrudeWebdataset\n"


def prepare(shards: ShardSet, *, directory: Path) -> None:
    """Link the shards into ``directory`` and index them there, by a process on each core."""
    for row, name in enumerate(shards.names):
        (directory / f"{row:06d}.tar").symlink_to(Path(shards.store.locate(name)).resolve())
    # The library forks one worker for each core.
    run_apart("bench.loaders.peers.energon", str(directory), failed=f"Energon cannot index '{shards.url}'")


@contextlib.contextmanager
def open_loader(shards: ShardSet, *, options: LoaderOptions, prepared: Prepared) -> Iterator[BenchLoader]:
    """Every sample comes exactly once an epoch. A worker makes its own batches, so each worker's last one is short."""
    check_shared_memory(num_batches_shared(options.num_threads) * options.batch_size, options=options)
    epochs = _Epochs(prepared.url, options)
    try:
        yield epochs
    finally:
        epochs.close()


class _Epochs:
    """A `BenchLoader`. Energon goes on where an epoch was left, so after such an epoch new workers are started."""

    def __init__(self, directory: str, options: LoaderOptions) -> None:
        self.num_workers, self.decode, self.device = options.num_threads, options.decode, options.delivery_device
        self._start = functools.partial(_start_workers, directory, options)
        self._workers = self._start()
        self._is_left = False

    def epoch(self) -> Iterator[BenchBatch]:
        if self._is_left:
            self._workers.close()
            self._workers = self._start()
        self._is_left = True
        yield from self._workers.epoch()
        self._is_left = False

    def close(self) -> None:
        self._workers.close()


def _start_workers(directory: str, options: LoaderOptions) -> WorkerEpochs:
    dataset = get_train_dataset(
        directory,
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=options.num_threads, seed_offset=options.seed),
        batch_size=options.batch_size,
        shuffle_buffer_size=None,
        max_samples_per_sequence=None,
        task_encoder=_Encoder(options),
        repeat=False,
    )
    return WorkerEpochs(get_loader(dataset), options=options)


@stateless  # type: ignore[untyped-decorator]  # not installed where types are checked
def _cook(sample: Any) -> dict[str, Any]:
    return {name if name.startswith("__") else name.lower(): value for name, value in sample.items()}


class _Encoder(TaskEncoder):  # type: ignore[misc]
    """Makes whole batches of encoded samples."""

    decoder = None
    cookers = (Cooker(_cook),)
    # The first bad sample ends the run, as with the other loaders; the library's own limit is 100 in a row.
    __default_failure_tolerance__ = 1

    def __init__(self, options: LoaderOptions) -> None:
        self._decode = BatchDecoder(options)

    @stateless  # type: ignore[untyped-decorator]
    def batch(self, samples: Sequence[Any]) -> Any:
        return self._decode(samples)


def _index(directory: Path) -> None:
    CrudeWebdataset.prepare_dataset(
        directory,
        sorted(path.name for path in directory.glob("*.tar")),
        split_parts_ratio=[("train", 1.0)],
        shuffle_seed=None,
        workers=available_cores(),
    )
    (directory / ".nv-meta" / "dataset.yaml").write_text(_DATASET)


if __name__ == "__main__":
    _index(Path(sys.stdin.read()))
