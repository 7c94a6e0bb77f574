"""Draw a contact sheet of some samples: photos, photos with their masks, labels."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from PIL import Image

from dali_pipes.errors import DataError, shown
from dali_pipes.formats.names import LABEL_COMPONENT
from dali_pipes.formats.photo_header import is_photo
from dali_pipes.formats.shard_index import ShardIndex
from dali_pipes.progress import bar
from dali_pipes.store.shard_set import ShardSet
from prep.inspect.contact_sheet import TILE, Cell, contact_sheet, mask_colours
from prep.inspect.indexed_set import IndexedSet
from prep.photos.decoders import ANY_FORMAT, Undecodable, check_size, decode, open_decoder
from prep.photos.masks import is_mask_name

MAX_CELLS = 1000
"""The largest number of samples on one sheet: it is then 53,000 pixels high."""

# Numbers of 18 digits fit into 64 bits.
_CLASS_ID = re.compile(r"-?[0-9]{1,18}")

Int64s = npt.NDArray[np.int64]
Pixels = npt.NDArray[np.uint8]


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
    chosen, num_matching = _choose(indexed, _class_ids(indexed, labels), keys, num=num, seed=seed)
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


def _class_ids(indexed: IndexedSet, labels: Sequence[str]) -> Int64s | None:
    """The ids of classes that are given by id or by name; ``None``: all classes."""
    if not labels:
        return None
    by_name = {name: label for label, name in indexed.manifest.classes.items()}
    found = []
    for text in labels:
        if text in by_name:
            found.append(by_name[text])
        elif _CLASS_ID.fullmatch(text):
            found.append(int(text))
        else:
            table = shown(sorted(by_name)) if by_name else "none: the set has no class table, name the id"
            raise DataError(f"no class '{text}' in '{indexed.shards.url}' (found: {table})")
    return np.array(found, np.int64)


def _choose(
    indexed: IndexedSet, wanted: Int64s | None, keys: Sequence[str], *, num: int, seed: int
) -> tuple[list[tuple[int, int]], int]:
    """Choose the samples to show: shard and row of each, and the number of samples from which they were chosen."""
    if wanted is None and not keys:
        total = indexed.manifest.num_samples
        ordinals = np.sort(np.random.default_rng(seed).choice(total, min(num, total), replace=False))
        stops = np.cumsum(indexed.manifest.samples)
        rows = np.searchsorted(stops, ordinals, side="right")
        firsts = (stops - indexed.manifest.samples)[rows]
        return list(zip(rows.tolist(), (ordinals - firsts).tolist(), strict=True)), total
    by_key: dict[str, tuple[int, int]] = {}
    matching: list[npt.NDArray[np.int64]] = []
    left = set(keys)
    for row, index in indexed.each():
        if keys:
            for at, key in enumerate(index.keys) if left else ():
                if key in left:
                    left.discard(key)
                    by_key[key] = (row, at)
            continue
        if index.labels is None:
            continue
        assert wanted is not None
        ats = np.flatnonzero(np.isin(index.labels, wanted) & (index.offsets[LABEL_COMPONENT] >= 0))
        matching.append(np.stack([np.full(len(ats), row), ats], axis=1))
    if keys:
        if left:
            raise DataError(f"no sample of '{indexed.shards.url}' has key {shown([k for k in keys if k in left])}")
        return [by_key[key] for key in keys][:num], len(keys)
    found = np.concatenate([np.zeros((0, 2), np.int64), *matching])
    if not len(found):
        assert wanted is not None
        raise DataError(f"no sample of '{indexed.shards.url}' is of class {', '.join(map(str, wanted.tolist()))}")
    drawn = np.sort(np.random.default_rng(seed).choice(len(found), min(num, len(found)), replace=False))
    return [(row, at) for row, at in found[drawn].tolist()], len(found)


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
    shard, key = indexed.manifest.names[row], index.keys[at]
    there = [component for component, offsets in index.offsets.items() if offsets[at] >= 0]
    photos = [component for component in there if is_photo(component)]
    masks = [component for component in photos if is_mask_name(component, set(photos))]
    if photo is None:
        photo = next((component for component in photos if component not in masks and component != mask), None)
    if photo is None or photo not in there:
        wanted = f"component '{photo}'" if photo is not None else "photo"
        raise DataError(f"shard '{shard}', key '{key}': no {wanted} to show (found: {', '.join(there) or 'none'})")
    if mask is None:
        mask = next((component for component in masks if component != photo), "")
    elif mask and mask not in there:
        raise DataError(f"shard '{shard}', key '{key}': no component '{mask}' to show (found: {', '.join(there)})")

    def pixels_of(component: str) -> Pixels | None:
        start, size = int(index.offsets[component][at]), int(index.sizes[component][at])
        is_mask = component == mask
        try:
            check_size(size)
            data = indexed.shards.store.read_range(shard, start=start, size=size)
            _, pixels = decode(open_decoder("pillow"), data, rules=ANY_FORMAT, output="rgb")
        except Undecodable as exc:
            undecodable.append(f"shard '{shard}', key '{key}', component '{component}': {exc}")
            return None
        # Scale each photo down at once, because a sheet holds many. The channels of an 8-bit gray photo are equal.
        resampling = Image.Resampling.NEAREST if is_mask else Image.Resampling.LANCZOS
        picture = Image.fromarray(pixels[..., 0] if is_mask else pixels)
        scale = TILE / max(picture.size)
        height, width = (max(1, round(side * scale)) for side in (picture.height, picture.width))
        return np.asarray(picture.resize((width, height), resampling))

    shown_photo, shown_mask = pixels_of(photo), pixels_of(mask) if mask else None
    note = key
    if shown_photo is None:
        shown_photo, shown_mask, note = np.full((TILE, TILE, 3), 225, np.uint8), None, f"cannot be decoded: {key}"
    if shown_mask is not None and shown_mask.shape != shown_photo.shape[:2]:
        shown_mask, note = None, f"mask of another shape: {key}"
    label = ""
    if index.labels is not None and LABEL_COMPONENT in there:
        label = str(index.labels[at])
        if (name := indexed.manifest.classes.get(int(index.labels[at]))) is not None:
            label = f"{name} ({label})"
    return Cell(photo=shown_photo, mask=shown_mask, label=label or note, note=note if label else "")
