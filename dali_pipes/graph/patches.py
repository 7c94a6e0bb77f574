"""A graph for batches with a budget of tokens: photos of their own sizes, as one sequence of patches."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from nvidia.dali import fn, types

from dali_pipes.arguments import as_number
from dali_pipes.graph.crop import Int32s
from dali_pipes.graph.definition import Graph
from dali_pipes.graph.inputs import Components, once_a_batch
from dali_pipes.graph.pipelines import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    Dtype,
    Layout,
    check_output,
    decode_crop,
    label_output,
    normalised,
)
from dali_pipes.graph.random import Random
from dali_pipes.order.tokens import TokenBudget
from dali_pipes.reader.batch import Batch


def patches(
    *,
    flip: float = 0.5,
    mean: Sequence[float] = IMAGENET_MEAN,
    std: Sequence[float] = IMAGENET_STD,
    dtype: Dtype = "float32",
    layout: Layout = "CHW",
    photo: str | None = None,
    orient: bool | None = None,
    text: str | None = None,
) -> Graph:
    """Resize each whole photo to its grid of patches, flip and normalise it, and give all patches as one sequence.

    For loaders with ``select=Select(tokens=dali_pipes.token_budget(...))``, which decides each photo's grid:
    `dali_pipes.order.tokens.TokenBudget.grids`. With P the side of a patch, and T patches of B photos in the batch, T
    at most ``max_tokens``, B at most ``batch_size``; both differ from batch to batch. Tensors are on the loader's
    device.

    Outputs:
        patches: ``dtype`` [T, 3 * P * P]: the patches of the first photo by rows, then those of the second, ... A
            patch's values are ordered as ``layout`` says; ``"CHW"`` fits ``conv.weight.flatten(1)`` of a patch
            embedding by ``nn.Conv2d``. Values are ``(pixel / 255 - mean) / std``, or with ``dtype="uint8"`` the pixels.
        cu_seqlens: int32 [B + 1]: photo i has the patches ``cu_seqlens[i]`` to ``cu_seqlens[i + 1]``, as the functions
            of flash-attention for sequences of varying lengths take it.
        grid: int32 [B, 2]: rows and columns of each photo's patches.
        label: int64 [B]; only if the data set has labels.
        text: list of B str; only with ``text``.

    Args:
        flip: Probability of a horizontal flip; 0 for evaluation.
        mean: Red, green, blue, of pixels in 0..1.
        std: Likewise.
        dtype: Of the patches: ``"float32"``, ``"float16"`` or ``"uint8"``.
        layout: ``"CHW"`` or ``"HWC"``, the order of the values of a patch.
        photo: The component that holds the photo, the same as that of ``token_budget``; ``None``: the only one.
        orient: Turn each photo upright by its EXIF orientation; ``None``: if the data set knows the orientations, see
            `Components.orient`. The plan groups upright photos; with ``False`` turned ones do not fit their batch well.
        text: A component with text in UTF-8, such as ``"txt"``, that is delivered as it is.

    Raises:
        ValueError: If ``dtype`` or ``layout`` is not one of these, or ``flip`` is not in [0, 1]; when the loader is
            opened: if it has no budget of tokens.
    """
    check_output(dtype=dtype, layout=layout)
    if not 0 <= as_number("flip", flip) <= 1:
        raise ValueError(f"flip must be in [0, 1], got {flip}")

    def graph(components: Components, random: Random) -> dict[str, Any]:
        name = components.photo(photo)
        upright = components.orient(orient)
        size_of = components.size(name, orient=upright)

        @once_a_batch
        def grids(batch: Batch) -> Int32s:
            return patch_grids(batch, *size_of(batch))

        whole = components.array(lambda batch: np.zeros((len(batch), 2), np.int32))
        shape = components.array(lambda batch: np.stack(size_of(batch), axis=1))
        pixels = decode_crop(components, name, whole, shape, types.RGB, device=components.device, orient=upright)
        size = components.array(lambda batch: (grids(batch) * _side(batch)).astype(np.float32))
        pixels = fn.resize(pixels, size=size, interp_type=types.INTERP_LINEAR, antialias=True)
        mirror = random.coin_flip(flip, stream="flip")
        pixels = normalised(pixels, None, None, mirror=mirror, mean=mean, std=std, dtype=dtype, layout="HWC")
        # [rows * P, columns * P, 3] -> [rows, P, columns, P, 3] -> [rows, columns, 3, P, P] -> [patches, 3 * P * P]
        pixels = fn.reshape(pixels, shape=components.array(lambda batch: _split(grids(batch), _side(batch))), layout="")
        order = [0, 2, 4, 1, 3] if layout == "CHW" else [0, 2, 1, 3, 4]
        pixels = fn.transpose(pixels, perm=order)
        pixels = fn.reshape(pixels, shape=components.array(lambda batch: _rows(grids(batch), _side(batch))))
        outputs = {"patches": components.packed(pixels), "grid": components.array(grids)} | label_output(components)
        return outputs if text is None else outputs | {"text": components.text(text)}

    return graph


def patch_grids(batch: Batch, height: Int32s, width: Int32s) -> Int32s:
    """Compute rows and columns of the patches of a batch's photos, from their sizes: int32 [B, 2].

    A photo that replaces a bad one has no more patches than the batch has space for.

    Raises:
        ValueError: If the loader has no budget of tokens.
    """
    budget = _budget(batch)
    grids = budget.grids(height, width)
    if batch.substituted:
        places = list(batch.substituted)
        others = np.delete(grids, places, axis=0).prod(axis=1).sum()
        share = (budget.max_tokens - others) // len(places)
        limit = np.full(len(grids), budget.max_photo_tokens)
        limit[places] = np.clip(share, 1, budget.max_photo_tokens)
        grids = budget.grids(height, width, at_most=limit)
    return grids.astype(np.int32)


def _budget(batch: Batch) -> TokenBudget:
    if not isinstance(batch.shape, TokenBudget):
        raise ValueError(
            "the graph asks for the budget of tokens, and the loader has none; pass "
            "select=dali_pipes.Select(tokens=dali_pipes.token_budget(max_tokens=...))"
        )
    return batch.shape


def _side(batch: Batch) -> int:
    return _budget(batch).patch


def _split(grids: Int32s, side: int) -> Int32s:
    """int32 [B, 5]: the shape of each photo with its patches apart, (rows, P, columns, P, 3)."""
    sides = np.full(len(grids), side)
    return np.stack([grids[:, 0], sides, grids[:, 1], sides, np.full(len(grids), 3)], axis=1).astype(np.int32)


def _rows(grids: Int32s, side: int) -> Int32s:
    """int32 [B, 2]: the shape of each photo as a list of patches."""
    return np.stack([grids[:, 0] * grids[:, 1], np.full(len(grids), 3 * side * side)], axis=1).astype(np.int32)
