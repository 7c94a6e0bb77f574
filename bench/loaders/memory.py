"""Load from memory with our own graph and decode pipeline: the ceiling for `dali`.

It leaves out the parts whose time `dali` should hide: the store, the cache file, the index and the reader. Order,
batches, the arrays of the inputs and the index are the same as in `dali`, sample for sample.
"""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from bench.loaders.dali import graph_of
from bench.loaders.protocol import BenchBatch, BenchLoader, LoaderOptions
from dali_pipes.store.shard_set import ShardSet

if TYPE_CHECKING:
    from dali_pipes.graph.decode import BatchInputs, DecodePipeline
    from dali_pipes.order.plan import Plan
    from dali_pipes.reader.samples import Samples

PREFETCH_QUEUE_DEPTH = 2  # dali_pipes.loader's default


@contextlib.contextmanager
def open_loader(shards: ShardSet, *, options: LoaderOptions) -> Iterator[BenchLoader]:
    """Feed every sample's encoded components as arrays to the recipe's graph."""
    import torch

    from dali_pipes.data_set.data_set import DataSet
    from dali_pipes.graph.decode import DecodePipeline
    from dali_pipes.reader.samples import Samples, StoredSamples

    data_set = DataSet(shards)  # makes the index if the store has none, as `dali` does
    manifest, read = data_set.manifest, data_set.read_index
    samples = Samples(manifest, read)
    device = options.delivery_device
    decode = DecodePipeline(
        graph_of(options),
        samples=StoredSamples(manifest, read),
        batch_size=options.batch_size,
        device_id=None if device == "cpu" else torch.cuda.current_device(),
        num_threads=options.num_threads,
        prefetch_queue_depth=PREFETCH_QUEUE_DEPTH,
    )
    with contextlib.closing(decode):
        yield _MemoryEpochs(decode, samples, _read_components(shards, samples, decode), options, device=device)


class _MemoryEpochs:
    num_workers = 0
    decode = "dali"

    def __init__(
        self,
        decode: "DecodePipeline",
        samples: "Samples",
        components: dict[str, list[npt.NDArray[np.uint8]]],
        options: LoaderOptions,
        *,
        device: str,
    ) -> None:
        self._decode, self._samples, self._components, self._options = decode, samples, components, options
        self._epochs = 0
        self.device = device

    def epoch(self) -> Iterator[BenchBatch]:
        from torch.utils.dlpack import from_dlpack

        from dali_pipes.graph.definition import CU_SEQLENS
        from dali_pipes.order.inputs import OrderInputs
        from dali_pipes.order.plan import Plan, num_steps

        if self._epochs:
            self._decode.drain()
        manifest = self._samples.manifest
        order = OrderInputs(seed=self._options.seed, epoch=self._epochs)
        plan = Plan(shard_bytes=manifest.shard_bytes, shard_samples=manifest.samples, order=order)
        self._epochs += 1
        batch_size = self._options.batch_size
        fed = self._fed(plan)
        self._decode.feed = lambda: next(fed, None)
        for step in range(num_steps(plan.num_samples, global_batch_size=batch_size, last_batch_policy="PARTIAL")):
            if step == 0:
                for _ in range(PREFETCH_QUEUE_DEPTH):
                    self._decode.schedule()
            fed_batch, tensors = self._decode.take()
            self._decode.schedule()
            made: dict[str, Any] = {}
            for name, tensor in tensors.items():
                if name == self._decode.inputs.packed:
                    made |= {name: tensor.tensor, CU_SEQLENS: tensor.offsets()}
                else:
                    made[name] = from_dlpack(tensor)
            yield cast("BenchBatch", made | {"key": fed_batch.batch.keys})

    def _fed(self, plan: "Plan") -> Iterator["BatchInputs"]:
        from dali_pipes.order.randomness import Stream
        from dali_pipes.reader.batch import Batch

        for step in plan.steps(batch_size=self._options.batch_size, last_batch_policy="PARTIAL"):
            batch = Batch(
                self._samples.rows(step.ordinals),
                0,
                len(step.ordinals),
                step.occurrences,
                num_valid=step.num_valid,
                stream=lambda name: Stream(plan.order.seed, plan.order.epoch, f"graph/{name}"),
            )
            encoded = {
                component: [arrays[ordinal] for ordinal in step.ordinals]
                for component, arrays in self._components.items()
            }
            yield self._decode.complete(batch, encoded)[0]


def _read_components(
    shards: ShardSet, samples: "Samples", decode: "DecodePipeline"
) -> dict[str, list[npt.NDArray[np.uint8]]]:
    """The bytes of all samples by the components that the graph takes: [ordinal], uint8 [bytes]."""
    data = [np.frombuffer(shards.store.read(name), np.uint8) for name in samples.manifest.names]
    rows = samples.rows(np.arange(len(samples)))
    components = {}
    for component in decode.inputs.read:
        places = rows.places(component)
        located = zip(rows.shard.tolist(), places.offset.tolist(), places.size.tolist(), strict=True)
        components[component] = [data[shard][offset : offset + size] for shard, offset, size in located]
    return components
