"""Look up samples by their ordinals in the indexes of their shards.

`Samples` serves a running loader: it has the indexes of the shards in the windows that are being read, and of no
others, whatever the size of the data set.

`StoredSamples` checks a data set against a graph before the first batch, by the manifest's sums and the store's shard
indexes. Later it finds the samples that can replace a bad one.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from dali_pipes.arrays import Int64s
from dali_pipes.errors import DataError, shown
from dali_pipes.formats.manifest import Manifest
from dali_pipes.formats.names import LABEL_COMPONENT, classes_name, index_name
from dali_pipes.formats.photo_header import REFUSED_FORMATS
from dali_pipes.formats.photo_names import ComponentCounts, DataSets, find_mask, find_photo, has_mask
from dali_pipes.order.randomness import Stream
from dali_pipes.reader.batch import NO_PHOTO, Batch, Rows, SampleRules, ShardTable
from dali_pipes.store.patience import PatientThreads, in_threads
from dali_pipes.store.ranges import NUM_THREADS
from dali_pipes.store.shard_names import shared_prefix

# Shard indexes read at a time in search of a fault; the wait is the store's latency.
NUM_READERS = 16


class Samples:
    """The samples of a data set; ``read_index`` takes a shard's number and returns the checked bytes of its index."""

    def __init__(
        self, manifest: Manifest, read_index: Callable[[int], bytes], *, rules: SampleRules | None = None
    ) -> None:
        self.manifest, self.rules = manifest, rules or SampleRules()
        self._read_index = read_index
        self._stops = manifest.sample_stops
        self._class_ids = np.array(sorted(manifest.classes), np.int64)
        self._tables: dict[int, ShardTable] = {}

    @property
    def classes(self) -> dict[int, str]:
        """Class id, as batches have it, to name; sorted by id."""
        is_contiguous = self.rules.labels == "contiguous"
        ids = self._class_ids.tolist()
        return {number if is_contiguous else label: self.manifest.classes[label] for number, label in enumerate(ids)}

    def __len__(self) -> int:
        return int(self._stops[-1]) if len(self._stops) else 0

    def shard_of(self, ordinals: Int64s) -> Int64s:
        """Return the shard of each ordinal: int64 [N]."""
        return np.searchsorted(self._stops, ordinals, side="right").astype(np.int64)

    def rows(self, ordinals: Int64s) -> Rows:
        """Look up these samples, in this order. A `DataError` if an index of a shard does not fit the manifest."""
        tables = [self._table(int(shard)) for shard in np.unique(self.shard_of(ordinals))]
        return Rows(ordinals, tables)

    def load(self, shards: Iterable[int], read_index: Callable[[int], bytes]) -> None:
        """Read the indexes of these shards, several at a time, from elsewhere."""
        missing = [shard for shard in shards if shard not in self._tables]
        tables = in_threads(lambda shard: self._load(shard, read_index), missing, num_threads=NUM_THREADS)
        self._tables.update(zip(missing, tables, strict=True))

    def forget(self, shards: Iterable[int]) -> None:
        """Drop the indexes of these shards."""
        for shard in shards:
            self._tables.pop(shard, None)

    def _start(self, shard: int) -> int:
        return int(self._stops[shard] - self.manifest.samples[shard])

    def _table(self, shard: int) -> ShardTable:
        if shard not in self._tables:
            self._tables[shard] = self._load(shard)
        return self._tables[shard]

    def _load(self, shard: int, read_index: Callable[[int], bytes] | None = None) -> ShardTable:
        name = self.manifest.names[shard]
        index = self.manifest.shard_index(shard, (read_index or self._read_index)(shard), where=index_name(name))
        first = self._start(shard)
        return ShardTable(shard, name=name, first=first, index=index, rules=self.rules, class_ids=self._class_ids)


class StoredSamples(Samples):
    """Samples whose indexes are read from the store each time and not kept.

    ``whole`` is the manifest of which ``manifest`` is a part, and to which the sums belong; ``sets`` are the sums of
    each data set of a mixture. ``excluded`` are ordinals that no plan names, int64, sorted; they are not checked.
    ``shape`` is an example of `Batch.shape`.
    """

    def __init__(
        self,
        manifest: Manifest,
        read_index: Callable[[int], bytes],
        *,
        rules: SampleRules | None = None,
        whole: Manifest | None = None,
        sets: DataSets | None = None,
        excluded: Int64s | None = None,
        shape: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(manifest, read_index, rules=rules)
        self._shape = shape
        self._whole = whole or manifest
        self._sets = sets or {"": ComponentCounts(self._whole.components, self._whole.num_samples)}
        self.excluded = np.empty(0, np.int64) if excluded is None else excluded
        # A graph is built again after an iteration was cut short: then these components are not checked again.
        self._checked: set[str] = set()
        self._checked_single: set[str] = set()

    def without(self, excluded: Int64s) -> "StoredSamples":
        """Copy the data set, with these ordinals excluded instead."""
        copied = copy.copy(self)
        copied.excluded, copied._checked, copied._checked_single = excluded, set(), set()
        return copied

    def example(self) -> Batch:
        """Make a batch of the first sample that is not excluded; it shows the kinds of a graph's arrays."""
        is_left = self.excluded != np.arange(len(self.excluded))
        first = np.array([np.argmax(is_left) if is_left.any() else len(self.excluded)], np.int64)
        return self.example_of(self.rows(first))

    def example_of(self, rows: Rows) -> Batch:
        """Make a batch of the first of these samples."""
        once = np.zeros(1, np.int64)
        return Batch(rows, 0, 1, once, num_valid=1, stream=lambda name: Stream(0, 0, name), shape=self._shape)

    def neighbours(self, ordinal: int) -> Iterator[Int64s]:
        """Yield the other samples that are not excluded, one shard at a time.

        First comes the sample's own shard: the samples before it, then those after it, the nearest ones first. Then
        come the following shards in their order, and after the last shard the first ones.
        """
        own_shard = int(self.shard_of(np.array([ordinal]))[0])
        for number in range(own_shard, own_shard + self.manifest.num_shards):
            shard = number % self.manifest.num_shards
            others = np.arange(self._start(shard), self._stops[shard], dtype=np.int64)
            if number == own_shard:
                others = np.concatenate([others[others < ordinal][::-1], others[others > ordinal]])
            others = others[~np.isin(others, self.excluded)]
            if len(others):
                yield others

    @property
    def has_labels(self) -> bool:
        """Whether any sample of the whole data set has a label, or the loader asks for contiguous class ids."""
        return self.rules.labels == "contiguous" or self._whole.components.get(LABEL_COMPONENT, 0) > 0

    @property
    def turned(self) -> Mapping[str, int]:
        """`Manifest.turned` of the whole data set."""
        return self._whole.turned

    def photo(self, *, besides: str = "") -> str:
        """Find the component of the photo; a `DataError` if it is not clear, or a sample has two alternatives."""
        return self._single(find_photo(self._sets, besides=besides))

    def mask(self, *, photo: str) -> str:
        """Find the component of the mask, likewise."""
        return self._single(find_mask(self._sets, photo=photo))

    def has_mask(self, *, photo: str) -> bool:
        """Tell whether there is a mask by its name."""
        return has_mask(self._sets, photo=photo)

    def _single(self, component: str) -> str:
        """Refuse a sample that has two of the alternatives, or none: the manifest's sums do not show it."""
        names = component.split(";")
        if len(names) == 1 or component in self._checked_single:
            return component

        def is_odd(table: ShardTable) -> Any:
            num_there = np.sum([table.places(name).is_there for name in names], axis=0)
            return (num_there > 1) | ((num_there == 0) & (self.rules.missing == "error"))

        if (found := self._first(is_odd)) is not None:
            table, row = found
            components = ", ".join(f"'{name}'" for name in table.components_of(row)) or "none"
            raise DataError(
                f"{table.name_of(row)}: expected one of the components {shown(names)}, found {components}; name the "
                "component in the graph (photo=, mask=), or leave the sample out (select=Select(exclude=...))"
            )
        self._checked_single.add(component)
        if self.rules.missing == "error":
            self._checked.add(component)
        return component

    def check_component(self, component: str) -> None:
        """Refuse a component that a sample lacks; read shard indexes only if the manifest's sums leave a doubt.

        For alternatives, ``"jpg;jpeg;png"``, a sample that has none of them; a `DataError` names the first such sample.
        """
        if component in self._checked:
            return
        whole, names = self._whole, component.split(";")
        most = max(whole.components.get(name, 0) for name in names)
        if self.rules.missing != "error" and not most:
            components = ", ".join(f"'{name}'" for name in whole.components)
            raise DataError(f"no sample has component '{component}'; the data set has {components or 'none'}")
        is_in_doubt = self.rules.missing == "error" and most < whole.num_samples
        if is_in_doubt and (found := self._first(lambda table: ~table.places(component).is_there)) is not None:
            table, row = found
            components = ", ".join(table.components_of(row)) or "none"
            raise DataError(
                f"{table.name_of(row)}: no component '{component}' (found: {components}); name another one in the "
                "graph, or pass select=Select(missing='empty'), or missing='skip' to leave such samples out"
            )
        self._checked.add(component)

    def check_sized(self, component: str) -> None:
        """Refuse a component whose height and width the graph asks for, but whose name is not that of a photo."""
        for name in component.split(";"):
            if name in self._whole.components and name not in self._whole.photos:
                raise DataError(
                    f"component '{name}' has no height and width in the index, because its name is not a photo's; name "
                    "it .jpg, .png or the like when packing"
                )

    def check_photos(self, component: str) -> None:
        """Refuse photos that must not reach a decoder, by the headers that were read when the shards were indexed."""
        rules = self.rules.photos
        formats = [self._whole.photos[name] for name in component.split(";") if name in self._whole.photos]
        if not any(found.get(kind) for found in formats for kind in (*REFUSED_FORMATS, "unsized")):
            return

        def is_bad(table: ShardTable) -> Any:
            places = table.places(component)
            is_photo = places.is_there & (places.format != NO_PHOTO)
            return is_photo & rules.are_bad(places.format, places.height, places.width)

        if (found := self._first(is_bad)) is not None:
            table, row = found
            problem = rules.problem(table.places(component).header(row))
            raise DataError(
                f"{table.name_of(row)}: component '{component}' {problem}; pass "
                "bad_samples=BadSamples(on_error='substitute'), leave it out (select=Select(exclude=...)), or pack "
                "without it: dali-pipes prep pack --on-bad skip"
            )

    def check_labels(self) -> None:
        """Refuse a data set in which a sample lacks a label, or contiguous ids lack a class table."""
        self.check_component(LABEL_COMPONENT)
        if self.rules.labels == "contiguous" and not len(self._class_ids):
            table = classes_name(shared_prefix(self.manifest.names))
            raise DataError(
                f"labels='contiguous' needs a class table, and the manifest has none; write '{table}', "
                '{"1": "name", ...}, and index the shards anew: dali-pipes prep index URL'
            )

    def _table(self, shard: int) -> ShardTable:
        return self._load(shard)

    def _first(self, is_found: Callable[[ShardTable], Any]) -> tuple[ShardTable, int] | None:
        """Find the first sample that is not excluded and for which ``is_found``: its shard's table and its row."""
        with PatientThreads(NUM_READERS) as readers:
            for first in range(0, self.manifest.num_shards, 16 * NUM_READERS):
                shards = range(first, min(first + 16 * NUM_READERS, self.manifest.num_shards))
                for table in readers.map(self._load, shards):
                    rows = np.flatnonzero(is_found(table))
                    rows = rows[~np.isin(rows + table.first, self.excluded)]
                    if len(rows):
                        return table, int(rows[0])
        return None
