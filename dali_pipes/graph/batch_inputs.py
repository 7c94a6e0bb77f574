"""Make the inputs of one batch: encoded bytes, the graph's arrays, and values parsed from components."""

import functools
import io
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dali_pipes.formats.photo_header import is_photo, read_photo_header
from dali_pipes.graph.inputs import ArrayKind, GraphInputs
from dali_pipes.graph.parse import Problems, parse_batch, stack
from dali_pipes.reader.batch import Batch
from dali_pipes.reader.shard_table import NO_PHOTO, photo_problem


class BatchInputs(NamedTuple):
    """The inputs of the decode pipeline for one batch."""

    batch: Batch
    encoded: Sequence[Any]
    """One entry for each of `DecodePipeline.read_components`: a TensorList, or a list of uint8 arrays, one for each
    sample."""
    arrays: Sequence[npt.NDArray[Any]]
    """One entry for each of `GraphInputs.arrays`: an array [B, ...]."""
    parsed: Sequence[npt.NDArray[Any] | list[npt.NDArray[Any]]] = ()
    """One entry for each of `GraphInputs.parsed`: an array [B, ...], or a list of arrays of different shapes."""
    lists: Mapping[str, list[Any]] = MappingProxyType({})
    """The outputs that are not tensors, by name: one Python object for each sample."""

    def part(self, positions: Sequence[int]) -> "BatchInputs":
        """Take the inputs of some samples; ``batch`` is still the whole batch."""
        return BatchInputs(
            self.batch,
            [[samples[position] for position in positions] for samples in self.encoded],
            [np.ascontiguousarray(array[list(positions)]) for array in self.arrays],
            [stack([values[position] for position in positions]) for values in self.parsed],
            {name: [values[position] for position in positions] for name, values in self.lists.items()},
        )


def complete_batch(
    asked: GraphInputs, batch: Batch, encoded: Sequence[Any], *, max_pixels: int, fills_missing: bool
) -> tuple[BatchInputs, Problems]:
    """Make a batch's inputs, and find its samples that must not be decoded or cannot be parsed.

    ``encoded`` has for each of ``asked.read`` a TensorList, or a list of arrays, of uint8 [bytes]. Photos with more
    than ``max_pixels`` are problems. With ``fills_missing`` a photo that a sample lacks becomes one black pixel.

    Raises:
        TypeError: If an array is of another kind than when the pipeline was built.
    """
    if oversized := _oversized(asked, encoded, max_pixels=max_pixels):
        return BatchInputs(batch, encoded, ()), oversized
    values, problems = parse_batch(
        [*asked.parsed, *asked.lists.values()],
        dict(zip(asked.read, encoded, strict=True)),
        is_there=lambda component: batch.places(component).offset >= 0,
    )
    if problems:
        return BatchInputs(batch, encoded, ()), problems
    parsed = [stack(arrays) for arrays in values[: len(asked.parsed)]]
    lists = dict(zip(asked.lists, values[len(asked.parsed) :], strict=True))
    filled = _with_black_pixels(asked, batch, encoded) if fills_missing else encoded
    return BatchInputs(batch, filled, _arrays(asked, batch), parsed, lists), {}


def _oversized(asked: GraphInputs, encoded: Sequence[Any], *, max_pixels: int) -> Problems:
    """Find photos that are too large and are not in the shard index, because their name is not that of a photo."""
    found: Problems = {}
    for component in asked.components:
        if _is_photo(component):
            continue
        for position, data in enumerate(encoded[asked.read.index(component)]):
            _, height, width = read_photo_header(bytes(np.asarray(data)))
            if problem := photo_problem(height, width, NO_PHOTO, max_pixels=max_pixels):
                found[position] = component, problem
    return found


def _arrays(asked: GraphInputs, batch: Batch) -> list[npt.NDArray[Any]]:
    arrays = []
    for function, kind in asked.arrays:
        try:
            array = function(batch)
        except Exception as exc:
            exc.add_note(f"in an array of the graph, for the batch of {batch.some_keys}")
            raise
        if (found := ArrayKind.of(array, num_samples=len(batch))) != kind:
            raise TypeError(f"an array of the graph was {kind} when it was built, and is {found} now")
        arrays.append(np.ascontiguousarray(array))
    return arrays


def _with_black_pixels(asked: GraphInputs, batch: Batch, encoded: Sequence[Any]) -> Sequence[Any]:
    """Put a black pixel where a sample lacks a photo: decoders refuse zero bytes."""
    filled = list(encoded)
    for number, component in enumerate(asked.read):
        lacking = set(np.flatnonzero(batch.places(component).offset < 0).tolist())
        if lacking and component in asked.components and _is_photo(component):
            filled[number] = [
                _black_pixel() if position in lacking else encoded[number][position] for position in range(len(batch))
            ]
    return filled


def _is_photo(component: str) -> bool:
    return all(is_photo(name) for name in component.split(";"))


@functools.cache
def _black_pixel() -> npt.NDArray[np.uint8]:
    """A PNG of one pixel: uint8 [bytes]."""
    from PIL import Image

    stream = io.BytesIO()
    Image.new("L", (1, 1)).save(stream, "PNG")
    return np.frombuffer(stream.getvalue(), np.uint8)
