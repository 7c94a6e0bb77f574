"""Prepare a GPU's JPEG engines before the first batch: how much memory they preallocate, and how many photos they take.

Nothing of this matters on the CPU.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dali_pipes.formats.photo_header import PHOTO_FORMATS
from dali_pipes.graph.batch_inputs import BatchInputs
from dali_pipes.graph.dali_internals import add_decoder_arguments, is_mixed, photos_of
from dali_pipes.reader.batch import Places

# What the engines of one decoder may preallocate, if nvJPEG takes an RGB picture of the hinted size for each sample of
# a batch. It does not say what it takes; 1 GiB is little on a GPU that has engines (24 GB or more), and enough for 256
# photos of 1.4 million pixels.
MAX_PREALLOCATED_BYTES = 2**30
_JPEG = PHOTO_FORMATS.index("JPEG")


def set_up_engines(
    decoders: Sequence[Any],
    *,
    photos: Mapping[str, Any],
    places: Callable[[str], Places],
    hw_decoder_load: float | None,
    batch_size: int,
    max_pixels: int,
) -> bool:
    """Give decoders the engines' share, and those on a GPU the size to preallocate for; return whether engines decode.

    Args:
        decoders: Operators of a pipeline that is not built yet. They keep what the graph has set.
        photos: The nodes of encoded bytes, by component.
        places: Gives the places of a component's photos, of which `size_hint` chooses the size.
        hw_decoder_load: Share of a batch's JPEGs that the engines decode; ``None``: DALI's default.
        batch_size: Samples in a full batch.
        max_pixels: A photo of more pixels is never decoded.
    """
    if hw_decoder_load is not None:
        add_decoder_arguments(decoders, hw_decoder_load=float(hw_decoder_load))
    mixed = [decoder for decoder in decoders if is_mixed(decoder)]
    if hw_decoder_load == 0 or not mixed:
        return False
    for decoder in mixed:
        decoded = [places(component) for component in photos_of(decoder, photos)]
        hint = size_hint(decoded, batch_size=batch_size, max_pixels=max_pixels)
        if hint is not None:
            add_decoder_arguments([decoder], preallocate_height_hint=hint[0], preallocate_width_hint=hint[1])
    return True


def size_hint(photos: Sequence[Places], *, batch_size: int, max_pixels: int) -> tuple[int, int] | None:
    """Choose the height and width for which a decoder's engines preallocate; ``None`` without a JPEG that fits.

    It is the largest height and the largest width of the JPEGs, from the smallest photo up, as long as ``batch_size``
    pictures of that size fit `MAX_PREALLOCATED_BYTES`. So one huge photo costs no memory in advance: the engines then
    allocate for it when it comes. Photos of more than ``max_pixels`` are bad and never come.
    """
    heights, widths = np.concatenate(
        [np.empty((2, 0), np.int64)]
        + [np.stack([places.height, places.width])[:, places.format == _JPEG] for places in photos],
        axis=1,
    )
    order = np.argsort(heights * widths, kind="stable")
    tallest, widest = np.maximum.accumulate(heights[order]), np.maximum.accumulate(widths[order])
    most = min(MAX_PREALLOCATED_BYTES // (3 * batch_size), max_pixels)
    num_fit = int(np.searchsorted(tallest * widest, most, side="right"))
    return (int(tallest[num_fit - 1]), int(widest[num_fit - 1])) if num_fit else None


def full_batch(inputs: BatchInputs, *, batch_size: int, max_batch_pixels: int | None) -> BatchInputs | None:
    """Repeat the smallest sample to a full batch of at most ``max_batch_pixels``; ``None`` if the batch is as large."""
    num = len(inputs.encoded[0])
    at, most = 0, batch_size
    if max_batch_pixels is not None and len(inputs.pixels):
        at = int(np.argmin(inputs.pixels))
        most = min(batch_size, max_batch_pixels // max(1, int(inputs.pixels[at])))
    return inputs.part([at] * most) if most > num else None
