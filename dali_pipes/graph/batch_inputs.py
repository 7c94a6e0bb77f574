"""Make the inputs of one batch: encoded bytes, the graph's arrays, and values parsed from components."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dali_pipes.arrays import Bools, Int64s
from dali_pipes.errors import DecodeError, printable
from dali_pipes.formats.orientation import plain_copy, read_orientation
from dali_pipes.formats.photo_header import (
    DAMAGED_PNG,
    PHOTO_FORMATS,
    PhotoHeader,
    PhotoRules,
    bytes_problem,
    have_bad_bytes,
    is_photo,
    size_problem,
)
from dali_pipes.graph.inputs import DecodedPhotos, GraphInputs
from dali_pipes.graph.parse import Problems, parse_batch, stack
from dali_pipes.graph.photos import PhotoHeaders, header_problems, photo_bytes, read_photo_headers
from dali_pipes.reader.batch import Batch, Places, SampleRules

UInt8s = npt.NDArray[np.uint8]
_DAMAGED = PHOTO_FORMATS.index(DAMAGED_PNG)
_BLACK_PIXEL = np.frombuffer(b"P5\n1 1\n255\n\0", np.uint8)  # a PNM of one pixel


class BatchInputs(NamedTuple):
    """The inputs of the decode pipeline for one batch."""

    batch: Batch
    encoded: Mapping[str, Any]
    """For each component that the graph reads a `dali_pipes.reader.buffers.EncodedBatch`, a TensorList, or a list of
    uint8 arrays [bytes], one for each sample."""
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


def complete_batch(
    asked: GraphInputs,
    batch: Batch,
    encoded: Mapping[str, Any],
    *,
    rules: SampleRules,
    max_batch_pixels: int | None,
) -> tuple[BatchInputs, Problems]:
    """Make a batch's inputs, and find its samples that must not be decoded or cannot be parsed.

    ``encoded`` is as `BatchInputs.encoded`. Photos with EXIF data that decoders understand in different ways become
    copies with plain data. With ``rules.missing="empty"`` a photo that a sample lacks becomes one black pixel.

    Raises:
        TypeError: If an array is of another kind than when the pipeline was built.
        DecodeError: If the photos have more than ``max_batch_pixels`` together, which could exhaust the memory.
    """
    judged = judge_photos(asked.decoded, batch, encoded, rules=rules.photos)
    if judged.problems:
        return BatchInputs(batch, encoded), judged.problems
    if max_batch_pixels is not None:
        _check_pixels(batch, judged.pixels, max_batch_pixels)
    parsers = [*asked.parsed.values(), *asked.lists.values()]
    values, problems = parse_batch(parsers, encoded, batch=batch) if parsers else ([], {})
    if problems:
        return BatchInputs(batch, encoded), problems
    arrays: dict[str, Any] = {name: array_of(batch) for name, array_of in asked.arrays.items()}
    arrays |= {name: stack(parsed) for name, parsed in zip(asked.parsed, values, strict=False)}
    lists = dict(zip(asked.lists, values[len(asked.parsed) :], strict=True))
    replacements = judged.copies
    if rules.missing == "empty":
        replacements = replacements | _black_pixels(asked, batch)
    return BatchInputs(batch, _with_replacements(encoded, replacements), arrays, lists), {}


class JudgedPhotos(NamedTuple):
    """The result of `judge_photos`."""

    problems: Problems
    copies: dict[tuple[str, int], UInt8s]
    """Component and position of each photo whose header DALI might not read, or that it might turn in another way than
    it should -> a copy that it reads and turns rightly: uint8 [bytes]. See `dali_pipes.formats.orientation`."""
    pixels: Int64s
    """int64 [B]: pixels of all photos of each sample."""


def judge_photos(
    decoded: DecodedPhotos, batch: Batch, encoded: Mapping[str, Any], *, rules: PhotoRules
) -> JudgedPhotos:
    """Judge the photos of a batch that reach a decoder, by their own bytes.

    ``encoded`` is as `BatchInputs.encoded`. A photo is bad by ``rules``, or if its size or orientation differs from the
    index, or its size from that of the photo with which it shares a crop, or if DALI cannot read its header, see
    Note [parallel parsers]. Sizes are those of the decoded photos: of the upright ones where the graph turns them.
    Checksums are not compared here; the index knows of a damaged PNG.
    """
    problems: Problems = {}
    copies: dict[tuple[str, int], UInt8s] = {}
    unsure: list[tuple[str, int, PhotoHeader]] = []
    # [component, (height, width), sample]; 0 where a sample lacks the component.
    sizes = np.zeros((len(decoded.components), 2, len(batch)), np.int64)
    stored = sizes.copy()
    for number, component in enumerate(decoded.components):
        places, photos = batch.places(component), encoded[component]
        orient = component in decoded.upright
        found = read_photo_headers(photos, orient=orient)
        is_there = places.is_there
        stored[number] = np.where(is_there, (found.height, found.width), 0)
        sizes[number] = np.where(is_there, found.sizes, 0)
        bad = rules.are_bad(found.format, found.height, found.width) | have_bad_bytes(places.size)
        bad |= (places.format >= 0) & _differ(found, places, orient=orient) | (places.format == _DAMAGED)
        for position in np.flatnonzero(bad & is_there).tolist():
            problems.setdefault(position, (component, _problem(found, places, position, rules=rules)))
        for position in np.flatnonzero(~found.is_plain & ~bad & is_there).tolist():
            data, format = photo_bytes(photos, position), PHOTO_FORMATS[found.format[position]]
            # Whether decoders turn the photo is not known here if the index does not know orientations.
            copy = plain_copy(data, format, read_orientation(data, format).value)
            copies[component, position] = np.frombuffer(copy, np.uint8)
            if not read_orientation(copy, format).is_plain:
                unsure.append((component, position, found.header(position)))
    if unsure:
        read_alone = header_problems([(copies[component, at], header) for component, at, header in unsure])
        for (component, position, _), problem in zip(unsure, read_alone, strict=True):
            if problem is not None:
                problems.setdefault(position, (component, problem))
    for photo, mask in decoded.same_size:
        numbers = [decoded.components.index(name) for name in (photo, mask)]
        of_photo, of_mask = sizes[numbers]
        differs = (of_photo != of_mask).any(axis=0) & of_photo.any(axis=0) & of_mask.any(axis=0)
        for position in np.flatnonzero(differs).tolist():
            fit_as_stored = bool((stored[numbers[0], :, position] == stored[numbers[1], :, position]).all())
            pair = (of_photo[:, position].tolist(), of_mask[:, position].tolist())
            problems.setdefault(position, (mask, size_problem(photo, *pair, fit_as_stored=fit_as_stored)))
    return JudgedPhotos(problems, copies, sizes.prod(axis=1).sum(axis=0))


def _differ(found: PhotoHeaders, places: Places, *, orient: bool) -> Bools:
    """Tell which photos are not those of the index: bool [B]."""
    height, width = places.sizes(orient=orient)
    found_height, found_width = found.sizes
    differ: Bools = (found_height != height) | (found_width != width)
    if orient:
        differ |= found.orientation != places.orientation
    return differ


def _problem(found: PhotoHeaders, places: Places, position: int, *, rules: PhotoRules) -> str:
    header, indexed = found.header(position), places.header(position)
    problem = rules.problem(header) or bytes_problem(int(places.size[position]))
    if problem is None and indexed.format == DAMAGED_PNG:
        problem = rules.problem(indexed)
    if problem is None:
        has, says = f"{header.height} x {header.width} pixels", f"{indexed.height} x {indexed.width}"
        if header[1:] == indexed[1:]:
            has, says = f"EXIF orientation {found.orientation[position]}", f"{places.orientation[position]}"
        problem = f"has {has}, its index says {says}; index it anew: dali-pipes prep index URL --anew"
    return problem


def _check_pixels(batch: Batch, pixels: Int64s, max_batch_pixels: int) -> None:
    """Refuse a batch whose decoded photos would take too much memory."""
    total = int(pixels.sum())
    if total > max_batch_pixels:
        largest = int(pixels.argmax())
        shard, key = map(printable, batch.name(largest))
        raise DecodeError(
            f"the photos of the batch of {batch.some_keys} have {total} pixels together, expected at most "
            f"max_batch_pixels={max_batch_pixels}; the largest sample, with {pixels[largest]}, is shard '{shard}', key "
            f"'{key}'; pass a smaller batch_size, Decode(max_batch_pixels=...) or BadSamples(max_pixels=...)"
        )


def _with_replacements(encoded: Mapping[str, Any], replacements: Mapping[tuple[str, int], UInt8s]) -> Mapping[str, Any]:
    """Put files, by component and position, in the places of others."""
    if not replacements:
        return encoded
    changed = {component: list(encoded[component]) for component in {component for component, _ in replacements}}
    for (component, position), data in replacements.items():
        changed[component][position] = data
    return {**encoded, **changed}


def _black_pixels(asked: GraphInputs, batch: Batch) -> dict[tuple[str, int], UInt8s]:
    """Find where a sample lacks a photo, and take a black pixel there: decoders refuse zero bytes."""
    return {
        (component, position): _BLACK_PIXEL
        for component in asked.components
        if all(is_photo(name) for name in component.split(";"))
        for position in np.flatnonzero(~batch.places(component).is_there).tolist()
    }
