"""A graph for photos with captions: the photo, the text, and the tokens that were made of it when it was packed."""

from typing import Any, Unpack

import numpy as np
import numpy.typing as npt

from dali_pipes.arguments import as_integer
from dali_pipes.arrays import Int32s, Int64s
from dali_pipes.graph.definition import Graph
from dali_pipes.graph.inputs import Components, once_a_batch
from dali_pipes.graph.parse import npy_array
from dali_pipes.graph.pipelines import ImageForm, ImageOptions, check_crop, check_range, covering_crop
from dali_pipes.graph.random import Random
from dali_pipes.reader.batch import Batch


def captions(
    *,
    crop: int | tuple[int, int] = 224,
    scale: tuple[float, float] | None = (0.9, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
    flip: float = 0.0,
    text: str | None = "txt",
    tokens: str | None = "tokens.npy",
    length: int = 77,
    padding: int = 0,
    end: int | None = None,
    **image: Unpack[ImageOptions],
) -> Graph:
    """Resize a random crop of the photo to ``crop`` and normalise it, and give its caption as text and as tokens.

    For validation pass ``scale=None``: then the crop is the largest one of the image's shape about the centre.

    Outputs:
        image: [B, 3, *crop], see `ImageOptions`.
        text: A list of B `str`; only if ``text`` is not ``None``.
        tokens: int64 [B, length], on the loader's device: the token ids, cut off at ``length``; ``padding`` behind the
            last one. Only if ``tokens`` is not ``None``.
        attention_mask: int64 [B, length], on the loader's device: 1 for a token, 0 behind the last one.

    A sample is bad if its text is not UTF-8, or if its tokens are not an array of integers [N] that are 0 or more. With
    ``missing="empty"``, a sample that lacks the tokens has none.

    Args:
        crop: Height and width of the image, in pixels: two numbers, or one of a square.
        scale: Smallest and largest area of the crop, as a share of the photo's; ``None``: see above.
        ratio: Smallest and largest width / height of the crop.
        flip: Probability of a horizontal flip. (A caption may say left or right.)
        text: The component that holds the caption; ``None`` leaves it out.
        tokens: The component that holds its token ids, a ``.npy`` file of integers [N]; ``None`` leaves them out.
        length: Tokens of each sample in a batch.
        padding: The token id behind the last token.
        end: The token id that ends a caption: if tokens are cut off, it replaces the last one that remains. ``None``
            replaces nothing.
        **image: See `ImageOptions`.

    Raises:
        TypeError: If an argument has another type.
        ValueError: If an argument is not one of its values, or both ``text`` and ``tokens`` are ``None``.
    """
    image_shape, form = check_crop(crop), ImageForm(**image)
    if scale is not None:
        check_range("scale", scale, most=1)
    check_range("ratio", ratio)
    length, padding = as_integer("length", length), as_integer("padding", padding)
    end = None if end is None else as_integer("end", end)
    if length < 1:
        raise ValueError(f"length must be positive, got {length}")
    if text is None and tokens is None:
        raise ValueError("text or tokens must name a component, got None for both; without captions use another graph")

    def graph(components: Components, random: Random) -> dict[str, Any]:
        photo = form.photo_of(components)

        @once_a_batch
        def largest(batch: Batch) -> Int32s:
            shapes = np.repeat(np.array([image_shape], np.int32), len(batch), axis=0)
            return covering_crop(photo.sizes(batch), shapes, None)

        if scale is None:
            start = components.array(lambda batch: largest(batch)[:, :2])
            shape = components.array(lambda batch: largest(batch)[:, 2:])
        else:
            start, shape = photo.random_crop(random, scale=scale, ratio=ratio)
        pixels, mirror = photo.decoded_crop(start, shape), random.coin_flip(flip, stream="flip")
        outputs: dict[str, Any] = {"image": form.image(components, pixels, size=image_shape, mirror=mirror)}
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
    """Read the token ids of a ``.npy`` file, of any dtype of integers: int64 [N]."""
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
