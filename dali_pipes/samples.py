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
        offset, size, height, width = (np.concatenate(parts) for parts in zip(*columns, strict=True))
        missing = np.flatnonzero(offset < 0)
        if len(missing):
            more = f"; {len(missing)} of {len(self)} samples lack it" if len(missing) > 1 else ""
            found = ", ".join(self.components_of(int(missing[0]))) or "none"
            raise DataError(f"{self.name(int(missing[0]))}: no component '{component}' (found: {found}){more}")
        return Places(offset=offset, size=size, height=height, width=width)

    def check_photos(self, component: str) -> None:
        """Refuse what DALI cannot decode, by the headers that the shard indexes hold, before any of it is read.

        Raises:
            DataError: If a photo is a GIF, or its header is none that is known.
        """
        for shard, index in enumerate(self._indexes):
            for name in component.split(";"):
                if name not in index.photos:
                    continue
                formats, present = index.photos[name].format, index.offsets[name] >= 0
                bad = np.isin(formats, [PHOTO_FORMATS.index(name) for name in UNDECODABLE])
                rows = np.flatnonzero(present & (bad | (index.photos[name].height == 0)))
                if len(rows):
                    what = PHOTO_FORMATS[formats[rows[0]]]
                    found = "an image whose header cannot be read" if what != "GIF" else "a GIF"
                    more = f"; so do {len(rows) - 1} more of this shard" if len(rows) > 1 else ""
                    raise DataError(
                        f"{self.name(int(self._starts[shard] + rows[0]))}: component '{name}' holds {found}, expected "
                        f"JPEG, PNG or another format that DALI decodes{more}; pack without it: "
                        "dali-pipes prep pack --on-bad skip"
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
        return np.searchsorted(ids, raw).astype(np.int64)

    def components_of(self, ordinal: int) -> list[str]:
        """The components that one sample has."""
        shard = int(self.shard[ordinal])
        row = ordinal - int(self._starts[shard])
        return [name for name, offsets in self._indexes[shard].offsets.items() if offsets[row] >= 0]

    @staticmethod
    def _places_in(index: ShardIndex, names: Sequence[str]) -> tuple[Int64s, Int64s, Int32s, Int32s]:
        offset = np.full(index.num_samples, -1, np.int64)
        size = np.zeros(index.num_samples, np.int64)
        height, width = np.zeros(index.num_samples, np.int32), np.zeros(index.num_samples, np.int32)
        for name in names:
            if name not in index.offsets:
                continue
            rows = (offset < 0) & (index.offsets[name] >= 0)
            offset[rows], size[rows] = index.offsets[name][rows], index.sizes[name][rows]
            if name in index.photos:
                height[rows], width[rows] = index.photos[name].height[rows], index.photos[name].width[rows]
        return offset, size, height, width


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
