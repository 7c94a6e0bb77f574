"""Resolve shard URLs into a store and object names: braces, globs, prefixes and lists, for buckets and local files.

A `Pattern` is a URL that does not spell the names of its shards: the beginning of names, a directory, a glob of local
tars.
"""

import contextlib
import fnmatch
import glob
import itertools
import os
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

from dali_pipes.errors import DataError, StoreError, shown
from dali_pipes.formats.names import INDEX_ENDING, MANIFEST_ENDING, described, start_of
from dali_pipes.formats.texts import Texts
from dali_pipes.store.base import DIRECT, PROVIDERS, SCHEMES, SERVERS, Store
from dali_pipes.store.local import LocalStore
from dali_pipes.store.shard_names import (
    BucketParts,
    check_object_name,
    ending_of,
    expand_braces,
    extension_of,
    is_object_name,
    prefix_of,
    split_bucket,
    stem_of,
    without_nul,
)
from dali_pipes.store.shard_set import ShardSet, there_is

# A version of a data set is at the end of a URL's last part.
_VERSION = re.compile(r"(.+)@([1-9][0-9]{0,8})", re.DOTALL)
_RECORD = re.compile(r"(.*)written(-[0-9]+)?\.json", re.DOTALL)
_VERSION_FILE = re.compile(r"(.*)manifest@.*", re.DOTALL)

ShardUrls = str | Path | Sequence[str | Path]


class Listing(NamedTuple):
    """What a store lists for a pattern: the shards, and the files that describe shards of such names."""

    shards: list[str]
    """URLs or paths of all objects that are named as shards are, sorted, each once."""
    manifest_prefixes: list[str]
    """The prefixes (names relative to the pattern's store) of the manifests among the listed objects."""
    indexed: list[str]
    """URLs or paths of the shards whose indexes are among the listed objects; the shards may be missing."""
    lost: list[str]
    """URLs or paths of the listed manifests of versions whose data set's newest manifest is not listed."""
    record_prefixes: list[str]
    """The prefixes of the listed records of written shards: see `dali_pipes.data_set.written`."""


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """A URL whose shards a manifest or a listing must name."""

    url: str
    """As the user wrote it; a local one without its scheme."""
    store: Store
    """The bucket, or the directory in which the names begin."""
    prefix: str
    """The text with which the names start, relative to ``store``. Of a glob: what stands before its first wildcard."""
    is_glob: bool = False
    version: int | None = None
    """The version of the data set that the URL names, ``3`` in ``ais://pets/shuffled-@3``; ``None``: the newest."""

    @property
    def manifest_prefixes(self) -> list[str]:
        """The prefixes under which the manifest is looked for without a listing, best first.

        ``samples-0001`` names some of the shards of ``samples-manifest.safetensors``.
        """
        return list(dict.fromkeys([self.prefix, self.prefix.rstrip("0123456789")]))

    @property
    def _path(self) -> str:
        """The path or glob, without the version."""
        return self.url if self.version is None else self.url.removesuffix(f"@{self.version}")

    def matching(self, names: Sequence[str], store: Store) -> Sequence[str]:
        """The names for whose shards, in ``store``, the pattern stands. For a glob that may be a folder of its own."""
        if self.is_glob:
            pattern = os.path.abspath(self._path)  # noqa: PTH100 (a pattern is no path)
            return tuple(name for name in names if _glob_matches(pattern, store.locate(name)))
        # A directory's pattern does not reach into the folders below, a bucket's does.
        is_flat = self.store.directory is not None
        # A manifest of a million shards: its names are not made into as many objects.
        if isinstance(names, Texts) and names.all_start_with(self.prefix) and not (is_flat and names.have("/")):
            return names
        return tuple(name for name in names if name.startswith(self.prefix) and not (is_flat and "/" in name))

    @cached_property
    def listing(self) -> Listing:
        """Everything that the store lists for the pattern; it is listed once.

        Raises:
            DataError: If a bucket lists a shard whose name would mean another object in an HTTP path or on a disk.
            StoreError: If there is no such directory, or the listing of a bucket is not complete: see
                `Store.list_all`.
        """
        shards = [name for name in self._listed_names() if ending_of(name)]
        if self.store.directory is None and (odd := next((n for n in shards if not is_object_name(n)), None)):
            raise DataError(
                f"bucket '{self.store.url}' lists a shard '{without_nul(odd)}'; expected a name without NUL whose "
                "parts are not empty, '.' or '..'; give it another, or name the shards with braces"
            )
        names, place = self.store.list_names(described(self.prefix)), self.store.url.rstrip("/")
        manifests = [start_of(name, MANIFEST_ENDING) for name in names if name.endswith(MANIFEST_ENDING)]
        indexed = [f"{start_of(name, INDEX_ENDING)}.tar" for name in names if name.endswith(INDEX_ENDING)]
        versions = {name: match[1] for name in names if (match := _VERSION_FILE.fullmatch(start_of(name)))}
        return Listing(
            [f"{place}/{name}" for name in self.matching(shards, self.store)],
            manifests,
            [f"{place}/{name}" for name in self.matching(indexed, self.store)],
            [self.store.locate(name) for name, prefix in versions.items() if prefix not in manifests],
            sorted({match[1] for name in names if (match := _RECORD.fullmatch(start_of(name)))}),
        )

    def _listed_names(self) -> list[str]:
        folder = self.store.directory
        if folder is not None and self.is_glob:
            pattern = os.path.abspath(self._path)  # noqa: PTH100 (a pattern is no path)
            return sorted(os.path.relpath(path, folder) for path in glob.glob(pattern))  # noqa: PTH207
        if folder is not None and not folder.is_dir():
            raise StoreError(f"no such directory: '{folder}', of '{self.url}'")
        return self.store.list_names(self.prefix)

    def choose(self, listed: Sequence[str]) -> list[str]:
        """The shards among listed ones: without compressed copies of them.

        Raises:
            StoreError: If there is none.
            ValueError: If they are of several data sets, and the pattern is not a glob.
        """
        found = _plain_first(listed)
        if not found:
            folder = self.store.directory
            is_folder = folder is not None and not (self.prefix or self.is_glob)
            if folder is not None and (is_folder or self.is_glob) and _has_photos(folder):
                raise StoreError(
                    f"'{self.url}' holds photos, and no shards; make shards of them: dali-pipes prep make "
                    f"{shlex.quote(str(folder))} SHARDS"
                )
            start = "samples-" if is_folder else f"{self.url.rstrip('*/-_')}-"
            raise StoreError(
                f"'{self.url}' {'holds' if is_folder else 'matches'} no .tar; expected shards such as {start}000000.tar"
                f"{there_is(self.store, self.prefix)}"
            )
        # Of several, for example the packed shards and the shards shuffled from them, one must be named.
        prefixes = sorted(set(map(prefix_of, found)))
        if len(prefixes) > 1 and not self.is_glob:
            raise ValueError(
                f"'{self.url}' holds shards of {len(prefixes)} sets: {shown(prefixes)}; name one of them, or list the "
                "shards"
            )
        return found


def local_pattern(text: str) -> Pattern | None:
    """The pattern that a local path stands for; ``None`` if it names one shard."""
    exists = os.path.exists(text)  # noqa: PTH110 (false, not an error, for impossible names)
    is_glob, is_directory = glob.has_magic(text) and not exists, Path(text).is_dir()
    if ending_of(text) and not is_glob and (text.endswith(".tar") or not is_directory):
        return None
    if is_glob:
        start = text[: min(text.find(mark) for mark in "*?[" if mark in text)]
        folder, _, prefix = start.rpartition("/")
        folder = folder or ("/" if start.startswith("/") else ".")
    elif is_directory:
        folder, prefix = text, ""
    else:
        folder, prefix = os.path.split(text)
    return Pattern(
        url=text,
        # Absolute, because a program may change its directory while a loader lives. Links stay as they are.
        store=LocalStore(Path(os.path.abspath(folder))),  # noqa: PTH100
        prefix=prefix,
        is_glob=is_glob,
    )


def _glob_matches(pattern: str, path: str) -> bool:
    """Whether `glob.glob` could find this absolute path."""
    wanted, found = pattern.split("/"), path.split("/")
    return len(wanted) == len(found) and all(
        fnmatch.fnmatchcase(name, part) and (not name.startswith(".") or part.startswith("."))
        for part, name in zip(wanted, found, strict=True)
    )


def _has_photos(folder: Path) -> bool:
    """Whether a photo lies in a folder, or in the first folders in it, two levels deep: it is the source of shards."""
    from dali_pipes.formats.photo_header import is_photo

    with contextlib.suppress(OSError):
        inside = list(itertools.islice(filter(Path.is_dir, folder.iterdir()), 20))
        deeper = (below for one in inside for below in itertools.islice(filter(Path.is_dir, one.iterdir()), 3))
        return any(is_photo(path.name) for place in (folder, *inside, *deeper) for path in place.iterdir())
    return False


def _plain_first(found: Sequence[str]) -> list[str]:
    """Drop compressed shards that were also found as ``.tar``, and those of sets without a ``.tar``.

    If no ``.tar`` was found, keep the shards that ``prep`` can unpack, or else all.
    """
    plain = {stem_of(name) for name in found if name.endswith(".tar")}
    if not plain:
        return [name for name in found if extension_of(name)] or list(found)
    sets = {prefix_of(name) for name in found if name.endswith(".tar")}
    return [name for name in found if name.endswith(".tar") or (stem_of(name) not in plain and prefix_of(name) in sets)]


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
        bucket, name = rest.partition("/")[::2] if scheme in SERVERS else split_bucket(rest)
        if not bucket:
            raise ValueError(f"'{url}' names no bucket; expected {scheme}://BUCKET/PREFIX")
        if scheme in SERVERS and "@" in bucket:
            raise ValueError(f"the URL at '{bucket.rpartition('@')[2]}' must not hold a password")
        if scheme in SERVERS and set("?#") & set(str(url)):
            raise ValueError(
                f"'{str(url).partition('?')[0]}': a URL of shards has no '?' or '#': a signed URL names one object"
            )
        if scheme not in SERVERS:
            try:
                parts = BucketParts.parse(bucket)
            except ValueError as exc:
                raise ValueError(f"'{url}': {exc}") from None
            if parts.query and not is_in_cluster(url, endpoint):
                raise ValueError(f"'{url}' names a namespace, which only AIStore has; set AIS_ENDPOINT to its proxy")
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
        DataError: If a shard's name would mean another object; if a shard is compressed, and may not be.
        StoreError: If nothing is found, there is no such directory, or a cluster cannot list all objects now.
        ValueError: If the URLs name no shard, one twice, too many, several sets or stores, or are not valid.
    """
    return resolve_parsed(parse_shards(urls, endpoint=endpoint), endpoint=endpoint, compressed=compressed)


def resolve_parsed(
    parts: Sequence[tuple[str, list[str] | Pattern]], *, endpoint: str | None, compressed: bool = False
) -> ShardSet:
    """The same for URLs that `parse_shards` has parsed."""
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
    found = _VERSION.fullmatch(text)
    if found is None or (not remote and os.path.exists(text)):  # noqa: PTH110 (false, not an error, for odd names)
        return _parse_text(text, remote=remote, endpoint=endpoint)
    base, version = found.groups()
    named = _parse_text(base, remote=remote, endpoint=endpoint)
    if not isinstance(named, Pattern):
        raise ValueError(
            f"'{text}': a version is one of a data set, which a prefix, a directory or a glob names, and "
            f"'{base}' names shards; leave out '@{version}'"
        )
    return replace(named, url=text, version=int(version))


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
        check_object_name(url[len(root) + 1 :], url=url)
    return [url[len(root) + 1 :] for url in urls]


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
