"""Make the shards that all loaders of ``bench feed`` read, and check what the loaders give."""

import io
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image

from bench.compare.outputs import OutputError
from bench.loaders.encoded import KEY, label_of, samples_of
from bench.loaders.peers.dali_readers import write_webdataset_indexes
from bench.tools.drawn_shards import draw_shards
from bench.tools.repeat import repeat_shards
from dali_pipes.errors import DataError
from dali_pipes.formats.names import LABEL_COMPONENT
from dali_pipes.store.shard_set import ShardSet
from prep.index import index_shards
from prep.inspect.indexed_set import IndexedSet

NUM_DRAWN = 60
NUM_SHARDS = 8
# Bytes a pixel of a drawn photo of quality 90.
BYTES_PER_PIXEL = 0.285
# Photos differ in size, in this proportion to the mean: with one size, the batches' buffers would all be alike.
AREAS = (0.6, 0.8, 1.0, 1.2, 1.4)

Array = npt.NDArray[Any]
Batch = Mapping[str, Any]
"""``label``, int64 [B]; for each component, int64 [B, 2 or more]: height, width and further numbers; ``key``, B texts.
Without keys, sizes may be left out."""


class FeedData(NamedTuple):
    """The shards that all loaders read, and the places of their components."""

    shards: ShardSet
    """Local shards, with their indexes."""
    cache: Path
    """The directory of our loader's cache file."""
    index_paths: Sequence[Path]
    """The index of each shard for DALI's reader."""
    keys: Sequence[str]
    labels: Array
    """int64 [samples]"""
    shard: Array
    """int64 [samples], the number of each sample's shard."""
    offsets: Mapping[str, Array]
    """Component -> int64 [samples], bytes from the shard's start."""
    sizes: Mapping[str, Array]
    """Component -> int64 [samples], bytes."""

    @property
    def num_samples(self) -> int:
        return len(self.keys)


@dataclass(frozen=True)
class Expected:
    """What every loader must give of each sample, by key."""

    labels: Mapping[str, int]
    sizes: Mapping[str, Mapping[str, tuple[int, int]]]
    """Component -> key -> height and width."""

    @classmethod
    def read(cls, shards: ShardSet, *, components: Sequence[str]) -> "Expected":
        """Read every sample; the sizes are those that Pillow finds.

        Raises:
            DataError: If a label is not a number, or two samples have the same key.
        """
        labels: dict[str, int] = {}
        sizes: dict[str, dict[str, tuple[int, int]]] = {name: {} for name in components}
        for shard, sample in samples_of(shards):
            key = sample[KEY]
            if key in labels:
                raise DataError(f"shard '{shard}': a second sample with the key '{key}'")
            labels[key] = label_of(sample[LABEL_COMPONENT], key=key, shard=shard)
            for name in components:
                sizes[name][key] = size_of(sample[name])
        return cls(labels, sizes)

    def check(self, batches: Iterator[Batch], *, components: Sequence[str], loader: str) -> None:
        """Compare an epoch of one pass: each sample must come once, as it is in its shard.

        Further samples, with which DALI's reader fills its last batch, are ignored.

        Raises:
            OutputError: Names the loader, and the first sample that is wrong.
        """
        seen: Counter[str] = Counter()
        samples = list(_samples_in(batches, components))
        for key, label, *sizes in samples[: len(self.labels)]:
            if key not in self.labels:
                raise OutputError(f"loader '{loader}': no shard has a sample with the key '{key}'")
            seen[key] += 1
            expected = [self.labels[key], *(self.sizes[name][key] for name in components)]
            for name, found, wanted in zip(["label", *components], [label, *sizes], expected, strict=True):
                if found != wanted:
                    raise OutputError(f"loader '{loader}', key '{key}': {name} must be {wanted}, got {found}")
        if wrong := next((key for key in self.labels if seen[key] != 1), None):
            raise OutputError(f"loader '{loader}', key '{wrong}': came {seen[wrong]} times in one pass, expected once")


def size_of(data: bytes) -> tuple[int, int]:
    """Height and width of a photo or mask, as Pillow reads them from its header."""
    with Image.open(io.BytesIO(data)) as image:
        return image.height, image.width


def drawn(directory: Path, *, photo_bytes: int) -> ShardSet:
    """Draw `NUM_DRAWN` photos with masks; the photos have about ``photo_bytes`` bytes on average."""
    sides = []
    for area in AREAS:
        height = round((area * photo_bytes / BYTES_PER_PIXEL * 3 / 4) ** 0.5)
        width = round(height * 4 / 3)
        sides += [(width, height), (height, width)]
    return draw_shards(directory, num=NUM_DRAWN, num_shards=1, sizes=sides)


def copied(
    shards: ShardSet,
    *,
    num_samples: int | None,
    components: Sequence[str],
    copies: Path,
    indexes: Path,
    cache: Path,
) -> FeedData:
    """Copy samples into indexed local shards, in empty directories.

    Args:
        shards: Where the samples come from.
        num_samples: Samples to write, repeated if necessary; ``None``: as many as there are.
        components: Photo and mask, which every sample must have.
        copies: For the shards.
        indexes: For the indexes of DALI's reader.
        cache: For the cache file of our loader.

    Raises:
        DataError: If there is no sample, or a sample lacks a component or its label.
        ValueError: If there is too little free space.
    """
    num_shards = None if num_samples is None else min(NUM_SHARDS, num_samples)
    written = repeat_shards(shards, directory=copies, num_samples=num_samples, num_shards=num_shards, option="--cache")
    index_shards(written)
    indexed = IndexedSet(written)
    found = [index for _, index in indexed.each()]
    for index, name in itertools.product(found, (*components, LABEL_COMPONENT)):
        if name not in index.offsets or (index.offsets[name] < 0).any():
            raise DataError(
                f"shard '{index.shard}': a sample has no component '{name}' (found: {', '.join(index.offsets)}); "
                "name the components: --photo, --mask, or leave masks out: --masks without"
            )

    return FeedData(
        shards=written,
        cache=cache,
        index_paths=write_webdataset_indexes(indexed, indexes),
        keys=[key for index in found for key in index.keys],
        labels=np.concatenate([np.asarray(index.labels) for index in found]),
        shard=np.repeat(np.arange(len(found)), [index.num_samples for index in found]),
        offsets={name: np.concatenate([index.offsets[name] for index in found]) for name in components},
        sizes={name: np.concatenate([index.sizes[name] for index in found]) for name in components},
    )


def _samples_in(batches: Iterator[Batch], components: Sequence[str]) -> Iterator[tuple[Any, ...]]:
    for batch in batches:
        sizes = ([tuple(size[:2]) for size in batch[name].tolist()] for name in components)
        yield from zip(batch["key"], batch["label"].tolist(), *sizes, strict=True)
