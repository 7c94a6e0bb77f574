"""Compute crops and resized shapes, for many photos at once, as torchvision computes them for one."""

import math

import numpy as np
import numpy.typing as npt

from dali_pipes.arrays import Int32s

Float32s = npt.NDArray[np.float32]
Float64s = npt.NDArray[np.float64]

CROP_TRIES = 10
"""After this number of tries torchvision's RandomResizedCrop takes the centre, and its RandomErasing erases nothing."""


def center_crop_start(size: Int32s, crop: int) -> Int32s:
    """Compute the start of torchvision's ``CenterCrop``; it is negative where a photo is padded.

    In a larger photo the crop starts at ``round(slack / 2)``, where halves round to even. A smaller photo is padded by
    ``(crop - size) // 2`` at its start.

    >>> center_crop_start(np.array([350, 351, 353, 355, 349, 347]), 350).tolist()
    [0, 0, 2, 2, 0, -1]
    """
    slack = size.astype(np.int32) - crop
    larger = np.rint(slack / 2).astype(np.int32)
    return np.where(slack > 0, larger, -(-slack // 2)).astype(np.int32)


def crop_position(sizes: Int32s, crop: int) -> Float32s:
    """Compute a centre crop as DALI's ``crop_pos_y, crop_pos_x``, the start as a share of the slack: float32 [B, 2]."""
    slack = sizes - crop
    start = center_crop_start(sizes, crop)
    return (start / np.where(slack == 0, 1, slack)).astype(np.float32)


def resized_shape(sizes: Int32s, shorter_side: int) -> Int32s:
    """Compute the shapes that torchvision's ``Resize(shorter_side)`` gives: int32 [B, 2] (rows, columns).

    The longer side is rounded down to whole pixels.

    >>> resized_shape(np.array([[200, 301], [301, 200]]), 100).tolist()
    [[100, 150], [150, 100]]
    """
    sizes = sizes.astype(np.int64)
    shortest = sizes.min(axis=1, keepdims=True)
    return np.where(sizes == shortest, shorter_side, shorter_side * sizes // np.maximum(shortest, 1)).astype(np.int32)


def resized_crop(
    height: Int32s, width: Int32s, uniforms: Float64s, *, scale: tuple[float, float], ratio: tuple[float, float]
) -> Int32s:
    """Draw crops as torchvision's ``RandomResizedCrop.get_params`` does, from given uniform numbers.

    Each of ten tries draws an area, as a share of the photo's that is uniform in ``scale``, and an aspect ratio,
    log-uniform in ``ratio``. The first try that fits is placed uniformly. If no try fits, the crop is the centre, with
    the nearest ratio that is allowed.

    Args:
        height: int32 [B], rows of the photo.
        width: int32 [B].
        uniforms: float64 [B, 22] in [0, 1).
        scale: Smallest and largest share of the area.
        ratio: Smallest and largest width / height.

    Returns:
        int32 [B, 4]: start row, start column, rows, columns.
    """
    tries = uniforms[:, :-2].reshape(len(uniforms), CROP_TRIES, 2)
    area = height.astype(np.float64) * width  # [B]
    target = area[:, None] * (scale[0] + (scale[1] - scale[0]) * tries[:, :, 0])
    log_ratio = math.log(ratio[0]) + (math.log(ratio[1]) - math.log(ratio[0])) * tries[:, :, 1]
    aspect = np.exp(log_ratio)
    columns = np.rint(np.sqrt(target * aspect)).astype(np.int32)  # [B, try]
    rows = np.rint(np.sqrt(target / aspect)).astype(np.int32)
    fits = (columns > 0) & (columns <= width[:, None]) & (rows > 0) & (rows <= height[:, None])
    pick = np.argmax(fits, axis=1)[:, None]
    drawn_rows, drawn_columns = (np.take_along_axis(drawn, pick, axis=1)[:, 0] for drawn in (rows, columns))
    whole_rows = np.where(width < ratio[0] * height, np.rint(width / ratio[0]), height).astype(np.int32)
    whole_columns = np.where(width > ratio[1] * height, np.rint(height * ratio[1]), width).astype(np.int32)
    any_fits = np.asarray(fits.any(axis=1))
    final_rows = np.where(any_fits, drawn_rows, whole_rows)
    final_columns = np.where(any_fits, drawn_columns, whole_columns)
    place = np.where(any_fits[:, None], uniforms[:, -2:], 0.5)
    slack = np.stack([height - final_rows, width - final_columns], axis=1)
    # A drawn crop can start at each of slack + 1 places with equal chance; the centre starts at slack // 2.
    start = np.where(any_fits[:, None], np.floor(place * (slack + 1)), slack // 2).astype(np.int32)
    return np.concatenate([start, np.stack([final_rows, final_columns], axis=1)], axis=1).astype(np.int32)


def erased_rectangle(
    height: int,
    width: int,
    uniforms: Float64s,
    *,
    probability: float,
    scale: tuple[float, float],
    ratio: tuple[float, float],
) -> Int32s:
    """Draw rectangles as torchvision's ``RandomErasing`` does, from given uniform numbers.

    Each of ten tries draws an area, as a share of the image's that is uniform in ``scale``, and an aspect ratio,
    log-uniform in ``ratio``. The first try whose sides are both shorter than the image's is placed uniformly. If no try
    fits, or with ``1 - probability``, the rectangle is empty.

    Args:
        height: Rows of the images.
        width: Their columns.
        uniforms: float64 [B, 23] in [0, 1).
        probability: Of a rectangle.
        scale: Smallest and largest share of the area.
        ratio: Smallest and largest height / width.

    Returns:
        int32 [B, 4]: start row, start column, rows, columns.
    """
    tries = uniforms[:, : 2 * CROP_TRIES].reshape(len(uniforms), CROP_TRIES, 2)
    area = height * width * (scale[0] + (scale[1] - scale[0]) * tries[:, :, 0])
    aspect = np.exp(math.log(ratio[0]) + (math.log(ratio[1]) - math.log(ratio[0])) * tries[:, :, 1])
    rows, columns = (np.rint(np.sqrt(side)).astype(np.int32) for side in (area * aspect, area / aspect))  # [B, try]
    fits = (rows < height) & (columns < width)
    pick = np.argmax(fits, axis=1)[:, None]
    is_erased = fits.any(axis=1) & (uniforms[:, -1] < probability)
    shape = np.concatenate([np.take_along_axis(side, pick, axis=1) for side in (rows, columns)], axis=1)
    shape = np.where(is_erased[:, None], shape, 0)
    start = np.floor(uniforms[:, -3:-1] * (np.array([height, width]) - shape + 1))
    return np.concatenate([start, shape], axis=1).astype(np.int32)


def covering_crop(sizes: Int32s, shape: Int32s, uniforms: Float64s | None) -> Int32s:
    """Compute the largest crops with the aspect ratios of ``shape``, rounded to whole pixels.

    Args:
        sizes: int32 [B, 2], rows and columns of the photo.
        shape: int32 [B, 2], rows and columns to which the crop is resized.
        uniforms: float64 [B, 2] in [0, 1), for the place; ``None``: the centre.

    Returns:
        int32 [B, 4]: start row, start column, rows, columns.

    >>> covering_crop(np.array([[300, 500]]), np.array([[100, 100]]), None).tolist()
    [[0, 100, 300, 300]]
    """
    size = sizes.astype(np.int64)
    rows, columns = shape[:, 0].astype(np.int64), shape[:, 1].astype(np.int64)
    # The shape fits the photo's width if the photo is the taller of the two, else its height.
    is_taller = size[:, 0] * columns > size[:, 1] * rows
    scaled = np.where(is_taller, np.rint(size[:, 1] * rows / columns), np.rint(size[:, 0] * columns / rows))
    crop = size.copy()
    crop[np.arange(len(size)), np.where(is_taller, 0, 1)] = np.maximum(scaled, 1).astype(np.int64)
    crop = np.minimum(crop, size)
    slack = size - crop
    start = slack // 2 if uniforms is None else np.floor(uniforms * (slack + 1)).astype(np.int64)
    return np.concatenate([start, crop], axis=1).astype(np.int32)
