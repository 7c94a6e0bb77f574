"""Name the data sets that a loader reads, and find their shards: in a cluster, the embedded node, or a directory."""

import contextlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from dali_pipes.arguments import as_number
from dali_pipes.data_set.indexing import find_manifest
from dali_pipes.data_set.named import name_shards
from dali_pipes.errors import DataError, StoreError
from dali_pipes.options import Shards
from dali_pipes.store.base import DIRECT
from dali_pipes.store.cluster.endpoint import check_endpoint, endpoint_for
from dali_pipes.store.cluster.transformed import NoEtlError
from dali_pipes.store.shard_set import ShardSet
from dali_pipes.store.urls import ShardUrls, is_in_cluster, is_remote


@dataclass(frozen=True)
class Mixture:
    """Several data sets that a loader reads as one: ``Mixture({"pets": "ais://pets/shuffled-", "own": "/data/cats"})``.

    Args:
        sets: Name -> shards, as `dali_pipes.loader` takes them: URLs, braces, globs, lists. The names become parts of
            shards' names and of keys, ``SET/SHARD`` and ``SET/KEY``: in batches, messages and lists of samples. (For
            `dali_pipes.Select.where` keys are as they are stored, and shards are called ``SET/SHARD``.) The order of
            the sets matters: the same sets in another order are another data set, with another order of samples.
        weights: Name -> this set's part of the samples that are read, relative to the others. With ``None`` an epoch
            reads every sample of all sets once.
        etl: Name -> the ETL through which this set's shards are read, for some or all of the sets; see
            `dali_pipes.Shards`.

    Raises:
        TypeError: If ``sets``, ``weights`` or ``etl`` is not a mapping, a name is not a text or a weight not a number.
        ValueError: If there is no set, a name cannot be a part of an object's name, the weights' names are not exactly
            the sets', a weight is not positive and finite, or an ETL is given for an unknown set.
    """

    sets: Mapping[str, ShardUrls]
    weights: Mapping[str, float] | None = field(default=None, kw_only=True)
    etl: Mapping[str, str] = field(default_factory=dict, kw_only=True)

    def __post_init__(self) -> None:
        """Check the arguments and copy them, because the caller may change its mappings."""
        if not isinstance(self.sets, Mapping):
            raise TypeError(f"sets must be a mapping of names to shards, got {type(self.sets).__name__}")
        if not self.sets:
            raise ValueError("a mixture must have at least one data set, got none")
        for name in self.sets:
            _check_name(name)
        sets = {name: shards if isinstance(shards, str | Path) else tuple(shards) for name, shards in self.sets.items()}
        object.__setattr__(self, "sets", sets)
        if self.weights is not None:
            object.__setattr__(self, "weights", _checked_weights(self.weights, sets))
        if not isinstance(self.etl, Mapping):
            raise TypeError(f"etl must be a mapping of data sets' names to ETLs, got {type(self.etl).__name__}")
        if unknown := sorted(map(str, self.etl.keys() - sets.keys())):
            raise ValueError(f"etl must be given for some of the sets {_quoted(sets)}, got one for {_quoted(unknown)}")
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


def find_shards(
    shards: ShardUrls | Shards | Mixture,
    *,
    endpoint: str | None,
    embedded_dir: Path | None,
    resources: contextlib.ExitStack,
    allow_missing: bool = False,
) -> ShardSet | NamedSets:
    """Find the named shards and their manifest; those of a mixture are grouped by its data sets.

    Args:
        shards: See `dali_pipes.data_set.named.name_shards`; `Shards` and `Mixture` name ETLs, too.
        endpoint: AIStore's proxy. ``None``: if shards are in a bucket, an embedded node is started, which must have it.
        embedded_dir: The embedded node's folder; ``None``: the default one.
        resources: Closes the node.
        allow_missing: Leave out shards that are missing.

    Raises:
        DataError, StoreError, ValueError: See `dali_pipes.data_set.named.name_shards` and
            `dali_pipes.store.cluster.endpoint.endpoint_for`.
    """
    named, etls = _named_urls(shards)
    firsts = {name: _first(urls) for name, urls in named.items()}
    for name, etl in etls.items():
        if is_remote(firsts[name]) and endpoint in (None, DIRECT):
            raise ValueError(
                f"ETL '{etl}' with '{firsts[name]}' needs the endpoint of the AIStore that runs it; pass endpoint= or "
                "set AIS_ENDPOINT; an embedded node that is started for this loader runs no ETL"
            )

    def find_sets(endpoint: str | None) -> dict[str, ShardSet]:
        return {name: find_set(name, endpoint) for name in named}

    def find_set(name: str, endpoint: str | None) -> ShardSet:
        try:
            found = name_shards(named[name], endpoint=endpoint, etl=etls.get(name), allow_missing=allow_missing)
            return replace(found, manifest=find_manifest(found))
        except (DataError, StoreError, ValueError) as exc:
            if not name or type(exc) not in (DataError, NoEtlError, StoreError, ValueError):
                raise
            raise type(exc)(f"data set '{name}': {exc}") from exc

    if endpoint is not None and any(is_in_cluster(url, endpoint) for url in firsts.values()):
        sets = find_sets(check_endpoint(endpoint))
    else:
        # A list that begins with a file may name a bucket: `resolve_shards` refuses that.
        node = endpoint_for(firsts.values(), endpoint=endpoint, embedded_dir=embedded_dir)
        sets = find_sets(resources.enter_context(node) or endpoint)
    if not isinstance(shards, Mixture):
        return sets[""]
    # A mixture of one data set reads all of it in an epoch, whatever its weight.
    weights = None if shards.weights is None or len(sets) == 1 else tuple(shards.weights[name] for name in sets)
    return NamedSets(sets=sets, weights=weights)


def _named_urls(shards: ShardUrls | Shards | Mixture) -> tuple[Mapping[str, ShardUrls], Mapping[str, str]]:
    """The URLs and the ETL of each data set; a single data set has an empty name."""
    if isinstance(shards, Mixture):
        return shards.sets, shards.etl
    given = shards if isinstance(shards, Shards) else Shards(shards)
    if isinstance(given.urls, Mixture):
        raise ValueError(
            f"Shards(..., etl='{given.etl}') with a mixture: name the data sets that it applies to: "
            f"Mixture({{...}}, etl={{'SET': '{given.etl}'}})"
        )
    return {"": given.urls}, {} if given.etl is None else {"": given.etl}


def is_in_directories(shards: Shards | Mixture) -> bool:
    """Whether all shards are in directories of this machine."""
    named = list(shards.sets.values()) if isinstance(shards, Mixture) else [shards.urls]
    return not any(is_remote(_first(urls)) for urls in named)


def _first(urls: ShardUrls) -> str | Path:
    return urls if isinstance(urls, str | Path) else next(iter(urls), "")


def _quoted(names: Iterable[object]) -> str:
    return ", ".join(map(repr, names))


def _check_name(name: object) -> None:
    if not isinstance(name, str):
        raise TypeError(f"a data set's name must be a text, got {name!r}")
    if name in ("", ".", "..") or "/" in name or not name.isprintable():
        raise ValueError(
            "a data set's name must not be empty, '.' or '..', nor hold a '/' or an unprintable character, "
            f"got {name!r:.60}"
        )


def _checked_weights(weights: object, sets: Mapping[str, ShardUrls]) -> dict[str, float]:
    if not isinstance(weights, Mapping):
        raise TypeError(f"weights must be a mapping of names to numbers, got {type(weights).__name__}")
    if weights.keys() != sets.keys():
        raise ValueError(f"weights must be given for exactly the sets {_quoted(sets)}, got some for {_quoted(weights)}")
    for name, weight in weights.items():
        as_number(f"the weight of '{name}'", weight)
        if not (math.isfinite(weight) and weight > 0):
            raise ValueError(f"a weight must be positive and finite, got {weight!r} for '{name}'")
    return {name: float(weights[name]) for name in sets}
