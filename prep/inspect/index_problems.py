"""Find what is wrong with samples by the shard indexes alone: no byte of a shard is read."""

from collections import Counter
from collections.abc import Set

import numpy as np

from dali_pipes.formats.manifest import Manifest
from dali_pipes.formats.names import LABEL_COMPONENT
from dali_pipes.formats.photo_header import PHOTO_FORMATS, PhotoHeader, is_photo
from dali_pipes.formats.photo_names import is_mask_name
from dali_pipes.formats.photo_rules import PhotoRules, bytes_problem, have_bad_bytes, size_problem
from dali_pipes.formats.shard_index import ShardIndex
from prep.inspect.findings import ShardFinding
from prep.left_out import as_reason

MAX_LISTED = 100
"""Findings of one kind that are kept; all are counted."""


class IndexProblems:
    """Judges the samples of a set as a loader does before its first batch, shard by shard.

    Found are photos that a loader refuses by format, size or bytes; masks of another size than their photo; samples
    that lack a component which more than half of the samples have; labels that the class table lacks.
    """

    def __init__(self, manifest: Manifest, *, watched: Set[tuple[str, int]] = frozenset()) -> None:
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
        self._rules = PhotoRules()

    def add(self, index: ShardIndex) -> None:
        """Judge the samples of a shard."""
        self._judge_photos(index)
        self._compare_masks(index)
        self._find_missing(index)
        if index.labels is not None and len(self._classes):
            is_there = index.offsets[LABEL_COMPONENT] >= 0
            ats = np.flatnonzero(is_there & ~np.isin(index.labels, self._classes))
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
        names = set(index.photos)
        masks = sorted(name for name in names if is_mask_name(name, names))
        photo = next((name for name in sorted(names) if name not in masks), None)
        if photo is None:
            return
        for mask in masks:
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
            lacks = index.offsets.get(component, none) < 0
            photos = {component, *index.photos}
            if is_photo(component) and not is_mask_name(component, photos):
                # A loader can read a photo in another format instead, if it names both: "jpg;png".
                for other in index.photos:
                    if not is_mask_name(other, photos):
                        lacks = lacks & (index.offsets[other] < 0)
            for at in np.flatnonzero(lacks).tolist():
                found = ", ".join(name for name, offsets in index.offsets.items() if offsets[at] >= 0)
                self._find("missing", index, at, component, f"is missing (found: {found or 'none'})")

    def _find(self, kind: str, index: ShardIndex, at: int, component: str, text: str) -> None:
        self.counts[kind, as_reason(text)] += 1
        self._num_listed[kind] += 1
        if self._num_listed[kind] <= MAX_LISTED:
            self.listed.append(ShardFinding(kind, index.shard, index.keys[at], component, text))
