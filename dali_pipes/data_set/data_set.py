"""Open a data set: the manifest, indexes and columns of the named shards, and the objects that stage them.

The data sets of a mixture become one: in the joined manifest a shard is called ``SET/SHARD``. Other code uses it like
any manifest; only code that asks a store for an object splits the name again. This needs no DALI.
"""

import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dali_pipes.arrays import Int32s, Int64s
from dali_pipes.cache.cache import Verify
from dali_pipes.cache.extents import EXTENT_ALIGNMENT, extent_starts
from dali_pipes.cache.placement import available_memory, place
from dali_pipes.cache.share import CacheShare, cache_file_key
from dali_pipes.data_set.find import NamedSets
from dali_pipes.data_set.indexing import (
    IndexedShards,
    find_manifest,
    has_columns,
    index_in_memory,
    open_columns,
    read_index,
)
from dali_pipes.errors import DataError, printable
from dali_pipes.fetch.fetcher import NUM_FETCHERS, Fetcher, Wanted, WholeShards, WithIndexes
from dali_pipes.fetch.samples import SomeSamples
from dali_pipes.fetch.stager import Stager
from dali_pipes.formats.manifest import Manifest, concatenate
from dali_pipes.formats.names import columns_name, described, index_name, manifest_name, start_of
from dali_pipes.formats.photo_names import ComponentCounts, DataSets
from dali_pipes.formats.sample_columns import ColumnRanges, Columns, SampleColumns, read_columns, read_parts
from dali_pipes.formats.shard_index import ComponentRange
from dali_pipes.order.state import DataVersions
from dali_pipes.store.base import Store
from dali_pipes.store.shard_set import ShardSet

_log = logging.getLogger(__name__)


class MixtureFetcher:
    """A `dali_pipes.fetch.fetcher.Fetcher` for combined names, which reads each set's objects from its own store.

    A store's fetcher is opened for its first object. Sets with the same store and ETL share one fetcher.
    """

    def __init__(self, stores: Mapping[str, Store]) -> None:
        self._stores = stores
        self._fetchers: dict[tuple[str, str], Fetcher] = {}
        """(URL of the store, ETL) -> fetcher."""

    def fetch(self, wanted: Sequence[Wanted], *, stopped: Callable[[], bool], num_connections: int = 1) -> bool:
        """See `dali_pipes.fetch.fetcher.Fetcher`. Objects of one store are fetched together, the stores in turn."""
        by_store: dict[tuple[str, str], list[Wanted]] = {}
        for one in wanted:
            set_, name = split_set(one.name)
            store = self._stores[set_]
            which = (store.url, store.etl)
            if which not in self._fetchers:
                self._fetchers[which] = store.open_fetcher()
            by_store.setdefault(which, []).append(one._replace(name=name))
        return all(
            self._fetchers[which].fetch(own, stopped=stopped, num_connections=num_connections)
            for which, own in by_store.items()
        )

    def close(self) -> None:
        """Close the open fetchers. Can be called twice."""
        while self._fetchers:
            self._fetchers.popitem()[1].close()


def split_set(name: str) -> tuple[str, str]:
    """Split a combined name into the data set's name and the object's own name.

    >>> split_set("pets/train/shuffled-000000.tar")
    ('pets', 'train/shuffled-000000.tar')
    >>> split_set(".dali-pipes/pets/train/shuffled-000000.index.safetensors")
    ('pets', '.dali-pipes/train/shuffled-000000.index.safetensors')
    """
    combined = start_of(name)
    set_, _, object_name = combined.partition("/")
    return set_, object_name if combined == name else described(object_name)


def join_manifests(parts: Mapping[str, Manifest]) -> Manifest:
    """One manifest for several data sets, in their order. Shard names get their set's name in front; sums are added.

    Versions and column files stay with the sets. If two sets have different names for a class id, the first one is
    kept: see `DataSet.check_classes`.
    """
    etls = [manifest.etl for manifest in parts.values()]
    joined = concatenate(list(parts.values()))
    return replace(
        joined,
        names=[f"{set_}/{name}" for set_, manifest in parts.items() for name in manifest.names],
        etl=";".join(etls) if any(etls) else "",
    )


# 20 as the file has them, and once more for those of the loader's shards.
BYTES_A_SAMPLE = 40


class DataSet:
    """Shards, the manifest of all shards that were indexed together, and the manifest of these shards.

    Args:
        shards: The shards. Those of a mixture are joined to one manifest, one data set after the other.
        alignment: Of the shards' extents; depends on the file system of the cache.

    Raises:
        DataError: If a manifest or index is broken, or a shard is not in the manifest.
    """

    def __init__(self, shards: ShardSet | NamedSets, *, alignment: int = EXTENT_ALIGNMENT) -> None:
        self.shards, self.alignment = shards, alignment
        self.is_mixture = isinstance(shards, NamedSets)
        named = shards.sets if isinstance(shards, NamedSets) else {"": shards}
        self._sets = {name: _Set(set_) for name, set_ in named.items()}
        sets = list(self._sets.values())
        self.set_names: tuple[str, ...] = tuple(named)
        """Names of a mixture's data sets, in order; one empty name if there is only one data set."""
        self.set_shards: list[int] = [set_.manifest.num_shards for set_ in sets]
        """The number of shards of each data set, in order."""
        self.weights: tuple[float, ...] | None = shards.weights if isinstance(shards, NamedSets) else None
        """Each data set's part of the samples that are read; ``None`` if the mixture gives no weights."""
        self.versions = DataVersions(
            [set_.whole.version for set_ in sets], [set_.shards.store.locate(set_.shards.prefix) for set_ in sets]
        )
        """The versions of the data sets, in order."""
        self.indexes: dict[str, bytes] | None = None
        """Shard indexes that were made now, by object name; ``None`` if the stores have all of them."""
        for name, set_ in self._sets.items():
            if set_.made is not None:
                prefix = f"{name}/" if self.is_mixture else ""
                made = {described(f"{prefix}{start_of(one)}"): data for one, data in set_.made.indexes.items()}
                self.indexes = (self.indexes or {}) | made
        self._whole_shards: WholeShards | None = None
        self.whole: Manifest = sets[0].whole
        """The manifest of all shards that were indexed together."""
        self.rows: Int64s = sets[0].rows
        """The position of each shard in ``whole``: int64 [shards]."""
        self.manifest: Manifest = sets[0].manifest
        """The manifest of these shards."""
        if self.is_mixture:
            self.whole = join_manifests({name: set_.whole for name, set_ in self._sets.items()})
            firsts = np.cumsum([0, *(set_.whole.num_shards for set_ in sets)])
            self.rows = np.concatenate([set_.rows + first for set_, first in zip(sets, firsts[:-1], strict=True)])
            self.manifest = self.whole.take(self.rows)

    @property
    def component_counts(self) -> DataSets:
        """How many samples of each data set have each component; over all shards that were indexed together."""
        return {
            name: ComponentCounts(set_.whole.components, set_.whole.num_samples) for name, set_ in self._sets.items()
        }

    @property
    def extent_bytes(self) -> Int64s:
        """Bytes of each shard's extent in a cache file: int64 [shards]."""
        manifest = self.manifest
        return np.diff(extent_starts(manifest.shard_bytes, manifest.index_bytes, alignment=self.alignment))

    @property
    def source(self) -> str:
        """The origin of the shards in one line: URLs and ETL."""
        if self.is_mixture:
            return self.shards.url
        etl = self._sets[""].shards.store.etl
        return f"{self.shards.url}{f' through ETL {etl}' if etl else ''}"

    def locate(self, name: str) -> str:
        """The URL or path of one of the shards, or of its index."""
        store, object_name = self._place(name)
        return store.locate(object_name)

    def read_index(self, shard: int) -> bytes:
        """A shard's index, from its store or as it was made now."""
        for set_ in self._sets.values():
            if shard < set_.manifest.num_shards:
                return set_.read_index(shard)
            shard -= set_.manifest.num_shards
        raise IndexError(f"shard must be in [0, {self.manifest.num_shards})")

    def read_range(self, shard: int, *, start: int, size: int) -> bytes:
        """A shard's bytes ``[start, start + size)``, from the store. For one thread."""
        name = self.manifest.names[shard]
        store, object_name = self._place(name)
        if not store.etl:
            return store.read_range(object_name, start=start, size=size)
        if self._whole_shards is None:
            self._whole_shards = WholeShards(self.open_fetcher)
        return self._whole_shards.read(
            name,
            shard_bytes=int(self.manifest.shard_bytes[shard]),
            checksum=int(self.manifest.checksums[shard]),
            start=start,
            size=size,
        )

    def read_ranges(self, ranges: Sequence[ComponentRange]) -> list[bytes]:
        """Read components of any of these shards; see `Store.read_ranges`. It does not read through an ETL."""
        if not self.is_mixture:
            return self._sets[""].shards.store.read_ranges(ranges)
        of_set: dict[str, list[int]] = {}
        for at, one in enumerate(ranges):
            of_set.setdefault(split_set(one.shard)[0], []).append(at)
        found = [b""] * len(ranges)
        for set_, own in of_set.items():
            plain = [ranges[at]._replace(shard=split_set(ranges[at].shard)[1]) for at in own]
            for at, data in zip(own, self._sets[set_].shards.store.read_ranges(plain), strict=True):
                found[at] = data
        return found

    def close(self) -> None:
        """Release the shards that `read_range` keeps. Can be called twice."""
        if self._whole_shards is not None:
            self._whole_shards.close()

    # Columns and classes

    def columns(self) -> Columns:
        """Key, label and components of every sample of these shards, in their order.

        They are read at each call and not kept: they take about 20 bytes a sample.

        Raises:
            DataError: If there is no column file beside the shards, or it belongs to another manifest.
            ValueError: If they do not fit in memory; nothing was read then.
        """
        num_samples = self.manifest.num_samples
        needed, available = num_samples * BYTES_A_SAMPLE, available_memory()
        if 0 < available < needed:  # 0: the system does not say
            raise ValueError(
                f"the columns (keys, labels, sizes of photos) of the {num_samples} samples indexed at "
                f"'{self.shards.url}' take about {needed} bytes of memory at once, and {available} are available; for "
                "oversample= and buckets use a data set of fewer samples, or more memory"
            )
        return Columns(self.sample_columns(), names=self.manifest.names, counts=self.manifest.samples)

    def sample_columns(self) -> SampleColumns:
        """Like `columns`, as the files have them."""
        return read_columns(self._open_columns(), self.rows)

    def columns_in_parts(
        self, *, of_whole: bool = False, shards: Int64s | None = None
    ) -> Iterator[tuple[int, Columns]]:
        """Yield the columns of a million samples or fewer at a time: the ordinal of the first one, and the columns.

        The parts are in the shards' order, each has whole shards, and a column is read when it is first asked for.
        With ``of_whole`` they are those of all shards that were indexed together, with ``shards`` those of some of
        these shards: int64 [N].

        Raises:
            DataError: As `columns`; also if a column file is replaced meanwhile.
        """
        rows = np.arange(self.whole.num_shards) if of_whole else self.rows
        chosen = np.arange(len(rows)) if shards is None else shards
        manifest = (self.whole if of_whole else self.manifest).take(chosen)
        firsts = np.append(0, manifest.sample_stops)
        for run, part in read_parts(self._open_columns(), rows[chosen]):
            own = slice(run.first, run.stop)
            yield int(firsts[run.first]), Columns(part, names=manifest.names[own], counts=manifest.samples[own])

    def _open_columns(self) -> list[ColumnRanges]:
        return [file for set_ in self._sets.values() for file in set_.open_columns()]

    def has_columns(self) -> bool:
        """Whether all data sets have a column file."""
        return all(set_.has_columns() for set_ in self._sets.values())

    def check_classes(self) -> None:
        """Refuse class tables of a mixture that contradict each other, for contiguous labels over all sets.

        Raw ids are not checked: data sets that each count their classes from 1 can be mixed if the graph uses no label,
        or if a training step tells the sets apart by their shards.

        Raises:
            DataError: If a set has no table, or two sets have different names for an id; shows both.
        """
        named_by: dict[int, tuple[str, str]] = {}
        for set_, table in {name: part.whole.classes for name, part in self._sets.items()}.items():
            if not table and self.is_mixture:
                raise DataError(
                    f"labels='contiguous' needs a class table of every data set, and the manifest of '{set_}' has "
                    'none; write one, .dali-pipes/PREFIXclasses.json with {"1": "name", ...}, and index the shards '
                    "anew: dali-pipes prep index URL"
                )
            for label, name in table.items():
                first, known = named_by.setdefault(label, (set_, name))
                if known != name:
                    raise DataError(
                        f"labels='contiguous' needs one class table, and class id {label} is '{known}' in data set "
                        f"'{first}', '{name}' in '{set_}'; give the classes of one of them other ids, pack and index "
                        "it anew, or take labels='raw'"
                    )

    # Staging

    def open_fetcher(self) -> Fetcher:
        """A fetcher of shards and their indexes, for one thread."""
        fetcher: Fetcher
        if self.is_mixture:
            fetcher = MixtureFetcher({name: set_.shards.store for name, set_ in self._sets.items()})
        else:
            fetcher = self._sets[""].shards.store.open_fetcher()
        return fetcher if self.indexes is None else WithIndexes(fetcher, self.indexes)

    def some_samples(self, excluded: Int64s) -> SomeSamples | None:
        """The samples of these shards that are not excluded, if they are few enough to be staged without the rest."""
        # An ETL gives whole shards. Blocks of another size would hold more than what is counted.
        if self.manifest.etl or self.alignment != EXTENT_ALIGNMENT:
            return None
        samples = SomeSamples(
            self.manifest,
            excluded,
            shard_extents=self.extent_bytes,
            read_ranges=self.read_ranges,
        )
        return samples if samples.are_few else None

    def open_stager(
        self, share: CacheShare, *, num_fetchers: int = NUM_FETCHERS, samples: SomeSamples | None = None
    ) -> Stager:
        """A stager that brings these shards, or some samples of them, into the cache file."""
        return Stager(
            share,
            self.manifest,
            open_fetcher=self.open_fetcher,
            locate=self.locate,
            num_fetchers=num_fetchers,
            samples=samples,
        )

    def open_share(
        self,
        *,
        reserved: int | None,
        is_windowed: bool,
        group: int,
        cache_dir: Path | None,
        cache_bytes: int | None,
        verify: Verify = "first",
        samples: SomeSamples | None = None,
    ) -> CacheShare:
        """A share of the cache file of these shards: see `dali_pipes.cache.share.CacheShare`.

        Args:
            reserved: Bytes that must be resident at a time; ``None``: as many as fit.
            is_windowed: Whether ``reserved`` is for two windows.
            group: The number of the loaders' group; loaders of one group share the reservation.
            cache_dir: The directory of cache files; ``None``: see `dali_pipes.cache.placement`.
            cache_bytes: The limit for all cache files there.
            verify: Which shards that are there already are checked again.
            samples: Those that the cache file is for; ``None``: whole shards.

        Raises:
            CacheError: If there is not enough space.
        """
        key = cache_file_key(self.whole, alignment=self.alignment)
        starts = extent_starts(self.whole.shard_bytes, self.whole.index_bytes, alignment=self.alignment)
        sizes = np.diff(starts)
        if samples is not None:
            key = hashlib.sha256(f"{key} {samples.digest}".encode()).hexdigest()[: len(key)]
            sizes[self.rows] = samples.extent_bytes
        total = int(sizes[self.rows].sum())
        least = 0 if reserved is None else reserved
        placement = place(cache_dir, cache_bytes, key=key, reserved=least, total=total, is_windowed=is_windowed)
        return CacheShare(
            placement,
            key=key,
            starts=starts,
            sizes=sizes,
            rows=self.rows,
            shard_bytes=self.manifest.shard_bytes,
            index_bytes=self.manifest.index_bytes,
            source=self.source,
            group=group,
            reserved=min(total, placement.cache_bytes) if reserved is None else reserved,
            verify=verify,
        )

    def _place(self, name: str) -> tuple[Store, str]:
        set_, object_name = split_set(name) if self.is_mixture else ("", name)
        return self._sets[set_].shards.store, object_name


class _Set:
    """The shards of one data set, with their manifest."""

    def __init__(self, shards: ShardSet) -> None:
        self.shards = shards
        self.made: IndexedShards | None = None
        """The files that were made now, if no manifest lies beside the shards."""
        found = find_manifest(shards)
        if found is None:
            self.made = _index_now(shards)
            found = self.made.manifest
        self.whole: Manifest = found
        self.rows = found.rows_of(shards.names, where=shards.store.locate(manifest_name(shards.prefix)))
        self.manifest = found.take(self.rows)
        if self.manifest.num_kept == 0:
            removed = f" that was not removed: {self.manifest.num_samples} were" if self.manifest.num_samples else ""
            raise DataError(f"'{shards.url}': {self.manifest.num_shards} shards hold no sample{removed}")

    def read_index(self, shard: int) -> bytes:
        if self.made is not None:
            return self.made.indexes[index_name(self.manifest.names[shard])]
        return read_index(self.shards.store, self.manifest, shard)

    def has_columns(self) -> bool:
        return self.made is not None or has_columns(self.shards, self.whole)

    def open_columns(self) -> list[ColumnRanges]:
        """The column files of ``whole``, to be read by ranges."""
        if self.made is not None:
            digest = self.whole.shards_digest
            data = self.made.columns.to_bytes(manifest=digest)
            read = lambda start, size: data[start : start + size]  # noqa: E731
            return [ColumnRanges(read, samples=self.whole.samples, manifest=digest, where="columns")]
        if (found := open_columns(self.shards, self.whole)) is not None:
            return found
        name = self.shards.store.locate(columns_name(self.shards.prefix))
        raise DataError(
            f"no column file '{name}', by which samples are chosen by key, label or component; index the shards "
            f"anew: {self.shards.index_command}"
        )


def _index_now(shards: ShardSet) -> IndexedShards:
    started = time.perf_counter()
    made = index_in_memory(shards)
    etl = shards.store.etl
    _log.warning(
        "no manifest beside the shards of '%s'%s: indexed %d of them in %.1f s; to skip this next time, store the "
        "index: %s",
        shards.url,
        f" as ETL '{etl}' gives them" if etl else "",
        made.manifest.num_shards,
        time.perf_counter() - started,
        shards.drop_command if shards.named_by else shards.index_command,
    )
    return made


class PhotoSizes(NamedTuple):
    """Rows and columns of each sample's upright photo: int32 [N] each; 0 where it lacks it or it has no size."""

    height: Int32s
    width: Int32s


def photo_sizes(data_set: DataSet, photo: str) -> PhotoSizes:
    """Find the sizes of one component, or of the first that each sample has of alternatives such as ``"jpg;jpeg"``.

    Raises:
        DataError: If the column file is missing, or the component is not a photo.
    """
    columns = data_set.columns()
    height, width = np.zeros(len(columns), np.int32), np.zeros(len(columns), np.int32)
    is_found = np.zeros(len(columns), np.bool_)
    for name in photo.split(";"):
        if name not in columns.samples.sizes and name in columns.components:
            photos = ", ".join(map(printable, sorted(columns.samples.sizes))) or "none"
            raise DataError(
                f"'{printable(data_set.source)}': expected heights and widths of '{printable(name)}' in the column "
                "file, to find the shape of each batch, found none; name a photo: photo=... of dali_pipes.buckets "
                f"(found: {photos})"
            )
        rows, sides = columns.size(name), columns.has(name) & ~is_found
        height[sides], width[sides] = rows[0][sides], rows[1][sides]
        is_found |= sides
    return PhotoSizes(height, width)
