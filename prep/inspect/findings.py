"""The findings of `prep verify` and `prep view`: their kinds, and those that shard indexes alone show."""

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from dali_pipes.arrays import Bools
from dali_pipes.errors import printable
from dali_pipes.formats.names import LABEL_COMPONENT
from dali_pipes.formats.photo_header import (
    PHOTO_FORMATS,
    PhotoHeader,
    PhotoRules,
    bytes_problem,
    have_bad_bytes,
    size_problem,
)
from dali_pipes.formats.photo_names import PhotoRoles
from dali_pipes.formats.shard_index import ShardIndex

KINDS: Mapping[str, str] = {
    # Differences between the manifest and the store.
    "gone": "shards that should be there and are not",
    "beyond": "shards that the manifest does not list",
    # Faults of a shard: no loader can read the shard.
    "archive": "shards that are not complete tars",
    "split": "samples whose members do not stand together",
    "twice": "components that a sample has twice",
    "name": "members whose names cannot be keys",
    "link": "components that are links",
    # Faults of a sample: the sample can be left out.
    "duplicate": "keys that come more than once",
    "missing": "components that samples lack",
    "photo": "photos that cannot be decoded",
    "mask": "masks that are not 8-bit gray PNGs",
    "mask size": "masks of another size than their photo",
    "mask values": "masks with other values",
    "label": "labels that are not integers, or not in the class table",
    # Faults of the files that describe the shards.
    "manifest": "shards that are not as the manifest says",
    "index": "shard indexes that do not fit",
    "columns": "a column file that does not fit",
    # Notes: our loaders are not affected.
    "note": "notes",
}
"""Kind of finding -> the words that follow its count on the command line."""
SAMPLE_KINDS = frozenset({"duplicate", "missing", "photo", "mask", "mask size", "mask values", "label"})
"""Kinds for which it is enough to leave out the sample. For the others, pack or index again."""
_TEXT_CHARS = 1000  # of an error's text, which may name several members


class ShardFinding(NamedTuple):
    """One fault, or a note."""

    kind: str
    """A key of `KINDS`."""
    text: str
    """The description; in messages it follows shard, key and component."""
    shard: str = ""
    """Empty for a finding of the set as a whole."""
    key: str = ""
    """Empty for a finding of the shard."""
    component: str = ""

    def __str__(self) -> str:
        parts = (("shard", self.shard), ("key", self.key), ("component", self.component))
        named = ", ".join(f"{what} '{printable(name)}'" for what, name in parts if name)
        text = printable(self.text, max_chars=_TEXT_CHARS)
        return f"{named}: {text}" if named else text


# By the shard index, as a loader judges before its first batch


def refused_photos(index: ShardIndex, rules: PhotoRules) -> Iterator[ShardFinding]:
    """Photos that a loader refuses by format, size or bytes."""
    for component, photo in index.photos.items():
        formats, sizes = photo.format.astype(np.int64), index.sizes[component]
        heights, widths = photo.height.astype(np.int64), photo.width.astype(np.int64)
        are_bad = have_bad_bytes(sizes) | rules.are_bad(formats, heights, widths)
        for at in np.flatnonzero((index.offsets[component] >= 0) & are_bad).tolist():
            header = PhotoHeader(PHOTO_FORMATS[formats[at]], int(heights[at]), int(widths[at]))
            text = bytes_problem(int(sizes[at])) or rules.problem(header) or "is refused"
            yield ShardFinding("photo", text, index.shard, index.keys[at], component)


def wrong_mask_sizes(index: ShardIndex, roles: PhotoRoles) -> Iterator[ShardFinding]:
    """Masks of another size than their photo, both upright."""
    for photo, mask in itertools.product(roles.photos, roles.masks):
        if photo not in index.photos or mask not in index.photos:
            continue
        both = index.photos[photo], index.photos[mask]
        sizes = np.array([found.upright_size for found in both])  # [photo and mask, height and width, samples]
        stored = np.array([(found.height, found.width) for found in both])
        differ = (sizes > 0).all(axis=(0, 1)) & (sizes[0] != sizes[1]).any(axis=0)
        for at in np.flatnonzero(differ).tolist():
            fit_as_stored = bool((stored[0, :, at] == stored[1, :, at]).all())
            text = size_problem(photo, *sizes[:, :, at].tolist(), fit_as_stored=fit_as_stored)
            yield ShardFinding("mask size", text, index.shard, index.keys[at], mask)


def unknown_labels(index: ShardIndex, classes: Collection[int]) -> Iterator[ShardFinding]:
    """Labels that the class table lacks; without a table every integer is a label."""
    if index.labels is None or not classes:
        return
    for at in np.flatnonzero(index.has_label & ~np.isin(index.labels, list(classes))).tolist():
        text = f"class id {index.labels[at]} is not in the class table"
        yield ShardFinding("label", text, index.shard, index.keys[at], LABEL_COMPONENT)


def usual_components(components: Mapping[str, int], num_samples: int) -> list[str]:
    """The components that more than half of the samples have; every sample is expected to have them."""
    return [name for name, number in components.items() if 2 * number > num_samples]


def missing_components(
    shard: str, keys: Sequence[str], has: Mapping[str, Bools], *, usual: Sequence[str], roles: PhotoRoles
) -> Iterator[ShardFinding]:
    """Usual components that samples lack; ``has`` tells for each component of the shard which samples have it."""
    nowhere = np.zeros(len(keys), np.bool_)
    for component in usual:
        # A sample has one of the alternatives for the photo.
        alternatives = roles.photos if component in roles.photos else (component,)
        lacks = ~np.any([has.get(name, nowhere) for name in alternatives], axis=0)
        for at in np.flatnonzero(lacks).tolist():
            found = ", ".join(name for name in sorted(has) if has[name][at]) or "none"
            yield ShardFinding("missing", f"is missing (found: {found})", shard, keys[at], component)
