"""Resolve shard URLs into a store and object names: braces, globs, prefixes and lists, for buckets and local files."""

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from urllib.parse import unquote

from dali_pipes.errors import DataError, StoreError
from dali_pipes.store.base import Store
from dali_pipes.store.entries import DIRECT, PROVIDERS, SCHEMES, SERVERS
from dali_pipes.store.local import LocalStore
from dali_pipes.store.patterns import Pattern, local_pattern, split_version
from dali_pipes.store.shard_names import (
    check_object_name,
    ending_of,
    expand_braces,
    extension_of,
    is_object_name,
    without_nul,
)
from dali_pipes.store.shard_set import ShardSet

# AIStore's rule; those of clouds are narrower.
_BUCKET_NAME = re.compile(r"(?!\.\.?$)[A-Za-z0-9._-]{1,64}")

ShardUrls = str | Path | Sequence[str | Path]


def is_remote(url: str | Path) -> bool:
    """Whether a URL names a bucket or a server: ``ais://``, ``s3://``, ``gs://``, ``az://``, ``https://``."""
    return isinstance(url, str) and "://" in url and url.partition("://")[0] in SCHEMES


def is_in_cluster(url: str | Path, endpoint: str | None) -> bool:
    """Whether a URL is read through AIStore: ``ais://``, and buckets of clouds if there is an endpoint."""
    scheme = str(url).partition("://")[0]
    return is_remote(url) and (scheme == "ais" or (scheme in PROVIDERS and endpoint not in (None, DIRECT)))


def open_store(url: str | Path, *, endpoint: str | None) -> tuple[Store, str]:
    """The store that ``url`` names, and the rest of the URL: an object name, template or prefix.

    Raises:
        ValueError: If the URL names a bucket and there is no ``endpoint``, the scheme is not supported, or the name of
            the bucket or object is not valid.
        StoreError: If a cloud's bucket cannot be opened: see `dali_pipes.store.cloud.settings.CloudSettings`.
    """
    if is_remote(url):
        scheme, _, rest = str(url).partition("://")
        bucket, _, name = rest.partition("/")
        if not bucket:
            raise ValueError(f"'{url}' names no bucket; expected {scheme}://BUCKET/PREFIX")
        if scheme in SERVERS:
            _check_host(str(url), bucket)
        elif not _BUCKET_NAME.fullmatch(bucket):
            raise ValueError(
                f"'{url}': a bucket's name is at most 64 letters, digits, '-', '_' and '.' (not '.' or '..' itself), "
                f"got '{bucket}'"
            )
        check_object_name(name, url=str(url))
        if is_in_cluster(url, endpoint) and endpoint not in (None, DIRECT):
            from dali_pipes.store.cluster.ais import AisStore

            return AisStore(endpoint, bucket, provider=SCHEMES[scheme].provider), name
        module, _, opener = SCHEMES[scheme].opener.partition(":")
        store: Store = getattr(import_module(module), opener)(scheme, bucket)
        return store, name
    if "://" in str(url):
        raise _unknown_scheme(str(url), supported=SCHEMES)
    if not isinstance(url, Path):
        _check_slashes(url)
    folder, _, name = str(url).rpartition("/")
    return LocalStore(Path(folder or (os.sep if str(url).startswith(os.sep) else "."))), name


def _check_host(url: str, host: str) -> None:
    if "@" in host:
        raise ValueError(f"the URL at '{host.rpartition('@')[2]}' must not hold a password")
    if "?" in url or "#" in url:
        raise ValueError(f"'{url.partition('?')[0]}': a URL of shards has no '?' or '#': a signed URL names one object")


def is_local(url: str | Path) -> bool:
    """Whether an output's URL is a path on this machine; every other URL has a scheme."""
    return isinstance(url, Path) or "://" not in url


def open_prefix(url: str | Path, *, endpoint: str | None) -> tuple[Store, str]:
    """The store and the prefix of names that an output's URL gives: ``ais://BUCKET[/PREFIX]``, ``DIRECTORY[/PREFIX]``.

    If the last part ends in ``-`` or ``_``, names start with it, unless it is a directory that exists. Any other last
    part is a folder: the prefix is then empty or ends in ``/``.

    Raises:
        ValueError: If the URL names shards, and where `open_store` raises it.
    """
    text = str(url)
    scheme = text.partition("://")[0]
    if is_remote(text) and scheme in SERVERS:
        writable = ", ".join(f"{other}://" for other in PROVIDERS)
        raise ValueError(f"'{text}': nothing can be written by {scheme}://; expected {writable} or a directory")
    if "{" in text or extension_of(text):
        raise ValueError(
            f"'{text}' names shards; expected a folder or what the shards' names start with, such as "
            "ais://pets/samples-"
        )
    if not isinstance(url, Path):
        _check_slashes(text)
    if is_local(text) and (not text.endswith(("-", "_")) or Path(text).is_dir()):
        return LocalStore(Path(text)), ""
    store, prefix = open_store(text, endpoint=endpoint)
    return store, prefix if not prefix or prefix.endswith(("-", "_", "/")) else f"{prefix}/"


def resolve_shards(urls: ShardUrls, *, endpoint: str | None, compressed: bool = False) -> ShardSet:
    """The shards that ``urls`` names, in order; a prefix, a directory and a glob name what is listed there now.

    For the shards of a data set, whose manifest says which they are, see `dali_pipes.data_set.named.name_shards`.

    Args:
        urls: ``ais://bucket/shuffled-{000000..000003}.tar``, ``ais://bucket/prefix``, a path with braces, a glob
            (``*``, ``?``, ``[``) of local tars, a directory, or a list of any of these within one bucket or directory.
            ``s3://``, ``gs://`` and ``az://`` are backend buckets of the cluster, if there is an ``endpoint``, and the
            clouds' own buckets if not. ``https://`` names files of a server, which lists nothing.
            ``file:///a%20b/`` is the path ``/a b/``; ``~`` is the home directory. A local shard may be a symbolic link
            to any place: the tree is the user's own.
        endpoint: AIStore's proxy, for buckets; ``direct`` for none, also where AIS_ENDPOINT is set.
        compressed: Whether to accept ``.tgz`` and ``.tar.gz``: if they are named, or if a prefix, glob or directory has
            them and no ``.tar``.

    Raises:
        DataError: If a bucket lists a shard whose name would mean another object in an HTTP path or on a disk; if a
            shard is compressed and ``compressed`` is false, or is compressed in another way.
        StoreError: If a prefix, glob or directory holds no ``.tar``, there is no such directory, or a cluster cannot
            list all objects now.
        ValueError: If the list is empty, names a shard twice, or spans stores; if braces expand to more than
            `MAX_EXPANDED` names, or an object's name is not valid; if a prefix or directory holds several sets.
    """
    return resolve_parsed(parse_shards(urls, endpoint=endpoint), endpoint=endpoint, compressed=compressed)


def resolve_parsed(
    parts: Sequence[tuple[str, list[str] | Pattern]], *, endpoint: str | None, compressed: bool = False
) -> ShardSet:
    """The same for URLs that `parse_shards` has parsed; each pattern is listed once."""
    locations: list[str] = []
    for url, named in parts:
        if isinstance(named, Pattern):
            if named.version is not None:
                raise StoreError(f"'{url}': a version is named, and only a manifest knows which shards it has")
            found = named.choose(named.listing.shards)
        else:
            found = named
        check_compression(found, url=url, compressed=compressed)
        locations += found
    return shard_set(locations, endpoint=endpoint)


def parse_shards(urls: ShardUrls, *, endpoint: str | None) -> list[tuple[str, list[str] | Pattern]]:
    """Each URL, and what it stands for: the URLs or paths of shards, or a `Pattern`. Nothing is listed.

    Raises:
        ValueError: If there is no URL, braces expand to more than `MAX_EXPANDED` names, or a URL is not valid.
    """
    listed = [urls] if isinstance(urls, str | Path) else list(urls)
    if not listed:
        raise ValueError("shards must name at least one tar, got an empty list")
    return [(str(url), _parse(url, endpoint=endpoint)) for url in listed]


def _parse(url: str | Path, *, endpoint: str | None) -> list[str] | Pattern:
    remote = is_remote(url)
    text = str(url) if remote else _local_path(url)
    base, version = split_version(text)
    if version is None or (not remote and os.path.exists(text)):  # noqa: PTH110 (false, not an error, for odd names)
        return _parse_text(text, remote=remote, endpoint=endpoint)
    named = _parse_text(base, remote=remote, endpoint=endpoint)
    if not isinstance(named, Pattern):
        raise ValueError(
            f"'{text}': a version is one of a data set, which a prefix, a directory or a glob names, and "
            f"'{base}' names shards; leave out '@{version}'"
        )
    return replace(named, url=text, version=version)


def _parse_text(text: str, *, remote: bool, endpoint: str | None) -> list[str] | Pattern:
    if "{" in text and (remote or not os.path.exists(text)):  # noqa: PTH110 (false, not an error, for impossible names)
        return expand_braces(text)
    if not remote:
        return local_pattern(text) or [text]
    if ending_of(text):
        return [text]
    store, prefix = open_store(text, endpoint=endpoint)
    return Pattern(url=text, store=store, prefix=prefix)


def shard_set(locations: Sequence[str], *, endpoint: str | None) -> ShardSet:
    """The shards with these URLs or paths, in the bucket or directory in which all of them lie.

    Raises:
        ValueError: If a shard is named twice, they span stores, or an object's name is not valid.
    """
    if is_remote(locations[0]):
        store, _ = open_store(locations[0], endpoint=endpoint)
        names = _remote_names(locations, store.url)
    else:
        root, names = _local_names(locations)
        store = LocalStore(Path(root))
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"shard '{store.locate(twice)}' is named twice")
    return ShardSet(store=store, names=tuple(names))


def check_compression(names: Sequence[str], *, url: str, compressed: bool) -> None:
    """Refuse compressed shards, in which no sample can be read by its offset."""
    packed = [name for name in names if not name.endswith(".tar") and ending_of(name)]
    foreign = next((name for name in packed if not extension_of(name)), None)
    if foreign is not None:
        raise DataError(
            f"shard '{foreign}' is compressed as {ending_of(foreign)}; DALI reads plain .tar, prep shuffle and "
            "pack tars also read .tgz and .tar.gz: unpack it"
        )
    if packed and not compressed:
        more = f", and so are {len(packed) - 1} more" if len(packed) > 1 else ""
        raise DataError(
            f"shard '{packed[0]}' is compressed{more}: DALI reads each sample at its offset in a plain .tar; write "
            f"plain shards: dali-pipes prep shuffle '{url}' --extension .tar (with --algorithm none their order stays)"
        )


def _remote_names(urls: Sequence[str], root: str) -> list[str]:
    for url in urls:
        if not url.startswith(f"{root}/"):
            raise ValueError(f"shards must lie in one bucket or directory, got '{root}' and '{url}'")
    names = [url[len(root) + 1 :] for url in urls]
    for name in names:
        if not is_object_name(name):
            check_object_name(name, url=f"{root}/{name}")
    return names


def _local_names(paths: Sequence[str]) -> tuple[str, list[str]]:
    """The directory in which all paths lie, and each path relative to it."""
    if remote := next((path for path in paths if is_remote(path)), None):
        raise ValueError(f"shards must lie in one bucket or directory, got '{paths[0]}' and '{remote}'")
    # Absolute, because a program may change its directory while a loader lives. Once for each folder: there are few.
    places: dict[str, str] = {}
    split = [os.path.split(path) for path in paths]
    for row, (folder, name) in enumerate(split):
        if name in ("", ".", ".."):
            split[row] = folder, name = os.path.split(os.path.abspath(paths[row]))  # noqa: PTH100
        if folder not in places:
            places[folder] = os.path.abspath(folder)  # noqa: PTH100 (links stay as they are)
    root = os.path.commonpath(set(places.values()))
    below = {folder: os.path.relpath(place, root) for folder, place in places.items()}
    return root, [name if below[folder] == "." else f"{below[folder]}/{name}" for folder, name in split]


def _local_path(url: str | Path) -> str:
    """A local path or ``file://`` URL as a path."""
    text = str(url)
    if isinstance(url, str) and text.startswith("file://"):
        host, slash, rest = text.removeprefix("file://").partition("/")
        if not slash or host not in ("", "localhost"):
            raise ValueError(f"'{text}': expected file:///PATH, with three slashes and an absolute path")
        path = f"/{unquote(rest)}"
    elif "://" in text:
        raise _unknown_scheme(text, supported=[*SCHEMES, "file"])
    else:
        if isinstance(url, str):
            _check_slashes(text)
        path = os.path.expanduser(text)  # noqa: PTH111 (Path drops a slash at the end)
    if "\0" in path:
        raise ValueError(f"'{without_nul(text)}': a path holds no NUL")
    return path


def _check_slashes(text: str) -> None:
    """Refuse ``s3:/b/x``, which would be a folder ``s3:`` here, unless there is one."""
    scheme, colon, rest = text.partition(":")
    if not colon or rest.startswith("//") or scheme not in (*SCHEMES, "file"):
        return
    if not Path(text.partition("/")[0]).exists():
        meant = f"{scheme}:///{rest.lstrip('/')}" if scheme == "file" else f"{scheme}://{rest.lstrip('/')}"
        raise ValueError(f"'{text}': expected two slashes after the colon, '{meant}'; for a path here write './{text}'")


def _unknown_scheme(url: str, *, supported: Iterable[str]) -> ValueError:
    schemes = ", ".join(f"{scheme}://" for scheme in supported)
    return ValueError(f"'{url}': {url.partition('://')[0]}:// is not supported; expected {schemes} or a local path")
