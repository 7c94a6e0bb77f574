"""Compare two versions of a data set, or two data sets: samples by key, shards, classes.

Shards that both have, by name and checksum, hold equal samples; of them only the removed samples are compared. The
column files are read, and no shard.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from dali_pipes.arrays import Int64s
from dali_pipes.data_set.data_set import DataSet
from dali_pipes.formats.manifest import Manifest
from dali_pipes.formats.sample_columns import NO_LABEL
from dali_pipes.store.shard_set import ShardSet


@dataclass(frozen=True, kw_only=True)
class SetDiff:
    """What the second of two data sets has, and the first has not, and the other way round."""

    urls: tuple[str, str]
    versions: tuple[int, int]
    added_keys: list[str]
    """Keys of samples that only the second has, in its order; a key as often as it comes more often there."""
    removed_keys: list[str]
    """Keys of samples that only the first has, in its order."""
    relabelled_keys: dict[str, tuple[int, int]]
    """The keys that both have, with different classes: key -> class id in the first and in the second. A sample without
    a class has `NO_LABEL`."""
    num_moved: int
    """Samples that both have, by key and class, in different shards."""
    added_shards: list[str]
    removed_shards: list[str]
    added_classes: dict[int, str]
    removed_classes: dict[int, str]
    renamed_classes: dict[int, tuple[str, str]]
    """Class id -> its name in the first and in the second."""

    @property
    def is_equal(self) -> bool:
        """Whether both have the same samples in the same shards, and the same classes."""
        return not any(value for name, value in vars(self).items() if name not in ("urls", "versions"))


def compare_sets(first: ShardSet, second: ShardSet) -> SetDiff:
    """Compare two data sets.

    Raises:
        DataError: If a data set has no column file, or a file is broken.
    """
    sets = DataSet(first), DataSet(second)
    manifests = sets[0].manifest, sets[1].manifest
    shards = [dict(zip(manifest.names, manifest.checksums.tolist(), strict=True)) for manifest in manifests]
    shared = {name for name, checksum in shards[0].items() if shards[1].get(name) == checksum}
    alone = [_ordinals_alone(one, other, shared) for one, other in (manifests, manifests[::-1])]
    counts = [Counter(_labelled_keys(*one)) for one in zip(sets, alone, strict=True)]
    before, after = counts[0] - counts[1], counts[1] - counts[0]  # (key, class id) -> how often
    ids = dict(before.keys()), dict(after.keys())
    lost, found = (Counter(key for key, _ in pairs.elements()) for pairs in (before, after))
    classes = manifests[0].classes, manifests[1].classes
    return SetDiff(
        urls=(first.url, second.url),
        versions=(manifests[0].version, manifests[1].version),
        added_keys=list((found - lost).elements()),
        removed_keys=list((lost - found).elements()),
        relabelled_keys={key: (ids[0][key], ids[1][key]) for key in lost & found},
        num_moved=sum((counts[0] & counts[1]).values()),
        added_shards=[name for name in shards[1] if name not in shared],
        removed_shards=[name for name in shards[0] if name not in shared],
        added_classes={label: classes[1][label] for label in sorted(classes[1].keys() - classes[0])},
        removed_classes={label: classes[0][label] for label in sorted(classes[0].keys() - classes[1])},
        renamed_classes={
            label: (name, classes[1][label])
            for label, name in classes[0].items()
            if classes[1].get(label, name) != name
        },
    )


def _labelled_keys(data_set: DataSet, ordinals: Int64s) -> Iterator[tuple[str, int]]:
    if len(ordinals):
        columns = data_set.columns()
        samples = columns.samples.read().take(ordinals)
        labels = [NO_LABEL] * len(ordinals) if samples.labels is None else columns.labels[ordinals].tolist()
        yield from zip(samples.keys, labels, strict=True)


def _ordinals_alone(manifest: Manifest, other: Manifest, shared: set[str]) -> Int64s:
    """The ordinals of samples of one data set that the other may lack: int64, sorted."""
    rows = {name: row for row, name in enumerate(other.names) if name in shared}
    starts = manifest.sample_stops - manifest.samples
    found = [np.empty(0, np.int64)]
    for row, name in enumerate(manifest.names):
        # Of a shard that both have, only samples that the other data set removed.
        numbers = other.removed_in(rows[name]) if name in shared else np.arange(manifest.samples[row], dtype=np.int64)
        if len(numbers):
            found.append(starts[row] + np.setdiff1d(numbers, manifest.removed_in(row)))
    return np.concatenate(found)
