"""Ordinals to what the shard indexes know of each sample: where its components lie, its label, its photos' sizes.

Columns of all shards of the manifest, joined in its order, so that an ordinal is a row. `Batch` is a view of some rows:
what the seam's arrays are computed from.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt

from dali_pipes.errors import DataError
from dali_pipes.randomness import Stream
from prep.index import LABEL_COMPONENT
from prep.manifest import Manifest, ShardIndex, checksum, classes_name, index_name, pack_texts
from prep.photos import PHOTO_FORMATS
from prep.store import Store
from prep.urls import shared_prefix

__all__ = ["Batch", "Places", "Samples", "load_samples"]

# Shard indexes read at a time: small objects, so the wait is the store's latency.
NUM_READERS = 16
UNDECODABLE = ("unknown", "GIF")

Int64s = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]
Labels = Literal["raw", "contiguous"]


@dataclass(frozen=True, kw_only=True)
class Places:
    """One component of every sample."""

    offset: Int64s
    """int64 [N]: first byte in the shard."""
    size: Int64s
    """int64 [N]: bytes."""
    height: Int32s
    """int32 [N]: rows of a photo as stored; 0 for what is no photo."""
    width: Int32s
    format: npt.NDArray[np.int16]
    """int16 [N]: index into `prep.photos.PHOTO_FORMATS`, -1 for what is no photo by its name."""


class Samples:
    """The joined columns of the manifest's shard indexes."""

    def __init__(self, manifest: Manifest, indexes: Sequence[ShardIndex]) -> None:
        self.manifest = manifest
        self.shard = np.repeat(np.arange(len(indexes)), manifest.samples)  # [N]
        self._indexes = indexes
        self._starts = np.cumsum(manifest.samples) - manifest.samples
        self._key_bytes, self._key_ends = pack_texts([key for index in indexes for key in index.keys])

    def __len__(self) -> int:
        return len(self.shard)

    def example(self) -> "Batch":
        """A batch of the first sample: what a graph's arrays are like is learned from it."""
        first = np.zeros(1, np.int64)
        return Batch(self, first, first, num_valid=1, stream=lambda name: Stream(0, 0, name))

    def key(self, ordinal: int) -> str:
        """The key of one sample."""
        start = int(self._key_ends[ordinal - 1]) if ordinal else 0
        return self._key_bytes[start : int(self._key_ends[ordinal])].tobytes().decode()

    def name(self, ordinal: int) -> str:
        """Shard and key of one sample, as errors give them."""
        return f"shard '{self.manifest.names[self.shard[ordinal]]}', key '{self.key(ordinal)}'"

    def places(self, component: str) -> Places:
        """Where one component of every sample lies.

        Args:
            component: Its name, or alternatives as DALI's reader takes them: ``"jpg;jpeg;png"``, the first that is
            there.

        Raises:
            DataError: If a sample has none of them.
        """
        columns = [self._places_in(index, component.split(";")) for index in self._indexes]
        offset, size, height, width, format_ = (np.concatenate(parts) for parts in zip(*columns, strict=True))
        missing = np.flatnonzero(offset < 0)
        if len(missing):
            more = f"; {len(missing)} of {len(self)} samples lack it" if len(missing) > 1 else ""
            found = ", ".join(self.components_of(int(missing[0]))) or "none"
            raise DataError(f"{self.name(int(missing[0]))}: no component '{component}' (found: {found}){more}")
        return Places(offset=offset, size=size, height=height, width=width, format=format_)

    def check_photos(self, component: str, *, sized: bool) -> None:
        """Refuse what DALI cannot decode, by the headers that the shard indexes hold, before any of it is read.

        Args:
            component: As in `places`.
            sized: Whether its height and width are needed, which only photos by name have.

        Raises:
            DataError: If a photo is a GIF, or its header is none that is known.
        """
        places = self.places(component)
        undecodable = np.isin(places.format, [PHOTO_FORMATS.index(name) for name in UNDECODABLE])
        bad = undecodable | ((places.format >= 0) & (places.height == 0))
        if sized:
            bad |= places.format < 0
        rows = np.flatnonzero(bad)
        if not len(rows):
            return
        first = int(rows[0])
        more = f"; so do {len(rows) - 1} more samples" if len(rows) > 1 else ""
        if places.format[first] < 0:
            raise DataError(
                f"{self.name(first)}: component '{component}' has no height and width in the index, because its name "
                "is not a photo's; name it .jpg, .png or the like when packing"
            )
        found = "a GIF" if PHOTO_FORMATS[places.format[first]] == "GIF" else "an image whose header cannot be read"
        raise DataError(
            f"{self.name(first)}: component '{component}' holds {found}, expected JPEG, PNG or another format that "
            f"DALI decodes{more}; pack without it: dali-pipes prep pack --on-bad skip"
        )

    def labels(self, kind: Labels) -> Int64s:
        """The class id of every sample: int64 [N].

        Args:
            kind: ``"raw"``: as ``cls`` holds it; ``"contiguous"``: from 0, by the order of the ids in the class table.

        Raises:
            DataError: If a sample has no ``cls``, or there is no class table to make ids contiguous by.
        """
        self.places(LABEL_COMPONENT)
        raw = np.concatenate([index.labels for index in self._indexes if index.labels is not None])
        if kind == "raw":
            return raw
        ids = np.array(sorted(self.manifest.classes), np.int64)
        if not len(ids):
            table = classes_name(shared_prefix(self.manifest.names))
            raise DataError(
                f"labels='contiguous' needs a class table, and the manifest has none; write '{table}' beside the "
                'shards, {"1": "name", ...}, and index them anew: dali-pipes prep index URL'
            )
        unknown = np.flatnonzero(~np.isin(raw, ids))
        if len(unknown):
            first = int(unknown[0])
            raise DataError(
                f"{self.name(first)}: class id {raw[first]} is not in the class table ({len(ids)} classes, {ids[0]} to "
                f"{ids[-1]}); add it to the table and index the shards anew: dali-pipes prep index URL"
            )
        return np.searchsorted(ids, raw).astype(np.int64)

    def components_of(self, ordinal: int) -> list[str]:
        """The components that one sample has."""
        shard = int(self.shard[ordinal])
        row = ordinal - int(self._starts[shard])
        return [name for name, offsets in self._indexes[shard].offsets.items() if offsets[row] >= 0]

    @staticmethod
    def _places_in(
        index: ShardIndex, names: Sequence[str]
    ) -> tuple[Int64s, Int64s, Int32s, Int32s, npt.NDArray[np.int16]]:
        offset = np.full(index.num_samples, -1, np.int64)
        size = np.zeros(index.num_samples, np.int64)
        height, width = np.zeros(index.num_samples, np.int32), np.zeros(index.num_samples, np.int32)
        format_ = np.full(index.num_samples, -1, np.int16)
        for name in names:
            if name not in index.offsets:
                continue
            rows = (offset < 0) & (index.offsets[name] >= 0)
            offset[rows], size[rows] = index.offsets[name][rows], index.sizes[name][rows]
            if name in index.photos:
                photo = index.photos[name]
                height[rows], width[rows], format_[rows] = photo.height[rows], photo.width[rows], photo.format[rows]
        return offset, size, height, width, format_


def load_samples(store: Store, manifest: Manifest) -> Samples:
    """Read the shard indexes of all shards.

    Raises:
        DataError: If an index is not the one that the manifest was made with.
    """

    def load_one(shard: int) -> ShardIndex:
        name = index_name(manifest.names[shard])
        data = store.read(name)
        if len(data) != manifest.index_bytes[shard] or checksum(data) != manifest.index_checksums[shard]:
            raise DataError(
                f"'{store.locate(name)}' is not the index that the manifest was made with: {len(data)} bytes, xxhash2 "
                f"{checksum(data):016x}; expected {manifest.index_bytes[shard]}, "
                f"{manifest.index_checksums[shard]:016x}; index the shards anew: dali-pipes prep index URL"
            )
        return ShardIndex.from_bytes(data, where=store.locate(name))

    with ThreadPoolExecutor(min(NUM_READERS, max(1, manifest.num_shards))) as readers:
        return Samples(manifest, list(readers.map(load_one, range(manifest.num_shards))))


class Batch:
    """One batch's rows: what the seam's arrays are computed from. All arrays are [B], in the order of the batch."""

    def __init__(
        self,
        samples: Samples,
        ordinals: Int64s,
        occurrences: Int64s,
        *,
        num_valid: int,
        stream: Callable[[str], Stream],
    ) -> None:
        self.ordinals = ordinals
        self.occurrences = occurrences
        self.num_valid = num_valid
        self._samples = samples
        self._stream = stream

    def __len__(self) -> int:
        return len(self.ordinals)

    @cached_property
    def keys(self) -> list[str]:
        """The samples' keys."""
        return [self._samples.key(ordinal) for ordinal in self.ordinals.tolist()]

    def uniforms(self, stream: str, num: int) -> npt.NDArray[np.float64]:
        """``num`` numbers in [0, 1) for each sample, its own in this epoch: float64 [B, num]."""
        return self._stream(stream).uniforms(self.ordinals, num, occurrence=self.occurrences)
