"""Find the upright size of each sample's photo in the column file, before any shard is read."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dali_pipes.data_set.data_set import DataSet
from dali_pipes.errors import DataError, printable

Int32s = npt.NDArray[np.int32]


class PhotoSizes(NamedTuple):
    """Rows and columns of each sample's upright photo: int32 [N] each; 0 where it lacks it or it has no size."""

    height: Int32s
    width: Int32s


def photo_sizes(data_set: DataSet, photo: str) -> PhotoSizes:
    """Find the sizes of one component, or of the first that each sample has of alternatives such as ``"jpg;jpeg"``.

    Raises:
        DataError: If the column file is missing or has no sizes, because the shards were indexed by an older version,
            or if the component is not a photo.
    """
    columns = data_set.columns()
    height, width = np.zeros(len(columns), np.int32), np.zeros(len(columns), np.int32)
    is_found = np.zeros(len(columns), np.bool_)
    for name in photo.split(";"):
        if name not in columns.samples.sizes and name in columns.components:
            photos = ", ".join(map(printable, sorted(columns.samples.sizes)))
            advice = (
                f"name a photo: photo=... of dali_pipes.buckets (found: {photos})"
                if photos
                else "index the shards anew, which reads them once: dali-pipes prep index URL"
            )
            raise DataError(
                f"'{printable(data_set.source)}': expected heights and widths of '{printable(name)}' in the column "
                f"file, to find the shape of each batch, found none; {advice}"
            )
        rows, sides = columns.size(name), columns.has(name) & ~is_found
        height[sides], width[sides] = rows[0][sides], rows[1][sides]
        is_found |= sides
    return PhotoSizes(height, width)
