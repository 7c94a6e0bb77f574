"""Open loaders for tests, and list what they deliver."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import dali_pipes as dp


def open_loader(shards: Any, graph: Any = None, **options: Any) -> dp.Loader:
    """A loader on the CPU that yields batches of four with keys; ``options`` of `dali_pipes.loader` take precedence.

    Without a graph, it yields crops of 16 x 16 of ``image.jpg`` and ``trimap.png``.
    """
    usual = {"batch_size": 4, "device": "cpu", "outputs": dp.Outputs(keys=True), "decode": dp.Decode(threads=1)}
    return dp.loader(shards, graph or dp.segmentation(crop=16), **(usual | options))


def open_windowed(
    shards: Any, graph: Any, *, directory: Path, window_bytes: int, max_bytes: int | None = None, **options: Any
) -> dp.Loader:
    """A loader like `open_loader`'s, without keys; it shuffles in windows and has its cache in ``directory``."""
    cache = dp.Cache(directory=directory, max_bytes=max_bytes)
    usual = {"outputs": dp.Outputs(), "cache": cache, "shuffle": dp.Shuffle(window_bytes=window_bytes)}
    return open_loader(shards, graph, **(usual | options))


def substituting(shards: Path, **options: Any) -> dp.BadSamples:
    """Bad samples are substituted and noted in ``q.tsv`` beside the shards; options take precedence."""
    return dp.BadSamples(**({"on_error": "substitute", "quarantine": shards / "q.tsv"} | options))


def batches_of(shards: Any, graph: Any, **options: Any) -> list[dict[str, Any]]:
    """The batches of an epoch, with keys."""
    arguments = {"batch_size": 7, "device": "cpu", "seed": 5, "outputs": dp.Outputs(keys=True)} | options
    with dp.loader(shards, graph, **arguments) as loader:
        return [batch for (batch,) in loader]


def torchdatas_loader(loader: dp.Loader) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(loader.as_dataset(), batch_size=None, num_workers=0)


def keys_of(batches: Iterable[Sequence[Mapping[str, Any]]]) -> list[str]:
    """The keys of the samples of a loader's epoch, or of some of its batches."""
    return [key for (batch,) in batches for key in batch["key"]]
