"""Name the shards of a data set: its manifest says which they are, whatever a store lists now.

A listing can lack shards: somebody deleted them, or a cluster moves objects and lists only some of them for a while.
Whoever trusts it reads fewer samples, without a word. So a prefix, a directory or a glob is matched against the names
in the manifest, and a shard that the manifest names and the store lacks is an error. Where there is no manifest, the
record of the command that wrote the shards names them: see `dali_pipes.data_set.written`.
"""

import contextlib
import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from dali_pipes.data_set.indexing import read_manifest, stored_versions
from dali_pipes.data_set.written import expected_shards
from dali_pipes.errors import DataError, StoreError, shown
from dali_pipes.formats.manifest import Manifest
from dali_pipes.formats.names import MANIFEST_ENDING, described, start_of
from dali_pipes.store.base import Store
from dali_pipes.store.cluster.transformed import open_transformed, through_etl
from dali_pipes.store.local import LocalStore
from dali_pipes.store.shard_names import grown_prefix
from dali_pipes.store.shard_set import ShardSet
from dali_pipes.store.urls import (
    Pattern,
    ShardUrls,
    check_compression,
    parse_shards,
    resolve_parsed,
    resolve_shards,
    shard_set,
)

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
    one of these with ``@3`` at its end         the same for version 3 of the data set; without it, for the newest
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
        StoreError: If the data set has no such version; if shards are missing in a directory, or, with
            ``allow_missing``, all of them are; if they must be listed, and cannot be; if a bucket has shards' indexes
            and no manifest. With a manifest, a bucket is not listed: if it lacks a shard, the first read of the shard
            fails. Without one, see `dali_pipes.data_set.written`.
        ValueError: See `dali_pipes.store.urls.resolve_shards` and
            `dali_pipes.store.cluster.transformed.open_transformed`.
    """
    shards = known_shards(urls, endpoint=endpoint, etl=etl)
    if allow_missing:
        present, missing = _present(shards)
        _log_missing(shards, missing)
        return present
    if shards.store.directory is not None:
        missing = _missing_files(shards.store.directory, shards.names)
    else:
        missing = _present(shards)[1] if shards.named_by else []
    if missing:
        raise shards.missing(missing)
    return shards


def known_shards(urls: ShardUrls, *, endpoint: str | None, etl: str | None = None) -> ShardSet:
    """Name the shards as `name_shards` does, without checking that they exist."""
    parts = parse_shards(urls, endpoint=endpoint)
    _, pattern = parts[0]
    if len(parts) == 1 and isinstance(pattern, Pattern):
        if etl is not None and pattern.version is not None:
            raise ValueError(
                f"'{pattern.url}' names a version of a data set, and through an ETL only the newest can be read; leave "
                f"out '@{pattern.version}'"
            )
        return _named(pattern, etl)
    locations: list[str] = []
    changed: list[ShardSet] = []
    for url, part in parts:
        if isinstance(part, Pattern):
            named = _named(part)
            if named.version is not None or (named.manifest is not None and len(named.manifest.removed)):
                changed.append(named)  # its shards' names do not say which samples are meant
            locations += map(named.store.locate, named.names)
        else:
            check_compression(part, url=url, compressed=False)
            locations += part
    shards = _of_grown_set(shard_set(locations, endpoint=endpoint))
    for named in changed:
        if named.version is not None or named.prefix != shards.prefix:
            raise ValueError(
                f"'{named.url}' is a version of a data set, or a data set with removed samples, and "
                f"{len(parts) - 1} more URLs are named; name it alone, or make a dali_pipes.Mixture of data sets"
            )
    return shards if etl is None else through_etl(shards, etl)


def list_shards(
    urls: ShardUrls, *, endpoint: str | None, compressed: bool = False, allow_missing: bool = False
) -> ShardSet:
    """The shards that are listed now, for commands that take more than a manifest lists: packed since, or compressed.

    The shards of a data set with versions are those of its manifest: shards of older versions lie beside them.

    Raises:
        DataError: If samples were removed from the data set: these commands read whole shards.
        StoreError: If a shard is missing: the manifest or the record names it, or there is a gap in the numbers. With
            ``allow_missing`` the log names it, and it is left out. Also where
            `dali_pipes.store.urls.resolve_shards` raises it.
        DataError, ValueError: See `dali_pipes.store.urls.resolve_shards`.
    """
    parts = parse_shards(urls, endpoint=endpoint)
    expected = [_expected(part) for _, part in parts if isinstance(part, Pattern)]
    for named in expected:
        if named.manifest is not None and (named.manifest.version > 1 or named.version is not None):
            if len(parts) > 1:
                raise ValueError(
                    f"'{named.url}' is a data set with versions, and {len(parts) - 1} more URLs are named; "
                    "name it alone"
                )
            return without_removals(named)
    shards = resolve_parsed(parts, endpoint=endpoint, compressed=compressed)
    listed = {shards.store.locate(name) for name in shards.names}
    for named in expected:
        if missing := [name for name in named.names if named.store.locate(name) not in listed]:
            if not allow_missing:
                raise named.missing(missing)
            _log_missing(named, missing)
        elif len(parts) == 1 and not allow_missing:
            shards = replace(shards, recorded=named.recorded)
    return without_removals(shards)


def _expected(pattern: Pattern) -> ShardSet:
    """Find the shards that a manifest or a record names. A broken manifest counts as none."""
    with contextlib.suppress(DataError):
        if (named := _by_manifest(pattern)) is not None:
            return named
    if set(pattern.listing.indexed).difference(pattern.listing.shards) and pattern.store.directory is None:
        raise _no_manifest(pattern)
    return shards_of(pattern, pattern.choose(pattern.listing.shards))


def without_removals(shards: ShardSet) -> ShardSet:
    """The same shards, for what reads whole shards.

    Raises:
        DataError: If they hold samples that were removed from the data set.
    """
    manifest = None
    with contextlib.suppress(DataError):
        shards = _of_grown_set(shards)
        manifest = shards.manifest or read_manifest(shards.store, shards.prefix)
    if manifest is None:
        return shards
    known = set(shards.names).intersection(manifest.names)
    if num_removed := len(manifest.select(sorted(known), where=shards.url).removed):
        raise DataError(
            f"'{shards.url}': the shards still hold samples that were removed from the data set ({num_removed}), and "
            f"this command reads whole shards; write them anew: dali-pipes prep compact "
            f"'{shards.store.locate(shards.prefix)}'"
        )
    return shards


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
        shards = known_shards(urls, endpoint=endpoint)
    except DataError:
        shards = resolve_shards(urls, endpoint=endpoint)
    present, missing = _present(shards)
    _, first = parse_shards(urls, endpoint=endpoint)[0]
    beyond: list[str] = []
    if shards.manifest is not None and isinstance(first, Pattern):
        beyond = _beyond(shards, shards.manifest, first)
    present = replace(present, recorded=None)  # `info` and `verify` read what is there, also if a shard was replaced
    return FoundShards(present, list(map(shards.store.locate, missing)), beyond)


def shards_of(pattern: Pattern, found: Sequence[str]) -> ShardSet:
    """The ``found`` shards of a pattern, and those that should be there: see `dali_pipes.data_set.written`."""
    expected = expected_shards(pattern, found)
    shards = shard_set(expected.locations, endpoint=pattern.store.endpoint)
    return replace(shards, named_by=expected.source, recorded=expected.recorded)


def _named(pattern: Pattern, etl: str | None = None) -> ShardSet:
    """The shards that a pattern stands for: by the manifest, else by the record or the listing."""
    if (named := _by_manifest(pattern, etl)) is not None:
        return named
    if pattern.store.directory is None and pattern.listing.indexed:
        raise _no_manifest(pattern)
    listed = shards_of(pattern, pattern.choose(pattern.listing.shards))
    check_compression(list(map(listed.store.locate, listed.names)), url=pattern.url, compressed=False)
    return listed if etl is None else through_etl(listed, etl)


def _no_manifest(pattern: Pattern) -> StoreError:
    """The error for indexes without a manifest: a node that is away takes shards and manifest from the listing."""
    return StoreError(
        f"'{pattern.url}': {len(pattern.listing.indexed)} shards have an index, and there is no manifest; is a node of "
        "the cluster away, or was 'prep index' interrupted? wait until the cluster is whole, or index the shards: "
        f"dali-pipes prep index '{pattern.url}'"
    )


def _by_manifest(pattern: Pattern, etl: str | None = None) -> ShardSet | None:
    """The shards that a manifest lists and the pattern matches; ``None`` if there is no manifest.

    Raises:
        StoreError: If there are only manifests of versions, or a version is named and there is no manifest.
        ValueError: If the pattern matches shards beside those of one data set.
    """
    for prefix in pattern.manifest_prefixes:
        if (named := _in_manifest(pattern, pattern.store, prefix, etl)) is not None:
            return named
    listing = pattern.listing
    manifests = (_in_manifest(pattern, store, prefix, etl) for store, prefix in _listed_manifests(pattern))
    found = [named for named in manifests if named is not None]
    start = f"{found[0].store.url.rstrip('/')}/{found[0].prefix}" if found else ""
    if len(found) > 1 or not all(shard.startswith(start) for shard in listing.shards):
        raise ValueError(
            f"'{pattern.url}' holds shards of several sets, such as '{found[0].url}'; name one of them, list the "
            "shards, or name the data sets in a dali_pipes.Mixture"
        )
    if found:
        named = found[0]
        if named.manifest is not None and (beyond := _beyond(named, named.manifest, pattern)):
            _log.warning(
                "'%s': %d shards are not in its manifest, and are not read: %s; to add them: %s",
                named.url, len(beyond), shown(beyond), named.index_command,
            )  # fmt: skip
        return named
    if listing.lost:
        raise StoreError(
            f"'{pattern.url}': a data set has versions, {shown(listing.lost)}, and its newest manifest is not there; "
            "is a node of the cluster away? copy the newest of these manifests to its name, without the '@' and number"
        )
    if pattern.version is not None:
        raise StoreError(f"'{pattern.url}': there is no manifest, so there are no versions; index the shards first")
    return None


def _listed_manifests(pattern: Pattern) -> list[tuple[Store, str]]:
    """Store and prefix of each manifest that may list the pattern's shards, by a listing."""
    found: list[tuple[Store, str]]
    if pattern.is_glob:  # a manifest does not match the glob
        stores = map(LocalStore, sorted({Path(shard).parent for shard in pattern.listing.shards}))
        names = ((store, name) for store in stores for name in store.list_names(described("")))
        found = [(store, start_of(name, MANIFEST_ENDING)) for store, name in names if name.endswith(MANIFEST_ENDING)]
    else:
        found = [(pattern.store, prefix) for prefix in pattern.listing.manifest_prefixes]
    if not found and pattern.listing.shards:
        # A cluster may list some shards, and not their manifest. That of shards in several folders lies above them.
        shards = shard_set(pattern.listing.shards, endpoint=pattern.store.endpoint)
        found.append((shards.store, grown_prefix(shards.names) or shards.prefix))
    return found


def _in_manifest(pattern: Pattern, store: Store, prefix: str, etl: str | None) -> ShardSet | None:
    read = store if etl is None else open_transformed(store, etl, url=pattern.url)
    # As long as the transformed shards have no manifest, that of the stored shards says which shards there are.
    for place in dict.fromkeys([read, store]):
        manifest = read_manifest(place, prefix, pattern.version)
        if manifest is None or not (names := pattern.matching(manifest.names, store)):
            continue
        if etl is not None:
            _check_etl_is_newest(manifest, store, prefix, etl)
        if manifest.version > 1 and pattern.version is None and len(names) < manifest.num_shards:
            _log.warning(
                "'%s' names %d of %d shards; shards that were added or written anew have other names; the whole data "
                "set is '%s'",
                pattern.url, len(names), manifest.num_shards, store.locate(prefix),
            )  # fmt: skip
        return ShardSet(
            store=read,
            names=names,
            manifest=manifest if place is read else None,
            manifest_prefix=prefix,
            version=pattern.version,
        )
    return None


def _check_etl_is_newest(manifest: Manifest, store: Store, prefix: str, etl: str) -> None:
    """Refuse the shards of an ETL if the stored ones are of a version with other samples."""
    stored = manifest if not manifest.etl else read_manifest(store, prefix)
    if stored is None or stored.version == 1:
        return
    where = store.locate(prefix)
    if len(stored.removed):
        raise DataError(
            f"'{where}': samples were removed from the data set ({len(stored.removed)}), and an ETL gives whole "
            f"shards; write the shards anew: dali-pipes prep compact '{where}'"
        )
    if manifest.etl and manifest.names != stored.names:
        raise DataError(
            f"'{where}': version {stored.version} has {stored.num_shards} shards, and the manifest of ETL '{etl}' "
            f"lists others; index them: dali-pipes prep index '{where}' --etl {etl} --overwrite"
        )


def _of_grown_set(shards: ShardSet) -> ShardSet:
    """The same shards, with their manifest, if all of them were added to a data set or written anew for it.

    Their names share more text than those of the data set's other shards.
    """
    prefix = grown_prefix(shards.names) if shards.manifest_prefix is None else None
    if prefix is None or read_manifest(shards.store, shards.prefix) is not None:
        return shards
    manifest = read_manifest(shards.store, prefix)
    return shards if manifest is None else replace(shards, manifest=manifest, manifest_prefix=prefix)


def _beyond(named: ShardSet, manifest: Manifest, pattern: Pattern) -> list[str]:
    """The listed shards that are in no manifest, also of no other version."""
    listing, place = pattern.listing, named.store.url.rstrip("/")
    others = tuple(
        f"{place}/{prefix}"
        for prefix in listing.manifest_prefixes
        if prefix != named.prefix and prefix.startswith(named.prefix)
    )
    listed = {shard for shard in listing.shards if shard.endswith(".tar") and not shard.startswith(others)}
    beyond = listed.difference(f"{place}/{name}" for name in manifest.names)
    if beyond and (manifest.version > 1 or named.version is not None):
        for version in (None, *stored_versions(named.store, named.prefix)):
            if (other := read_manifest(named.store, named.prefix, version)) is not None:
                beyond.difference_update(f"{place}/{name}" for name in other.names)
    return sorted(beyond)


def _log_missing(shards: ShardSet, missing: Sequence[str]) -> None:
    if missing:
        listed = ", ".join(map(repr, missing[:_MAX_LOGGED]))
        _log.warning(
            "'%s' lacks %d of %d shards, which are left out: %s", shards.url, len(missing), len(shards.names), listed
        )


def _present(shards: ShardSet) -> tuple[ShardSet, list[str]]:
    """The shards that the store has, and the names of the others."""
    found = shards.store.find_all(shards.names)
    missing = found.lacking(shards.names)
    if len(missing) == len(shards.names):
        raise shards.missing(missing)
    if not missing:
        return shards, []
    there = tuple(entry.name for entry in found if entry is not None)
    return replace(shards, names=there, manifest_prefix=shards.prefix), missing


def _missing_files(directory: Path, names: Sequence[str]) -> list[str]:
    """The shards that a directory lacks; each folder is read once, because a network's file system is slow to ask."""
    there: set[str] = set()
    for folder in {os.path.dirname(name) for name in names}:  # noqa: PTH120 (names, not paths)
        with contextlib.suppress(OSError):
            there.update(os.path.join(folder, name) for name in os.listdir(directory / folder))  # noqa: PTH118, PTH208
    return [name for name in names if name not in there]
