"""Read the lines of an HTTP/1.1 answer that say where its body ends. What RFC 9112 leaves in doubt is refused.

Two readers that disagree on the end of a body take a part of it for the next answer. So an answer with two lengths, or
with a length and chunks, or with a size that is not a plain number, is a broken answer, and its connection is closed.
"""

import re
from collections.abc import Iterable
from typing import NamedTuple

from dali_pipes.store.cluster.transport.http_limits import ProtocolError, framing

_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) ([1-5][0-9][0-9])(?: ([^\r\n\0]*))?")
_FIELD = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\r\n\0]*)")
_FOLD = re.compile(rb"[ \t]*\r\n[ \t]+")
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[^\r\n\0]*)?")
_LONE_LINE_FEED = re.compile(rb"(?<!\r)\n")


class Headers:
    """The fields of a head by name, whatever the case of their letters. The values of a repeated field are joined."""

    def __init__(self, fields: Iterable[tuple[str, str]]) -> None:
        self._values: dict[str, str] = {}
        for name, value in fields:
            known = self._values.get(name.lower())
            self._values[name.lower()] = value if known is None else f"{known}, {value}"

    def find(self, name: str) -> str | None:
        """The value, ``None`` if the head lacks the field."""
        return self._values.get(name.lower())

    def get(self, name: str, default: str = "") -> str:
        """The value, ``default`` if the head lacks the field."""
        return self._values.get(name.lower(), default)


class Answer(NamedTuple):
    """The head of an answer."""

    status: int
    reason: str
    headers: Headers
    length: int | None
    """Bytes of the body; ``None`` if the head does not state them."""
    is_chunked: bool
    """Whether the body comes in chunks, each with its size."""
    is_last: bool
    """Whether the server closes the connection after it."""


def parse_head(head: bytes) -> Answer:
    """Read a head, without the empty line at its end; `ProtocolError` if it is not valid."""
    first, _, lines = head.partition(b"\r\n")
    if not (status_line := _STATUS_LINE.fullmatch(first)):
        raise ProtocolError("the server does not speak HTTP/1.1")
    fields = []
    for line in _FOLD.sub(b" ", lines).split(b"\r\n") if lines else ():
        if not (field := _FIELD.fullmatch(line)):
            raise ProtocolError("the head of its answer holds a line that is not a field")
        fields.append((field[1].decode("latin-1"), field[2].decode("latin-1").rstrip(" \t")))
    headers, is_1_1 = Headers(fields), status_line[1] == b"1"
    length, is_chunked = framing(headers.find("Content-Length"), headers.find("Transfer-Encoding"), is_1_1=is_1_1)
    options = [option.strip() for option in headers.get("Connection").lower().split(",")]
    is_last = "close" in options or (not is_1_1 and "keep-alive" not in options)
    reason = (status_line[3] or b"").decode("latin-1").strip()
    return Answer(int(status_line[2]), reason, headers, length, is_chunked, is_last)


def chunk_size(line: bytes) -> int:
    """Read the size from the first line of a chunk; `ProtocolError` if there is none."""
    if not (found := _CHUNK.fullmatch(line)):
        raise ProtocolError("a chunk of the body has no size")
    return int(found[1], 16)


def has_lone_line_feed(lines: bytearray, start: int) -> bool:
    """Whether a line that ends at ``start`` or later ends without a carriage return."""
    return bool(_LONE_LINE_FEED.search(lines, start))
