"""Errors that a caller may want to catch. Each says where, what was expected, what was found and what to do."""

import re
from collections.abc import Sequence
from urllib.parse import quote, quote_plus

# Names of a long list that an error shows, so that it stays short.
_NUM_SHOWN = 3
# What must never be shown. It is kept for the life of the process, because a server may repeat it in any text.
_secrets: set[str] = set()
_MIN_SECRET_CHARS = 8  # a shorter one may be a word of any text; tokens have more than a hundred
# The parts of a URL or a request that work like a password, at S3, GCS and Azure; in a URL within a URL, too.
_SIGNATURE = re.compile(
    r"((?:(?:\b|%26|%3F)sig|Signature|Security-Token)(?:=|%3D)|Security-Token\"?: ?\"?"
    r"|SharedKey [^\s:]+:|Bearer (?=[^\s&\"'<>,]*[\d._-]))[^\s&\"'<>,]{8,}",
    re.IGNORECASE,
)
# A name or a text of the data. The paths that people give their files are shorter; a path may have 4,096 bytes.
_TEXT_CHARS = 300
# An error as a whole: it may name several such texts.
_ERROR_CHARS = 8000


class PipesError(Exception):
    """Any failure that this project reports; its text is written for the user.

    The text passes `printable`: whatever part of the data it repeats, it is one line that no terminal obeys, and holds
    no token.
    """

    def __init__(self, text: str) -> None:
        super().__init__(printable(text, max_chars=_ERROR_CHARS))


class DataError(PipesError):
    """The data are invalid: a broken archive, a missing component, a label that is not a number."""


class StoreError(PipesError):
    """The object store or file system failed: no answer, no such bucket, no free space."""


class CacheError(PipesError):
    """The cache file cannot hold the shards that must be resident: no free space, or an unsuitable file system."""


class DecodeError(PipesError):
    """DALI could not read or decode a batch; the text names the batch's samples."""


class WorkerProcessError(PipesError):
    """A loader was used in a process other than the one that made it."""


def keep_secret(secret: str | None) -> None:
    """From now on, `printable` masks this text of eight characters or more: a token, a password.

    Also in a URL, and each line of a key that has several.
    """
    for text in (secret or "").splitlines():
        quoted = {text, quote(text, safe=""), quote(text), quote_plus(text)}
        lower = {re.sub("%..", lambda found: found[0].lower(), one) for one in quoted}
        _secrets.update(one for one in quoted | lower if len(one) >= _MIN_SECRET_CHARS)


def printable(text: str, *, max_chars: int = _TEXT_CHARS) -> str:
    r"""A text of the data or of a server, safe to show in an error, a log or a table: one line, of bounded length.

    Every character that Unicode does not call printable is shown as an escape: control characters (also those that
    colour or clear a terminal), line breaks, marks that change the direction of writing, and halves of surrogate pairs.
    A byte of a file's name that is not UTF-8 is shown as ``\xff``. A longer text is cut to ``max_chars``
    characters, with a mark that says so. A text that is safe and short is returned unchanged. Whatever `keep_secret`
    was told is shown as ``***``, and so are signatures and bearers' tokens.

    >>> printable("a\x1b[2J\nb")
    'a\\x1b[2J\\nb'
    >>> printable("0" * 5000, max_chars=30)
    '000000000... (5000 characters)'
    """
    for secret in sorted(_secrets, key=len, reverse=True):  # one may be the beginning of another
        text = text.replace(secret, "***")
    text = _SIGNATURE.sub(r"\1***", text)
    if len(text) <= max_chars and text.isprintable():
        return text
    escapes = (one if one.isprintable() else _escape(one) for one in text[: max_chars + 1])
    head = "".join(escapes)
    if len(head) <= max_chars:
        return head
    mark = f"... ({len(text)} characters)"
    return head[: max(0, max_chars - len(mark))] + mark


def _escape(character: str) -> str:
    is_byte = "\udc80" <= character <= "\udcff"  # surrogateescape's form of a byte that is not UTF-8
    return f"\\x{ord(character) - 0xDC00:02x}" if is_byte else character.encode("unicode_escape").decode()


def shown(texts: Sequence[str], *, are_names: bool = True) -> str:
    """The first items of a list, for an error's text: names in quotes and printable, other texts unchanged.

    >>> shown(["a", "b", "c", "d"])
    "'a', 'b', 'c' and 1 more"
    >>> shown(["a: no photo", "b: no mask"], are_names=False)
    'a: no photo; b: no mask'
    """
    more = f" and {len(texts) - _NUM_SHOWN} more" if len(texts) > _NUM_SHOWN else ""
    first = texts[:_NUM_SHOWN]
    return (", ".join(f"'{printable(text)}'" for text in first) if are_names else "; ".join(first)) + more
