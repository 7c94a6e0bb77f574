"""Join data sets: several that are named in, one combined manifest out, and what fetches each from where it is.

In the combination a shard is called ``SET/SHARD``. Everything behind works on it as on any other manifest; only who
asks a store for an object takes the name apart again.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from dali_pipes.errors import DataError
from dali_pipes.fetch.stager import Fetcher, Wanted
from dali_pipes.formats.column_file import UNSIZED
from dali_pipes.formats.manifest import Manifest
from dali_pipes.formats.texts import Texts, pack_texts
from dali_pipes.store.base import Store
from dali_pipes.store.etl import etl_of
from dali_pipes.store.urls import ShardSet, ShardUrls

__all__ = ["Mixture", "MixtureFetcher", "NamedSets", "check_class_tables", "join_manifests", "split_set"]

_UNKNOWN = "unknown"  # the photo format of what has no size either


@dataclass(frozen=True)
class Mixture:
    """Several data sets that a loader reads as one: ``Mixture({"pets": "ais://pets/shuffled-", "own": "/data/cats"})``.

    Args:
        sets: Name -> shards, as `dali_pipes.loader` takes them: URLs, braces, globs, lists. The names become parts of
            the shards' names, in messages and in lists of samples. Their order is part of the data set, and so of the
            order of the samples: the same sets the other way round are another data set.
        weights: Name -> how much of what is read is this set's, relative to the others. ``None``: every sample of all
            sets once an epoch.
        etl: Name -> the ETL through which this set's shards are read, of some sets or all; see `dali_pipes.loader`.

    Raises:
        TypeError: If ``sets``, ``weights`` or ``etl`` is no mapping, a name no text or a weight no number.
        ValueError: If there is no set, a name cannot be a part of an object's name, weights are not given for exactly
            the sets, positive and finite, or an ETL for what is no set.
    """

    sets: Mapping[str, ShardUrls]
    weights: Mapping[str, float] | None = field(default=None, kw_only=True)
    etl: Mapping[str, str] = field(default_factory=dict, kw_only=True)

    def __post_init__(self) -> None:
        """Check them, and keep copies: a mapping of the caller's may change."""
        if not isinstance(self.sets, Mapping):
            raise TypeError(f"sets must be a mapping of names to shards, got {type(self.sets).__name__}")
        if not self.sets:
            raise ValueError("a mixture must have at least one data set, got none")
        for name in self.sets:
            _check_name(name)
        copied = {
            name: shards if isinstance(shards, str | Path) else tuple(shards) for name, shards in self.sets.items()
        }
        object.__setattr__(self, "sets", copied)
        if self.weights is not None:
            object.__setattr__(self, "weights", _checked_weights(self.weights, copied))
        if not isinstance(self.etl, Mapping):
            raise TypeError(f"etl must be a mapping of data sets' names to ETLs, got {type(self.etl).__name__}")
        if unknown := sorted(map(str, self.etl.keys() - copied.keys())):
            raise ValueError(
                f"etl must be given for some of the sets {', '.join(map(repr, copied))}, got one for "
                f"{', '.join(map(repr, unknown))}"
            )
        object.__setattr__(self, "etl", dict(self.etl))


@dataclass(frozen=True, kw_only=True)
class NamedSets:
    """The shards of a mixture's data sets, in the mixture's order."""

    sets: Mapping[str, ShardSet]
    weights: tuple[float, ...] | None

    @property
    def url(self) -> str:
        """All sets in one line, for messages: ``pets=ais://pets/shuffled-, cats=/data/cats/s-``."""
        return ", ".join(f"{name}={shards.url}" for name, shards in self.sets.items())


class MixtureFetcher:
    """A `dali_pipes.fetch.stager.Fetcher` of combined names: each set's objects from its own store.

    Args:
        stores: Name of the set -> its store.
        open_fetcher: What fetches objects of a store. Opened when the first is wanted, one for sets that share a store
            and are read alike.
    """

    def __init__(self, stores: Mapping[str, Store], open_fetcher: Callable[[Store], Fetcher]) -> None:
        self._stores, self._open_fetcher = stores, open_fetcher
        self._fetchers: dict[tuple[str, str], Fetcher] = {}
        """By the store's URL and the ETL."""

    def fetch(self, wanted: Sequence[Wanted], *, stopped: Callable[[], bool], num_connections: int = 1) -> bool:
        """See `dali_pipes.fetch.stager.Fetcher`; the objects are of one set."""
        (set_,) = {split_set(one.name)[0] for one in wanted}
        store = self._stores[set_]
        which = (store.url, etl_of(store))
        if which not in self._fetchers:
            self._fetchers[which] = self._open_fetcher(store)
        own = [one._replace(name=split_set(one.name)[1]) for one in wanted]
        return self._fetchers[which].fetch(own, stopped=stopped, num_connections=num_connections)

    def close(self) -> None:
        """Close all that were opened. Can be called twice."""
        while self._fetchers:
            self._fetchers.popitem()[1].close()


def split_set(name: str) -> tuple[str, str]:
    """The data set's name and the object's own, of a combined name.

    >>> split_set("pets/train/shuffled-000000.tar")
    ('pets', 'train/shuffled-000000.tar')
    """
    set_, _, object_name = name.partition("/")
    return set_, object_name


def join_manifests(parts: Mapping[str, Manifest]) -> Manifest:
    """One manifest of several data sets, in their order, each shard's name after its set's; sums are added.

    Of a class id that two sets name differently the first name stays: see `check_class_tables`.
    """
    manifests = list(parts.values())
    classes: dict[int, str] = {}
    components: dict[str, int] = {}
    for manifest in manifests:
        classes = dict(manifest.classes) | classes
        for component, count in manifest.components.items():
            components[component] = components.get(component, 0) + count
    labels = [manifest.labels for manifest in manifests if manifest.labels]
    names = [f"{set_}/{name}" for set_, manifest in parts.items() for name in manifest.names]
    return Manifest(
        names=Texts(*pack_texts(names)),
        shard_bytes=np.concatenate([manifest.shard_bytes for manifest in manifests]),
        checksums=np.concatenate([manifest.checksums for manifest in manifests]),
        samples=np.concatenate([manifest.samples for manifest in manifests]),
        index_bytes=np.concatenate([manifest.index_bytes for manifest in manifests]),
        index_checksums=np.concatenate([manifest.index_checksums for manifest in manifests]),
        components=components,
        classes=classes,
        photos=_joined_photos([manifest.photos for manifest in manifests]),
        labels={
            "min": min(found["min"] for found in labels),
            "max": max(found["max"] for found in labels),
        }
        if labels
        else {},
        etl=";".join(manifest.etl for manifest in manifests) if any(manifest.etl for manifest in manifests) else "",
    )


def check_class_tables(tables: Mapping[str, Mapping[int, str]]) -> None:
    """Refuse to make one numbering of classes out of tables that do not go together.

    Only for contiguous labels. Raw ids are given as they are: data sets of which each counts its classes from 1 can be
    mixed where the graph takes no label, or where a step tells them apart by their shards.

    Args:
        tables: Name of the set -> its class table.

    Raises:
        DataError: If a set has no table, or two name the same id differently; names both.
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
    num_unsized: dict[str, int] = {}
    for part in parts:
        for component, counts in part.items():
            joined = photos.setdefault(component, {})
            for kind, count in counts.items():
                if kind != UNSIZED:
                    joined[kind] = joined.get(kind, 0) + count
            # It stands in a manifest only where it is another number than that of the unknown.
            unsized = counts.get(UNSIZED, counts.get(_UNKNOWN, 0))
            num_unsized[component] = num_unsized.get(component, 0) + unsized
    for component, counts in photos.items():
        if num_unsized[component] != counts.get(_UNKNOWN, 0):
            counts[UNSIZED] = num_unsized[component]
    return photos


def _check_name(name: object) -> None:
    if not isinstance(name, str):
        raise TypeError(f"a data set's name must be a text, got {name!r}")
    if name in ("", ".", "..") or "/" in name or not name.isprintable():
        raise ValueError(
            "a data set's name must not be empty, '.' or '..', nor hold a '/' or what cannot be printed, "
            f"got {name!r:.60}"
        )


def _checked_weights(weights: object, sets: Mapping[str, ShardUrls]) -> dict[str, float]:
    """The weights in the order of the sets."""
    if not isinstance(weights, Mapping):
        raise TypeError(f"weights must be a mapping of names to numbers, got {type(weights).__name__}")
    if weights.keys() != sets.keys():
        missing, unknown = sorted(sets.keys() - weights.keys()), sorted(map(str, weights.keys() - sets.keys()))
        found = [f"none for {', '.join(map(repr, missing))}"] if missing else []
        found += [f"one for {', '.join(map(repr, unknown))}"] if unknown else []
        raise ValueError(
            f"weights must be given for exactly the sets {', '.join(map(repr, sets))}, got {'; '.join(found)}"
        )
    for name, weight in weights.items():
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            raise TypeError(f"a weight must be a number, got {weight!r} for '{name}'")
        if not (math.isfinite(weight) and weight > 0):
            raise ValueError(f"a weight must be positive and finite, got {weight!r} for '{name}'")
    return {name: float(weights[name]) for name in sets}
