"""Names of shards and other objects: extensions, the prefix that shards share, and which names are safe."""

import os
import re
from collections.abc import Sequence

EXTENSIONS = (".tar", ".tgz", ".tar.gz")
"""The extensions of shards. Compressed shards save space; only ``.tar`` can be indexed and trained from."""

# No command here reads these. They are recognised, so that the error can say how a shard is compressed.
_FOREIGN = (".tar.lz4", ".tar.zst", ".tar.xz", ".tar.bz2", ".txz", ".tbz2", ".zip")

# An empty part, a part '.' or '..', or a NUL. The last part may be empty: a prefix may end with a slash.
_ODD_PART = re.compile(r"(?:^|/)(?:\.{0,2}/|\.{1,2}$)|\0")

# Shards that were added to a data set, or written anew for it: their names begin with that of its manifest.
_ADDED = re.compile(r"(.*)(?:add|compact)-[0-9a-f]{10}-[0-9]+\.tar", re.DOTALL)


def extension_of(name: str) -> str:
    """The extension of `EXTENSIONS` in which a shard's name ends; empty if it ends in none of them.

    >>> extension_of("a-0.tar.gz")
    '.tar.gz'
    """
    return next((extension for extension in EXTENSIONS if name.endswith(extension)), "")


def ending_of(name: str) -> str:
    """The extension of a shard's name, also one that no command reads; empty if the name is not a shard's."""
    return extension_of(name) or next((ending for ending in _FOREIGN if name.endswith(ending)), "")


def stem_of(name: str) -> str:
    return name.removesuffix(ending_of(name))


def prefix_of(name: str) -> str:
    """A shard's name without its number and extension.

    >>> prefix_of("train/shuffled-000012.tar")
    'train/shuffled-'
    """
    return stem_of(name).rstrip("0123456789")


def shared_prefix(names: Sequence[str]) -> str:
    """The text with which all shard names start, without the digits that count them.

    >>> shared_prefix(["shuffled-000000.tar", "shuffled-000012.tar"])
    'shuffled-'
    >>> shared_prefix(["only.tar"])
    'only'
    """
    stems = [stem_of(name) for name in names]
    return os.path.commonprefix(stems).rstrip("0123456789")  # noqa: RUF071 (character by character is intended)


def grown_prefix(names: Sequence[str]) -> str | None:
    """The prefix of the data set to which shards were added, or written anew, by their names; ``None``: other names.

    >>> grown_prefix(["shuffled-add-3f9a6c01d2-000000.tar"]), grown_prefix(["shuffled-000000.tar"])
    ('shuffled-', None)
    """
    found = [_ADDED.fullmatch(name) for name in names]
    prefixes = {match[1] if match else None for match in found}
    return prefixes.pop() if len(prefixes) == 1 else None


def check_object_name(name: str, *, url: str) -> None:
    """Refuse an object's name, or a prefix of names, that would mean another object in an HTTP path.

    Clients resolve dots there: ``ais://pets/../photos/a`` would be read from, or written to, another bucket.

    Raises:
        ValueError: If a part between slashes is ``.`` or ``..``, a part other than the last is empty, or there is a
            NUL; names ``url``.
    """
    if not is_object_name(name):
        raise ValueError(
            f"'{without_nul(url)}': the parts of an object's name must not be empty, '.' or '..', nor hold a NUL, "
            f"got '{without_nul(name)}'"
        )


def is_object_name(name: str) -> bool:
    """Whether a name, or a prefix of names, means the same object in an HTTP path and below a directory."""
    return not _ODD_PART.search(name)


def without_nul(text: str) -> str:
    """A text for a message, each NUL written as ``\\0``."""
    return text.replace("\0", "\\0")
