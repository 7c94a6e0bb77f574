"""Single samples, still encoded, by their numbers: a map-style data set, for trainers that decode by themselves."""

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dali_pipes.data_set.data_set import DataSet, split_set
from dali_pipes.data_set.exclusions import excluded_ordinals
from dali_pipes.data_set.find import Mixture, find_shards
from dali_pipes.formats.names import LABEL_COMPONENT, index_name
from dali_pipes.options import Select, Shards
from dali_pipes.store.patience import in_threads
from dali_pipes.store.ranges import NUM_THREADS

if TYPE_CHECKING:
    from dali_pipes.formats.shard_index import ComponentRange, ShardIndex
    from dali_pipes.store.urls import ShardUrls

KEY = "__key__"
"""The name under which a sample has its key, as in WebDataset."""
# Shard indexes in memory: some 60 MB for shards of 1,000 samples with two components.
_MAX_INDEXES = 1024


class EncodedSamples:
    """The samples of a data set in the order of their ordinals, without those that were left out; see `samples`.

    It can be pickled and forked; each process has connections of its own.
    """

    def __init__(self, data_set: DataSet, *, select: Select, resources: contextlib.ExitStack) -> None:
        if data_set.manifest.etl:
            raise ValueError(f"'{data_set.source}': an ETL gives whole shards; read them by dali_pipes.loader")
        chosen = excluded_ordinals(data_set, exclude=select.exclude, where=select.where)
        self._data_set, self._resources = data_set, resources
        self._stops = data_set.manifest.sample_stops
        self._ordinals = np.setdiff1d(np.arange(data_set.manifest.num_samples), chosen.excluded, assume_unique=True)
        self._indexes: dict[int, ShardIndex] = {}

    def __len__(self) -> int:
        return len(self._ordinals)

    def __repr__(self) -> str:
        return f"<samples of '{self._data_set.source}': {len(self)}>"

    def __getitem__(self, number: int) -> dict[str, Any]:
        """One sample; see `__getitems__`."""
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: Iterable[int]) -> list[dict[str, Any]]:
        """Samples by their numbers, in this order, in as few requests as the store allows.

        Returns:
            A dict for each sample: ``"__key__"`` has its key, ``"cls"`` its class id as int, and the name of each
            other component has the component's bytes.

        Raises:
            IndexError: If there is no such sample.
            DataError: If a component has other bytes than when it was indexed.
            StoreError: If the store cannot be read.
        """
        at = np.array([number.__index__() for number in numbers], np.int64)
        if len(wrong := at[(at < -len(self)) | (at >= len(self))]):
            raise IndexError(f"no sample {wrong[0]}: there are {len(self)}")
        ordinals, manifest = self._ordinals[at], self._data_set.manifest
        shards = np.searchsorted(self._stops, ordinals, side="right")
        rows = ordinals - self._stops[shards] + manifest.samples[shards]
        indexes = self._read_indexes(dict.fromkeys(shards.tolist()))
        names = {shard: manifest.names[shard] for shard in indexes}
        samples: list[dict[str, Any]] = []
        places: list[tuple[dict[str, Any], ComponentRange]] = []
        for shard, row in zip(shards.tolist(), rows.tolist(), strict=True):
            index, name = indexes[shard], names[shard]
            set_ = f"{split_set(name)[0]}/" if self._data_set.is_mixture else ""
            key = index.keys[row]
            sample: dict[str, Any] = {KEY: f"{set_}{key}"}
            samples.append(sample)
            for component, offsets in index.offsets.items():
                if component == LABEL_COMPONENT and index.labels is not None:
                    if offsets[row] >= 0:
                        sample[component] = int(index.labels[row])
                elif (one := index.range_of(component, row, shard=name, key=key)) is not None:
                    sample[component] = b""  # in the components' order
                    places.append((sample, one))
        found = self._data_set.read_ranges([one for _, one in places])
        for (sample, one), data in zip(places, found, strict=True):
            sample[one.component] = data
        return samples

    def _read_indexes(self, shards: Iterable[int]) -> dict[int, Any]:
        """The indexes of these shards, from memory or, several at a time, from the store."""
        manifest, data_set = self._data_set.manifest, self._data_set
        found: dict[int, Any] = {shard: self._indexes.get(shard) for shard in shards}
        if missing := [shard for shard, index in found.items() if index is None]:
            read = in_threads(data_set.read_index, missing, num_threads=NUM_THREADS)
            for shard, data in zip(missing, read, strict=True):
                found[shard] = manifest.shard_index(shard, data, where=index_name(manifest.names[shard]))
        for shard, index in found.items():  # those used last are kept; other threads do the same
            self._indexes.pop(shard, None)
            self._indexes[shard] = index
        with contextlib.suppress(RuntimeError, KeyError):
            while len(self._indexes) > _MAX_INDEXES:
                del self._indexes[next(iter(self._indexes))]
        return found

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_indexes": {}, "_resources": None}


def samples(
    shards: "ShardUrls | Shards | Mixture", *, select: Select | None = None, endpoint: str | None = None
) -> EncodedSamples:
    """Open single samples of a data set by number, as a map-style data set of encoded bytes.

    ``samples[i]`` is the sample of the i-th ordinal that ``select`` keeps: the loader's ordinals. Only the bytes of the
    samples are read, and each component is compared with its checksum in the shard index. It works in the workers of
    torch's ``DataLoader``, which calls ``__getitems__`` with a batch's numbers.

    Args:
        shards: See `dali_pipes.loader`; ``"ais://pets/shuffled-@3"`` for version 3.
        select: The samples to leave out: ``exclude``, ``where`` and ``allow_missing``. Other fields belong to epochs.
        endpoint: See `dali_pipes.loader`.

    Raises:
        DataError: If the data set is not indexed, or a file that describes it is damaged.
        StoreError: If the store cannot be read.
        ValueError: If ``select`` has a field that describes epochs, or if no sample is left.
    """
    select = select or Select()
    if (plain := Select(exclude=select.exclude, where=select.where, allow_missing=select.allow_missing)) != select:
        raise ValueError(f"samples are selected by exclude, where and allow_missing alone, got {select}, not {plain}")
    with contextlib.ExitStack() as resources:
        endpoint = endpoint or os.environ.get("AIS_ENDPOINT") or None
        folder = os.environ.get("DALI_PIPES_EMBEDDED_DIR")
        found = find_shards(
            shards,
            endpoint=endpoint,
            embedded_dir=Path(folder) if folder else None,
            resources=resources,
            allow_missing=select.allow_missing,
        )
        return EncodedSamples(DataSet(found), select=select, resources=resources.pop_all())
