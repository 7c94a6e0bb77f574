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

from dali_pipes.data_set.indexing import read_manifest, stored_versions
from dali_pipes.data_set.written import expected_shards
from dali_pipes.errors import DataError, StoreError, shown
from dali_pipes.formats.manifest import Manifest
from dali_pipes.formats.names import manifest_name
from dali_pipes.store.base import Store
from dali_pipes.store.cluster.transformed import open_transformed, through_etl
from dali_pipes.store.local import LocalStore
from dali_pipes.store.patterns import Listing, Pattern
from dali_pipes.store.shard_names import grown_prefix
from dali_pipes.store.shard_set import ShardSet
from dali_pipes.store.urls import (
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
    belong to the data set; where it is listed, a warning says so. A URL that ends in ``@3`` names a version only if the
    data set has it; names may end so, too.

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
            ``allow_missing``, all of them are; if they must be listed, and cannot be; a `LostManifestError` if a
            bucket has shards' indexes and no manifest. With a manifest, a bucket is not listed: if it lacks a shard,
            the first read of the shard fails. Without one, see `dali_pipes.data_set.written`.
        ValueError: See `dali_pipes.store.urls.resolve_shards` and
            `dali_pipes.store.cluster.transformed.open_transformed`.
    """
    shards = known_shards(urls, endpoint=endpoint, etl=etl)
    if not allow_missing:
        if shards.store.directory is not None:
            missing = _missing_files(shards)
        else:
            missing = _present(shards)[1] if shards.named_by else []
        if missing:
            raise shards.missing(missing)
        return shards
    present, missing = _present(shards)
    if missing:
        _log_missing(shards, missing)
    return present


def _log_missing(shards: ShardSet, missing: Sequence[str]) -> None:
    _log.warning(
        "'%s' lacks %d of %d shards, which are left out: %s%s",
        shards.url, len(missing), len(shards.names), ", ".join(map(repr, missing[:_MAX_LOGGED])),
        f" and {len(missing) - _MAX_LOGGED} more" if len(missing) > _MAX_LOGGED else "",
    )  # fmt: skip


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
    answers = [_listed_answer(part) for _, part in parts if isinstance(part, Pattern)]
    for named in filter(None, answers):
        if named.manifest is not None and (named.manifest.version > 1 or named.version is not None):
            if len(parts) > 1:
                raise ValueError(
                    f"'{named.url}' is a data set with versions, and {len(parts) - 1} more URLs are named; "
                    "name it alone"
                )
            return without_removals(named)
    shards = resolve_parsed(parts, endpoint=endpoint, compressed=compressed)
    listed = {shards.store.locate(name) for name in shards.names}
    for named in filter(None, answers):
        if missing := [name for name in named.names if named.store.locate(name) not in listed]:
            if not allow_missing:
                raise named.missing(missing, is_read=False)
            _log_missing(named, missing)
        elif len(parts) == 1 and not allow_missing:
            shards = replace(shards, recorded=named.recorded)
    return without_removals(shards)


def _listed_answer(pattern: Pattern) -> ShardSet | None:
    """The shards that a pattern names; without a manifest that can be read, the listed ones. ``None``: none found."""
    try:
        return _answer(pattern)
    except DataError:
        return _listed(pattern.literal or pattern)
    except LostManifestError as exc:
        # A manifest that was never written is what `prep index` is for.
        if exc.missing:
            raise
        return _listed(pattern.literal or pattern)
    except (StoreError, ValueError):
        if pattern.version is not None:
            raise
        return None  # `resolve_shards` says it, or knows better


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
    num_removed = len(manifest.select(sorted(known), where=shards.url).removed)
    if num_removed:
        what = "a removed sample" if num_removed == 1 else f"{num_removed} removed samples"
        raise DataError(
            f"'{shards.url}': the shards still hold {what} of the data set, and this command reads whole shards; write "
            f"them anew: dali-pipes prep compact '{shards.store.locate(shards.prefix)}'"
        )
    return shards


class LostManifestError(StoreError):
    """A bucket lists indexes of shards, and no manifest. A node that is away takes its objects from the listing, too:
    the shards that are listed may be a part of the data set.
    """

    def __init__(self, text: str, missing: Sequence[str] = ()) -> None:  # the default lets it be pickled
        super().__init__(text)
        self.missing = missing
        """URLs of shards that have an index, and are not listed; or of versions, whose newest is not listed."""


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
    parts = [part for _, part in parse_shards(urls, endpoint=endpoint)]
    beyond: list[str] = []
    if shards.manifest is not None and isinstance(parts[0], Pattern):
        beyond = _beyond(shards, shards.manifest, parts[0].listing)
    present = replace(present, recorded=None)  # `info` and `verify` read what is there, also if a shard was replaced
    return FoundShards(present, list(map(shards.store.locate, missing)), beyond)


def known_shards(urls: ShardUrls, *, endpoint: str | None, etl: str | None = None) -> ShardSet:
    """As `name_shards`, without a look at whether the shards are there."""
    parts = parse_shards(urls, endpoint=endpoint)
    if len(parts) == 1 and isinstance(parts[0][1], Pattern):
        return _answer(parts[0][1], etl)
    locations: list[str] = []
    changed: list[ShardSet] = []
    for url, part in parts:
        if isinstance(part, Pattern):
            answer = _answer(part)
            changed += [answer] if _is_changed(answer) else []
            part = list(map(answer.store.locate, answer.names))
        check_compression(part, url=url, compressed=False)
        locations += part
    shards = _of_grown_set(shard_set(locations, endpoint=endpoint))
    for answer in changed:
        if answer.version is not None or answer.prefix != shards.prefix:
            raise ValueError(
                f"'{answer.url}' is a version of a data set, or a data set with removed samples, and "
                f"{len(parts) - 1} more URLs are named; name it alone, or make a dali_pipes.Mixture of data sets"
            )
    return shards if etl is None else through_etl(shards, etl)


def _is_changed(shards: ShardSet) -> bool:
    """Whether the names of shards do not say which samples are meant."""
    return shards.version is not None or (shards.manifest is not None and len(shards.manifest.removed) > 0)


def _of_grown_set(shards: ShardSet) -> ShardSet:
    """The same shards, with their manifest, if all of them were added to a data set or written anew for it.

    Their names share more text than those of the data set's other shards.
    """
    prefix = grown_prefix(shards.names) if shards.manifest_prefix is None else None
    if prefix is None or read_manifest(shards.store, shards.prefix) is not None:
        return shards
    manifest = read_manifest(shards.store, prefix)
    return shards if manifest is None else replace(shards, manifest=manifest, manifest_prefix=prefix)


def _answer(pattern: Pattern, etl: str | None = None) -> ShardSet:
    """The shards that a pattern names: by a manifest, or by a listing."""
    if pattern.literal is not None:
        return _answer_version(pattern, pattern.literal, etl)
    return _answer_newest(pattern, etl)


def _answer_version(pattern: Pattern, literal: Pattern, etl: str | None) -> ShardSet:
    """The shards of one version, unless the URL is also the beginning of shards' names."""
    if (named := _by_manifest(literal, literal.store, literal.prefix, etl)) is not None:
        return named
    if etl is not None:
        raise ValueError(
            f"'{pattern.url}' names a version of a data set, and through an ETL only the newest can be read; leave out "
            f"'@{pattern.version}'"
        )
    try:
        return _answer_newest(pattern, None)
    except StoreError:
        with contextlib.suppress(StoreError):
            return _answer_newest(literal, None)
        raise


def _answer_newest(pattern: Pattern, etl: str | None) -> ShardSet:
    """As `_answer`, for a URL without a version; or with one, if that cannot be the beginning of shards' names."""
    for prefix in pattern.manifest_prefixes:
        if (named := _by_manifest(pattern, pattern.store, prefix, etl)) is not None:
            return named
    listing = pattern.listing
    if not listing.shards and len(listing.manifest_prefixes) == 1:
        prefix = listing.manifest_prefixes[0]
        if (named := _by_manifest(pattern, pattern.store, prefix, etl)) is not None:
            return named
    if (named := _with_versions(pattern, listing, etl)) is not None:
        return named
    if listing.lost:
        raise LostManifestError(
            f"'{pattern.url}': a data set has versions, {shown(listing.lost)}, and its newest manifest is not there; "
            "is a node of the cluster away? copy the newest of these manifests to its name, without the '@' and number",
            listing.lost,
        )
    if pattern.version is not None:
        raise StoreError(f"'{pattern.url}': there is no manifest, so there are no versions; index the shards first")
    listed = _listed(pattern)
    check_compression(list(map(listed.store.locate, listed.names)), url=pattern.url, compressed=False)
    # If shards are gone, the others may share more text than the manifest's prefix.
    prefixes = sorted(filter(listed.prefix.startswith, listing.manifest_prefixes), key=len, reverse=True)
    grown = grown_prefix(listed.names)
    for prefix in dict.fromkeys([listed.prefix, *([] if grown is None else [grown]), *prefixes]):
        if (named := _by_manifest(pattern, listed.store, prefix, etl)) is not None:
            if named.manifest is not None and (beyond := _beyond(named, named.manifest, listing)):
                _log.warning(
                    "'%s': %d shards are not in its manifest, and are not read: %s; to add them: %s",
                    named.url, len(beyond), shown(beyond), named.index_command,
                )  # fmt: skip
            return named
    if listed.store.directory is not None and (missing := _missing_of_several(pattern, listed)):
        return shard_set(sorted([*pattern.choose(listing.shards), *missing]), endpoint=None)
    if listed.store.directory is None and listing.indexed:
        raise LostManifestError(
            f"'{pattern.url}': {len(listing.indexed)} shards have an index, and there is no manifest; is a node of the "
            f"cluster away, or was 'prep index' interrupted? wait until the cluster is whole, or index the shards: "
            f"{listed.index_command}",
            sorted(set(listing.indexed) - set(listing.shards)),
        )
    return listed if etl is None else through_etl(listed, etl)


def _listed(pattern: Pattern) -> ShardSet:
    return shards_of(pattern, pattern.choose(pattern.listing.shards))


def shards_of(pattern: Pattern, found: Sequence[str]) -> ShardSet:
    """The ``found`` shards of a pattern, and those that should be there: see `dali_pipes.data_set.written`."""
    expected = expected_shards(pattern, found)
    shards = shard_set(expected.locations, endpoint=pattern.store.endpoint)
    return replace(shards, named_by=expected.source, recorded=expected.recorded)


def _with_versions(pattern: Pattern, listing: Listing, etl: str | None) -> ShardSet | None:
    """The shards of the only data set that is listed, if it has versions; ``None``: see `_answer_newest`.

    Names of its shards begin in several ways, and shards of older versions lie beside them.
    """
    place = pattern.store.url.rstrip("/")
    prefixes = [
        prefix
        for prefix in listing.manifest_prefixes
        if all(location.startswith(f"{place}/{prefix}") for location in listing.shards)
    ]
    if len(prefixes) != 1 or (named := _by_manifest(pattern, pattern.store, prefixes[0], etl)) is None:
        return None
    has_versions = pattern.version is not None or (named.manifest is not None and named.manifest.version > 1)
    return named if has_versions else None


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
        manifest = read_manifest(place, prefix, pattern.version)
        if manifest is not None and (names := pattern.matching(manifest.names, store)):
            if etl is not None:
                _check_etl_is_newest(manifest, store, prefix, etl)
            _warn_of_grown(pattern, names, manifest, whole=store.locate(prefix))
            return ShardSet(
                store=read,
                names=names,
                manifest=manifest if place is read else None,
                manifest_prefix=prefix,
                version=pattern.version,
            )
    return None


def _warn_of_grown(pattern: Pattern, names: Sequence[str], manifest: Manifest, *, whole: str) -> None:
    """Say so if numbers or a glob name only shards that the data set had from the beginning."""
    if manifest.version == 1 or len(names) == manifest.num_shards:
        return
    num_grown = sum(grown_prefix([name]) is not None for name in manifest.names)
    if num_grown and not any(grown_prefix([name]) is not None for name in names):
        _log.warning(
            "'%s' names %d of %d shards, and none of the %d that were added or written anew, which are called "
            "otherwise; the whole data set is '%s'",
            pattern.url, len(names), manifest.num_shards, num_grown, whole,
        )  # fmt: skip


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


def _beyond(named: ShardSet, manifest: Manifest, listing: Listing) -> list[str]:
    """The listed shards that are in no manifest, also of no other version."""
    place = named.store.url.rstrip("/")
    known = {f"{place}/{name}" for name in manifest.names}
    others = [
        f"{place}/{prefix}"
        for prefix in listing.manifest_prefixes
        if prefix != named.prefix and prefix.startswith(named.prefix)
    ]
    beyond = [
        location
        for location in listing.shards
        if location.endswith(".tar") and location not in known and not location.startswith(tuple(others))
    ]
    if beyond and (manifest.version > 1 or named.version is not None):
        for version in (None, *stored_versions(named.store, named.prefix)):
            if (other := read_manifest(named.store, named.prefix, version)) is not None:
                known.update(f"{place}/{name}" for name in other.names)
    return [location for location in beyond if location not in known]


def _present(shards: ShardSet) -> tuple[ShardSet, list[str]]:
    """The shards that the store has, and the names of the others."""
    (found,) = shards.store.find_all(shards.names)
    missing = found.lacking(shards.names)
    if len(missing) == len(shards.names):
        raise shards.missing(missing)
    if not missing:
        return shards, []
    there = tuple(entry.name for entry in found if entry is not None)
    return replace(shards, names=there, manifest_prefix=shards.prefix), missing


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
