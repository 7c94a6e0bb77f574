"""Name the shards of a data set: its manifest says which they are, whatever a store lists now.

A listing can lack shards: somebody deleted them, or a cluster moves objects and lists only some of them for a while.
Whoever trusts it reads fewer samples, without a word. So a prefix, a directory or a glob is matched against the names
in the manifest, and a shard that the manifest names and the store lacks is an error. A listing names the shards only
where there is no manifest.
"""

import contextlib
import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from dali_pipes.data_set.indexing import read_manifest
from dali_pipes.errors import DataError, StoreError, shown
from dali_pipes.formats.manifest import Manifest
from dali_pipes.formats.names import manifest_name
from dali_pipes.store.base import Store
from dali_pipes.store.cluster.transformed import open_transformed, through_etl
from dali_pipes.store.local import LocalStore
from dali_pipes.store.patterns import Listing, Pattern
from dali_pipes.store.shard_set import ShardSet
from dali_pipes.store.urls import ShardUrls, check_compression, parse_shards, resolve_shards, shard_set

_log = logging.getLogger(__name__)

# Names of missing shards in a line of the log.
_MAX_LOGGED = 1000


def name_shards(
    urls: ShardUrls, *, endpoint: str | None, etl: str | None = None, allow_missing: bool = False
) -> ShardSet:
    """The shards of a data set that ``urls`` names, in the manifest's order, or in the order of a list.

    ==========================================  ======================================================================
    a prefix, a directory or a glob             the shards in the manifest whose names it matches; if there is no
                                                manifest, the shards that are listed
    shards' names, also with braces             these shards
    ==========================================  ======================================================================

    The manifest of ``ais://pets/shuffled-`` is read under this prefix, without a listing, and so is that of
    ``ais://pets/shuffled-0001``, a part of the same data set. Otherwise (``ais://pets/``) the store is listed to find
    out under which prefix the manifest lies. A shard that lies beside the others and is not in the manifest does not
    belong to the data set; where it is listed, a warning says so.

    Args:
        urls: See `dali_pipes.store.urls.resolve_shards`.
        endpoint: AIStore's proxy, for buckets.
        etl: The ETL through which the shards are read. They have a manifest of their own; if it is not made yet, that
            of the stored shards names them.
        allow_missing: Leave out the shards that the store lacks, and log their names. The shards that remain are
            another data set, with another order of samples.

    Raises:
        DataError: If the manifest is broken, and where `dali_pipes.store.urls.resolve_shards` raises it.
        StoreError: If shards are missing in a directory, or, with ``allow_missing``, all of them are; if they must be
            listed, and cannot be; a `LostManifestError` if a bucket has shards' indexes and no manifest. A bucket is
            not listed: if it lacks a shard, the first read of the shard fails.
        ValueError: See `dali_pipes.store.urls.resolve_shards` and
            `dali_pipes.store.cluster.transformed.open_transformed`.
    """
    shards = _named(urls, endpoint=endpoint, etl=etl)
    if not allow_missing:
        if shards.store.directory is not None and (missing := _missing_files(shards)):
            raise shards.missing(missing)
        return shards
    present, missing = _present(shards)
    if missing:
        _log.warning(
            "'%s' lacks %d of %d shards, which are left out: %s%s",
            shards.url, len(missing), len(shards.names), ", ".join(map(repr, missing[:_MAX_LOGGED])),
            f" and {len(missing) - _MAX_LOGGED} more" if len(missing) > _MAX_LOGGED else "",
        )  # fmt: skip
    return present


def list_shards(urls: ShardUrls, *, endpoint: str | None, compressed: bool = False) -> ShardSet:
    """The shards that are listed now, for commands that take more than a manifest lists: packed since, or compressed.

    Raises:
        StoreError: If a manifest beside the shards names a shard that is not listed, and where
            `dali_pipes.store.urls.resolve_shards` raises it.
        DataError, ValueError: See `dali_pipes.store.urls.resolve_shards`.
    """
    shards = resolve_shards(urls, endpoint=endpoint, compressed=compressed)
    listed = {shards.store.locate(name) for name in shards.names}
    for _, pattern in parse_shards(urls, endpoint=endpoint):
        if isinstance(pattern, Pattern):
            with contextlib.suppress(DataError):  # a broken manifest names no shard
                try:
                    named = _answer(pattern)
                except LostManifestError as exc:
                    # A manifest that was never written is what `prep index` is for.
                    if exc.missing:
                        raise
                    continue
                if missing := [name for name in named.names if named.store.locate(name) not in listed]:
                    raise named.missing(missing, is_read=False)
    return shards


class LostManifestError(StoreError):
    """A bucket lists indexes of shards, and no manifest. A node that is away takes its objects from the listing, too:
    the shards that are listed may be a part of the data set.
    """

    def __init__(self, text: str, missing: Sequence[str] = ()) -> None:  # the default lets it be pickled
        super().__init__(text)
        self.missing = missing
        """URLs of shards that have an index, and are not listed."""


class FoundShards(NamedTuple):
    """A data set's shards, compared with what its store has."""

    present: ShardSet
    """The shards that the URLs name and the store has."""
    missing: list[str]
    """URLs or paths of the other shards that the URLs name."""
    beyond: list[str]
    """URLs or paths of shards in the store that the URLs match, and that no manifest lists."""


def compare_shards(urls: ShardUrls, *, endpoint: str | None) -> FoundShards:
    """Compare the shards that ``urls`` names, see `name_shards`, with those in the store.

    A broken manifest names no shard: then the listed shards are given.

    Raises:
        StoreError: If none of the shards is in the store; if the store cannot be listed.
        DataError, ValueError: See `name_shards`.
    """
    try:
        shards = _named(urls, endpoint=endpoint)
    except DataError:
        shards = resolve_shards(urls, endpoint=endpoint)
    present, missing = _present(shards)
    parts = [part for _, part in parse_shards(urls, endpoint=endpoint)]
    beyond: list[str] = []
    if shards.manifest is not None and isinstance(parts[0], Pattern):
        beyond = _beyond(shards, shards.manifest, parts[0].listing())
    return FoundShards(present, list(map(shards.store.locate, missing)), beyond)


def _named(urls: ShardUrls, *, endpoint: str | None, etl: str | None = None) -> ShardSet:
    parts = parse_shards(urls, endpoint=endpoint)
    if len(parts) == 1 and isinstance(parts[0][1], Pattern):
        return _answer(parts[0][1], etl)
    locations: list[str] = []
    for url, part in parts:
        if isinstance(part, Pattern):
            answer = _answer(part)
            part = list(map(answer.store.locate, answer.names))
        check_compression(part, url=url, compressed=False)
        locations += part
    shards = shard_set(locations, endpoint=endpoint)
    return shards if etl is None else through_etl(shards, etl)


def _answer(pattern: Pattern, etl: str | None = None) -> ShardSet:
    """The shards that a pattern names: by a manifest, or by a listing."""
    for prefix in pattern.manifest_prefixes:
        if (named := _by_manifest(pattern, pattern.store, prefix, etl)) is not None:
            return named
    listing = pattern.listing()
    if not listing.shards and len(listing.manifest_prefixes) == 1:
        prefix = listing.manifest_prefixes[0]
        if (named := _by_manifest(pattern, pattern.store, prefix, etl)) is not None:
            return named
    found = pattern.choose(listing.shards)
    check_compression(found, url=pattern.url, compressed=False)
    listed = shard_set(found, endpoint=pattern.store.endpoint)
    # If shards are gone, the others may share more text than the manifest's prefix.
    prefixes = sorted(filter(listed.prefix.startswith, listing.manifest_prefixes), key=len, reverse=True)
    for prefix in dict.fromkeys([listed.prefix, *prefixes]):
        if (named := _by_manifest(pattern, listed.store, prefix, etl)) is not None:
            if named.manifest is not None and (beyond := _beyond(named, named.manifest, listing)):
                _log.warning(
                    "'%s': %d shards are not in its manifest, and are not read: %s; to add them: %s",
                    named.url, len(beyond), shown(beyond), named.index_command,
                )  # fmt: skip
            return named
    if listed.store.directory is not None and (missing := _missing_of_several(pattern, listed)):
        return shard_set(sorted([*found, *missing]), endpoint=None)
    if listed.store.directory is None and listing.indexed:
        raise LostManifestError(
            f"'{pattern.url}': {len(listing.indexed)} shards have an index, and there is no manifest; is a node of the "
            f"cluster away, or was 'prep index' interrupted? wait until the cluster is whole, or index the shards: "
            f"{listed.index_command}",
            sorted(set(listing.indexed) - set(listing.shards)),
        )
    return listed if etl is None else through_etl(listed, etl)


def _missing_of_several(pattern: Pattern, listed: ShardSet) -> list[str]:
    """The missing shards of a glob that spans several data sets, by the manifests of those that have shards left."""
    missing: list[str] = []
    for folder in sorted({Path(listed.store.locate(name)).parent for name in listed.names}):
        for path in sorted(folder.glob(f"*{manifest_name('')}")):
            store, prefix = LocalStore(folder), path.name.removesuffix(manifest_name(""))
            named = _by_manifest(pattern, store, prefix, None)
            if named is not None and 0 < len(gone := _missing_files(named)) < len(named.names):
                missing += map(store.locate, gone)
    return missing


def _by_manifest(pattern: Pattern, store: Store, prefix: str, etl: str | None) -> ShardSet | None:
    """The shards of the manifest under a prefix that a pattern matches; ``None`` if there is none."""
    read = store if etl is None else open_transformed(store, etl, url=pattern.url)
    # As long as the transformed shards have no manifest, that of the stored shards says which shards there are.
    for place in dict.fromkeys([read, store]):
        manifest = read_manifest(place, prefix)
        if manifest is not None and (names := tuple(pattern.matching(manifest.names, store))):
            return ShardSet(
                store=read, names=names, manifest=manifest if place is read else None, manifest_prefix=prefix
            )
    return None


def _beyond(named: ShardSet, manifest: Manifest, listing: Listing) -> list[str]:
    """The listed shards that are in no manifest."""
    place = named.store.url.rstrip("/")
    known = {f"{place}/{name}" for name in manifest.names}
    others = [
        f"{place}/{prefix}"
        for prefix in listing.manifest_prefixes
        if prefix != named.prefix and prefix.startswith(named.prefix)
    ]
    return [
        location
        for location in listing.shards
        if location.endswith(".tar") and location not in known and not location.startswith(tuple(others))
    ]


def _present(shards: ShardSet) -> tuple[ShardSet, list[str]]:
    """The shards that the store has, and the names of the others."""
    found = shards.store.find_all(shards.names)
    missing = [name for name in shards.names if name not in found]
    if not found:
        raise shards.missing(missing)
    if not missing:
        return shards, []
    return replace(shards, names=tuple(found), manifest_prefix=shards.prefix), missing


def _missing_files(shards: ShardSet) -> list[str]:
    """The shards that a directory lacks; each folder is read once, because a network's file system is slow to ask."""
    directory = shards.store.directory
    assert directory is not None
    places = [os.path.split(name) for name in shards.names]
    there: dict[str, set[str]] = {}
    for folder in {folder for folder, _ in places}:
        with contextlib.suppress(OSError):
            there[folder] = {path.name for path in (directory / folder).iterdir()}
    return [
        name for name, (folder, own) in zip(shards.names, places, strict=True) if own not in there.get(folder, set())
    ]
