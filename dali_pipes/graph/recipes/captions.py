"""A graph for photos with captions: the photo, the text, and the tokens that were made of it when it was packed."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from nvidia.dali import fn, types

from dali_pipes.arguments import as_integer
from dali_pipes.arrays import Int64s
from dali_pipes.graph.definition import Graph
from dali_pipes.graph.inputs import Components, once_a_batch
from dali_pipes.graph.parse import npy_array
from dali_pipes.graph.pipelines import IMAGENET_MEAN, IMAGENET_STD, Dtype, Layout, check_crop, decode_crop, normalised
from dali_pipes.graph.random import Random
from dali_pipes.reader.batch import Batch

Int32s = npt.NDArray[np.int32]


def captions(
    *,
    crop: int | tuple[int, int] = 224,
    scale: tuple[float, float] | None = (0.9, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
    flip: float = 0.0,
    mean: Sequence[float] = IMAGENET_MEAN,
    std: Sequence[float] = IMAGENET_STD,
    dtype: Dtype = "float32",
    layout: Layout = "CHW",
    photo: str | None = None,
    orient: bool | None = None,
    text: str | None = "txt",
    tokens: str | None = "tokens.npy",
    length: int = 77,
    padding: int = 0,
    end: int | None = None,
) -> Graph:
    """Resize a random crop of the photo to ``crop`` and normalise it, and give its caption as text and as tokens.

    For validation pass ``scale=None``: then the crop is the largest square about the centre.

    Outputs:
        image: ``dtype`` [B, 3, crop, crop] (``layout="CHW"``) or [B, crop, crop, 3] (``"HWC"``), on the loader's
            device: ``(pixel / 255 - mean) / std``, or with ``dtype="uint8"`` the pixels themselves.
        text: A list of B `str`; only if ``text`` is not ``None``.
        tokens: int64 [B, length], on the loader's device: the token ids, cut off at ``length``; ``padding`` behind the
            last one. Only if ``tokens`` is not ``None``.
        attention_mask: int64 [B, length], on the loader's device: 1 for a token, 0 behind the last one.

    A sample is bad if its text is not UTF-8, or if its tokens are not an array of integers [N] that are 0 or more. With
    ``missing="empty"``, a sample that lacks the tokens has none.

    Args:
        crop: Height and width of the image, in pixels: one number, or two equal ones.
        scale: Smallest and largest area of the crop, as a share of the photo's; ``None``: see above.
        ratio: Smallest and largest width / height of the crop.
        flip: Probability of a horizontal flip. (A caption may say left or right.)
        mean: Red, green, blue, of pixels in 0..1.
        std: Likewise.
        dtype: Of the image: ``"float32"``, ``"float16"`` or ``"uint8"``.
        layout: ``"CHW"`` or ``"HWC"``.
        photo: The component that holds the photo; ``None``: the only one, see `Components.photo`.
        orient: Turn each photo upright by its EXIF orientation, as Pillow's ``exif_transpose`` does; ``None``: if the
            data set knows the orientations, see `Components.orient`.
        text: The component that holds the caption; ``None`` leaves it out.
        tokens: The component that holds its token ids, a ``.npy`` file of integers [N]; ``None`` leaves them out.
        length: Tokens of each sample in a batch.
        padding: The token id behind the last token.
        end: The token id that ends a caption: if tokens are cut off, it replaces the last one that is left. ``None``:
            nothing is replaced.

    Raises:
        TypeError: If an argument has another type.
        ValueError: If ``crop`` is not positive or not square, ``dtype`` or ``layout`` is not one of these, ``length``
            is not positive, or both ``text`` and ``tokens`` are ``None``.
    """
    crop = check_crop(crop=crop, dtype=dtype, layout=layout)
    length, padding = as_integer("length", length), as_integer("padding", padding)
    end = None if end is None else as_integer("end", end)
    if length < 1:
        raise ValueError(f"length must be positive, got {length}")
    if text is None and tokens is None:
        raise ValueError("text or tokens must name a component, got None for both; without captions use another graph")

    def graph(components: Components, random: Random) -> dict[str, Any]:
        name = components.photo(photo)
        upright = components.orient(orient)
        if scale is None:
            start, shape = _centre_square(components, name, orient=upright)
        else:
            start, shape = random.resized_crop(name, scale=scale, ratio=ratio, orient=upright, stream="crop")
        pixels = decode_crop(components, name, start, shape, types.RGB, device=components.device, orient=upright)
        pixels = fn.resize(pixels, size=(crop, crop), interp_type=types.INTERP_LINEAR, antialias=True)
        mirror = random.coin_flip(flip, stream="flip")
        image = normalised(pixels, crop, None, mirror=mirror, mean=mean, std=std, dtype=dtype, layout=layout)
        outputs: dict[str, Any] = {"image": image}
        if text is not None:
            outputs["text"] = components.text(text)
        if tokens is not None:
            padded = components.parsed(
                tokens,
                lambda data: pad_tokens(read_tokens(data), length=length, padding=padding, end=end),
                dtype=np.int64,
                ndim=2,
                empty=lambda: pad_tokens(np.zeros(0, np.int64), length=length, padding=padding, end=end),
            )
            outputs |= {"tokens": padded[0], "attention_mask": padded[1]}
        return outputs

    return graph


def read_tokens(data: npt.NDArray[np.uint8]) -> Int64s:
    """Read the token ids of a ``.npy`` file, of any dtype of integers: int64 [N].

    Raises:
        ValueError: If it holds something else, or a negative id.
    """
    array = npy_array(data)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(f"expected token ids, integers [N], found {array.dtype} {list(array.shape)}")
    if array.size and (array.min() < 0 or array.max() > np.iinfo(np.int64).max):
        wrong = array.min() if array.min() < 0 else array.max()
        raise ValueError(f"expected token ids in [0, 2**63), found {wrong}")
    return array.astype(np.int64)


def pad_tokens(ids: Int64s, *, length: int, padding: int, end: int | None) -> Int64s:
    """Bring token ids to one length. Row 0 has the ids, row 1 has 1 for a token and 0 for padding: int64 [2, length].

    >>> pad_tokens(np.array([5, 6, 7]), length=4, padding=0, end=9).tolist()
    [[5, 6, 7, 0], [1, 1, 1, 0]]
    >>> pad_tokens(np.array([5, 6, 7]), length=2, padding=0, end=9).tolist()
    [[5, 9], [1, 1]]
    """
    rows = np.stack([np.full(length, padding, np.int64), np.zeros(length, np.int64)])
    num = min(len(ids), length)
    rows[0, :num], rows[1, :num] = ids[:num], 1
    if len(ids) > length and end is not None:
        rows[0, -1] = end
    return rows


def _centre_square(components: Components, photo: str, *, orient: bool) -> tuple[Any, Any]:
    """Nodes of start and shape, int32 [2] (rows, columns), of the largest square about the centre."""
    size_of = components.size(photo, orient=orient)

    @once_a_batch
    def sizes(batch: Batch) -> Int32s:
        return np.stack(size_of(batch), axis=1)  # [B, (height, width)]

    def sides(batch: Batch) -> Int32s:
        return np.repeat(sizes(batch).min(axis=1, keepdims=True), 2, axis=1)

    return components.array(lambda batch: (sizes(batch) - sides(batch)) // 2), components.array(sides)
