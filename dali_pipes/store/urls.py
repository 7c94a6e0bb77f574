"""Resolve shard URLs into a store and object names: braces, globs, prefixes and lists, for buckets and local files."""

import glob
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from urllib.parse import unquote

from dali_pipes.errors import DataError, StoreError
from dali_pipes.store.base import Store
from dali_pipes.store.cluster.ais import AisStore
from dali_pipes.store.entries import PROVIDERS
from dali_pipes.store.local import LocalStore
from dali_pipes.store.shard_names import (
    check_object_name,
    ending_of,
    extension_of,
    is_object_name,
    stem_of,
    without_nul,
)
from dali_pipes.store.shard_set import ShardSet
from dali_pipes.store.templates import expand_braces

# AIStore's rule; those of clouds are narrower.
_BUCKET_NAME = re.compile(r"(?!\.\.?$)[A-Za-z0-9._-]{1,64}")

ShardUrls = str | Path | Sequence[str | Path]


def is_remote(url: str | Path) -> bool:
    """Whether a URL names a bucket: ``ais://``, ``s3://``, ``gs://``, ``az://``."""
    return isinstance(url, str) and url.partition("://")[0] in PROVIDERS and "://" in url


def check_is_not_cloud(url: str | Path) -> None:
    """Refuse ``s3://``, ``gs://`` and ``az://`` if no endpoint is given: the embedded node reads no cloud's buckets."""
    scheme = str(url).partition("://")[0]
    if is_remote(url) and scheme != "ais":
        raise ValueError(
            f"'{url}': {scheme}:// is supported only through an AIStore cluster that has the bucket as a backend, and "
            "no AIStore endpoint is given; pass endpoint= (--endpoint), or set AIS_ENDPOINT"
        )


def open_store(url: str | Path, *, endpoint: str | None) -> tuple[Store, str]:
    """The store that ``url`` names, and the rest of the URL: an object name, template or prefix.

    Raises:
        ValueError: If the URL names a bucket and there is no ``endpoint``, the scheme is not supported, or the name of
            the bucket or object is not valid.
    """
    if is_remote(url):
        scheme, _, rest = str(url).partition("://")
        bucket, _, name = rest.partition("/")
        if not bucket:
            raise ValueError(f"'{url}' names no bucket; expected {scheme}://BUCKET/PREFIX")
        if not _BUCKET_NAME.fullmatch(bucket):
            raise ValueError(
                f"'{url}': a bucket's name is at most 64 letters, digits, '-', '_' and '.' (not '.' or '..' itself), "
                f"got '{bucket}'"
            )
        check_object_name(name, url=str(url))
        if endpoint is None:
            check_is_not_cloud(url)
            raise ValueError(f"'{url}' is in a bucket, and no AIStore endpoint is given; set AIS_ENDPOINT")
        return AisStore(endpoint, bucket, provider=PROVIDERS[scheme]), name
    if "://" in str(url):
        raise _unknown_scheme(str(url), supported=PROVIDERS)
    folder, _, name = str(url).rpartition("/")
    return LocalStore(Path(folder or (os.sep if str(url).startswith(os.sep) else "."))), name


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
    if "{" in text or extension_of(text):
        raise ValueError(
            f"'{text}' names shards; expected a folder or what the shards' names start with, such as "
            "ais://pets/samples-"
        )
    if is_local(text) and (not text.endswith(("-", "_")) or Path(text).is_dir()):
        return LocalStore(Path(text)), ""
    store, prefix = open_store(text, endpoint=endpoint)
    return store, prefix if not prefix or prefix.endswith(("-", "_", "/")) else f"{prefix}/"


def resolve_shards(urls: ShardUrls, *, endpoint: str | None, compressed: bool = False) -> ShardSet:
    """The shards that ``urls`` names, in order.

    Args:
        urls: ``ais://bucket/shuffled-{000000..000003}.tar``, ``ais://bucket/prefix``, a path with braces, a glob
            (``*``, ``?``, ``[``) of local tars, a directory, or a list of any of these within one bucket or directory.
            ``s3://``, ``gs://`` and ``az://`` are backend buckets of the cluster. ``file:///a%20b/`` is the path
            ``/a b/``; ``~`` is the home directory. A local shard may be a symbolic link to any place: the tree is the
            user's own.
        endpoint: AIStore's proxy, for buckets.
        compressed: Whether to accept ``.tgz`` and ``.tar.gz``: if they are named, or if a prefix, glob or directory has
            them and no ``.tar``.

    Raises:
        DataError: If a bucket lists a shard whose name would mean another object in an HTTP path or on a disk; if a
            shard is compressed and ``compressed`` is false, or is compressed in another way.
        StoreError: If a prefix, glob or directory holds no ``.tar``, or there is no such directory.
        ValueError: If the list is empty, names a shard twice, or spans stores; if braces expand to more than
            `MAX_EXPANDED` names, or an object's name is not valid; if a prefix or directory holds several sets.
    """
    listed = [urls] if isinstance(urls, str | Path) else list(urls)
    if not listed:
        raise ValueError("shards must name at least one tar, got an empty list")
    expanded: list[str] = []
    for url in listed:
        found = _expand(url, endpoint=endpoint)
        _check_compression(found, url=str(url), compressed=compressed)
        expanded += found
    if is_remote(listed[0]):
        store, _ = open_store(listed[0], endpoint=endpoint)
        names = _remote_names(expanded, store.url)
    else:
        root, names = _local_names(expanded)
        store = LocalStore(Path(root))
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"shard '{store.locate(twice)}' is named twice")
    return ShardSet(store=store, names=tuple(names))


def _expand(url: str | Path, *, endpoint: str | None) -> list[str]:
    remote = is_remote(url)
    text = str(url) if remote else _local_path(url)
    path = Path(text)
    exists = not remote and os.path.exists(text)  # noqa: PTH110 (false, not an error, for impossible names)
    if "{" in text and not exists:
        return expand_braces(text)
    is_glob = not remote and glob.has_magic(text) and not exists
    if ending_of(text) and not is_glob and (text.endswith(".tar") or remote or not path.is_dir()):
        return [text]
    if remote:
        store, prefix = open_store(url, endpoint=endpoint)
        listed = [entry.name for entry in store.list(prefix) if ending_of(entry.name)]
        if odd := next((name for name in listed if not is_object_name(name)), None):
            raise DataError(
                f"bucket '{store.url}' lists a shard '{without_nul(odd)}'; expected a name without NUL whose parts are "
                "not empty, '.' or '..'; give it another, or name the shards with braces"
            )
        found = [store.locate(name) for name in listed]
    elif is_glob:
        found = sorted(name for name in glob.glob(text) if ending_of(name))  # noqa: PTH207 (text may be absolute)
    elif path.is_dir():
        found = sorted(str(entry) for entry in path.iterdir() if ending_of(entry.name))
        if not found:
            raise StoreError(f"directory '{text}' holds no .tar; expected shards such as samples-000000.tar")
    elif not path.parent.is_dir():
        raise StoreError(f"no such directory: '{path.parent}', of '{text}'")
    else:
        named = (entry for entry in path.parent.iterdir() if entry.name.startswith(path.name))
        found = sorted(str(entry) for entry in named if ending_of(entry.name))
    found = _plain_first(found)
    if not found:
        raise StoreError(f"'{text}' matches no .tar; expected shards such as {text.rstrip('*/-_')}-000000.tar")
    if not is_glob:
        _check_one_set(found, url=text)
    return found


def _plain_first(found: Sequence[str]) -> list[str]:
    """Drop compressed shards that were also found as ``.tar``, and those of sets without a ``.tar``.

    If no ``.tar`` was found, keep the shards that ``prep`` can unpack, or else all.
    """
    plain = {stem_of(name) for name in found if name.endswith(".tar")}
    if not plain:
        return [name for name in found if extension_of(name)] or list(found)
    sets = set(map(_without_number, plain))
    return [
        name
        for name in found
        if name.endswith(".tar") or (stem_of(name) not in plain and _without_number(stem_of(name)) in sets)
    ]


def _without_number(stem: str) -> str:
    return stem.rstrip("0123456789")


def _check_compression(names: Sequence[str], *, url: str, compressed: bool) -> None:
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


def _check_one_set(found: Sequence[str], *, url: str) -> None:
    """Refuse shards of two data sets, for example the packed shards and the shards shuffled from them."""
    sets = Counter(_without_number(stem_of(name)) for name in found)
    if len(sets) > 1:
        counted = ", ".join(f"'{prefix}' ({count} shards)" for prefix, count in sorted(sets.items())[:4])
        raise ValueError(f"'{url}' holds shards of {len(sets)} sets: {counted}; name one of them, or list the shards")


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
        raise _unknown_scheme(text, supported=[*PROVIDERS, "file"])
    else:
        path = os.path.expanduser(text)  # noqa: PTH111 (Path drops a slash at the end)
    if "\0" in path:
        raise ValueError(f"'{without_nul(text)}': a path holds no NUL")
    return path


def _unknown_scheme(url: str, *, supported: Iterable[str]) -> ValueError:
    schemes = ", ".join(f"{scheme}://" for scheme in supported)
    return ValueError(f"'{url}': {url.partition('://')[0]}:// is not supported; expected {schemes} or a local path")
