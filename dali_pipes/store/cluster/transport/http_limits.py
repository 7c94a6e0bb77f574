"""Limits of an HTTP answer, for the fetch client and for sessions of `requests`: its lines, its length, its pace."""

import http.client

MAX_INTERIM_ANSWERS = 16
"""Answers of the kind ``100 Continue`` before the answer itself. We never ask for one."""
MAX_LINES_BYTES = 64 << 10
"""Bytes of a head, or of the lines between the chunks of a body, see `max_lines_bytes`."""
MAX_ERROR_BYTES = 64 << 10
"""Bytes of an error's body that are read, to quote it and to keep the connection."""
MAX_OBJECT_BYTES = 4 << 30
"""An object that is read into memory: a manifest, a column file, a shard index. Its answer must tell its length."""
MIN_BYTES_PER_S = 1024
"""A slower transfer is a broken one: a shard of 64 MiB would take 18 hours. curl's manual suggests 1000."""
MAX_DIGITS = 18
"""A length with more digits is refused: sizes of objects are 64-bit integers."""


class ProtocolError(http.client.HTTPException):
    """The server's answer is not valid HTTP/1.1, or exceeds a limit."""


class TooSlowError(TimeoutError):
    """Bytes come, but too few."""


def decimal(text: str) -> int | None:
    """Read a plain number of at most `MAX_DIGITS` digits; ``None`` for any other text.

    >>> [decimal(text) for text in ("20480", "-1", "+1", "1_0", "9" * 10_000)]
    [20480, None, None, None, None]
    """
    return int(text) if text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS else None


def framing(content_length: str | None, transfer_encoding: str | None, *, is_1_1: bool) -> tuple[int | None, bool]:
    """The length of an answer's body, ``None`` if it is not stated, and whether the body comes in chunks.

    Args:
        content_length: The values of this field, joined by commas; ``None`` if there is none.
        transfer_encoding: The values of this field.
        is_1_1: Whether the answer is of HTTP/1.1.

    Raises:
        ProtocolError: If two readers could take different bytes for the end of the body.
    """
    if transfer_encoding is not None and (transfer_encoding.lower() != "chunked" or not is_1_1):
        raise ProtocolError("its answer has a Transfer-Encoding other than 'chunked'")
    if transfer_encoding is not None and content_length is not None:
        raise ProtocolError("its answer has both a Content-Length and a Transfer-Encoding")
    length = None if content_length is None else decimal(content_length)
    if content_length is not None and length is None:
        raise ProtocolError("the Content-Length of its answer is not one number")
    return length, transfer_encoding is not None


def max_lines_bytes(num_bytes: int) -> int:
    """The most bytes that the lines around ``num_bytes`` of a body may take.

    A head is some hundred bytes, and a chunk of a single byte has five more around it. A server that sends lines only
    (interim answers, trailers, extensions of chunks) would never end.
    """
    return MAX_LINES_BYTES + 8 * num_bytes


class Pace:
    """Finds out that an answer has become too slow, as curl does with ``--speed-limit`` and ``--speed-time``.

    It is too slow if fewer than `MIN_BYTES_PER_S` come in ``window_s`` seconds. Only the time counts in which we wait
    for the server; and not before the first byte, which a server may have to fetch from elsewhere: silence has a limit
    of its own.
    """

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._num_bytes, self._waited_s = 0, 0.0

    def restart(self) -> None:
        """Forget the bytes and seconds until now."""
        self._num_bytes, self._waited_s = 0, 0.0

    def count(self, num_bytes: int, *, waited_s: float) -> None:
        """Count bytes that came after a wait; `TooSlowError` if the answer is too slow."""
        if self._num_bytes:
            self._waited_s += waited_s
        self._num_bytes += num_bytes
        if self._waited_s < self._window_s:
            return
        if self._num_bytes < MIN_BYTES_PER_S * self._waited_s:
            raise TooSlowError(
                f"only {self._num_bytes} bytes in {self._waited_s:.1f} s, less than {MIN_BYTES_PER_S} bytes/s"
            )
        self.restart()
