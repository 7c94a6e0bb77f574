"""Choose the samples to show: by key, by class, or drawn by a seed."""

import re
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dali_pipes.errors import DataError, shown
from dali_pipes.formats.names import LABEL_COMPONENT
from prep.inspect.indexed_set import IndexedSet

# Numbers of 18 digits fit into 64 bits.
_CLASS_ID = re.compile(r"-?[0-9]{1,18}")

Int64s = npt.NDArray[np.int64]


def class_ids(indexed: IndexedSet, labels: Sequence[str]) -> Int64s | None:
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


def choose_samples(
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
