"""Shard URLs to stores and object names: braces, globs, prefixes and lists, of buckets and of local files."""

import glob
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from dali_pipes.errors import DataError, StoreError
from dali_pipes.store.ais import AisStore
from dali_pipes.store.base import PROVIDERS, Store
from dali_pipes.store.local import LocalStore
from dali_pipes.store.shard_names import extension_of

__all__ = ["ShardSet", "check_object_name", "is_remote", "open_store", "resolve_shards", "shared_prefix"]

_SCHEMES = ", ".join(PROVIDERS)

# As AIStore has it; a cloud's rules are narrower.
_BUCKET_NAME = re.compile(r"(?!\.\.?$)[A-Za-z0-9._-]{1,64}")
# Names that one URL's braces may stand for: more is a typing error, or a data set that no listing of this kind fits.
MAX_EXPANDED = 1_000_000
_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)(?:\.\.(-?\d+))?")

# An empty part, one of dots alone, or a NUL. The last part may be empty: it is what a prefix ends with.
_ODD_PART = re.compile(r"(?:^|/)(?:\.{0,2}/|\.{1,2}$)|\0")
_ONE_RANGE = re.compile(r"([^{}\\]*)\{([0-9]+)\.\.([0-9]+)\}([^{}\\]*)")

# What no command here reads: a name that ends so is a shard's all the same, and told from one that is not there.
_FOREIGN = (".tar.lz4", ".tar.zst", ".tar.xz", ".tar.bz2", ".txz", ".tbz2", ".zip")

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
        raise ValueError(f"'{url}': scheme must be one of {_SCHEMES}, or a local path")
    folder, _, name = str(url).rpartition("/")
    return LocalStore(Path(folder or (os.sep if str(url).startswith(os.sep) else "."))), name


def check_object_name(name: str, *, url: str) -> None:
    """Refuse an object's name, or a prefix of names, that stands for another object's once it is in an HTTP path.

    Clients fold dots there: ``ais://pets/../photos/a`` would be read from, or written to, another bucket.

    Raises:
        ValueError: If a part between slashes is ``.`` or ``..``, one that is not the last is empty, or there is a NUL;
            names ``url``.
    """
    if not _is_object_name(name):
        raise ValueError(
            f"'{_shown(url)}': the parts of an object's name must not be empty, '.' or '..', nor hold a NUL, "
            f"got '{_shown(name)}'"
        )


def resolve_shards(urls: ShardUrls, *, endpoint: str | None, compressed: bool = False) -> ShardSet:
    """The shards that ``urls`` names, in order.

    Args:
        urls: ``ais://bucket/shuffled-{000000..000003}.tar``, ``ais://bucket/prefix``, a path with braces, a glob
            (``*``, ``?``, ``[``) of local tars, a directory, or a list of any of these within one bucket or directory.
            ``s3://``, ``gs://`` and ``az://`` are buckets that the cluster has as a backend. ``file:///a%20b/`` is the
            path ``/a b/``; ``~`` is the home directory. A local shard may be a symbolic link to anywhere: the tree is
            the user's own.
        endpoint: AIStore's proxy, for buckets.
        compressed: Whether ``.tgz`` and ``.tar.gz`` will do: of a prefix, glob or directory where there is no ``.tar``,
            and where they are named.

    Raises:
        DataError: If a bucket lists a shard whose name would stand for another object's in an HTTP path, or on a disk;
            if a shard is compressed, and ``compressed`` is false or it is so in another way.
        StoreError: If a prefix, glob or directory holds no ``.tar``, or there is no such directory.
        ValueError: If the list is empty, names a shard twice, or spans stores; if braces stand for more than
            `MAX_EXPANDED` names, or an object's name is none; if a prefix or directory holds several sets.
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
        scheme, _, rest = str(listed[0]).partition("://")
        root = f"{scheme}://{rest.partition('/')[0]}"
        store, _ = open_store(f"{root}/", endpoint=endpoint)
        names = _remote_names(expanded, root)
    else:
        root, names = _local_names(expanded)
        store = LocalStore(Path(root))
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
    stems = [_stem(name) for name in names]
    return os.path.commonprefix(stems).rstrip("0123456789")  # noqa: RUF071 (by character is what is meant)


def _expand(url: str | Path, *, endpoint: str | None) -> list[str]:
    from braceexpand import braceexpand

    text = str(url) if is_remote(url) else _local_path(url)
    path = Path(text)
    exists = not is_remote(url) and os.path.exists(text)  # noqa: PTH110 (false, not an error, for impossible names)
    if "{" in text and not exists:
        if _num_names(text) > MAX_EXPANDED:
            raise ValueError(
                f"'{text}' stands for more than {MAX_EXPANDED:,} names; name the prefix alone to list the shards"
            )
        return _expand_range(text) or list(braceexpand(text))
    is_glob = not is_remote(url) and glob.has_magic(text) and not exists
    if _ending(text) and not is_glob and (text.endswith(".tar") or is_remote(url) or not path.is_dir()):
        return [text]
    if is_remote(url):
        store, prefix = open_store(url, endpoint=endpoint)
        listed = [entry.name for entry in store.list(prefix) if _ending(entry.name)]
        if odd := next((name for name in listed if not _is_object_name(name)), None):
            raise DataError(
                f"bucket '{store.url}' lists a shard '{_shown(odd)}'; expected a name without NUL whose parts are not "
                "empty, '.' or '..'; give it another, or name the shards with braces"
            )
        found = [store.locate(name) for name in listed]
    elif is_glob:
        found = sorted(name for name in glob.glob(text) if _ending(name))  # noqa: PTH207 (text may be absolute)
    elif path.is_dir():
        found = sorted(str(entry) for entry in path.iterdir() if _ending(entry.name))
        if not found:
            raise StoreError(f"directory '{text}' holds no .tar; expected shards such as samples-000000.tar")
    elif not path.parent.is_dir():
        raise StoreError(f"no such directory: '{path.parent}', of '{text}'")
    else:
        named = (entry for entry in path.parent.iterdir() if entry.name.startswith(path.name))
        found = sorted(str(entry) for entry in named if _ending(entry.name))
    found = _plain_first(found)
    if not found:
        raise StoreError(f"'{text}' matches no .tar; expected shards such as {text.rstrip('*/-_')}-000000.tar")
    if not is_glob:
        _check_one_set(found, url=text)
    return found


def _ending(name: str) -> str:
    """How a shard's name ends; empty of what is none."""
    return extension_of(name) or next((ending for ending in _FOREIGN if name.endswith(ending)), "")


def _stem(name: str) -> str:
    return name.removesuffix(_ending(name))


def _plain_first(found: Sequence[str]) -> list[str]:
    """Without compressed shards that lie unpacked beside, or are of another set than plain ones."""
    if not any(name.endswith(".tar") for name in found):
        return [name for name in found if extension_of(name)] or list(found)
    plain = {_stem(name) for name in found if name.endswith(".tar")}
    sets = {stem.rstrip("0123456789") for stem in plain}

    def is_lacking(stem: str) -> bool:
        return stem not in plain and stem.rstrip("0123456789") in sets

    return [name for name in found if name.endswith(".tar") or is_lacking(_stem(name))]


def _check_compression(names: Sequence[str], *, url: str, compressed: bool) -> None:
    """Refuse shards in which nothing can be found by its place.

    Raises:
        DataError: Names the first one, and says what to do.
    """
    packed = [name for name in names if not name.endswith(".tar") and _ending(name)]
    foreign = next((name for name in packed if not extension_of(name)), None)
    if foreign is not None:
        raise DataError(
            f"shard '{foreign}' is compressed as {_ending(foreign)}; DALI reads plain .tar, and prep shuffle and pack "
            "tars .tgz and .tar.gz besides: unpack it"
        )
    if packed and not compressed:
        more = f", and so are {len(packed) - 1} more" if len(packed) > 1 else ""
        raise DataError(
            f"shard '{packed[0]}' is compressed{more}: DALI reads a sample at its place in a plain .tar, and a "
            f"compressed one has no such places; write plain ones: dali-pipes prep shuffle '{url}' --extension .tar "
            "(with --algorithm none their order stays)"
        )


def _check_one_set(found: Sequence[str], *, url: str) -> None:
    """Refuse what would join two data sets: the shards that were packed and those that were shuffled from them, say."""
    sets = Counter(_stem(name).rstrip("0123456789") for name in found)
    if len(sets) > 1:
        counted = ", ".join(f"'{prefix}' ({count} shards)" for prefix, count in sorted(sets.items())[:4])
        raise ValueError(f"'{url}' holds shards of {len(sets)} sets: {counted}; name one of them, or list the shards")


def _expand_range(text: str) -> list[str]:
    """What `braceexpand` makes of one range that counts up, in a fifth of the time; of all else nothing."""
    match = _ONE_RANGE.fullmatch(text)
    if match is None:
        return []
    before, first, last, after = match.groups()
    is_padded = any(number.startswith("0") and number != "0" for number in (first, last))
    width = max(len(first), len(last)) if is_padded else 0
    return [f"{before}{number:0{width}d}{after}" for number in range(int(first), int(last) + 1)]


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


def _remote_names(urls: Sequence[str], root: str) -> list[str]:
    for url in urls:
        if not url.startswith(f"{root}/"):
            raise ValueError(f"shards must lie in one bucket or directory, got '{root}' and '{url}'")
    names = [url[len(root) + 1 :] for url in urls]
    for name in names:
        if not _is_object_name(name):
            check_object_name(name, url=f"{root}/{name}")
    return names


def _local_names(paths: Sequence[str]) -> tuple[str, list[str]]:
    """The directory that all paths lie in, and each path from there."""
    if remote := next((path for path in paths if is_remote(path)), None):
        raise ValueError(f"shards must lie in one bucket or directory, got '{paths[0]}' and '{remote}'")
    # Absolute: a program may change its directory while a loader lives. Done once a folder, of which there are few.
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
        raise ValueError(f"'{text}': scheme must be one of {_SCHEMES}, file, or a local path")
    else:
        path = os.path.expanduser(text)  # noqa: PTH111 (Path drops a slash at the end)
    if "\0" in path:
        raise ValueError(f"'{_shown(text)}': a path holds no NUL")
    return path


def _is_object_name(name: str) -> bool:
    """Whether a name, or a prefix of names, stands for itself in an HTTP path and below a directory."""
    return not _ODD_PART.search(name)


def _shown(text: str) -> str:
    return text.replace("\0", "\\0")
