"""Find the shards that a user named, in a bucket of a cluster, of the embedded node, or in a directory."""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dali_pipes.data_set.mixture import Mixture
from dali_pipes.errors import DataError, StoreError
from dali_pipes.options import Shards
from dali_pipes.store.cluster.endpoint import endpoint_for
from dali_pipes.store.cluster.etl import NoEtlError
from dali_pipes.store.cluster.transformed import through_etl
from dali_pipes.store.shard_set import ShardSet
from dali_pipes.store.urls import ShardUrls, is_remote, resolve_shards


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
) -> ShardSet | NamedSets:
    """The shards that are named; those of a mixture by their sets.

    Args:
        shards: See `dali_pipes.store.urls.resolve_shards`; `Shards` and `Mixture` name ETLs, too.
        endpoint: AIStore's proxy. ``None``: if shards are in a bucket, an embedded node is started, which must have it.
        embedded_dir: The embedded node's folder; ``None``: the default one.
        resources: Closes the node.

    Raises:
        DataError, StoreError, ValueError: See `dali_pipes.store.urls.resolve_shards` and
            `dali_pipes.store.cluster.transformed.through_etl`.
        StoreError, ValueError: See `dali_pipes.store.cluster.endpoint.endpoint_for`.
    """
    if isinstance(shards, Mixture):
        named, etls = shards.sets, shards.etl
    else:
        one = shards if isinstance(shards, Shards) else Shards(shards)
        if isinstance(one.urls, Mixture):
            raise ValueError(
                f"Shards(..., etl='{one.etl}') with a mixture: name the data sets that it applies to: Mixture({{...}}, "
                f"etl={{'{next(iter(one.urls.sets))}': '{one.etl}'}})"
            )
        named, etls = {"": one.urls}, {} if one.etl is None else {"": one.etl}
    firsts = {name: _first(urls) for name, urls in named.items()}
    for name, etl in etls.items():
        if endpoint is None and is_remote(firsts[name]):
            raise ValueError(
                f"ETL '{etl}' with '{firsts[name]}' needs the endpoint of the AIStore that runs it; pass endpoint= or "
                "set AIS_ENDPOINT; an embedded node that is started for this loader runs no ETL"
            )
    endpoint = resources.enter_context(endpoint_for(firsts.values(), endpoint=endpoint, embedded_dir=embedded_dir))

    def find_set(name: str) -> ShardSet:
        found = resolve_shards(named[name], endpoint=endpoint)
        return through_etl(found, etls[name]) if name in etls else found

    if not isinstance(shards, Mixture):
        return find_set("")
    sets = {}
    for name in named:
        try:
            sets[name] = find_set(name)
        except (DataError, StoreError, ValueError) as exc:
            if type(exc) not in (DataError, NoEtlError, StoreError, ValueError):
                raise
            raise type(exc)(f"data set '{name}': {exc}") from exc
    # A mixture of one data set reads all of it in an epoch, whatever its weight.
    weights = None if shards.weights is None or len(sets) == 1 else tuple(shards.weights[name] for name in sets)
    return NamedSets(sets=sets, weights=weights)


def _first(urls: ShardUrls) -> str | Path:
    return urls if isinstance(urls, str | Path) else next(iter(urls), "")
