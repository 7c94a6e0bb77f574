"""Decode and transform: batches of encoded bytes and the seam's arrays in, finished tensors out. The decode half.

Lives as long as its loader: the decoders' threads and, on a GPU, their buffers and streams are made once. It pulls:
whenever a batch is scheduled it asks its feed for the next one, in the thread that iterates.
"""

import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from nvidia.dali.pipeline import Pipeline
from nvidia.dali.types import PipelineAPIType

from dali_pipes.forks import keep_in_children
from dali_pipes.samples import Batch, Samples
from dali_pipes.seam import ArrayKind, Components, Graph, Random, make_source

__all__ = ["DecodeHalf", "Fed"]


class Fed(NamedTuple):
    """What the feed gives for one batch."""

    batch: Batch
    encoded: Sequence[Any]
    """For each component of the graph, in its order: a TensorList, or a list of uint8 arrays, one a sample."""
    arrays: Sequence[npt.NDArray[Any]]
    """From `DecodeHalf.arrays`."""


class DecodeHalf:
    """A graph, as a pipeline that pulls its batches.

    Args:
        graph: See `dali_pipes.seam.Graph`.
        samples: The data set; asked for an example, and whether it has what the graph takes.
        batch_size: The most samples a batch.
        device_id: A CUDA device, ``None`` for the CPU.
        num_threads: Decoding threads.
        prefetch_queue_depth: Batches decoded ahead.

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
    ) -> None:
        self.feed: Callable[[], Fed | None] = lambda: None
        """Gives the next batch, ``None`` at the end of the epoch; to be set before the first batch is scheduled."""
        self.scheduled: deque[Batch] = deque()
        """The batches that were pulled and not yet delivered, oldest first."""
        self._graph, self._samples, self._example = graph, samples, samples.example()
        self._device_id = device_id
        self.prefetch_queue_depth = prefetch_queue_depth
        self._settings: dict[str, Any] = {
            "batch_size": batch_size,
            "num_threads": num_threads,
            "device_id": device_id,
            "prefetch_queue_depth": prefetch_queue_depth,
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
            if not components.inputs.components:
                raise ValueError("graph takes none of the components; take one as components['image.jpg']")
            nodes = outputs.values() if self._device_id is None else [node.gpu() for node in outputs.values()]
            self.pipeline.set_outputs(*nodes)
        keep_in_children(self.pipeline)
        self.inputs = components.inputs
        self.output_names = list(outputs)
        names = [f"component/{name}" for name in self.inputs.components]
        names += [f"array/{number}" for number in range(len(self.inputs.arrays))]
        self._waiting: dict[str, deque[Any]] = {name: deque() for name in names}

    def arrays(self, batch: Batch) -> list[npt.NDArray[Any]]:
        """What the graph's arrays are for one batch. Called by the feed, where an error loses no other batch.

        Raises:
            TypeError: If one is of another kind than it was when the pipeline was built.
        """
        arrays = []
        for function, kind in self.inputs.arrays:
            array = function(batch)
            if (found := ArrayKind.of(array, num_samples=len(batch))) != kind:
                raise TypeError(f"an array of the graph was {kind} when it was built, and is {found} now")
            arrays.append(np.ascontiguousarray(array))
        return arrays

    def schedule(self) -> None:
        """Pull a batch and start decoding it; at the end of the epoch's feed it does nothing."""
        # DALI's own first run pulls as many as its queue holds, and would wait for the shards of the second batch
        # before the first can be delivered.
        self.pipeline._first_iter = False
        with self._iterator_scope():
            self.pipeline.schedule_run()

    def take(self) -> tuple[Batch, dict[str, Any]]:
        """The oldest batch in flight, waited for, and its outputs by name as DALI tensors on the graph's device.

        Raises:
            StopIteration: If none is in flight.
            RuntimeError: If DALI could not decode it; the batch is then the oldest in `scheduled`, and is lost.
            ValueError: If an output's samples are not all of one shape.
        """
        with self._iterator_scope():
            outputs = self.pipeline.share_outputs()
            batch = self.scheduled.popleft()
            tensors = {}
            for name, output in zip(self.output_names, outputs, strict=True):
                if not output.is_dense_tensor():
                    raise ValueError(
                        f"output '{name}' of the graph has samples of different shapes; crop, resize or pad them alike"
                    )
                tensors[name] = output.as_tensor()
            self.pipeline.release_outputs()
        return batch, tensors

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
        assert not any(self._waiting.values()), "an iteration takes all of its inputs or none"

    def close(self) -> None:
        """Destroy the pipeline, its threads and buffers. Can be called twice."""
        self.feed = lambda: None
        self.pipeline = None

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
            self.scheduled.append(fed.batch)
            for component, encoded in zip(self.inputs.components, fed.encoded, strict=True):
                self._waiting[f"component/{component}"].append(encoded)
            for number, array in enumerate(fed.arrays):
                self._waiting[f"array/{number}"].append(array)
        return self._waiting[name].popleft()
