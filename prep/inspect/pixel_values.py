"""Count the values of 8-bit pixels."""

import numpy as np
import numpy.typing as npt

_PIXELS_AT_A_TIME = 1 << 20


def count_values(pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """int64 [256]: how many pixels of a photo's channel, uint8 [height, width], have each value."""
    counts = np.zeros(256, np.int64)
    rows = max(1, _PIXELS_AT_A_TIME // max(1, pixels.shape[1]))
    # In pieces, because numpy takes 8 bytes a pixel to count.
    for start in range(0, len(pixels), rows):
        counts += np.bincount(pixels[start : start + rows].ravel(), minlength=256)
    return counts
