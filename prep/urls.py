"""Shard URLs to stores and object names: braces, globs, prefixes and lists, of buckets and of local files."""

import glob
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from prep.errors import StoreError
from prep.store import PROVIDERS, AisStore, LocalStore, Store

__all__ = ["ShardSet", "check_object_name", "is_remote", "open_store", "resolve_shards", "shared_prefix"]

_EXPECTED_SCHEME = f"scheme must be one of {', '.join(PROVIDERS)}, or a local path"

# As AIStore has it; a cloud's rules are narrower.
_BUCKET_NAME = re.compile(r"(?!\.\.?$)[A-Za-z0-9._-]{1,64}")
# Names that one URL's braces may stand for: more is a typing error, or a data set that no listing of this kind fits.
MAX_EXPANDED = 1_000_000
_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)(?:\.\.(-?\d+))?")

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
        ValueError: If a bucket is named and there is no ``endpoint``, the scheme is not known, or a bucket's or
            object's name is none.
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
            raise ValueError(f"'{url}' is in a bucket, and no AIStore endpoint is given; set AIS_ENDPOINT")
        return AisStore(endpoint, bucket, provider=PROVIDERS[scheme]), name
    if "://" in str(url):
        raise ValueError(f"'{url}': {_EXPECTED_SCHEME}")
    folder, _, name = str(url).rpartition("/")
    return LocalStore(Path(folder or (os.sep if str(url).startswith(os.sep) else "."))), name


def check_object_name(name: str, *, url: str) -> None:
    """Refuse an object's name, or a prefix of names, that stands for another object's once it is in an HTTP path.

    Clients fold dots there: ``ais://pets/../photos/a`` would be read from, or written to, another bucket.

    Raises:
        ValueError: If a part between slashes is ``.`` or ``..``, or one that is not the last is empty; names ``url``.
    """
    *folders, last = name.split("/")
    if any(part in ("", ".", "..") for part in folders) or last in (".", ".."):
        raise ValueError(f"'{url}': the parts of an object's name must not be empty, '.' or '..', got '{name}'")


def resolve_shards(urls: ShardUrls, *, endpoint: str | None) -> ShardSet:
    """The shards that ``urls`` names, in order.

    Args:
        urls: ``ais://bucket/shuffled-{000000..000003}.tar``, ``ais://bucket/prefix``, a path with braces, a glob
            (``*``, ``?``, ``[``) of local tars, a directory, or a list of any of these within one bucket or directory.
        endpoint: AIStore's proxy, for buckets.

    Raises:
        StoreError: If a prefix, glob or directory holds no ``.tar``, or there is no such directory.
        ValueError: If the list is empty, names a shard twice, or spans stores; if braces stand for more than
            `MAX_EXPANDED` names, or an object's name is none; if a prefix or directory holds several sets.
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
        if remote := [url for url in expanded if is_remote(url)]:
            raise ValueError(f"shards must lie in one bucket or directory, got '{expanded[0]}' and '{remote[0]}'")
        # Absolute: a program may change its directory while a loader lives.
        expanded = [os.path.abspath(path) for path in expanded]  # noqa: PTH100 (links stay as they are)
        root = os.path.commonpath([os.path.dirname(path) for path in expanded])  # noqa: PTH120
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

    text = str(url) if is_remote(url) else os.path.expanduser(url)  # noqa: PTH111 (a URL must stay one)
    if "://" in text and not is_remote(url):
        raise ValueError(f"'{text}': {_EXPECTED_SCHEME}")
    path = Path(text)
    exists = not is_remote(url) and os.path.exists(text)  # noqa: PTH110 (false, not an error, for impossible names)
    if "{" in text and not exists:
        if _num_names(text) > MAX_EXPANDED:
            raise ValueError(
                f"'{text}' stands for more than {MAX_EXPANDED:,} names; name the prefix alone to list the shards"
            )
        return list(braceexpand(text))
    is_glob = not is_remote(url) and glob.has_magic(text) and not exists
    if text.endswith(".tar") and not is_glob:
        return [text]
    if is_remote(url):
        store, prefix = open_store(url, endpoint=endpoint)
        found = [store.locate(entry.name) for entry in store.list(prefix) if entry.name.endswith(".tar")]
    elif is_glob:
        found = sorted(name for name in glob.glob(text) if name.endswith(".tar"))  # noqa: PTH207 (text may be absolute)
    elif path.is_dir():
        found = sorted(str(shard) for shard in path.glob("*.tar"))
        if not found:
            raise StoreError(f"directory '{text}' holds no .tar; expected shards such as samples-000000.tar")
    elif not path.parent.is_dir():
        raise StoreError(f"no such directory: '{path.parent}', of '{text}'")
    else:
        found = sorted(str(shard) for shard in path.parent.glob(f"{glob.escape(path.name)}*.tar"))
    if not found:
        raise StoreError(f"'{text}' matches no .tar; expected shards such as {text.rstrip('*/-_')}-000000.tar")
    if not is_glob:
        _check_one_set(found, url=text)
    return found


def _check_one_set(found: Sequence[str], *, url: str) -> None:
    """Refuse what would join two data sets: the shards that were packed and those that were shuffled from them, say."""
    sets: dict[str, int] = {}
    for name in found:
        prefix = shared_prefix([name])
        sets[prefix] = sets.get(prefix, 0) + 1
    if len(sets) > 1:
        counted = ", ".join(f"'{prefix}' ({count} shards)" for prefix, count in sorted(sets.items())[:4])
        raise ValueError(f"'{url}' holds shards of {len(sets)} sets: {counted}; name one of them, or list the shards")


def _num_names(text: str) -> int:
    """How many names braces stand for, without making them: `braceexpand` holds all of each range."""
    num_names, depth, start = 1, 0, 0
    for position, character in enumerate(text):
        if character == "{":
            start = start if depth else position + 1
            depth += 1
        elif character == "}":
            depth -= 1
            if not depth:
                num_names *= _num_choices(text[start:position])
    return num_names


def _num_choices(braces: str) -> int:
    if match := _RANGE.fullmatch(braces):
        if max(map(len, match.groups(""))) > 18:
            return MAX_EXPANDED + 1
        first, last, step = (int(text or 1) for text in match.groups())
        return abs(last - first) // max(1, abs(step)) + 1
    depth, start, total = 0, 0, 0
    for position, character in enumerate(braces):
        depth += (character == "{") - (character == "}")
        if character == "," and not depth:
            total += _num_names(braces[start:position])
            start = position + 1
    return total + _num_names(braces[start:])


def _relative(url: str, root: str) -> str:
    if is_remote(root):
        if not url.startswith(f"{root}/"):
            raise ValueError(f"shards must lie in one bucket or directory, got '{root}' and '{url}'")
        name = url.removeprefix(f"{root}/")
        check_object_name(name, url=url)
        return name
    return os.path.relpath(url, root)
