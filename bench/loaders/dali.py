"""Load with ``dali_pipes.loader``, opened as in a training script; it reads the index beside the shards."""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.loaders.encoded import shard_urls
from bench.loaders.protocol import BenchBatch, BenchLoader, LoaderOptions
from bench.loaders.recipe import crops_of
from dali_pipes.arrays import Int32s
from dali_pipes.graph.inputs import Components, once_a_batch
from dali_pipes.graph.random import Random
from dali_pipes.reader.batch import Batch
from dali_pipes.store.shard_set import ShardSet

if TYPE_CHECKING:
    from dali_pipes.graph.definition import Graph


@contextlib.contextmanager
def open_loader(shards: ShardSet, *, options: LoaderOptions) -> Iterator[BenchLoader]:
    """Open ``dali_pipes.loader`` with `graph_of`; its shards stay staged for all epochs."""
    import dali_pipes as dp

    graph = graph_of(options)
    if options.recipe == "encoded":
        # As a user would ask for bytes that no operator takes: views of the buffer that they were read into, no copy.
        graph = lambda components, random: {  # noqa: E731
            "encoded": components.listed(options.photo, lambda data: data),
            "label": components.label,
        }
    with dp.loader(
        shard_urls(shards),
        graph,
        batch_size=options.batch_size,
        seed=options.seed,
        last_batch_policy="PARTIAL",
        device=options.device,
        decode=dp.Decode(threads=options.num_threads),
        outputs=dp.Outputs(keys=True),
        endpoint=shards.store.endpoint,
    ) as loader:
        yield _DaliEpochs(loader, device=options.delivery_device)


def graph_of(options: LoaderOptions) -> "Graph":
    """Make the graph of the run's recipe: a built-in graph that takes the given crops instead of random ones.

    Photos are not turned upright by their EXIF data: most peers do not do that, either.
    """
    import dali_pipes as dp
    from bench.loaders.dali import GivenCrops

    if options.recipe == "encoded":
        return lambda components, random: {
            "encoded": components.packed(components[options.photo]),
            "label": components.label,
        }
    if options.recipe == "segmentation":
        return dp.segmentation(crop=options.crop, photo=options.photo, mask=options.mask, orient=False)
    graph = dp.classification_train(crop=options.crop, photo=options.photo, orient=False)
    return lambda components, random: graph(components, GivenCrops(components))


class _DaliEpochs:
    num_workers = 0
    decode = "dali"

    def __init__(self, loader: Any, *, device: str) -> None:
        self._loader = loader
        self._is_new = True
        self.device = device

    def epoch(self) -> Iterator[BenchBatch]:
        if not self._is_new:
            self._loader.reset()
        self._is_new = False
        for (batch,) in self._loader:
            yield batch


class GivenCrops(Random):
    """Gives a graph the crops and flips of `bench.loaders.recipe.crops_of` where it asks for random ones."""

    def __init__(self, components: Components) -> None:
        super().__init__(components)
        self._crops: Any = None

    def resized_crop(self, component: str, **_: Any) -> tuple[Any, Any]:
        """Return the nodes of the given crop's start and shape."""

        @once_a_batch
        def crops(batch: Batch) -> Int32s:
            height, width = self._components.size(component)(batch)
            num_bytes = batch.places(component).size
            return crops_of(num_bytes, height.astype(np.int64), width.astype(np.int64)).astype(np.int32)

        self._crops = crops
        return (
            self._components.array(lambda batch: crops(batch)[:, :2]),
            self._components.array(lambda batch: crops(batch)[:, 2:4]),
        )

    def coin_flip(self, *_: Any, **__: Any) -> Any:
        """Return the node that says whether the given crop is flipped."""
        return self._components.array(lambda batch: self._crops(batch)[:, 4])
