"""Shard URLs to stores and object names: braces, globs, prefixes and lists, of buckets and of local files."""

import glob
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from prep.errors import StoreError
from prep.store import PROVIDERS, AisStore, LocalStore, Store

__all__ = ["ShardSet", "is_remote", "open_store", "resolve_shards", "shared_prefix"]

_EXPECTED_SCHEME = f"scheme must be one of {', '.join(PROVIDERS)}, or a local path"

ShardUrls = str | Path | Sequence[str | Path]


@dataclass(frozen=True, kw_only=True)
class ShardSet:
    """Shards of one store, in the order they were named."""

    store: Store
    names: tuple[str, ...]

    @property
    def prefix(self) -> str:
        """What the manifest and the class table of these shards are named after: see `shared_prefix`."""
        return shared_prefix(self.names)

    @property
    def url(self) -> str:
        """The set in one line, for messages and commands: ``ais://pets/shuffled-``."""
        return self.store.locate(self.prefix)


def is_remote(url: str | Path) -> bool:
    """Whether a URL names a bucket: ``ais://``, ``s3://``, ``gs://``, ``az://``."""
    return isinstance(url, str) and url.partition("://")[0] in PROVIDERS and "://" in url


def open_store(url: str | Path, *, endpoint: str | None) -> tuple[Store, str]:
    """The store that ``url`` names, and the rest of the URL: an object name, template or prefix.

    Raises:
        ValueError: If a bucket is named and there is no ``endpoint``, or the scheme is not known.
    """
    if is_remote(url):
        scheme, _, rest = str(url).partition("://")
        bucket, _, name = rest.partition("/")
        if not bucket:
            raise ValueError(f"'{url}' names no bucket; expected {scheme}://BUCKET/PREFIX")
        if endpoint is None:
            raise ValueError(f"'{url}' is in a bucket, and no AIStore endpoint is given; set AIS_ENDPOINT")
        return AisStore(endpoint, bucket, provider=PROVIDERS[scheme]), name
    if "://" in str(url):
        raise ValueError(f"'{url}': {_EXPECTED_SCHEME}")
    folder, _, name = str(url).rpartition("/")
    return LocalStore(Path(folder or (os.sep if str(url).startswith(os.sep) else "."))), name


def resolve_shards(urls: ShardUrls, *, endpoint: str | None) -> ShardSet:
    """The shards that ``urls`` names, in order.

    Args:
        urls: ``ais://bucket/shuffled-{000000..000003}.tar``, ``ais://bucket/prefix``, a path with braces, a glob
            (``*``, ``?``, ``[``) of local tars, a directory, or a list of any of these within one bucket or directory.
        endpoint: AIStore's proxy, for buckets.

    Raises:
        StoreError: If a prefix, glob or directory holds no ``.tar``.
        ValueError: If the list is empty, names a shard twice, or spans stores.
    """
    listed = [urls] if isinstance(urls, str | Path) else list(urls)
    if not listed:
        raise ValueError("shards must name at least one tar, got an empty list")
    expanded: list[str] = []
    for url in listed:
        expanded += _expand(url, endpoint=endpoint)
    if is_remote(listed[0]):
        scheme, _, rest = str(listed[0]).partition("://")
        root = f"{scheme}://{rest.partition('/')[0]}"
        store, _ = open_store(f"{root}/", endpoint=endpoint)
    else:
        root = os.path.commonpath([str(Path(path).parent) for path in expanded]) if expanded else "."
        root = root or "."
        store = LocalStore(Path(root))
    names = [_relative(url, root) for url in expanded]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"shard '{store.locate(twice)}' is named twice")
    return ShardSet(store=store, names=tuple(names))


def shared_prefix(names: Sequence[str]) -> str:
    """What all shard names start with, without the digits that count them.

    >>> shared_prefix(["shuffled-000000.tar", "shuffled-000012.tar"])
    'shuffled-'
    >>> shared_prefix(["only.tar"])
    'only'
    """
    stems = [name.removesuffix(".tar") for name in names]
    return os.path.commonprefix(stems).rstrip("0123456789")  # noqa: RUF071 (by character is what is meant)


def _expand(url: str | Path, *, endpoint: str | None) -> list[str]:
    from braceexpand import braceexpand

    text = str(url)
    if "://" in text and not is_remote(url):
        raise ValueError(f"'{text}': {_EXPECTED_SCHEME}")
    if "{" in text:
        return list(braceexpand(text))
    if text.endswith(".tar") and not glob.has_magic(text):
        return [text]
    if is_remote(url):
        store, prefix = open_store(url, endpoint=endpoint)
        found = [store.locate(entry.name) for entry in store.list(prefix) if entry.name.endswith(".tar")]
    elif glob.has_magic(text):
        found = sorted(path for path in glob.glob(text) if path.endswith(".tar"))  # noqa: PTH207 (text may be absolute)
    elif Path(text).is_dir():
        found = sorted(str(path) for path in Path(text).glob("*.tar"))
    else:
        found = sorted(str(path) for path in Path(text).parent.glob(f"{glob.escape(Path(text).name)}*.tar"))
    if not found:
        raise StoreError(f"'{text}' matches no .tar; expected shards such as {text.rstrip('*/-_')}-000000.tar")
    return found


def _relative(url: str, root: str) -> str:
    if is_remote(url):
        if not url.startswith(f"{root}/"):
            raise ValueError(f"shards must lie in one bucket, got '{root}' and '{url}'")
        return url.removeprefix(f"{root}/")
    if is_remote(root):
        raise ValueError(f"shards must lie in one bucket or directory, got '{root}' and '{url}'")
    return os.path.relpath(url, root)
