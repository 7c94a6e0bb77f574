"""Our loader, and three that show its bounds.

``memory`` is our graph, fed from memory. ``obstore`` reads a bucket's bytes and decodes nothing. ``synthetic`` gives
the same batch again and again.
"""

import contextlib
import itertools
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from bench.loaders.encoded import shard_urls
from bench.loaders.protocol import BenchBatch, BenchLoader, LoaderOptions
from bench.loaders.recipe import crops_of
from bench.loaders.s3 import s3_client, s3_place
from dali_pipes.arrays import Int32s
from dali_pipes.graph.inputs import Components, once_a_batch
from dali_pipes.graph.random import Random
from dali_pipes.reader.batch import Batch
from dali_pipes.store.shard_set import ShardSet
from prep.inspect.indexed_set import IndexedSet

if TYPE_CHECKING:
    from dali_pipes.graph.decode import BatchInputs
    from dali_pipes.graph.definition import Graph
    from dali_pipes.graph.pipelines import ImageOptions
    from dali_pipes.order.plan import Plan

PREFETCH_QUEUE_DEPTH = 2  # dali_pipes.loader's default
OBSTORE_GETS, COUNTS = 8, "counts.json"


@contextlib.contextmanager
def open_dali(shards: ShardSet, *, options: LoaderOptions) -> Iterator[BenchLoader]:
    """Open ``dali_pipes.loader`` as in a training script; its shards stay staged for all epochs."""
    import dali_pipes as dp

    with dp.loader(
        shard_urls(shards),
        graph_of(options),
        batch_size=options.batch_size,
        seed=options.seed,
        last_batch_policy="PARTIAL",
        device=options.device,
        decode=dp.Decode(threads=options.num_threads),
        outputs=dp.Outputs(keys=True),
        endpoint=shards.store.endpoint,
    ) as loader:
        epochs = itertools.count()

        def epoch() -> Iterator[BenchBatch]:
            if next(epochs):
                loader.reset()
            for (batch,) in loader:
                yield cast("BenchBatch", batch)

        yield BenchLoader(epoch, options=options, decode="dali")


def graph_of(options: LoaderOptions) -> "Graph":
    """Make the graph of the run's recipe: a built-in graph that takes the given crops instead of random ones.

    Photos are not turned upright by their EXIF data: most peers do not do that, either.
    """
    import dali_pipes as dp

    if options.recipe == "encoded":
        return lambda components, random: {
            "encoded": components.packed(components[options.photo]),
            "label": components.label,
        }
    image: ImageOptions = {"photo": options.photo, "orient": False, "dtype": options.dtype}
    if options.recipe == "segmentation":
        return dp.segmentation(crop=options.crop, mask=options.mask, **image)
    if options.recipe == "evaluation":
        return dp.classification_eval(resize=options.resize, crop=options.crop, **image)
    graph = dp.classification_train(crop=options.crop, **image)
    return lambda components, random: graph(components, GivenCrops(components))


class GivenCrops(Random):
    """Gives a graph the crops and flips of `bench.loaders.recipe.crops_of` where it asks for random ones."""

    def __init__(self, components: Components) -> None:
        super().__init__(components)
        self._crops: Any = None

    def resized_crop(self, component: str, **_: Any) -> tuple[Any, Any]:
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
        return self._components.array(lambda batch: self._crops(batch)[:, 4])


@contextlib.contextmanager
def open_memory(shards: ShardSet, *, options: LoaderOptions) -> Iterator[BenchLoader]:
    """Feed our graph and decode pipeline from memory: the ceiling for `dali`, with the same samples in each batch.

    It leaves out the parts whose time `dali` should hide: the store, the cache file, the index and the reader.
    """
    from torch.utils.dlpack import from_dlpack

    from dali_pipes.data_set.data_set import DataSet
    from dali_pipes.graph.decode import DecodePipeline
    from dali_pipes.graph.definition import CU_SEQLENS
    from dali_pipes.order.inputs import OrderInputs
    from dali_pipes.order.plan import Batching, Plan
    from dali_pipes.order.randomness import Stream
    from dali_pipes.reader.samples import Samples, StoredSamples

    data_set = DataSet(shards)  # makes the index if the store has none, as `dali` does
    manifest, read = data_set.manifest, data_set.read_index
    samples, batch_size = Samples(manifest, read), options.batch_size
    decode = DecodePipeline(
        graph_of(options),
        samples=StoredSamples(manifest, read),
        batch_size=batch_size,
        device_id=None if options.delivery_device == "cpu" else torch.cuda.current_device(),
        num_threads=options.num_threads,
        prefetch_queue_depth=PREFETCH_QUEUE_DEPTH,
    )
    data = [np.frombuffer(shards.store.read(name), np.uint8) for name in manifest.names]
    rows = samples.rows(np.arange(len(samples)))
    components = {}
    for component in decode.inputs.read:
        places = rows.places(component)
        located = zip(rows.shard.tolist(), places.offset.tolist(), places.size.tolist(), strict=True)
        components[component] = [data[shard][offset : offset + size] for shard, offset, size in located]

    def fed(plan: "Plan") -> Iterator["BatchInputs"]:
        for step in plan.steps(Batching(batch_size=batch_size)):
            batch = Batch(
                samples.rows(step.ordinals),
                0,
                len(step.ordinals),
                step.occurrences,
                num_valid=step.num_valid,
                stream=lambda name: Stream(plan.order.seed, plan.order.epoch, f"graph/{name}"),
            )
            encoded = {name: [arrays[ordinal] for ordinal in step.ordinals] for name, arrays in components.items()}
            yield decode.complete(batch, encoded)[0]

    epochs = itertools.count()

    def epoch() -> Iterator[BenchBatch]:
        if number := next(epochs):
            decode.drain()
        order = OrderInputs(seed=options.seed, epoch=number)
        plan = Plan(shard_bytes=manifest.shard_bytes, shard_samples=manifest.samples, order=order)
        batches = fed(plan)
        decode.feed = lambda: next(batches, None)
        for step in range(plan.num_steps(Batching(batch_size=batch_size))):
            if step == 0:
                for _ in range(PREFETCH_QUEUE_DEPTH):
                    decode.schedule()
            fed_batch, tensors = decode.take()
            decode.schedule()
            made: dict[str, Any] = {"key": fed_batch.batch.keys}
            for name, tensor in tensors.items():
                if name == decode.inputs.packed:
                    made |= {name: tensor.tensor, CU_SEQLENS: tensor.offsets()}
                else:
                    made[name] = from_dlpack(tensor)
            yield cast("BenchBatch", made)

    with contextlib.closing(decode):
        yield BenchLoader(epoch, options=options, decode="dali")


@contextlib.contextmanager
def open_synthetic(shards: ShardSet, *, options: LoaderOptions) -> Iterator[BenchLoader]:
    """Return the same tensors of the right shapes again and again: no other loader makes the training step faster.

    An epoch has as many samples as the shards hold; only this number is read.
    """
    manifest = IndexedSet(shards).manifest
    size, crop, device = options.batch_size, options.crop, options.delivery_device
    draw = torch.Generator().manual_seed(options.seed)
    whole: dict[str, Any] = {
        "label": torch.randint(1, 38, (size,), generator=draw).to(device),
        "key": [f"synthetic/{row:06d}" for row in range(size)],
    }
    num_bytes = round(manifest.total_bytes / max(1, manifest.num_samples))
    if options.recipe == "encoded":
        whole["encoded"] = torch.zeros(size * num_bytes, dtype=torch.uint8)
        whole["cu_seqlens"] = torch.arange(size + 1, dtype=torch.int32) * num_bytes
    else:
        whole["image"] = torch.randn(size, 3, crop, crop, generator=draw).to(device, getattr(torch, options.dtype))
    if options.mask is not None:
        whole["mask"] = torch.randint(1, 4, (size, 1, crop, crop), dtype=torch.uint8, generator=draw).to(device)

    def epoch() -> Iterator[BenchBatch]:
        for start in range(0, manifest.num_samples, size):
            rows = min(size, manifest.num_samples - start)
            ends = {"encoded": rows * num_bytes, "cu_seqlens": rows + 1}
            yield cast("BenchBatch", {name: part[: ends.get(name, rows)] for name, part in whole.items()})

    yield BenchLoader(epoch, options=options, decode="none")


def prepare_obstore(shards: ShardSet, *, directory: Path) -> None:
    """Write how many samples each shard has, so that no turn reads it."""
    counts = dict(zip(shards.names, IndexedSet(shards).manifest.samples.tolist(), strict=True))
    (directory / COUNTS).write_text(json.dumps(counts))


@contextlib.contextmanager
def open_obstore(shards: ShardSet, *, options: LoaderOptions, place: str) -> Iterator[BenchLoader]:
    """Get every shard of a bucket of S3 as a whole by obstore, `OBSTORE_GETS` at a time, and drop the bytes.

    A batch has the number of samples of a shard, and nothing of it.
    """
    store = s3_client(s3_place(shards))
    counts = json.loads((Path(place) / COUNTS).read_text())

    def get(name: str) -> int:
        store.get(name).bytes()
        return int(counts[name])

    def epoch() -> Iterator[BenchBatch]:
        for num in pool.map(get, shards.names):
            yield {"label": torch.zeros(num, dtype=torch.int64)}

    with ThreadPoolExecutor(OBSTORE_GETS) as pool:
        yield BenchLoader(epoch, options=options, decode="none")
