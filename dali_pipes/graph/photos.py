"""Judge the photos of a batch by their own bytes, before these reach a decoder.

The shard index has judged them already, but an index can be old, wrong or made to deceive, and components whose names
are not those of photos are not in it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dali_pipes.formats.photo_header import DALI_FORMATS, PHOTO_FORMATS, PhotoHeader
from dali_pipes.formats.photo_rules import PhotoRules, bytes_problem, have_bad_bytes, size_problem
from dali_pipes.graph.inputs import GraphInputs
from dali_pipes.graph.parse import Problems
from dali_pipes.graph.photo_headers import PhotoHeaders, photo_bytes, read_photo_headers
from dali_pipes.reader.batch import Batch, Places


class OtherPhoto(NamedTuple):
    """An allowed photo that DALI must not decode."""

    component: str
    position: int
    header: PhotoHeader
    data: memoryview


class JudgedPhotos(NamedTuple):
    """The result of `judge_photos`."""

    problems: Problems
    others: list[OtherPhoto]
    pixels: npt.NDArray[np.int64]
    """int64 [B]: pixels of all photos of each sample."""


def judge_photos(asked: GraphInputs, batch: Batch, encoded: Sequence[Any], *, rules: PhotoRules) -> JudgedPhotos:
    """Judge the photos of a batch that reach a decoder.

    ``encoded`` is as in `complete_batch`. A photo is bad by ``rules``, or if its size differs from the index, or from
    that of the photo with which it shares a crop.
    """
    problems: Problems = {}
    others: list[OtherPhoto] = []
    # [component, (height, width), sample]; 0 where a sample lacks the component.
    sizes = np.zeros((len(asked.decoded.components), 2, len(batch)), np.int64)
    for number, component in enumerate(asked.decoded.components):
        places, photos = batch.places(component), encoded[asked.read.index(component)]
        found = read_photo_headers(photos)
        is_there = places.offset >= 0
        sizes[number] = np.where(is_there, (found.height, found.width), 0)
        # The stored bytes count: Pillow's pixels stand in the place of a photo in a batch that is repaired.
        bad = rules.are_bad(*found) | have_bad_bytes(places.size)
        bad |= (places.format >= 0) & ((found.height != places.height) | (found.width != places.width))
        for position in np.flatnonzero(bad & is_there).tolist():
            problems.setdefault(position, (component, _problem(found, places, position, rules=rules)))
        for position in np.flatnonzero(_FOR_PILLOW[found.format] & ~bad & is_there).tolist():
            data = photo_bytes(photos, position)
            others.append(OtherPhoto(component, position, found.header(position), data))
    for photo, mask in asked.decoded.same_size:
        of_photo, of_mask = (sizes[asked.decoded.components.index(name)] for name in (photo, mask))
        differs = (of_photo != of_mask).any(axis=0) & of_photo.any(axis=0) & of_mask.any(axis=0)
        for position in np.flatnonzero(differs).tolist():
            text = size_problem(photo, of_photo[:, position].tolist(), of_mask[:, position].tolist())
            problems.setdefault(position, (mask, text))
    return JudgedPhotos(problems, others, sizes.prod(axis=1).sum(axis=0))


_FOR_PILLOW = ~np.isin(PHOTO_FORMATS, DALI_FORMATS)


def _problem(found: PhotoHeaders, places: Places, position: int, *, rules: PhotoRules) -> str:
    header = found.header(position)
    problem = rules.problem(header) or bytes_problem(int(places.size[position]))
    if problem is None:
        _, height, width = places.header(position)
        problem = (
            f"has {header.height} x {header.width} pixels, its index says {height} x {width}; index it anew: "
            "dali-pipes prep index URL"
        )
    return problem
