"""Make the inputs of one batch: encoded bytes, the graph's arrays, and values parsed from components."""

import functools
import io
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dali_pipes.errors import DecodeError, printable
from dali_pipes.formats.photo_header import is_photo
from dali_pipes.graph.asked import ArrayKind, GraphInputs
from dali_pipes.graph.parse import Problems, parse_batch, stack
from dali_pipes.graph.photos import judge_photos
from dali_pipes.reader.batch import Batch
from dali_pipes.reader.shard_table import SampleRules

_NO_PIXELS = np.zeros(0, np.int64)
UInt8s = npt.NDArray[np.uint8]


class BatchInputs(NamedTuple):
    """The inputs of the decode pipeline for one batch."""

    batch: Batch
    encoded: Sequence[Any]
    """For each of `DecodePipeline.read_components` a `dali_pipes.reader.buffers.EncodedBatch`, a TensorList,
    or a list of uint8 arrays [bytes], one for each sample."""
    arrays: Sequence[npt.NDArray[Any]]
    """One entry for each of `GraphInputs.arrays`: an array [B, ...]."""
    parsed: Sequence[npt.NDArray[Any] | list[npt.NDArray[Any]]] = ()
    """One entry for each of `GraphInputs.parsed`: an array [B, ...], or a list of arrays of different shapes."""
    lists: Mapping[str, list[Any]] = MappingProxyType({})
    """The outputs that are not tensors, by name: one Python object for each sample."""
    pixels: npt.NDArray[np.int64] = _NO_PIXELS
    """int64 [B]: the pixels of each sample's photos, as stored; empty if they are not known."""

    def part(self, positions: Sequence[int]) -> "BatchInputs":
        """Take the inputs of some samples; ``batch`` is still the whole batch."""
        return BatchInputs(
            self.batch,
            [[samples[position] for position in positions] for samples in self.encoded],
            [np.ascontiguousarray(array[list(positions)]) for array in self.arrays],
            [stack([values[position] for position in positions]) for values in self.parsed],
            {name: [values[position] for position in positions] for name, values in self.lists.items()},
            self.pixels[list(positions)] if len(self.pixels) else self.pixels,
        )


def complete_batch(
    asked: GraphInputs,
    batch: Batch,
    encoded: Sequence[Any],
    *,
    rules: SampleRules,
    max_batch_pixels: int | None,
) -> tuple[BatchInputs, Problems]:
    """Make a batch's inputs, and find its samples that must not be decoded or cannot be parsed.

    ``encoded`` is as `BatchInputs.encoded`, with one entry for each of ``asked.read``. Photos are judged by
    their first bytes, whatever the index says. Photos with EXIF data that decoders understand in different ways become
    copies with plain data. With ``rules.missing="empty"`` a photo that a sample lacks becomes one black pixel.

    Raises:
        TypeError: If an array is of another kind than when the pipeline was built.
        DecodeError: If the photos have more than ``max_batch_pixels`` together, which could exhaust the memory.
    """
    photos = judge_photos(asked, batch, encoded, rules=rules.photos)
    if photos.problems:
        return BatchInputs(batch, encoded, ()), photos.problems
    if max_batch_pixels is not None:
        _check_pixels(batch, photos.pixels, max_batch_pixels)
    decodable = _with_replacements(asked, encoded, photos.copies)
    values, problems = parse_batch(
        [*asked.parsed, *asked.lists.values()],
        dict(zip(asked.read, encoded, strict=True)),
        batch=batch,
    )
    if problems:
        return BatchInputs(batch, encoded, ()), problems
    parsed = [stack(arrays) for arrays in values[: len(asked.parsed)]]
    lists = dict(zip(asked.lists, values[len(asked.parsed) :], strict=True))
    filled = _with_black_pixels(asked, batch, decodable) if rules.missing == "empty" else decodable
    return BatchInputs(batch, filled, _arrays(asked, batch), parsed, lists, photos.pixels), {}


def _check_pixels(batch: Batch, pixels: npt.NDArray[np.int64], max_batch_pixels: int) -> None:
    """Refuse a batch whose decoded photos would take too much memory."""
    total = int(pixels.sum())
    if total > max_batch_pixels:
        largest = int(pixels.argmax())
        shard, key = batch.name(largest)
        raise DecodeError(
            f"the photos of the batch of {batch.some_keys} have {total} pixels together, expected at most "
            f"max_batch_pixels={max_batch_pixels}; the largest sample, with {pixels[largest]}, is shard "
            f"'{printable(shard)}', key '{printable(key)}'; pass a smaller batch_size, raise "
            "Decode(max_batch_pixels=...) if there is memory for it, or make huge photos bad samples: "
            "BadSamples(max_pixels=...)"
        )


def _with_replacements(
    asked: GraphInputs, encoded: Sequence[Any], replacements: Mapping[tuple[str, int], UInt8s]
) -> Sequence[Any]:
    """Put files, by component and position, in the places of others."""
    if not replacements:
        return encoded
    decodable = list(encoded)
    for (component, position), data in replacements.items():
        number = asked.read.index(component)
        if decodable[number] is encoded[number]:
            decodable[number] = list(encoded[number])
        decodable[number][position] = data
    return decodable


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
