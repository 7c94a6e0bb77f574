"""Load shards with Hugging Face ``datasets``: its WebDataset builder, streamed, and a ``DataLoader``.

Settings, for datasets 5.2 (documentation, "Load image data: WebDataset" and "Use with PyTorch: Stream data"):
``load_dataset("webdataset", streaming=True)``, and workers that each get some of the shards: one for each core, kept
for all epochs. ``decode(False)`` hands over the bytes of a photo, because the library decodes with Pillow only, one
sample after the other ("Image decoding"); each photo is decoded as a whole where the batch is made (``collate_fn``),
straight into the batch in shared memory. Local files are streamed without the library's decoding threads, as it does by
itself. ``shuffle`` with ``set_epoch`` gives the shards another order in each epoch. Its buffer of samples is left out,
as in `webloader`, because dSort has shuffled the samples.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import datasets
from torch.utils.data import IterableDataset

from bench.loaders.encoded import EncodedSample, shard_urls
from bench.loaders.protocol import BenchLoader, LoaderOptions
from bench.loaders.workers import num_shard_workers, open_data_loader
from bench.tools.folders import RunFolder
from dali_pipes.errors import DataError
from dali_pipes.store.shard_set import ShardSet

_NO_COMPONENTS = ("__url__",)


@contextlib.contextmanager
def open_loader(shards: ShardSet, *, options: LoaderOptions) -> Iterator[BenchLoader]:
    """Every sample comes exactly once an epoch. A worker gets whole shards, so each worker's last batch is short.

    Raises:
        DataError: If the library cannot read the first samples of the first shard.
    """
    with RunFolder() as folder:
        try:
            streamed = datasets.load_dataset(
                "webdataset",
                data_files={"train": shard_urls(shards)},
                split="train",
                streaming=True,
                cache_dir=str(folder.new()),
            )
        except ValueError as exc:
            raise DataError(f"'{shards.url}': Hugging Face datasets cannot read its first shard: {exc}") from exc
        # A buffer of one sample, filled from one shard: only the shards are shuffled.
        streamed = streamed.decode(False).shuffle(seed=options.seed, buffer_size=1, max_buffer_input_shards=1)
        samples = _StreamedSamples(streamed)
        workers = num_shard_workers(shards, options)
        with open_data_loader(samples, shards, options=options, num_workers=workers) as loader:
            yield loader


class _StreamedSamples(IterableDataset[EncodedSample]):
    """The encoded samples of one worker's shards; iterated once an epoch."""

    def __init__(self, streamed: Any) -> None:
        self._streamed = streamed
        self._epochs = 0

    def __iter__(self) -> Iterator[EncodedSample]:
        # Each worker counts for itself: all workers begin each epoch, also after one that was left early.
        self._streamed.set_epoch(self._epochs)
        self._epochs += 1
        for example in self._streamed:
            yield _encoded(example)


def _encoded(example: dict[str, Any]) -> EncodedSample:
    """A sample as `components_of` takes it: the library has photos as dicts, and absent components as ``None``."""
    return {
        name if name.startswith("__") else name.lower(): value["bytes"] if isinstance(value, dict) else value
        for name, value in example.items()
        if value is not None and name not in _NO_COMPONENTS
    }
