"""Load shards from a directory with Megatron Energon: ``CrudeWebdataset``, ``TaskEncoder``, ``SavableDataLoader``.

Settings, for megatron-energon 7.4 (documentation, "Crude Datasets" and "Data Loading"): the index of ``energon
prepare`` beside the shards, which are linked and not copied; each photo is decoded where the batch is made
(``TaskEncoder.batch``), straight into the batch in shared memory; one worker for each core, which the library forks and
keeps for all epochs; ``repeat=False``, so that every sample comes exactly once an epoch. The buffer of samples is left
out, as in `webloader`, because dSort has shuffled the samples. The loader is that of ``get_loader`` without
``gc_freeze_at_start``, which runs a full garbage collection at the start of each epoch. By default Energon has no
epochs, so a training pays for it once. The imports are frozen already (`bench.engine.surviving_server`).
"""

import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron.energon import (
    Cooker,
    CrudeWebdataset,
    SavableDataLoader,
    TaskEncoder,
    WorkerConfig,
    get_train_dataset,
    stateless,
)

from bench.loaders.protocol import BenchBatch, BenchLoader, LoaderOptions
from bench.loaders.transforms import BatchDecoder
from bench.loaders.workers import check_shared_memory, num_batches_shared, opened_workers, run_apart
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
def open_loader(shards: ShardSet, *, options: LoaderOptions, place: str) -> Iterator[BenchLoader]:
    """Every sample comes exactly once an epoch. A worker makes its own batches, so each worker's last one is short."""
    check_shared_memory(num_batches_shared(options.num_threads) * options.batch_size, options=options)
    with contextlib.ExitStack() as workers:

        def start_workers() -> BenchLoader:
            dataset = get_train_dataset(
                place,
                worker_config=WorkerConfig(
                    rank=0, world_size=1, num_workers=options.num_threads, seed_offset=options.seed
                ),
                batch_size=options.batch_size,
                shuffle_buffer_size=None,
                max_samples_per_sequence=None,
                task_encoder=_Encoder(options),
                repeat=False,
            )
            loader = SavableDataLoader(dataset, gc_freeze_at_start=False)
            return workers.enter_context(opened_workers(loader, options=options))

        running = start_workers()
        is_left = False

        def epoch() -> Iterator[BenchBatch]:
            nonlocal running, is_left
            if is_left:  # Energon goes on where an epoch was left, so new workers are started
                workers.close()
                running = start_workers()
            is_left = True
            yield from running.epoch()
            is_left = False

        yield BenchLoader(epoch, options=options, num_workers=options.num_threads)


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
