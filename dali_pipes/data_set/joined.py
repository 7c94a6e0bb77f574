"""Join the data sets of a mixture: one manifest for all, and a fetcher that reads each object from its own store.

In the joined manifest a shard is called ``SET/SHARD``. Other code uses it like any manifest; only code that asks a
store for an object splits the name again.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from dali_pipes.errors import DataError
from dali_pipes.fetch.fetcher import Fetcher, Wanted
from dali_pipes.formats.manifest import SHARD_COLUMNS, UNSIZED, Manifest
from dali_pipes.store.base import Store

_UNKNOWN = "unknown"  # photos of this format have no size either


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
    """
    set_, _, object_name = name.partition("/")
    return set_, object_name


def join_manifests(parts: Mapping[str, Manifest]) -> Manifest:
    """One manifest for several data sets, in their order. Shard names get their set's name in front; sums are added.

    Versions and column files stay with the sets. If two sets have different names for a class id, the first one is
    kept: see `check_class_tables`.
    """
    etls = [manifest.etl for manifest in parts.values()]
    joined = concatenate(list(parts.values()))
    return replace(
        joined,
        names=[f"{set_}/{name}" for set_, manifest in parts.items() for name in manifest.names],
        etl=";".join(etls) if any(etls) else "",
    )


def concatenate(manifests: Sequence[Manifest]) -> Manifest:
    """The shards of several manifests, one after the other, in one of version 1; sums and class tables are added."""
    classes: dict[int, str] = {}
    components: Counter[str] = Counter()
    for manifest in manifests:
        classes = dict(manifest.classes) | classes
        components.update(manifest.components)
    columns: dict[str, Any] = {
        name: np.concatenate([getattr(manifest, name) for manifest in manifests]) for name in SHARD_COLUMNS
    }
    firsts = np.cumsum([0, *(manifest.num_samples for manifest in manifests)])
    ids = [label for manifest in manifests for label in manifest.labels.values()]
    return Manifest(
        names=[name for manifest in manifests for name in manifest.names],
        **columns,
        components=components,
        classes=classes,
        photos=_joined_photos([manifest.photos for manifest in manifests]),
        labels={"min": min(ids), "max": max(ids)} if ids else {},
        turned=_joined_turned([manifest.turned for manifest in manifests]),
        recoded=tuple(step for manifest in manifests for step in manifest.recoded),
        removed=np.concatenate(
            [manifest.removed + first for manifest, first in zip(manifests, firsts[:-1], strict=True)]
        ).astype(np.int64),
    )


def check_class_tables(tables: Mapping[str, Mapping[int, str]]) -> None:
    """Refuse class tables (by the names of the sets) that contradict each other, for contiguous labels over all sets.

    Raw ids are not checked: data sets that each count their classes from 1 can be mixed if the graph uses no label, or
    if a training step tells the sets apart by their shards.

    Raises:
        DataError: If a set has no table, or two sets have different names for an id; shows both.
    """
    named_by: dict[int, tuple[str, str]] = {}
    if missing := next((set_ for set_, table in tables.items() if not table), None):
        raise DataError(
            f"labels='contiguous' needs a class table of every data set, and the manifest of '{missing}' has none; "
            'write one beside its shards, PREFIXclasses.json with {"1": "name", ...}, and index them anew: '
            "dali-pipes prep index URL"
        )
    for set_, table in tables.items():
        for label, name in table.items():
            first, known = named_by.setdefault(label, (set_, name))
            if known != name:
                raise DataError(
                    f"labels='contiguous' needs one class table, and class id {label} is '{known}' in data set "
                    f"'{first}', '{name}' in '{set_}'; give the classes of one of them other ids, pack and index it "
                    "anew, or take labels='raw'"
                )


def _joined_photos(parts: Sequence[Mapping[str, Mapping[str, int]]]) -> dict[str, dict[str, int]]:
    photos: dict[str, dict[str, int]] = {}
    for component in {component: None for part in parts for component in part}:
        counted = [part[component] for part in parts if component in part]
        joined = Counter[str]()
        for counts in counted:
            joined.update(counts)
        # A manifest gives this number only if it differs from the number of unknown photos.
        joined[UNSIZED] = sum(counts.get(UNSIZED, counts.get(_UNKNOWN, 0)) for counts in counted)
        if joined[UNSIZED] == joined[_UNKNOWN]:
            del joined[UNSIZED]
        photos[component] = dict(joined)
    return photos


def _joined_turned(parts: Sequence[Mapping[str, int] | None]) -> dict[str, int] | None:
    joined = Counter[str]()
    for turned in parts:
        if turned is None:
            return None  # where one data set does not know, the mixture does not
        joined.update(turned)
    return dict(joined)
