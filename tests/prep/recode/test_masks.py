"""Masks keep their values: resized by the nearest neighbour, or rewritten."""

import io

import numpy as np
import pytest
from PIL import Image

from prep.pack.check import mask_problem
from prep.photos.decoders import Undecodable
from prep.recode.photos import is_plain_mask, optimized_mask, resized_mask
from tests.prep.recode.photos import pixels, with_odd_notes
from tests.shards import image_bytes, mask_bytes

VALUES = np.random.default_rng(0).integers(0, 256, (31, 47)).astype(np.uint8)


def palette_mask() -> bytes:
    mask = Image.fromarray(VALUES % 7)
    mask = mask.convert("P")
    mask.putpalette([number for index in range(256) for number in (index, 255 - index, 7)])
    return image_bytes(mask, "PNG", transparency=0, bits=8)


def test_a_resized_mask_has_values_of_its_nearest_pixels() -> None:
    small = resized_mask(image_bytes(Image.fromarray(VALUES)), 10, 20)
    # The pixel in which the middle of the new one lies.
    rows = (np.arange(10) * 2 + 1) * 31 // 20
    columns = (np.arange(20) * 2 + 1) * 47 // 40
    assert np.array_equal(pixels(small), VALUES[rows][:, columns])


@pytest.mark.parametrize("data", [mask_bytes(2, 97, 61), palette_mask(), image_bytes(Image.fromarray(VALUES))])
def test_a_rewritten_mask_has_the_same_pixels_and_palette(data: bytes) -> None:
    copy = optimized_mask(data)
    assert np.array_equal(pixels(copy), pixels(data))
    before, after = (Image.open(io.BytesIO(one)) for one in (data, copy))
    assert (before.mode, before.getpalette(), before.info.get("transparency")) == (
        after.mode,
        after.getpalette(),
        after.info.get("transparency"),
    )
    assert mask_problem(copy) is None
    assert optimized_mask(copy) == copy


def test_other_pngs_are_left_as_they_are() -> None:
    for photo in (Image.fromarray(VALUES).convert("RGB"), Image.fromarray(VALUES).convert("1")):
        data = image_bytes(photo)
        assert not is_plain_mask(data)
        assert optimized_mask(data) == data
        with pytest.raises(Undecodable, match="is no PNG of 8 bits with one channel"):
            resized_mask(data, 3, 3)


def test_a_mask_is_rewritten_whatever_its_texts_are() -> None:
    data = image_bytes(Image.fromarray(VALUES))
    assert optimized_mask(with_odd_notes(data)) == optimized_mask(data)


def test_a_damaged_mask_cannot_be_resized() -> None:
    data = mask_bytes(3, 40, 30)
    with pytest.raises(Undecodable, match="cannot be decoded"):
        resized_mask(data[:-30], 3, 3)
