"""Judge the photos of a batch by their own bytes, before these reach a decoder.

The shard index has judged them already, but an index can be old, wrong or made to deceive, and components whose names
are not those of photos are not in it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dali_pipes.arrays import Bools
from dali_pipes.formats.orientation import LATE, plain_copy, read_orientation, values_of
from dali_pipes.formats.photo_header import PHOTO_FORMATS, PhotoHeader
from dali_pipes.formats.photo_rules import PhotoRules, bytes_problem, have_bad_bytes, size_problem
from dali_pipes.graph.alone import header_problems
from dali_pipes.graph.asked import GraphInputs
from dali_pipes.graph.parse import Problems
from dali_pipes.graph.photo_headers import PhotoHeaders, photo_bytes, read_photo_headers
from dali_pipes.reader.batch import Batch, Places


class JudgedPhotos(NamedTuple):
    """The result of `judge_photos`."""

    problems: Problems
    copies: dict[tuple[str, int], npt.NDArray[np.uint8]]
    """Component and position of each photo whose header DALI might not read, or that it might turn in another way than
    it should -> a copy that it reads and turns rightly: uint8 [bytes]. See `dali_pipes.formats.orientation`."""
    pixels: npt.NDArray[np.int64]
    """int64 [B]: pixels of all photos of each sample."""


def judge_photos(asked: GraphInputs, batch: Batch, encoded: Sequence[Any], *, rules: PhotoRules) -> JudgedPhotos:
    """Judge the photos of a batch that reach a decoder.

    ``encoded`` is as in `complete_batch`. A photo is bad by ``rules``, or if its size or orientation differs from the
    index, or its size from that of the photo with which it shares a crop, or if DALI cannot read its header, see
    Note [parallel parsers]. Sizes are those of the decoded photos: of the upright ones where the graph turns them.
    """
    problems: Problems = {}
    copies: dict[tuple[str, int], npt.NDArray[np.uint8]] = {}
    unsure: list[tuple[str, int, PhotoHeader]] = []
    # [component, (height, width), sample]; 0 where a sample lacks the component.
    sizes = np.zeros((len(asked.decoded.components), 2, len(batch)), np.int64)
    stored = sizes.copy()
    for number, component in enumerate(asked.decoded.components):
        places, photos = batch.places(component), encoded[asked.read.index(component)]
        orient = component in asked.decoded.upright
        found = read_photo_headers(photos, orient=orient, late=places.orientation > LATE)
        is_there = places.offset >= 0
        stored[number] = np.where(is_there, (found.height, found.width), 0)
        sizes[number] = np.where(is_there, found.sizes, 0)
        bad = rules.are_bad(found.format, found.height, found.width) | have_bad_bytes(places.size)
        bad |= (places.format >= 0) & _differ(found, places, orient=orient)
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
    for photo, mask in asked.decoded.same_size:
        numbers = [asked.decoded.components.index(name) for name in (photo, mask)]
        of_photo, of_mask = sizes[numbers]
        differs = (of_photo != of_mask).any(axis=0) & of_photo.any(axis=0) & of_mask.any(axis=0)
        for position in np.flatnonzero(differs).tolist():
            fit_as_stored = bool((stored[numbers[0], :, position] == stored[numbers[1], :, position]).all())
            text = size_problem(
                photo,
                of_photo[:, position].tolist(),
                of_mask[:, position].tolist(),
                fit_as_stored=fit_as_stored,
            )
            problems.setdefault(position, (mask, text))
    return JudgedPhotos(problems, copies, sizes.prod(axis=1).sum(axis=0))


def _differ(found: PhotoHeaders, places: Places, *, orient: bool) -> Bools:
    """Tell which photos are not those of the index: bool [B]."""
    height, width = places.sizes(orient=orient)
    found_height, found_width = found.sizes
    differ: Bools = (found_height != height) | (found_width != width)
    if orient:
        differ |= found.orientation != values_of(places.orientation)
    return differ


def _problem(found: PhotoHeaders, places: Places, position: int, *, rules: PhotoRules) -> str:
    header = found.header(position)
    problem = rules.problem(header) or bytes_problem(int(places.size[position]))
    if problem is None:
        _, height, width = places.header(position)
        has, says = f"{header.height} x {header.width} pixels", f"{height} x {width}"
        if (header.height, header.width) == (height, width):
            has, says = f"EXIF orientation {found.orientation[position]}", f"{values_of(places.orientation)[position]}"
        problem = f"has {has}, its index says {says}; index it anew: dali-pipes prep index URL --anew"
    return problem
