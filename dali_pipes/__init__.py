"""WebDataset shards in AIStore or on disk to training batches, decoded by DALI, in an order that a seed fixes.

>>> import dali_pipes as dp
>>> loader = dp.loader("ais://pets/shuffled-", dp.segmentation(crop=350), batch_size=64, seed=7)  # doctest: +SKIP
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dali_pipes import metrics as metrics
    from dali_pipes.data_set.encoded import samples as samples
    from dali_pipes.data_set.find import Mixture as Mixture
    from dali_pipes.errors import CacheError as CacheError
    from dali_pipes.errors import DataError as DataError
    from dali_pipes.errors import DecodeError as DecodeError
    from dali_pipes.errors import PipesError as PipesError
    from dali_pipes.errors import StoreError as StoreError
    from dali_pipes.errors import WorkerProcessError as WorkerProcessError
    from dali_pipes.graph.definition import BatchDict as BatchDict
    from dali_pipes.graph.inputs import Components as Components
    from dali_pipes.graph.pipelines import IMAGENET_MEAN as IMAGENET_MEAN
    from dali_pipes.graph.pipelines import IMAGENET_STD as IMAGENET_STD
    from dali_pipes.graph.pipelines import ImageOptions as ImageOptions
    from dali_pipes.graph.pipelines import bucketed as bucketed
    from dali_pipes.graph.pipelines import classification_eval as classification_eval
    from dali_pipes.graph.pipelines import classification_train as classification_train
    from dali_pipes.graph.pipelines import image as image
    from dali_pipes.graph.pipelines import normalise as normalise
    from dali_pipes.graph.pipelines import segmentation as segmentation
    from dali_pipes.graph.random import Random as Random
    from dali_pipes.graph.recipes.captions import captions as captions
    from dali_pipes.graph.recipes.detection import detection as detection
    from dali_pipes.graph.recipes.mix import mix as mix
    from dali_pipes.graph.recipes.mix import mixing as mixing
    from dali_pipes.graph.recipes.multi_crop import multi_crop as multi_crop
    from dali_pipes.iterator import Loader as Loader
    from dali_pipes.iterator import loader as loader
    from dali_pipes.options import BadSamples as BadSamples
    from dali_pipes.options import Cache as Cache
    from dali_pipes.options import Decode as Decode
    from dali_pipes.options import Outputs as Outputs
    from dali_pipes.options import Select as Select
    from dali_pipes.options import Shards as Shards
    from dali_pipes.options import Shuffle as Shuffle
    from dali_pipes.order.inputs import buckets as buckets
    from dali_pipes.order.state import StateError as StateError

# Resolved when first used: DALI and torch take seconds to import, and the command line must answer at once.
_NAMES = {
    "data_set.encoded": "samples",
    "data_set.find": "Mixture",
    "errors": "CacheError DataError DecodeError PipesError StoreError WorkerProcessError",
    "graph.inputs": "Components",
    "graph.definition": "BatchDict",
    "graph.pipelines": (
        "IMAGENET_MEAN IMAGENET_STD ImageOptions bucketed classification_eval classification_train image normalise "
        "segmentation"
    ),
    "graph.random": "Random",
    "graph.recipes.captions": "captions",
    "graph.recipes.detection": "detection",
    "graph.recipes.mix": "mix mixing",
    "graph.recipes.multi_crop": "multi_crop",
    "iterator": "Loader loader",
    "options": "BadSamples Cache Decode Outputs Select Shards Shuffle",
    "order.inputs": "buckets",
    "order.state": "StateError",
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}

# Modules that have names of their own: `dp.metrics.serve`.
_MODULES = ("metrics",)

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
