"""What all loaders of a run make of a sample: the segmentation, the classification or the encoded recipe.

``segmentation`` is a centre crop of photo and mask, normalised. ``classification`` is a crop of any size at any place,
resized to one size, flipped or not, and normalised, as `torchvision.transforms.RandomResizedCrop` prepares a photo for
training. So that outputs can be compared, the crops are given: each photo has one of `NUM_CROPS` crops, drawn as
``RandomResizedCrop`` draws them from a square photo, in all loaders and epochs. It follows from the size of the photo's
file in bytes, which every loader knows before it decodes. ``encoded`` decodes nothing: a batch has the files of its
photos, one after the other in one tensor, with the place of each.
"""

import functools
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from bench.loaders.protocol import Recipe
from dali_pipes.arrays import Int64s
from dali_pipes.data_set.indexing import find_manifest, index_in_memory
from dali_pipes.errors import DataError
from dali_pipes.formats.names import LABEL_COMPONENT
from dali_pipes.formats.photo_names import ComponentCounts, find_mask, find_photo, has_mask
from dali_pipes.order.randomness import Stream

if TYPE_CHECKING:
    from dali_pipes.store.shard_set import ShardSet

NUM_CROPS = 64
"""A power of two: the crop's number is the last bits of the file's size."""
WHOLE = 256


class Crop(NamedTuple):
    """A crop of one photo, in pixels."""

    top: int
    left: int
    height: int
    width: int
    is_flipped: bool


@functools.cache
def crop_table() -> Int64s:
    """The crops: int64 [64, 5], top, left, height and width in shares of 256, and 1 where the photo is flipped."""
    from dali_pipes.graph.random import CROP_TRIES, resized_crop  # loads DALI, which peers go without

    numbers = np.arange(NUM_CROPS)
    whole = np.full(NUM_CROPS, WHOLE, np.int32)
    uniforms = Stream(0, 0, "crop").uniforms(numbers, 2 * CROP_TRIES + 2)
    crops = resized_crop(whole, whole, uniforms, scale=(0.08, 1.0), ratio=(3 / 4, 4 / 3))
    flips = Stream(0, 0, "flip").uniforms(numbers, 1) < 0.5
    return np.concatenate([crops, flips], axis=1).astype(np.int64)


def crops_of(num_bytes: Int64s, heights: Int64s, widths: Int64s) -> Int64s:
    """The crops of photos, from the sizes of their files and their heights and widths in pixels, all int64 [B].

    Returns:
        int64 [B, 5]: first row, first column, rows, columns, 1 where it is flipped.
    """
    shares = crop_table()[num_bytes % NUM_CROPS]
    sizes = np.stack([heights, widths, heights, widths], axis=1)
    crops = shares[:, :4] * sizes // WHOLE
    crops[:, 2:] = np.maximum(crops[:, 2:], 1)
    return np.concatenate([crops, shares[:, 4:]], axis=1)


def crop_of(num_bytes: int, *, height: int, width: int) -> Crop:
    """The crop of one photo: see `crops_of`."""
    crops = crops_of(*(np.array([value], np.int64) for value in (num_bytes, height, width)))
    top, left, rows, columns, is_flipped = crops[0].tolist()
    return Crop(top, left, rows, columns, bool(is_flipped))


class ChosenRecipe(NamedTuple):
    """A recipe and the components that it reads."""

    recipe: Recipe
    photo: str
    mask: str | None


def choose_recipe(
    shards: "ShardSet", *, recipe: Recipe | None = None, photo: str | None = None, mask: str | None = None
) -> ChosenRecipe:
    """Choose what was not named by the components of the data set; without a manifest the shards are read for them."""
    if recipe not in (None, "segmentation") and mask is not None:
        raise ValueError(f"--recipe {recipe} takes no mask, got --mask '{mask}'; drop one of them")
    counts = _counts(shards)
    photo = photo or find_photo({"": counts}, besides=mask or "")
    if recipe is None:
        recipe = "segmentation" if mask is not None or has_mask({"": counts}, photo=photo) else "classification"
    if recipe == "segmentation":
        mask = mask or find_mask({"": counts}, photo=photo)
    if not counts.components.get(LABEL_COMPONENT):
        raise DataError(
            f"'{shards.url}': no sample has a label, and loaders are compared by photos and labels; pack the samples "
            f"with a component '{LABEL_COMPONENT}': dali-pipes prep pack imagefolder, or table"
        )
    return ChosenRecipe(recipe, photo, mask)


def find_components(shards: "ShardSet", *, photo: str | None, mask: str | None) -> tuple[str, str | None]:
    """Find the photo, and the mask if the samples have one by its name; names that are given are kept."""
    if photo is not None and mask is not None:
        return photo, mask
    sets = {"": _counts(shards)}
    photo = photo or find_photo(sets, besides=mask or "")
    if mask is None and has_mask(sets, photo=photo):
        mask = find_mask(sets, photo=photo)
    return photo, mask


def _counts(shards: "ShardSet") -> ComponentCounts:
    manifest = find_manifest(shards) or index_in_memory(shards).manifest
    return ComponentCounts(manifest.components, manifest.num_samples)
