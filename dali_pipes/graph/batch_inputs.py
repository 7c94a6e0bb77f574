"""Make the inputs of one batch: encoded bytes, the graph's arrays, and values parsed from components."""

import functools
import io
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dali_pipes.errors import DecodeError
from dali_pipes.formats.photo_header import is_photo
from dali_pipes.graph.asked import ArrayKind, GraphInputs
from dali_pipes.graph.parse import Problems, parse_batch, stack
from dali_pipes.graph.photos import OtherPhoto, judge_photos
from dali_pipes.processes.pillow import PillowProcesses
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

    def split(self, max_pixels: int | None) -> list["BatchInputs"]:
        """Split the batch into runs of samples with at most ``max_pixels`` each; a larger sample is a run alone."""
        if max_pixels is None or int(self.pixels.sum()) <= max_pixels:
            return [self]
        runs: list[list[int]] = []
        left = 0
        for position, pixels in enumerate(self.pixels.tolist()):
            if not runs or pixels > left:
                runs.append([])
                left = max_pixels
            runs[-1].append(position)
            left -= pixels
        return [self.part(run) for run in runs] if len(runs) > 1 else [self]


def complete_batch(
    asked: GraphInputs,
    batch: Batch,
    encoded: Sequence[Any],
    *,
    rules: SampleRules,
    pillow: PillowProcesses,
    max_batch_pixels: int | None,
) -> tuple[BatchInputs, Problems]:
    """Make a batch's inputs, and find its samples that must not be decoded or cannot be parsed.

    ``encoded`` is as `BatchInputs.encoded`, with one entry for each of ``asked.read``. Photos are judged by
    their first bytes, whatever the index says. Allowed photos that DALI must not decode become PNM files, by
    ``pillow``; photos with EXIF data that decoders understand in different ways become copies with plain data. With
    ``rules.missing="empty"`` a photo that a sample lacks becomes one black pixel.

    Raises:
        TypeError: If an array is of another kind than when the pipeline was built.
        DecodeError: If the photos that ``pillow`` must decode have more than ``max_batch_pixels`` together.
    """
    photos = judge_photos(asked, batch, encoded, rules=rules.photos)
    if photos.problems:
        return BatchInputs(batch, encoded, ()), photos.problems
    if max_batch_pixels is not None:
        _check_pixels(batch, photos.others, max_batch_pixels)
    replacements, problems = _by_pillow(photos.others, pillow)
    if problems:
        return BatchInputs(batch, encoded, ()), problems
    decodable = _with_replacements(asked, encoded, replacements | photos.copies)
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


def _check_pixels(batch: Batch, others: Sequence[OtherPhoto], max_batch_pixels: int) -> None:
    """Refuse a batch whose PNM files would take too much memory: all of them are made before its parts are decoded."""
    pixels = [photo.header.height * photo.header.width for photo in others]
    if len(pixels) > 1 and sum(pixels) > max_batch_pixels:
        raise DecodeError(
            f"the photos that Pillow decodes for the batch of {batch.some_keys} have {sum(pixels)} pixels together, "
            f"expected at most max_batch_pixels={max_batch_pixels}; raise Decode(max_batch_pixels=...) if there is "
            "memory for it, pass a smaller batch_size, or convert the photos to JPEG or PNG before you pack them"
        )


def _by_pillow(others: Sequence[OtherPhoto], pillow: PillowProcesses) -> tuple[dict[tuple[str, int], UInt8s], Problems]:
    """Make PNM files of photos of other formats than DALI's, by component and position."""
    if not others:
        return {}, {}
    problems: Problems = {}
    made: dict[tuple[str, int], UInt8s] = {}
    decoded = pillow.decode([(photo.data, photo.header, photo.orientation) for photo in others])
    for photo, pixels in zip(others, decoded, strict=True):
        if isinstance(pixels, str):
            problems.setdefault(photo.position, (photo.component, pixels))
        else:
            made[photo.component, photo.position] = pixels
    return made, problems


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
