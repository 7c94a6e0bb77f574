"""URLs that do not spell the names of their shards: the beginning of names, a directory, a glob of local tars."""

import fnmatch
import glob
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from dali_pipes.errors import DataError, PipesError, StoreError, shown
from dali_pipes.formats.names import index_name, manifest_name, version_start
from dali_pipes.formats.texts import Texts
from dali_pipes.store.base import Store
from dali_pipes.store.local import LocalStore
from dali_pipes.store.shard_names import (
    ending_of,
    extension_of,
    is_object_name,
    prefix_of,
    stem_of,
    without_nul,
)

# A version of a data set is at the end of a URL's last part.
_VERSION = re.compile(r"(.+)@([1-9][0-9]{0,8})", re.DOTALL)
_RECORD = re.compile(r"(.*)written(-[0-9]+)?\.json", re.DOTALL)


def there_is(store: Store, prefix: str) -> str:
    """The data sets in a prefix's folder, as the end of an error's text; empty if none is listed."""
    folder = prefix.rpartition("/")[0]
    try:
        names = [entry.name for entry in store.list(f"{folder}/" if folder else "")]
    except (PipesError, OSError):
        return ""  # the error that this text is for matters more
    prefixes = sorted({prefix_of(name) for name in names if ending_of(name)})
    return f"; found: {shown([store.locate(name) for name in prefixes])}" if prefixes else ""


class Listing(NamedTuple):
    """What a store lists for a pattern."""

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
        names = self._listed_names()
        shards = [name for name in names if ending_of(name)]
        if self.store.directory is None and (odd := next((n for n in shards if not is_object_name(n)), None)):
            raise DataError(
                f"bucket '{self.store.url}' lists a shard '{without_nul(odd)}'; expected a name without NUL whose "
                "parts are not empty, '.' or '..'; give it another, or name the shards with braces"
            )
        ending, place = manifest_name(""), self.store.url.rstrip("/")
        indexed = [f"{name.removesuffix(index_name(''))}.tar" for name in names if name.endswith(index_name(""))]
        versions = {name: name.rpartition(version_start(""))[0] for name in names if version_start("") in name}
        return Listing(
            [f"{place}/{name}" for name in self.matching(shards, self.store)],
            [name.removesuffix(ending) for name in names if name.endswith(ending)],
            [f"{place}/{name}" for name in self.matching(indexed, self.store)],
            [f"{place}/{name}" for name, prefix in versions.items() if manifest_name(prefix) not in names],
            sorted({match[1] for name in names if (match := _RECORD.fullmatch(name))}),
        )

    def _listed_names(self) -> list[str]:
        folder = self.store.directory
        if folder is None:
            return [entry.name for entry in self.store.list_all(self.prefix)]
        if self.is_glob:
            # The manifest of a glob's shards does not match the glob.
            pattern = os.path.abspath(self._path)  # noqa: PTH100 (a pattern is no path)
            found = glob.glob(pattern) + glob.glob(f"{glob.escape(f'{folder}/{self.prefix}')}*")  # noqa: PTH207
            return sorted({os.path.relpath(path, folder) for path in found})
        if not folder.is_dir():
            raise StoreError(f"no such directory: '{folder}', of '{self.url}'")
        return sorted(path.name for path in folder.iterdir() if path.name.startswith(self.prefix))

    def choose(self, listed: Sequence[str]) -> list[str]:
        """The shards among listed ones: without compressed copies of them.

        Raises:
            StoreError: If there is none.
            ValueError: If they are of several data sets, and the pattern is not a glob.
        """
        found = _plain_first(listed)
        if not found:
            is_folder = self.store.directory is not None and not (self.prefix or self.is_glob)
            start = "samples-" if is_folder else f"{self.url.rstrip('*/-_')}-"
            raise StoreError(
                f"'{self.url}' {'holds' if is_folder else 'matches'} no .tar; expected shards such as {start}000000.tar"
                f"{there_is(self.store, self.prefix)}"
            )
        if not self.is_glob:
            _check_one_set(found, url=self.url)
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


def split_version(text: str) -> tuple[str, int | None]:
    """Split a URL into the data set's own and the version that it names, if it names one.

    >>> split_version("ais://pets/shuffled-@3"), split_version("ais://pets/shuffled-")
    (('ais://pets/shuffled-', 3), ('ais://pets/shuffled-', None))
    """
    found = _VERSION.fullmatch(text)
    return (found[1], int(found[2])) if found else (text, None)


def _glob_matches(pattern: str, path: str) -> bool:
    """Whether `glob.glob` could find this absolute path."""
    wanted, found = pattern.split("/"), path.split("/")
    return len(wanted) == len(found) and all(
        fnmatch.fnmatchcase(name, part) and (not name.startswith(".") or part.startswith("."))
        for part, name in zip(wanted, found, strict=True)
    )


def _plain_first(found: Sequence[str]) -> list[str]:
    """Drop compressed shards that were also found as ``.tar``, and those of sets without a ``.tar``.

    If no ``.tar`` was found, keep the shards that ``prep`` can unpack, or else all.
    """
    plain = {stem_of(name) for name in found if name.endswith(".tar")}
    if not plain:
        return [name for name in found if extension_of(name)] or list(found)
    sets = {prefix_of(name) for name in found if name.endswith(".tar")}
    return [name for name in found if name.endswith(".tar") or (stem_of(name) not in plain and prefix_of(name) in sets)]


def _check_one_set(found: Sequence[str], *, url: str) -> None:
    """Refuse shards of two data sets, for example the packed shards and the shards shuffled from them."""
    prefixes = sorted(set(map(prefix_of, found)))
    if len(prefixes) > 1:
        raise ValueError(
            f"'{url}' holds shards of {len(prefixes)} sets: {shown(prefixes)}; name one of them, or list the shards"
        )
