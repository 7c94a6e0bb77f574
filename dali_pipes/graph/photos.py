"""Judge the photos of a batch by their own bytes, before these reach a decoder.

The shard index has judged them already, but an index can be old, wrong or made to deceive, and components whose names
are not those of photos are not in it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dali_pipes.formats.photo_header import (
    DALI_FORMATS,
    PhotoHeader,
    PhotoRules,
    bytes_problem,
    read_photo_header,
    size_problem,
)
from dali_pipes.graph.inputs import GraphInputs
from dali_pipes.graph.parse import Problems
from dali_pipes.reader.batch import Batch


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
    """Judge the photos of a batch that reach a decoder: 4 us of CPU for each.

    ``encoded`` is as in `complete_batch`. A photo is bad by ``rules``, if its size differs from the index, or from the
    size of the photo with which it shares a crop.
    """
    problems: Problems = {}
    others: list[OtherPhoto] = []
    # [component, sample, (height, width)]; 0 where a sample lacks the component.
    sizes = np.zeros((len(asked.decoded.components), len(batch), 2), np.int64)
    for number, component in enumerate(asked.decoded.components):
        places = batch.places(component)
        columns = (places.offset, places.size, places.format, places.height, places.width)
        listed = [column.tolist() for column in columns]
        found = []
        for position, (data, offset, num_bytes, format, *indexed) in enumerate(
            zip(encoded[asked.read.index(component)], *listed, strict=True)
        ):
            if offset < 0:
                found.append((0, 0))
                continue
            view = memoryview(np.asarray(data))  # type: ignore[arg-type]  # mypy does not know numpy's buffers
            header = read_photo_header(view)
            found.append(size := header[1:])
            # The stored bytes count: Pillow's pixels stand in the place of a photo in a batch that is repaired.
            if problem := rules.problem(header) or bytes_problem(num_bytes):
                problems.setdefault(position, (component, problem))
            elif format >= 0 and size != tuple(indexed):
                text = f"has {size[0]} x {size[1]} pixels, its index says {indexed[0]} x {indexed[1]}; index it anew"
                problems.setdefault(position, (component, f"{text}: dali-pipes prep index URL"))
            elif header.format not in DALI_FORMATS:
                others.append(OtherPhoto(component, position, header, view))
        sizes[number] = found
    for photo, mask in asked.decoded.same_size:
        of_photo, of_mask = (sizes[asked.decoded.components.index(name)] for name in (photo, mask))
        differs = (of_photo != of_mask).any(axis=1) & of_photo.any(axis=1) & of_mask.any(axis=1)
        for position in np.flatnonzero(differs).tolist():
            text = size_problem(photo, of_photo[position].tolist(), of_mask[position].tolist())
            problems.setdefault(position, (mask, text))
    return JudgedPhotos(problems, others, sizes.prod(axis=2).sum(axis=0))
