"""Look up a shard's samples: where each component lies, how large its photos are, labels and keys.

A `ShardTable` is a checked shard index with one table for each component that was asked for.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from dali_pipes.data_set.data_set import split_set
from dali_pipes.errors import DataError
from dali_pipes.formats.names import LABEL_COMPONENT
from dali_pipes.formats.orientation import UPRIGHT
from dali_pipes.formats.photo_rules import PhotoRules
from dali_pipes.formats.sample_columns import NO_LABEL
from dali_pipes.formats.shard_index import ShardIndex
from dali_pipes.options import Labels, Missing

# Columns of a component's table.
OFFSET, SIZE, HEIGHT, WIDTH, FORMAT, ORIENTATION = range(6)
NO_PHOTO = -1
"""The format of a component whose name is not that of a photo."""

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class SampleRules:
    """Rules for reading samples; see `dali_pipes.options`."""

    labels: Labels = "raw"
    missing: Missing = "error"
    photos: PhotoRules = field(default_factory=PhotoRules)
    names_sets: bool = False
    """Whether the shards are those of a mixture, called ``SET/SHARD``; then keys are ``SET/KEY``, too."""


class ShardTable:
    """One shard's samples: ``first`` is the first one's ordinal; ``class_ids`` is the class table, int64, sorted."""

    def __init__(
        self, shard: int, *, name: str, first: int, index: ShardIndex, rules: SampleRules, class_ids: Int64s
    ) -> None:
        self.shard, self.name, self.first = shard, name, first
        self._set = f"{split_set(name)[0]}/" if rules.names_sets else ""
        self._index, self._rules, self._class_ids = index, rules, class_ids
        self._columns: dict[str, Int64s] = {}

    def __len__(self) -> int:
        return self._index.num_samples

    def column(self, component: str) -> Int64s:
        """Make the table of a component, or of the first alternative that each sample has: int64 [N, 6], see `OFFSET`.

        Where a sample lacks it, the offset is -1 and the size 0.
        """
        if component in self._columns:
            return self._columns[component]
        index = self._index
        found = np.zeros((index.num_samples, 6), np.int64)
        found[:, OFFSET] = -1
        found[:, FORMAT] = NO_PHOTO
        found[:, ORIENTATION] = UPRIGHT
        for name in component.split(";"):
            if name not in index.offsets:
                continue
            rows = np.flatnonzero((found[:, OFFSET] < 0) & (index.offsets[name] >= 0))
            found[rows, OFFSET], found[rows, SIZE] = index.offsets[name][rows], index.sizes[name][rows]
            if (photo := index.photos.get(name)) is not None:
                found[rows, HEIGHT], found[rows, WIDTH] = photo.height[rows], photo.width[rows]
                found[rows, FORMAT] = photo.format[rows]
                if photo.orientation is not None:
                    found[rows, ORIENTATION] = photo.orientation[rows]
        if self._rules.missing != "error":  # 1 x 1 pixel, so that crops can be drawn and a size can be a divisor
            lacking = found[:, OFFSET] < 0
            found[lacking, HEIGHT] = found[lacking, WIDTH] = 1
        self._columns[component] = found
        return found

    def key(self, row: int) -> str:
        """Return the key of one sample."""
        return f"{self._set}{self._index.keys[row]}"

    def components_of(self, row: int) -> list[str]:
        """List the components that one sample has."""
        return [name for name, offsets in self._index.offsets.items() if offsets[row] >= 0]

    def name_of(self, row: int) -> str:
        """Name shard and key of one sample, for errors."""
        return f"shard '{self.name}', key '{self.key(row)}'"

    def labels(self, rows: Int64s) -> Int64s:
        """Return the class ids of some rows: int64 [N].

        Raises:
            DataError: If a sample has no class id, or one that is not in the class table.
        """
        if self._rules.missing != "empty":
            return self._known_labels(rows)
        is_there = self.column(LABEL_COMPONENT)[rows, OFFSET] >= 0
        labels = np.full(len(rows), NO_LABEL, np.int64)
        if is_there.any():
            labels[is_there] = self._known_labels(rows[is_there])
        return labels

    def _known_labels(self, rows: Int64s) -> Int64s:
        if self._index.labels is None:
            raise DataError(f"{self.name_of(int(rows[0]))}: no component '{LABEL_COMPONENT}'")
        raw = self._index.labels[rows]
        if self._rules.labels == "raw":
            return raw
        class_ids = self._class_ids
        contiguous = np.searchsorted(class_ids, raw)
        is_known = class_ids[np.minimum(contiguous, len(class_ids) - 1)] == raw
        if not is_known.all():
            at = int(np.argmin(is_known))
            raise DataError(
                f"{self.name_of(int(rows[at]))}: class id {raw[at]} is not in the class table ({len(class_ids)} "
                f"classes, {class_ids[0]} to {class_ids[-1]}); add it to the table and index the shards anew: "
                "dali-pipes prep index URL"
            )
        return contiguous.astype(np.int64)
