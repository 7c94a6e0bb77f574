"""Decode and transform batches: a graph as a DALI pipeline that pulls its inputs batch by batch.

The decode pipeline lives as long as its loader: the decoders' threads and, on a GPU, their buffers and streams are made
once. Whenever a batch is scheduled, the pipeline takes the next one from its feed, in the thread that iterates.
"""

import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from nvidia.dali import fn

from dali_pipes.errors import DecodeError, printable
from dali_pipes.formats.names import LABEL_COMPONENT
from dali_pipes.formats.photo_header import is_photo
from dali_pipes.graph.dali_internals import (
    QuickPipeline,
    decoders_behind,
    end_pipeline,
    inputs_in_use,
    keep_pipeline,
    on_gpu,
    pool_host_memory,
    random_operators,
    refuse_any_data,
    refuse_sources,
    schedule_batch,
)
from dali_pipes.graph.definition import Graph, decoded_photos, output_nodes, set_up_engines
from dali_pipes.graph.finish import FinishThreads, OutputValueError, Packed
from dali_pipes.graph.inputs import Components, GraphInputs
from dali_pipes.graph.parse import Problems, parse_batch, stack
from dali_pipes.graph.photos import judge_photos
from dali_pipes.graph.random import Random
from dali_pipes.reader.batch import Batch
from dali_pipes.reader.samples import StoredSamples

_BLACK_PIXEL = np.frombuffer(b"P5\n1 1\n255\n\0", np.uint8)  # a PNM of one pixel


class BatchInputs(NamedTuple):
    """The inputs of the decode pipeline for one batch."""

    batch: Batch
    encoded: Mapping[str, Any]
    """For each component that the graph reads a `dali_pipes.reader.encoded_batch.EncodedBatch`, a TensorList, or a list
    of uint8 arrays [bytes], one for each sample."""
    arrays: Mapping[str, npt.NDArray[Any] | list[npt.NDArray[Any]]] = MappingProxyType({})
    """For each other input of the graph, by its name, an array [B, ...], or a list of arrays of different shapes."""
    lists: Mapping[str, list[Any]] = MappingProxyType({})
    """The outputs that are not tensors, by name: one Python object for each sample."""

    def part(self, positions: Sequence[int]) -> "BatchInputs":
        """Take the inputs of some samples; ``batch`` is still the whole batch."""

        def taken(values: Any) -> list[Any]:
            return [values[position] for position in positions]

        return BatchInputs(
            self.batch,
            {component: taken(samples) for component, samples in self.encoded.items()},
            {name: stack(taken(values)) for name, values in self.arrays.items()},
            {name: taken(values) for name, values in self.lists.items()},
        )


class DecodePipeline:
    """A graph as a pipeline that pulls its batches.

    Args:
        graph: See `dali_pipes.graph.definition.Graph`.
        samples: The data set: gives an example, and checks that it has the components that the graph takes.
        device_id: A CUDA device, ``None`` for the CPU.
        seed: Of DALI's own random operators.
        hw_decoder_load: Share of a batch's JPEGs that the GPU's JPEG engines decode, 0 to 1, in those decoders of the
            graph that do not set it; ``None``: DALI's own default. On the CPU it changes nothing.
        only_decoders: Leave out everything that follows the graph's decoders, to time decoding alone by `run`.
        example: A batch that shows the kinds of the graph's arrays; ``None``: the data set's first sample.
        max_batch_pixels: The most pixels that the photos of a batch may have together; ``None``: no limit.

    Raises:
        ValueError: If the graph does not return a dict of outputs, or takes no component.
        TypeError: If DALI cannot take one of its arrays.
    """

    def __init__(
        self,
        graph: Graph,
        *,
        samples: StoredSamples,
        batch_size: int,
        device_id: int | None,
        num_threads: int,
        prefetch_queue_depth: int,
        seed: int = 0,
        hw_decoder_load: float | None = None,
        only_decoders: bool = False,
        example: Batch | None = None,
        max_batch_pixels: int | None = None,
    ) -> None:
        if hw_decoder_load is not None and not 0 <= hw_decoder_load <= 1:
            raise ValueError(f"hw_decoder_load must be in [0, 1], got {hw_decoder_load}")
        pool_host_memory()  # before any pipeline of the loader
        self.feed: Callable[[], BatchInputs | None] = lambda: None
        """Returns the next batch, ``None`` at the end of the epoch; set it before the first batch is scheduled."""
        self.scheduled: deque[BatchInputs] = deque()
        """Batches that were pulled and not yet delivered, oldest first: DALI loses a batch that it cannot decode."""
        self._delivered: deque[tuple[Any, BatchInputs]] = deque()  # with an event, see Note [pinned bytes]
        self.waits_on_host = False
        """Whether `take` waits until a GPU has made the outputs: set it to measure how long that takes."""
        self.taken: list[BatchInputs] | None = None
        """Set it to a list, and `take` adds the inputs of each batch that it returns."""
        self.prefetch_queue_depth, self.num_threads = prefetch_queue_depth, num_threads
        self.device_id = device_id
        """The CUDA device that decodes, ``None`` for the CPU."""
        self._graph, self._samples, self._batch_size, self._seed = graph, samples, batch_size, seed
        self._example = samples.example() if example is None else example
        self._hw_decoder_load, self._only_decoders = hw_decoder_load, only_decoders
        self._max_batch_pixels = max_batch_pixels
        self._finish_threads = FinishThreads(num_threads)
        self.pipeline: Any = None
        self.rebuild()

    def rebuild(self) -> None:
        """Make the pipeline; make it anew if an iteration was cut short after some inputs were fed.

        DALI keeps what was fed, also across a reset: the next batch would have one batch's pixels and another's labels.
        """
        self.scheduled.clear()
        pipeline = QuickPipeline(
            batch_size=self._batch_size,
            num_threads=self.num_threads,
            device_id=self.device_id,
            prefetch_queue_depth=self.prefetch_queue_depth,
            seed=self._seed & (2**63 - 1),  # DALI takes 63 bits
            # Outputs stay valid while they are held, and the reader's TensorLists are taken as they are.
            exec_dynamic=True,
        )
        samples = self._samples
        with pipeline:
            components = Components(
                source=self._source(),
                samples=samples,
                example=self._example,
                device="cpu" if self.device_id is None else "mixed",
            )
            outputs = self._graph(components, Random(components))
            nodes = output_nodes(outputs, components, None if self._only_decoders else self._finish_threads)
            decoders = decoders_behind(nodes)
            shard = self._example.rows.of_whole_shards()  # its index is at hand
            set_up_engines(
                decoders,
                [shard.places(component) for component in components.inputs.components],
                hw_decoder_load=self._hw_decoder_load,
                batch_size=self._batch_size,
                max_pixels=samples.rules.photos.max_pixels,
            )
            if self._only_decoders:
                nodes = [node for decoder in decoders for node in decoder.outputs] or nodes
            pipeline.set_outputs(*(nodes if self.device_id is None else map(on_gpu, nodes)))
        refuse_any_data(pipeline)
        inputs = components.inputs
        fed = {f"component/{name}": node for name, node in inputs.components.items()} | inputs.array_nodes
        refuse_sources(pipeline, fed.values())
        inputs.decoded = decoded_photos(pipeline, inputs, turned=samples.turned)
        before, self.pipeline = self.pipeline, pipeline
        self.inputs: GraphInputs = inputs
        self.output_names = list(outputs)
        self.num_decoders = len(decoders)
        """Decoding operators on which an output depends."""
        self.random_operators = random_operators(pipeline)
        """DALI's own random operators, by name: their numbers do not belong to the sample."""
        # DALI never takes the inputs on which no output depends: they must not be queued.
        self._waiting: dict[str, deque[Any]] = {name: deque() for name in inputs_in_use(pipeline, fed)}
        keep_pipeline(pipeline)
        if before is not None:
            end_pipeline(before)

    def as_current_device(self) -> AbstractContextManager[None]:
        """Make this device torch's current one inside the context, in which batches are taken; not on the CPU."""
        if self.device_id is None:
            return nullcontext()
        import torch

        return torch.cuda.device(self.device_id)

    @property
    def torch_device(self) -> str:
        """The device of the outputs, as torch names it."""
        return "cpu" if self.device_id is None else f"cuda:{self.device_id}"

    @property
    def taken_components(self) -> list[str]:
        """All components that the graph takes of a sample, its class id as ``cls``."""
        labels = [LABEL_COMPONENT] if self.inputs.has_label else []
        return [*self.inputs.read, *sorted(self.inputs.photos - {*self.inputs.read}), *labels]

    def complete(self, batch: Batch, encoded: Mapping[str, Any]) -> tuple[BatchInputs, Problems]:
        """Make a batch's inputs, and find its samples that must not be decoded or cannot be parsed.

        ``encoded`` is as `BatchInputs.encoded`. Photos with EXIF data that decoders understand in different ways become
        copies with plain data. With ``missing="empty"`` a photo that a sample lacks becomes one black pixel.

        Raises:
            TypeError: If an array is of another kind than when the pipeline was built.
            DecodeError: If the photos have more than ``max_batch_pixels`` together, which could exhaust the memory.
        """
        asked, rules = self.inputs, self._samples.rules
        judged = judge_photos(asked.decoded, batch, encoded, rules=rules.photos)
        if judged.problems:
            return BatchInputs(batch, encoded), judged.problems
        most, total = self._max_batch_pixels, int(judged.pixels.sum())
        if most is not None and total > most:
            largest = int(judged.pixels.argmax())
            shard, key = map(printable, batch.name(largest))
            raise DecodeError(
                f"the photos of the batch of {batch.some_keys} have {total} pixels together, expected at most "
                f"max_batch_pixels={most}; the largest sample, with {judged.pixels[largest]}, is shard '{shard}', key "
                f"'{key}'; pass a smaller batch_size, Decode(max_batch_pixels=...) or BadSamples(max_pixels=...)"
            )
        values, problems = parse_batch([*asked.parsed.values(), *asked.lists.values()], encoded, batch=batch)
        if problems:
            return BatchInputs(batch, encoded), problems
        arrays: dict[str, Any] = {name: array_of(batch) for name, array_of in asked.arrays.items()}
        arrays |= {name: stack(parsed) for name, parsed in zip(asked.parsed, values, strict=False)}
        lists = dict(zip(asked.lists, values[len(asked.parsed) :], strict=True))
        replaced = judged.copies
        if rules.missing == "empty":  # decoders refuse zero bytes
            photos = [name for name in asked.components if all(map(is_photo, name.split(";")))]
            lacking = {name: np.flatnonzero(~batch.places(name).is_there).tolist() for name in photos}
            replaced |= {(name, position): _BLACK_PIXEL for name in photos for position in lacking[name]}
        if replaced:
            encoded = {**encoded, **{component: [*encoded[component]] for component, _ in replaced}}
            for (component, position), photo in replaced.items():
                encoded[component][position] = photo
        return BatchInputs(batch, encoded, arrays, lists), {}

    def schedule(self) -> None:
        """Pull a batch and start decoding it; at the end of the epoch's feed this does nothing."""
        schedule_batch(self.pipeline)

    def take(self) -> tuple[BatchInputs, dict[str, Any]]:
        """Wait for the oldest batch in flight; return its inputs, and its outputs by name: DALI tensors, or lists.

        On a GPU the tensors belong to torch's current stream, see Note [whose stream]; they may not be computed yet.

        Raises:
            StopIteration: If no batch is in flight.
            RuntimeError: If DALI could not decode it; it is then the oldest in `scheduled`, and DALI continues with the
                next one.
            ValueError: If an output cannot be made of its samples, such as samples of several shapes.
        """
        tensor_lists = iter(self.pipeline.share_outputs(self._consumer_stream()))
        inputs = self.scheduled.popleft()
        self._keep_while_copied(inputs)
        outputs: dict[str, Any] = {}
        for name in self.output_names:
            if name in inputs.lists:
                outputs[name] = inputs.lists[name]
                continue
            tensor_list = next(tensor_lists)
            if name in self.inputs.finishers or name == self.inputs.packed:
                outputs[name] = self._finished(name, tensor_list)
            elif tensor_list.is_dense_tensor():
                outputs[name] = tensor_list.as_tensor()
            else:
                raise ValueError(
                    f"output '{name}' of the graph has samples of different shapes; crop, resize or pad them alike"
                )
        self.pipeline.release_outputs()
        if self.taken is not None:
            self.taken.append(inputs)
        return inputs, outputs

    def _finished(self, name: str, tensor_list: Any) -> Any:
        try:
            if name in self.inputs.finishers:
                return self.inputs.finishers[name].take(tensor_list)
            return Packed.on_gpu(tensor_list)
        except (OutputValueError, RuntimeError) as exc:
            # After a RuntimeError the caller drops the first batch in `scheduled`: DALI has refused that one. But this
            # batch is decoded, and it is not in `scheduled` any more.
            raise OutputValueError(f"output '{name}' of the graph: {exc}") from exc

    def second_pipeline(self, **changed: Any) -> "DecodePipeline":
        """Make another pipeline of the same graph, to decode batches apart from those in flight; the caller closes it.

        ``changed`` are arguments of `DecodePipeline`; ``prefetch_queue_depth`` is 1 by default.
        """
        arguments: dict[str, Any] = {
            "batch_size": self._batch_size,
            "device_id": self.device_id,
            "num_threads": self.num_threads,
            "prefetch_queue_depth": 1,
            "seed": self._seed,
            "hw_decoder_load": self._hw_decoder_load,
            "example": self._example,
            "max_batch_pixels": self._max_batch_pixels,
        }
        return DecodePipeline(self._graph, samples=self._samples, **(arguments | changed))

    def decode(self, inputs: BatchInputs) -> dict[str, Any]:
        """Decode one batch, while no other is in flight; return the outputs by name. Errors are those of `take`."""
        self._schedule_alone(inputs)
        try:
            return self.take()[1]
        except RuntimeError:
            self.scheduled.clear()
            raise

    def run(self, inputs: BatchInputs) -> None:
        """Decode one batch as `decode` does, but discard the outputs."""
        self._schedule_alone(inputs)
        try:
            self.pipeline.share_outputs()
            self.pipeline.release_outputs()
        finally:
            self._clear()

    def drain(self) -> None:
        """Discard the batches in flight and prepare for another epoch's feed."""
        self.feed = lambda: None
        self.pipeline.schedule_run()  # pulls the end of the epoch: without it reset() does nothing
        for _ in range(len(self.scheduled) + 1):
            try:
                self.pipeline.share_outputs()
            except StopIteration:
                break
            except RuntimeError:
                continue  # a discarded batch could not be decoded
            self.pipeline.release_outputs()
        self.pipeline.reset()
        self._clear()
        if any(self._waiting.values()):
            self.rebuild()  # an iteration that was cut short has taken only some of its inputs

    def _clear(self) -> None:
        self.scheduled.clear()
        for finisher in self.inputs.finishers.values():
            finisher.clear()

    def close(self) -> None:
        """End the pipeline, then the threads that make its images. Drop all buffers. Can be called twice."""
        self.feed = lambda: None
        if self.pipeline is not None:
            end_pipeline(self.pipeline)
            self.pipeline = None
        self._finish_threads.close()
        self.scheduled.clear()
        for finisher in self.inputs.finishers.values():
            finisher.close()
        self.inputs.finishers = {}
        self._delivered.clear()

    # Note [pinned bytes]: a GPU copies encoded bytes from page-locked buffers by itself, perhaps after DALI has dropped
    # its tensors, and a buffer that nothing views is used again. So a batch's inputs are kept until the stream has
    # passed the batch's outputs, which depend on these copies.
    def _keep_while_copied(self, inputs: BatchInputs) -> None:
        stream = self._consumer_stream()
        if stream is None:
            return
        self._delivered.append((stream.record_event(), inputs))
        while self._delivered and self._delivered[0][0].query():
            self._delivered.popleft()

    # Note [whose stream]: `share_outputs(stream)` makes the stream wait until the outputs are computed, so that the
    # host need not. It does not change the order in which their memory is freed. What was handed on by DLPack is not
    # freed when its last tensor is dropped: a thread of DALI's first waits until the GPU has done all that was launched
    # before. So kernels that were launched and have not run yet may still read a dropped batch, in any stream.
    def _consumer_stream(self) -> Any:
        """Return the stream that waits for the outputs; ``None`` on the CPU, and if the host must wait for them."""
        if self.device_id is None or self.waits_on_host:
            return None
        import torch

        return torch.cuda.current_stream(self.device_id)

    def _schedule_alone(self, inputs: BatchInputs) -> None:
        waiting = [inputs]
        self.feed = lambda: waiting.pop() if waiting else None
        self.schedule()

    def _source(self) -> Callable[[str, Any, int], Any]:
        """Return the function that makes an input node; the pipeline must not keep its owner alive by it."""
        next_input = weakref.WeakMethod(self._next_input)

        def source(name: str, dtype: Any, ndim: int) -> Any:
            return fn.external_source(
                source=lambda: pull(name) if (pull := next_input()) is not None else None,
                batch=True,
                dtype=dtype,
                ndim=ndim,
                # DALI shares the TensorList, which lives until it is decoded. Decoders on the CPU read it where it is.
                # Those on a GPU do so if it is page-locked; otherwise DALI makes a page-locked copy in its threads.
                no_copy=name.startswith("component/"),
            )

        return source

    def _next_input(self, name: str) -> Any:
        """Return one input's data for DALI; the first input of an iteration pulls the batch for all inputs."""
        if not self._waiting[name]:
            inputs = self.feed()
            if inputs is None:
                raise StopIteration
            self.scheduled.append(inputs)
            values = dict(inputs.arrays)
            values |= {f"component/{read}": getattr(data, "tensor_list", data) for read, data in inputs.encoded.items()}
            for waiting, queue in self._waiting.items():
                queue.append(values[waiting])
        return self._waiting[name].popleft()
