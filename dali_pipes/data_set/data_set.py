"""Shards that are named, to an image that they can be staged into: manifest, place, threads. Needs no DALI."""

import contextlib
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt

from dali_pipes.cache.extents import EXTENT_ALIGNMENT, extent_starts
from dali_pipes.cache.placement import place
from dali_pipes.cache.share import CacheShare, cache_file_key
from dali_pipes.data_set.indexing import find_columns, find_manifest, index_in_memory
from dali_pipes.data_set.mixture import (
    Mixture,
    MixtureFetcher,
    NamedSets,
    check_class_tables,
    join_manifests,
    split_set,
)
from dali_pipes.errors import DataError, StoreError
from dali_pipes.fetch.local import LocalFetcher, WithIndexes
from dali_pipes.fetch.stager import NUM_FETCHERS, Fetcher, Stager
from dali_pipes.formats.manifest import Manifest
from dali_pipes.formats.names import columns_name, index_name, manifest_name
from dali_pipes.formats.sample_columns import Columns, SampleColumns, join_columns
from dali_pipes.reader.samples import index_reader
from dali_pipes.store.ais import AisStore
from dali_pipes.store.base import Store
from dali_pipes.store.endpoint import cluster
from dali_pipes.store.etl import TransformedStore, etl_of, index_command, through_etl
from dali_pipes.store.etl_errors import NoEtlError
from dali_pipes.store.local import LocalStore
from dali_pipes.store.urls import ShardSet, ShardUrls, is_remote, resolve_shards

if TYPE_CHECKING:
    from dali_pipes.fetch.through_etl import WholeShards

__all__ = ["Indexed", "find_shards", "open_share", "open_stager"]

_log = logging.getLogger(__name__)

Int64s = npt.NDArray[np.int64]


class Indexed:
    """Shards, with the manifest of all that were indexed together and of those that are wanted.

    Args:
        shards: Which ones; those of a mixture are joined to one manifest, each set's after the other's.
        alignment: Of their extents, by the room that they go to.

    Raises:
        DataError: If a manifest or index is broken, or a shard is not in the manifest.
    """

    def __init__(self, shards: ShardSet | NamedSets, *, alignment: int = EXTENT_ALIGNMENT) -> None:
        self.shards, self.alignment = shards, alignment
        self._is_mixture = isinstance(shards, NamedSets)
        named = shards.sets if isinstance(shards, NamedSets) else {"": shards}
        self._sets = {name: _IndexedSet(set_) for name, set_ in named.items()}
        sets = list(self._sets.values())
        self.set_names: tuple[str, ...] = tuple(named)
        """Of a mixture's data sets, in order; one empty name where there is only one."""
        self.set_shards: list[int] = [set_.manifest.num_shards for set_ in sets]
        """How many of the loader's shards are of each data set, in order."""
        self.weights: tuple[float, ...] | None = shards.weights if isinstance(shards, NamedSets) else None
        """For each data set how much of what is read is its own; ``None`` where that was not asked for."""
        self.indexes: dict[str, bytes] | None = None
        """Shard indexes that were made on the fly, by object name; ``None`` where the stores have them all."""
        for name, set_ in self._sets.items():
            if set_.indexes is not None:
                made = {self._combined(name, index): data for index, data in set_.indexes.items()}
                self.indexes = (self.indexes or {}) | made
        self._whole_shards: WholeShards | None = None
        self.whole: Manifest = sets[0].whole
        self.rows: Int64s = sets[0].rows
        """Where each shard stands in ``whole``: int64 [shards]."""
        self.manifest: Manifest = sets[0].manifest
        if self._is_mixture:
            self.whole = join_manifests({name: set_.whole for name, set_ in self._sets.items()})
            firsts = np.cumsum([0, *(set_.whole.num_shards for set_ in sets)])
            self.rows = np.concatenate([set_.rows + first for set_, first in zip(sets, firsts[:-1], strict=True)])
            self.manifest = self.whole.take(self.rows)

    @property
    def extent_bytes(self) -> Int64s:
        """What each shard takes of a cache: int64 [shards]."""
        manifest = self.manifest
        return np.diff(extent_starts(manifest.shard_bytes, manifest.index_bytes, alignment=self.alignment))

    def read_index(self, shard: int) -> bytes:
        """A shard's index, from the store or as it was made."""
        for set_, num_shards in zip(self._sets.values(), self.set_shards, strict=True):
            if shard < num_shards:
                return set_.read_index(shard)
            shard -= num_shards
        raise IndexError(f"shard must be in [0, {self.manifest.num_shards})")

    def read_range(self, shard: int, *, start: int, size: int) -> bytes:
        """A shard's bytes ``[start, start + size)``, from the store. For one thread."""
        name = self.manifest.names[shard]
        store, object_name = self._place(name)
        if not etl_of(store):
            return store.read_range(object_name, start=start, size=size)
        if self._whole_shards is None:
            from dali_pipes.fetch.through_etl import WholeShards

            self._whole_shards = WholeShards(self.open_fetcher)
        return self._whole_shards.read(
            name,
            shard_bytes=int(self.manifest.shard_bytes[shard]),
            checksum=int(self.manifest.checksums[shard]),
            start=start,
            size=size,
        )

    @property
    def source(self) -> str:
        """Where the shards come from, in a line."""
        if self._is_mixture:
            return self.shards.url
        etl = etl_of(self._sets[""].shards.store)
        return f"{self.shards.url}{f' through ETL {etl}' if etl else ''}"

    def close(self) -> None:
        """Give up what `read_range` keeps. Can be called twice."""
        if self._whole_shards is not None:
            self._whole_shards.close()

    def columns(self) -> Columns:
        """Keys, labels and which components there are, of all samples of the loader's shards, in their order.

        Read anew each time, and kept by nobody: some 20 bytes a sample.

        Raises:
            DataError: If there is no column file beside the shards, or it is another manifest's.
        """
        return Columns(
            self.whole_columns().of_shards(self.whole.samples, self.rows),
            names=self.manifest.names,
            counts=self.manifest.samples,
        )

    def whole_columns(self) -> SampleColumns:
        """As `columns`, of all samples of ``whole``."""
        if not self._is_mixture:
            return self._sets[""].columns()
        return join_columns([(set_.columns(), set_.whole.components) for set_ in self._sets.values()])

    def has_columns(self) -> bool:
        """Whether all data sets have a column file."""
        return all(set_.has_columns() for set_ in self._sets.values())

    def check_classes(self) -> None:
        """Refuse to number the classes of a mixture whose class tables do not go together.

        Raises:
            DataError: See `dali_pipes.data_set.mixture.check_class_tables`.
        """
        if self._is_mixture:
            check_class_tables({name: set_.whole.classes for name, set_ in self._sets.items()})

    def locate(self, name: str) -> str:
        """The URL or path of one of the shards, or of its index."""
        store, object_name = self._place(name)
        return store.locate(object_name)

    def open_fetcher(self) -> Fetcher:
        """What fetches shards and their indexes in one thread."""
        fetcher: Fetcher
        if self._is_mixture:
            fetcher = MixtureFetcher({name: set_.shards.store for name, set_ in self._sets.items()}, fetcher_of)
        else:
            fetcher = fetcher_of(self._sets[""].shards.store)
        return fetcher if self.indexes is None else WithIndexes(fetcher, self.indexes)

    def _place(self, name: str) -> tuple[Store, str]:
        """The store that an object is in, and what it is called there."""
        set_, object_name = split_set(name) if self._is_mixture else ("", name)
        return self._sets[set_].shards.store, object_name

    def _combined(self, set_: str, name: str) -> str:
        return f"{set_}/{name}" if self._is_mixture else name


class _IndexedSet:
    """One data set's shards, with their manifest."""

    def __init__(self, shards: ShardSet) -> None:
        self.shards = shards
        self.indexes: dict[str, bytes] | None = None
        self._made_columns: SampleColumns | None = None
        found = find_manifest(shards)
        if found is None:
            found = self._index()
        self.whole: Manifest = found
        self.rows = found.rows_of(shards.names, where=shards.store.locate(manifest_name(shards.prefix)))
        self.manifest = found.take(self.rows)
        if self.manifest.num_samples == 0:
            raise DataError(f"'{shards.url}': {self.manifest.num_shards} shards hold no sample")

    def read_index(self, shard: int) -> bytes:
        if self.indexes is not None:
            return self.indexes[index_name(self.manifest.names[shard])]
        return index_reader(self.shards.store, self.manifest)(shard)

    def has_columns(self) -> bool:
        if self._made_columns is not None:
            return True
        return self.shards.store.size(columns_name(self.shards.prefix)) is not None

    def columns(self) -> SampleColumns:
        """Of all samples of ``whole``."""
        found = self._made_columns if self._made_columns is not None else find_columns(self.shards, self.whole)
        if found is None:
            name = self.shards.store.locate(columns_name(self.shards.prefix))
            raise DataError(
                f"no column file '{name}', which samples are chosen from by key or label; the shards were indexed "
                f"before there were such files: index them anew: {index_command(self.shards)}"
            )
        return found

    def _index(self) -> Manifest:
        started = time.perf_counter()
        made = index_in_memory(self.shards)
        self.indexes, self._made_columns = dict(made.indexes), made.columns
        _log.warning(
            "no manifest beside the shards of '%s'%s: indexed %d of them in %.1f s; store the index to be spared that: "
            "%s",
            self.shards.url,
            f" as ETL '{etl}' gives them" if (etl := etl_of(self.shards.store)) else "",
            made.manifest.num_shards,
            time.perf_counter() - started,
            index_command(self.shards),
        )
        return made.manifest


def find_shards(
    shards: ShardUrls | Mixture,
    *,
    endpoint: str | None,
    embedded_dir: Path | None,
    resources: contextlib.ExitStack,
    etl: str | None = None,
) -> ShardSet | NamedSets:
    """The shards that are named, in a bucket of the cluster at ``endpoint`` or in a directory; a mixture's by its sets.

    Args:
        shards: See `dali_pipes.store.urls.resolve_shards`.
        endpoint: AIStore's proxy. ``None``: an embedded node is started where shards are in a bucket.
        embedded_dir: Its storage.
        resources: Closes what is opened here.
        etl: The ETL through which they are read; those of a mixture's sets it names itself.

    Raises:
        DataError, StoreError, ValueError: See `dali_pipes.store.urls.resolve_shards` and `dali_pipes.store.etl.through_etl`.
    """
    if isinstance(shards, Mixture) and etl is not None:
        raise ValueError(
            f"etl='{etl}' with a mixture: say of which data sets: Mixture({{...}}, etl={{'{next(iter(shards.sets))}': "
            f"'{etl}'}})"
        )
    if endpoint is None and (etl is not None or (isinstance(shards, Mixture) and shards.etl)):
        _refuse_embedded(shards, etl)
    named = shards.sets if isinstance(shards, Mixture) else {"": shards}
    if any(is_remote(_first(urls)) for urls in named.values()):
        endpoint = resources.enter_context(cluster(endpoint, embedded_dir=embedded_dir))
    if not isinstance(shards, Mixture):
        found = resolve_shards(shards, endpoint=endpoint)
        return found if etl is None else through_etl(found, etl)
    sets = {}
    for name, urls in shards.sets.items():
        try:
            sets[name] = resolve_shards(urls, endpoint=endpoint)
            if name in shards.etl:
                sets[name] = through_etl(sets[name], shards.etl[name])
        except (DataError, StoreError, ValueError) as exc:
            if type(exc) not in (DataError, NoEtlError, StoreError, ValueError):
                raise
            raise type(exc)(f"data set '{name}': {exc}") from exc
    # Of one data set all of an epoch is, whatever its weight.
    weights = None if shards.weights is None or len(sets) == 1 else tuple(shards.weights[name] for name in sets)
    return NamedSets(sets=sets, weights=weights)


def _refuse_embedded(shards: ShardUrls | Mixture, etl: str | None) -> None:
    """Say that a node which starts now runs no ETL yet. Files, which need no node, are refused later."""
    named = {name: shards.sets[name] for name in shards.etl} if isinstance(shards, Mixture) else {"": shards}
    if remote := next((url for url in map(_first, named.values()) if is_remote(url)), None):
        etl = etl or next(iter(cast("Mixture", shards).etl.values()))
        raise ValueError(
            f"etl='{etl}' with '{remote}' needs the endpoint of the AIStore that runs it; pass endpoint= or set "
            "AIS_ENDPOINT; an embedded node that is started for this loader runs none"
        )


def _first(urls: ShardUrls) -> str | Path:
    return urls if isinstance(urls, str | Path) else next(iter(urls), "")


def open_stager(indexed: Indexed, share: CacheShare, *, num_fetchers: int = NUM_FETCHERS) -> Stager:
    """What brings these shards into the image."""
    return Stager(
        share,
        indexed.manifest,
        open_fetcher=indexed.open_fetcher,
        locate=indexed.locate,
        num_fetchers=num_fetchers,
    )


def fetcher_of(store: Store) -> Fetcher:
    """What fetches objects of a store in one thread."""
    if isinstance(store, LocalStore):
        return LocalFetcher(store.directory)
    from dali_pipes.fetch.connection_pool import ClusterAccess
    from dali_pipes.fetch.objects import ObjectFetcher

    if isinstance(store, TransformedStore):
        from dali_pipes.fetch.through_etl import TransformedFetcher

        return TransformedFetcher(ClusterAccess.from_environment(store.stored.endpoint), store)
    assert isinstance(store, AisStore)
    return ObjectFetcher(ClusterAccess.from_environment(store.endpoint), store.bucket, provider=store.provider)


def open_share(
    indexed: Indexed,
    *,
    reserved: int | None,
    is_windowed: bool,
    group: int,
    cache_dir: Path | None,
    cache_bytes: int | None,
) -> CacheShare:
    """A share in the image of these shards.

    Args:
        indexed: The shards.
        reserved: Bytes that must be resident at a time; ``None``: as many as fit.
        is_windowed: Whether they are two windows.
        group: See `dali_pipes.cache.share.CacheShare`.
        cache_dir: Where images lie; ``None``: see `dali_pipes.cache.placement`.
        cache_bytes: What all images there may take.

    Raises:
        CacheError: If there is no room.
    """
    total = int(indexed.extent_bytes.sum())
    placement = place(
        cache_dir,
        cache_bytes,
        key=cache_file_key(indexed.whole, alignment=indexed.alignment),
        reserved=0 if reserved is None else reserved,
        total=total,
        is_windowed=is_windowed,
    )
    return CacheShare(
        indexed.whole,
        indexed.rows,
        space=placement.space,
        source=indexed.source,
        group=group,
        reserved=min(total, placement.cache_bytes) if reserved is None else reserved,
        cache_bytes=placement.cache_bytes,
        keep=placement.keep,
        alignment=indexed.alignment,
    )
