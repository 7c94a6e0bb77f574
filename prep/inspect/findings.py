"""The findings of `prep verify` and `prep view`: their kinds, and those that shard indexes alone show."""

import itertools
import re
from collections import Counter
from collections.abc import Mapping, Set
from typing import NamedTuple

import numpy as np

from dali_pipes.errors import printable
from dali_pipes.formats.names import LABEL_COMPONENT
from dali_pipes.formats.photo_header import PHOTO_FORMATS, PhotoHeader
from dali_pipes.formats.photo_rules import PhotoRules, bytes_problem, have_bad_bytes, size_problem
from dali_pipes.formats.shard_index import ShardIndex
from prep.inspect.indexed_set import IndexedSet
from prep.left_out import as_reason

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

# An error's text, which may name several members.
_TEXT_CHARS = 1000


class ShardFinding(NamedTuple):
    """One fault, or a note."""

    kind: str
    """A key of `KINDS`."""
    shard: str
    """Empty for a finding of the set as a whole."""
    key: str
    """Empty for a finding of the shard."""
    component: str
    text: str
    """The description; in messages it follows shard, key and component."""

    def __str__(self) -> str:
        parts = (("shard", self.shard), ("key", self.key), ("component", self.component))
        named = ", ".join(f"{what} '{printable(name)}'" for what, name in parts if name)
        text = printable(self.text, max_chars=_TEXT_CHARS)
        return f"{named}: {text}" if named else text


def note(text: str, *, shard: str = "") -> ShardFinding:
    """A note about a shard, or about the set."""
    return ShardFinding("note", shard, "", "", text)


def without_shard(text: str, shard: str) -> str:
    """Remove the shard from the beginning of an error's text, because a finding names the shard itself."""
    return re.sub(rf"^shard '{re.escape(shard)}'(: |, | )", "", text)


# Judged by the shard indexes

MAX_LISTED = 100
"""Findings of one kind that are kept; all are counted."""


class IndexProblems:
    """Judges the samples of a set as a loader does before its first batch, shard by shard.

    Found are photos that a loader refuses by format, size or bytes; masks of another size than their photo; samples
    that lack a component which more than half of the samples have; labels that the class table lacks.
    """

    def __init__(self, indexed: IndexedSet, *, watched: Set[tuple[str, int]] = frozenset()) -> None:
        manifest = indexed.manifest
        self.counts: Counter[tuple[str, str]] = Counter()
        """Kind of finding, see `prep.inspect.findings.KINDS`, and reason, see `as_reason` -> number of findings."""
        self.listed: list[ShardFinding] = []
        """The first findings of each kind, at most `MAX_LISTED`."""
        self.refused: set[tuple[str, str, str]] = set()
        """Shard, key and component of bad photos, listed or not, of the ``watched`` samples, shards and their rows."""
        self._watched = watched
        self._num_listed: Counter[str] = Counter()
        self._usual = [name for name, number in manifest.components.items() if 2 * number > manifest.num_samples]
        self._classes = np.array(sorted(manifest.classes), np.int64)
        self._rules, self._roles = PhotoRules(), indexed.roles

    def add(self, index: ShardIndex) -> None:
        """Judge the samples of a shard."""
        self._judge_photos(index)
        self._compare_masks(index)
        self._find_missing(index)
        if index.labels is not None and len(self._classes):
            ats = np.flatnonzero(index.has_label & ~np.isin(index.labels, self._classes))
            for at in ats.tolist():
                text = f"class id {index.labels[at]} is not in the class table"
                self._find("label", index, at, LABEL_COMPONENT, text)

    def _judge_photos(self, index: ShardIndex) -> None:
        for component, photo in index.photos.items():
            formats, sizes = photo.format.astype(np.int64), index.sizes[component]
            heights, widths = photo.height.astype(np.int64), photo.width.astype(np.int64)
            is_bad = have_bad_bytes(sizes) | self._rules.are_bad(formats, heights, widths)
            ats = np.flatnonzero((index.offsets[component] >= 0) & is_bad)
            for at in ats.tolist():
                if (index.shard, at) in self._watched:
                    self.refused.add((index.shard, index.keys[at], component))
                header = PhotoHeader(PHOTO_FORMATS[formats[at]], int(heights[at]), int(widths[at]))
                text = bytes_problem(int(sizes[at])) or self._rules.problem(header)
                self._find("photo", index, at, component, text or "is refused")

    def _compare_masks(self, index: ShardIndex) -> None:
        for photo, mask in itertools.product(self._roles.photos, self._roles.masks):
            if photo not in index.photos or mask not in index.photos:
                continue
            both = [index.photos[photo], index.photos[mask]]
            of_photo, of_mask = (photos.upright_size for photos in both)
            are_sized = (of_photo[0] > 0) & (of_photo[1] > 0) & (of_mask[0] > 0) & (of_mask[1] > 0)
            differ = (of_photo[0] != of_mask[0]) | (of_photo[1] != of_mask[1])
            for at in np.flatnonzero(are_sized & differ).tolist():
                sizes = [(int(heights[at]), int(widths[at])) for heights, widths in (of_photo, of_mask)]
                stored = [(int(photos.height[at]), int(photos.width[at])) for photos in both]
                fit_as_stored = stored[0] == stored[1]
                self._find("mask size", index, at, mask, size_problem(photo, *sizes, fit_as_stored=fit_as_stored))

    def _find_missing(self, index: ShardIndex) -> None:
        none = np.full(index.num_samples, -1, np.int64)
        for component in self._usual:
            # A sample has one of the alternatives for the photo.
            alternatives = self._roles.photos if component in self._roles.photos else (component,)
            lacks = np.all([index.offsets.get(name, none) < 0 for name in alternatives], axis=0)
            for at in np.flatnonzero(lacks).tolist():
                found = ", ".join(name for name, offsets in index.offsets.items() if offsets[at] >= 0)
                self._find("missing", index, at, component, f"is missing (found: {found or 'none'})")

    def _find(self, kind: str, index: ShardIndex, at: int, component: str, text: str) -> None:
        self.counts[kind, as_reason(text)] += 1
        self._num_listed[kind] += 1
        if self._num_listed[kind] <= MAX_LISTED:
            self.listed.append(ShardFinding(kind, index.shard, index.keys[at], component, text))
