"""Give a graph of ours the classification recipe's crops where it asks for random ones."""

from typing import Any

import numpy as np

from bench.loaders.recipe import crops_of
from dali_pipes.graph.inputs import Components, Int32s, once_a_batch
from dali_pipes.graph.random import Random
from dali_pipes.reader.batch import Batch


class GivenCrops(Random):
    """Draws nothing: crops and flips are those of `bench.loaders.recipe.crops_of`."""

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
