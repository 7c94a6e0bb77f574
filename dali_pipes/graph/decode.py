"""Decode and transform: batches of encoded bytes and the seam's arrays in, finished tensors out. The decode half.

Lives as long as its loader: the decoders' threads and, on a GPU, their buffers and streams are made once. It pulls:
whenever a batch is scheduled it asks its feed for the next one, in the thread that iterates.
"""

import functools
import io
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from nvidia.dali import types
from nvidia.dali.data_node import DataNode
from nvidia.dali.pipeline import Pipeline
from nvidia.dali.types import PipelineAPIType

from dali_pipes import profiling as stages
from dali_pipes.forks import keep_in_children
from dali_pipes.formats.names import LABEL_COMPONENT
from dali_pipes.formats.photo_header import is_photo, read_photo_header
from dali_pipes.graph.inputs import (
    ArrayKind,
    Components,
    Graph,
    ListOutput,
    Random,
    make_source,
    random_operators,
    refuse_any_data,
)
from dali_pipes.graph.parse import parse_batch, stack
from dali_pipes.reader.samples import Batch, Samples

__all__ = ["BatchInputs", "DecodePipeline", "decoders_behind", "set_hw_decoder_load"]

# As the names of decoding operators begin, in a pipeline's own listing.
_DECODERS = ("decoders__", "experimental__decoders__", "legacy__decoders__", "ImageDecoder")


class BatchInputs(NamedTuple):
    """What the feed gives for one batch."""

    batch: Batch
    encoded: Sequence[Any]
    """For each of `DecodePipeline.read_components`: a TensorList, or a list of uint8 arrays, one a sample."""
    arrays: Sequence[npt.NDArray[Any]]
    """From `DecodePipeline.arrays`."""
    parsed: Sequence[npt.NDArray[Any] | list[npt.NDArray[Any]]] = ()
    """For each of `GraphInputs.parsed`: an array [B, ...], or a list of arrays of different shapes."""
    lists: Mapping[str, list[Any]] = MappingProxyType({})
    """The outputs that are no tensors, by name: one Python object a sample."""

    def part(self, positions: Sequence[int]) -> "BatchInputs":
        """Some samples of it, alone; its batch is still the whole one."""
        return BatchInputs(
            self.batch,
            [[samples[position] for position in positions] for samples in self.encoded],
            [np.ascontiguousarray(array[list(positions)]) for array in self.arrays],
            [stack([values[position] for position in positions]) for values in self.parsed],
            {name: [values[position] for position in positions] for name, values in self.lists.items()},
        )


class DecodePipeline:
    """A graph, as a pipeline that pulls its batches.

    Args:
        graph: See `dali_pipes.graph.inputs.Graph`.
        samples: The data set; asked for an example, and whether it has what the graph takes.
        batch_size: The most samples a batch.
        device_id: A CUDA device, ``None`` for the CPU.
        num_threads: Decoding threads.
        prefetch_queue_depth: Batches decoded ahead.
        seed: Of DALI's own random operators.
        hw_decoder_load: Share of a batch's JPEGs that the GPU's JPEG engines are to decode, 0 to 1, in those decoders
            of the graph that do not say themselves; ``None``: DALI's own default. On the CPU it changes nothing.
        only_decoders: Leave out all of the graph behind its decoders: their outputs are the pipeline's, unnamed, and
            only `run` is of use. To time decoding apart from the rest.
        example: A batch to learn by what the graph's arrays are like; ``None``: the data set's first sample, read.

    Raises:
        ValueError: If the graph returns no dict of outputs, or takes no component.
        TypeError: If one of its arrays is none that DALI takes.
    """

    def __init__(
        self,
        graph: Graph,
        *,
        samples: Samples,
        batch_size: int,
        device_id: int | None,
        num_threads: int,
        prefetch_queue_depth: int,
        seed: int = 0,
        hw_decoder_load: float | None = None,
        only_decoders: bool = False,
        example: Batch | None = None,
    ) -> None:
        if hw_decoder_load is not None and not 0 <= hw_decoder_load <= 1:
            raise ValueError(f"hw_decoder_load must be in [0, 1], got {hw_decoder_load}")
        self.feed: Callable[[], BatchInputs | None] = lambda: None
        """Gives the next batch, ``None`` at the end of the epoch; to be set before the first batch is scheduled."""
        self.scheduled: deque[BatchInputs] = deque()
        """What was pulled and is not yet delivered, oldest first: DALI loses a batch that it cannot decode."""
        self._graph, self._samples = graph, samples
        self._example = samples.example() if example is None else example
        self._device_id, self._hw_decoder_load, self._only_decoders = device_id, hw_decoder_load, only_decoders
        self.prefetch_queue_depth = prefetch_queue_depth
        self.waits_on_host = False
        """Whether `take` comes back only when a GPU has made the outputs: for who asks how long that takes."""
        self._settings: dict[str, Any] = {
            "batch_size": batch_size,
            "num_threads": num_threads,
            "device_id": device_id,
            "prefetch_queue_depth": prefetch_queue_depth,
            # For DALI's own random operators; DALI takes 63 bits.
            "seed": seed & (2**63 - 1),
            # Outputs stay valid while they are held, and TensorLists of the reader half are taken as they are.
            "exec_dynamic": True,
        }
        self.rebuild()

    def rebuild(self) -> None:
        """Make the pipeline, anew if there was one: for when an iteration was cut short, with some of its inputs fed.

        DALI keeps what was fed to an input until an iteration takes it, whatever is reset: the next batch would be made
        of one batch's pixels and another's labels.
        """
        self.scheduled.clear()
        self.pipeline = Pipeline(**self._settings)
        with self.pipeline:
            # A weak reference: the pipeline must not keep its owner, or nobody would close a loader that is dropped.
            next_input = weakref.WeakMethod(self._next_input)
            components = Components(
                source=make_source(lambda name: method(name) if (method := next_input()) is not None else None),
                check=self._samples.check_component,
                check_labels=self._samples.check_labels,
                example=self._example,
                device="cpu" if self._device_id is None else "mixed",
            )
            outputs = self._graph(components, Random(components))
            if not isinstance(outputs, Mapping) or not outputs:
                raise ValueError(f"graph must return a dict of outputs by name, got {type(outputs).__name__}")
            if not components.inputs.read:
                raise ValueError("graph takes none of the components; take one as components['image.jpg']")
            self._lists = {name: output.parser for name, output in outputs.items() if isinstance(output, ListOutput)}
            nodes = [output for output in outputs.values() if not isinstance(output, ListOutput)]
            # A pipeline must have an output, and pulls batches by what it depends on: this one is delivered to nobody.
            nodes = nodes or [components.array(lambda batch: batch.ordinals)]
            decoders = decoders_behind(nodes)
            self.num_decoders = len(decoders)
            """Decoding operators in the graph, of those that an output depends on."""
            if self._hw_decoder_load is not None:
                set_hw_decoder_load(decoders, self._hw_decoder_load)
            if self._only_decoders:
                nodes = [node for decoder in decoders for node in decoder.outputs] or nodes
            self.pipeline.set_outputs(*(nodes if self._device_id is None else [_on_gpu(node) for node in nodes]))
        refuse_any_data(self.pipeline)
        self.random_operators = random_operators(self.pipeline)
        """DALI's own random operators in the graph, by name: what they draw does not belong to the sample."""
        keep_in_children(self.pipeline)
        self.inputs = components.inputs
        self.output_names = list(outputs)
        # What no output depends on DALI never asks for: it must not wait.
        self._waiting: dict[str, deque[Any]] = {name: deque() for name in self.inputs.used(self.pipeline)}

    @property
    def device_id(self) -> int | None:
        """The CUDA device that is decoded on, ``None`` for the CPU."""
        return self._device_id

    @property
    def num_threads(self) -> int:
        """Decoding threads."""
        return int(self._settings["num_threads"])

    @property
    def torch_device(self) -> str:
        """Where the outputs are, as torch calls it."""
        return "cpu" if self._device_id is None else f"cuda:{self._device_id}"

    @property
    def read_components(self) -> list[str]:
        """What is read of each sample, in the order of `BatchInputs.encoded`."""
        return self.inputs.read

    @property
    def taken_components(self) -> list[str]:
        """All that the graph takes of a sample, its class id as ``cls``."""
        labels = [LABEL_COMPONENT] if self.inputs.has_label else []
        return [*self.inputs.read, *sorted(self.inputs.photos - {*self.inputs.read}), *labels]

    @property
    def decoded_components(self) -> list[str]:
        """Those that the graph is handed as they are, to decode."""
        return list(self.inputs.components)

    def complete(self, batch: Batch, encoded: Sequence[Any]) -> tuple[BatchInputs, dict[int, tuple[str, str]]]:
        """What is fed for a batch, and which of its samples cannot be parsed: position -> component and reason.

        Args:
            batch: Its rows.
            encoded: For each of `read_components` a TensorList, or a list of arrays, of uint8 [bytes].
        """
        if oversized := self._oversized(encoded):
            return BatchInputs(batch, encoded, ()), oversized
        if not self.inputs.parsed and not self._lists:
            return BatchInputs(batch, self._filled(batch, encoded), self.arrays(batch)), {}
        values, errors = parse_batch(
            [*self.inputs.parsed, *self._lists.values()],
            dict(zip(self.read_components, encoded, strict=True)),
            is_there=lambda component: batch.places(component).offset >= 0,
        )
        if errors:
            return BatchInputs(batch, encoded, ()), {
                at: (error.component, error.reason) for at, error in errors.items()
            }
        num_arrays = len(self.inputs.parsed)
        parsed = [stack(arrays) for arrays in values[:num_arrays]]
        lists = dict(zip(self._lists, values[num_arrays:], strict=True))
        return BatchInputs(batch, self._filled(batch, encoded), self.arrays(batch), parsed, lists), {}

    def _filled(self, batch: Batch, encoded: Sequence[Any]) -> Sequence[Any]:
        """The bytes with a photo of one black pixel where a sample has none: decoders refuse no bytes at all."""
        if self._samples.missing != "empty":
            return encoded
        filled = list(encoded)
        for number, component in enumerate(self.read_components):
            lacking = set(np.flatnonzero(batch.places(component).offset < 0).tolist())
            if lacking and component in self.inputs.components and _is_photo(component):
                filled[number] = [
                    _black_pixel() if position in lacking else encoded[number][position]
                    for position in range(len(batch))
                ]
        return filled

    def _oversized(self, encoded: Sequence[Any]) -> dict[int, tuple[str, str]]:
        """Photos of too many pixels whose header nobody has read yet, because their name is not a photo's."""
        found: dict[int, tuple[str, str]] = {}
        for component in self.inputs.components:
            if _is_photo(component):
                continue
            for position, data in enumerate(encoded[self.read_components.index(component)]):
                _, height, width = read_photo_header(bytes(np.asarray(data)))
                if height * width > self._samples.max_pixels:
                    text = f"holds a photo of {height} x {width} pixels, expected at most max_pixels="
                    found[position] = component, f"{text}{self._samples.max_pixels}"
        return found

    def arrays(self, batch: Batch) -> list[npt.NDArray[Any]]:
        """What the graph's arrays are for one batch. Called by the feed, where an error loses no other batch.

        Raises:
            TypeError: If one is of another kind than it was when the pipeline was built.
        """
        arrays = []
        for function, kind in self.inputs.arrays:
            try:
                array = function(batch)
            except Exception as exc:
                keys = ", ".join(batch.keys[:8]) + (", ..." if len(batch) > 8 else "")
                exc.add_note(f"in an array of the graph, for the batch of {keys}")
                raise
            if (found := ArrayKind.of(array, num_samples=len(batch))) != kind:
                raise TypeError(f"an array of the graph was {kind} when it was built, and is {found} now")
            arrays.append(np.ascontiguousarray(array))
        return arrays

    def schedule(self) -> None:
        """Pull a batch and start decoding it; at the end of the epoch's feed it does nothing."""
        # DALI's own first run pulls as many as its queue holds, and would wait for the shards of the second batch
        # before the first can be delivered.
        self.pipeline._first_iter = False
        with stages.busy("seam"), self._iterator_scope():
            self.pipeline.schedule_run()

    def take(self) -> tuple[BatchInputs, dict[str, Any]]:
        """The oldest batch in flight, waited for, and its outputs by name: DALI tensors on the graph's device, lists.

        On a GPU they belong to the current stream of torch, see Note [whose stream]; the host need not have waited.

        Raises:
            StopIteration: If none is in flight.
            RuntimeError: If DALI could not decode it; it is then the oldest in `scheduled`, and DALI goes on with the
                next.
            ValueError: If an output's samples are not all of one shape.
        """
        with self._iterator_scope():
            with stages.waiting("hand-over"):
                outputs = self.pipeline.share_outputs(self._consumer_stream())
            fed = self.scheduled.popleft()
            tensors: dict[str, Any] = {}
            tensor_lists = iter(outputs)
            for name in self.output_names:
                if name in fed.lists:
                    tensors[name] = fed.lists[name]
                    continue
                output = next(tensor_lists)
                if not output.is_dense_tensor():
                    raise ValueError(
                        f"output '{name}' of the graph has samples of different shapes; crop, resize or pad them alike"
                    )
                tensors[name] = output.as_tensor()
            self.pipeline.release_outputs()
        return fed, tensors

    def twin(self, *, only_decoders: bool = False, **changed: Any) -> "DecodePipeline":
        """Another pipeline of the same graph, to decode batches apart from those in flight; to be closed.

        Args:
            only_decoders: See `DecodePipeline`.
            changed: ``num_threads``, ``prefetch_queue_depth`` (1 here, by default) and ``hw_decoder_load``, where they
                are to be others.
        """
        settings = {name: self._settings[name] for name in ("batch_size", "device_id", "num_threads", "seed")}
        settings |= {"prefetch_queue_depth": 1, "hw_decoder_load": self._hw_decoder_load, **changed}
        return DecodePipeline(
            self._graph, samples=self._samples, only_decoders=only_decoders, example=self._example, **settings
        )

    def decode(self, fed: BatchInputs) -> dict[str, Any]:
        """One batch's outputs, while nothing else is in flight.

        Raises:
            RuntimeError: If DALI cannot decode it; the next batch can be decoded all the same.
        """
        waiting = [fed]
        self.feed = lambda: waiting.pop() if waiting else None
        self.schedule()
        try:
            return self.take()[1]
        except RuntimeError:
            self.scheduled.clear()
            raise

    def run(self, fed: BatchInputs) -> None:
        """Decode one batch, while nothing else is in flight, and throw it away.

        Raises:
            RuntimeError: If DALI cannot decode it; the next batch can be decoded all the same.
        """
        waiting = [fed]
        self.feed = lambda: waiting.pop() if waiting else None
        self.schedule()
        try:
            with self._iterator_scope():
                self.pipeline.share_outputs()
                self.pipeline.release_outputs()
        finally:
            self.scheduled.clear()

    def drain(self) -> None:
        """Throw away what is in flight and be ready for another epoch's feed."""
        self.feed = lambda: None
        with self._iterator_scope():
            self.pipeline.schedule_run()  # pulls the end of the epoch: without it reset() does nothing
            for _ in range(len(self.scheduled) + 1):
                try:
                    self.pipeline.share_outputs()
                except StopIteration:
                    break
                except RuntimeError:
                    continue  # a batch that nobody will see could not be decoded
                self.pipeline.release_outputs()
            self.pipeline.reset()
        self.scheduled.clear()
        if any(self._waiting.values()):
            self.rebuild()  # an iteration that was cut short has taken some of its inputs

    def close(self) -> None:
        """Destroy the pipeline, its threads and buffers. Can be called twice."""
        self.feed = lambda: None
        self.pipeline = None

    # Note [whose stream]: an output's memory goes back to DALI's pool when the last tensor of it is dropped, in the
    # order of the stream that the output is bound to. Bound to none, it is written again at once, while kernels that
    # were launched before and have not run yet still read it: a step is launched long before it runs. Bound to the
    # stream that the step is launched on, it is free when that stream has come so far.
    def _consumer_stream(self) -> Any:
        """The stream that outputs are bound to; ``None`` on the CPU, and where the host is to wait for them."""
        if self._device_id is None or self.waits_on_host:
            return None
        import torch

        return torch.cuda.current_stream(self._device_id)

    def _iterator_scope(self) -> AbstractContextManager[None]:
        # DALIGenericIterator claims its pipelines for itself when it is made, and DALI refuses other callers than
        # iterators from then on; this half is driven by such an iterator, and says so.
        return self.pipeline._check_api_type_scope(PipelineAPIType.ITERATOR)  # type: ignore[no-any-return]

    def _next_input(self, name: str) -> Any:
        """What DALI is handed for one input; the first input of an iteration pulls the batch for all of them."""
        if not self._waiting[name]:
            fed = self.feed()
            if fed is None:
                raise StopIteration
            self.scheduled.append(fed)
            values = {f"component/{name}": encoded for name, encoded in zip(self.inputs.read, fed.encoded, strict=True)}
            values |= {f"array/{number}": array for number, array in enumerate(fed.arrays)}
            values |= {f"parsed/{number}": arrays for number, arrays in enumerate(fed.parsed)}
            for waiting, queue in self._waiting.items():
                queue.append(values[waiting])
        return self._waiting[name].popleft()


def _on_gpu(output: Any) -> Any:
    """A graph's output there; what is no node is a constant, as DALI takes it on the CPU."""
    if isinstance(output, DataNode):
        return output.gpu()
    value = output.value if isinstance(output, types.ScalarConstant) else output
    return types.Constant(value, device="cpu").gpu()


def decoders_behind(nodes: Sequence[Any]) -> list[Any]:
    """The decoding operators that these nodes depend on, each once, in no order that matters."""
    found: dict[int, Any] = {}
    seen: set[int] = set()
    # What is no node, DALI itself refuses or makes a constant of.
    waiting = [getattr(node, "source", None) for node in nodes]
    while waiting:
        operator = waiting.pop()
        if operator is None or id(operator) in seen:
            continue
        seen.add(id(operator))
        if _operator_name(operator).startswith(_DECODERS):
            found[id(operator)] = operator
        waiting += [getattr(node, "source", None) for node in operator.inputs]
    return list(found.values())


def set_hw_decoder_load(decoders: Sequence[Any], hw_decoder_load: float) -> None:
    """Have these decoders give so much of a batch to the JPEG engines, before their pipeline is built.

    One that was given a ``hw_decoder_load=`` where the graph made it keeps that.
    """
    for operator in decoders:
        takes_it = "__Image" in _operator_name(operator) or _operator_name(operator).startswith("ImageDecoder")
        if takes_it and "\n    hw_decoder_load: " not in str(operator.spec):
            # A pipeline has no default for its operators' arguments, and a graph is the user's own: so it is written
            # into the operator's specification, as the call would have done.
            operator.spec.AddArg("hw_decoder_load", float(hw_decoder_load))


def _operator_name(operator: Any) -> str:
    return str(operator.spec).removeprefix("OpSpec for ").partition(":")[0]


def _is_photo(component: str) -> bool:
    return all(is_photo(name) for name in component.split(";"))


@functools.cache
def _black_pixel() -> npt.NDArray[np.uint8]:
    """A PNG of one pixel: uint8 [bytes]."""
    from PIL import Image

    stream = io.BytesIO()
    Image.new("L", (1, 1)).save(stream, "PNG")
    return np.frombuffer(stream.getvalue(), np.uint8)
