"""Draw a contact sheet of some samples: photos, photos with their masks, labels."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

from dali_pipes.errors import DataError
from dali_pipes.formats.shard_index import ShardIndex
from dali_pipes.progress import bar
from dali_pipes.store.shard_set import ShardSet
from prep.inspect.chosen import choose_samples, class_ids
from prep.inspect.contact_sheet import TILE, Cell, contact_sheet, mask_colours
from prep.inspect.indexed_set import IndexedSet
from prep.inspect.shown_sample import read_sample

MAX_CELLS = 1000
"""The largest number of samples on one sheet: it is then 53,000 pixels high."""


@dataclass(kw_only=True)
class Sheet:
    """A contact sheet and its contents."""

    picture: Image.Image
    keys: list[str]
    """Keys of the samples, in order."""
    num_matching: int
    """The number of samples from which they were drawn."""
    mask_values: list[int]
    """Values of the masks' pixels, sorted."""
    undecodable: list[str]
    """Components that could not be decoded, and the reasons; a gray field replaces such a photo."""


def draw_sheet(
    shards: ShardSet,
    *,
    num: int = 24,
    seed: int = 0,
    labels: Sequence[str] = (),
    keys: Sequence[str] = (),
    photo: str | None = None,
    mask: str | None = None,
    show_progress: bool = False,
) -> Sheet:
    """Draw samples of some shards as one picture.

    Args:
        shards: The shards.
        num: The most samples.
        seed: Draws the samples; they are shown in the shards' order.
        labels: Class ids or names: only samples of these classes. Empty: of all classes.
        keys: Only samples with these keys, in this order; then ``seed`` is not used.
        photo: The component to show; ``None``: the first photo that is not a mask, see `is_mask_name`.
        mask: The component to lay over it; ``None``: the first mask; an empty name: no mask.
        show_progress: Draw bars.

    Raises:
        DataError: If there is no sample, key, class or component of this name, or the manifest, an index or a shard
            cannot be read.
        ValueError: If ``num`` is not in [1, `MAX_CELLS`].
    """
    if not 1 <= num <= MAX_CELLS:
        raise ValueError(f"num must be in [1, {MAX_CELLS}], got {num}")
    indexed = IndexedSet(shards, show_progress=show_progress)
    if not indexed.manifest.num_samples:
        raise DataError(f"'{shards.url}' holds no sample to show")
    chosen, num_matching = choose_samples(indexed, class_ids(indexed, labels), keys, num=num, seed=seed)
    cells: list[Cell] = []
    named: list[str] = []
    undecodable: list[str] = []
    row_of_index, index = -1, None
    with bar(what="view", total=len(chosen), unit="samples", shown=show_progress, delay_s=1) as drawn:
        for row, at in chosen:
            if index is None or row != row_of_index:
                row_of_index, index = row, indexed.read(row)
            cells.append(_cell(indexed, row, at, index, photo=photo, mask=mask, undecodable=undecodable))
            named.append(index.keys[at])
            drawn.update(1)
    values: set[int] = set()
    for cell in cells:
        values.update([] if cell.mask is None else np.unique(cell.mask).tolist())
    which = "as named" if keys else f"drawn by seed {seed}"
    picture = contact_sheet(
        cells,
        title=shards.url,
        subtitle=f"{len(cells)} of {num_matching} samples, {which}"
        + (f"; class {', '.join(labels)}" if labels else ""),
        colours=mask_colours(values),
    )
    return Sheet(
        picture=picture,
        keys=named,
        num_matching=num_matching,
        mask_values=sorted(values),
        undecodable=undecodable,
    )


def _cell(
    indexed: IndexedSet,
    row: int,
    at: int,
    index: ShardIndex,
    *,
    photo: str | None,
    mask: str | None,
    undecodable: list[str],
) -> Cell:
    sample = read_sample(indexed, row, at, index, side=TILE, photo=photo, mask=mask)
    if sample.photo is None and not sample.problems:
        there = [component for component, offsets in index.offsets.items() if offsets[at] >= 0]
        raise DataError(
            f"shard '{sample.shard}', key '{sample.key}': no photo to show (found: {', '.join(there) or 'none'})"
        )
    undecodable += map(str, sample.problems)
    shown_photo, note = sample.photo, sample.key
    if shown_photo is None:
        shown_photo, note = np.full((TILE, TILE, 3), 225, np.uint8), f"cannot be decoded: {sample.key}"
    elif sample.is_mask_of_another_shape:
        note = f"mask of another shape: {sample.key}"
    label = ""
    if sample.label is not None:
        label = str(sample.label)
        if (name := indexed.manifest.classes.get(sample.label)) is not None:
            label = f"{name} ({label})"
    return Cell(photo=shown_photo, mask=sample.mask, label=label or note, note=note if label else "")
