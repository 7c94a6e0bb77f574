"""HTTP/1.1 over sockets: a request, the head of its answer, and the body, each within limits.

A server that lies or is broken costs a bounded time and little memory. What RFC 9112 leaves in doubt is refused: two
readers that disagree on the end of a body take a part of it for the next answer. Bytes that no request asked for end
the connection. Left out: compressed bodies, pipelining, cookies and HTTP/2.

Sockets do not block. A thread that waits for one asks ten times a second whether it is to stop.
"""

import contextlib
import http
import os
import re
import select
import socket
import ssl
import time
from collections.abc import Callable, ItemsView
from functools import partial
from typing import NamedTuple, TypeVar

MAX_INTERIM_ANSWERS = 16
"""Answers of the kind ``100 Continue`` before the answer itself."""
MAX_LINES_BYTES = 64 << 10
"""Bytes of a head. The lines between the chunks of a body may take 8 more for each of the body's bytes."""
MIN_BYTES_PER_S = 1024
"""A slower transfer is a broken one: a shard of 64 MiB would take 18 hours. curl's manual suggests 1000."""
STOP_CHECK_S = 0.1

_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) ([1-5][0-9][0-9])(?: ([^\r\n\0]*))?")
_FIELD = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):([^\r\n\0]*)")
_FOLD = re.compile(rb"\r\n[ \t]+")
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[^\r\n\0]*)?")
_LONE_LINE_FEED = re.compile(rb"(?<!\r)\n")
_MAX_DIGITS = 18  # sizes of objects are 64-bit integers
_BLOCK_BYTES = 16 << 10

Result = TypeVar("Result")
Stopped = Callable[[], bool]
"""Returns whether the thread must stop. A waiting thread calls it at least every 100 ms."""


class ProtocolError(Exception):
    """The server's answer is not valid HTTP/1.1, or exceeds a limit."""


class TooSlowError(TimeoutError):
    """Bytes come, but too few."""


class StoppedError(Exception):
    """The thread was told to stop while it waited for a server."""


class Headers:
    """The fields of a head by name, whatever the case of their letters. The values of a repeated field are joined."""

    def __init__(self, values: dict[str, str]) -> None:
        self._values = values  # names in small letters

    def get(self, name: str, default: str = "") -> str:
        return self._values.get(name.lower(), default)

    def items(self) -> ItemsView[str, str]:
        return self._values.items()


class Head(NamedTuple):
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


def parse_head(head: bytes) -> Head:
    """Read a head, without the empty line at its end; `ProtocolError` if it is not valid."""
    first, _, lines = head.partition(b"\r\n")
    if not (status_line := _STATUS_LINE.fullmatch(first)):
        raise ProtocolError("the server does not speak HTTP/1.1")
    values: dict[str, str] = {}
    for line in _FOLD.sub(b" ", lines).split(b"\r\n") if lines else ():
        if not (field := _FIELD.fullmatch(line)):
            raise ProtocolError("the head of its answer holds a line that is not a field")
        name, value = field[1].decode("latin-1").lower(), field[2].decode("latin-1").strip(" \t")
        values[name] = f"{values[name]}, {value}" if name in values else value
    is_1_1 = status_line[1] == b"1"
    length, coding = values.get("content-length"), values.get("transfer-encoding")
    if coding is not None and (coding.lower() != "chunked" or not is_1_1):
        raise ProtocolError("its answer has a Transfer-Encoding other than 'chunked'")
    if coding is not None and length is not None:
        raise ProtocolError("its answer has both a Content-Length and a Transfer-Encoding")
    if length is not None and decimal(length) is None:
        raise ProtocolError("the Content-Length of its answer is not one number")
    options = [option.strip() for option in values.get("connection", "").lower().split(",")]
    return Head(
        status=int(status_line[2]),
        reason=(status_line[3] or b"").decode("latin-1").strip(),
        headers=Headers(values),
        length=None if length is None else decimal(length),
        is_chunked=coding is not None,
        is_last="close" in options or (not is_1_1 and "keep-alive" not in options),
    )


def decimal(text: str) -> int | None:
    """Read a plain number of at most 18 digits; ``None`` for any other text.

    >>> [decimal(text) for text in ("20480", "-1", "+1", "1_0", "9" * 10_000)]
    [20480, None, None, None, None]
    """
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS else None


class HttpConnection:
    """One connection; owns its socket. After an error, or in the middle of an answer, it cannot be used again.

    It serves requests for its ``origin``, ``http://host:port``; ``address`` is that, or a proxy's host and port.
    """

    def __init__(
        self, address: tuple[str, int], *, origin: str, connect_timeout_s: float, silence_s: float, stopped: Stopped
    ) -> None:
        self.origin = origin
        self.silence_s = silence_s
        """So long without a byte is a `TimeoutError`; so is an answer that comes too slowly for that time."""
        self.stopped = stopped
        self.is_idle = True
        """Whether the last answer was read to its end, so that another request may follow."""
        self.was_used = False
        self.is_last = False
        """Whether no other request may follow, whatever the answer says: the server may still wait for a body."""
        self.process = os.getpid()
        """The process that made it. A forked child that reads from it takes bytes that its parent waits for."""
        self._rest = memoryview(b"")
        """Bytes that came with a head, and are not read yet."""
        self._num_paced = 0
        """Bytes that came since the pace was last looked at, with the seconds of waiting for them."""
        self._paced_s = self._waited_s = 0.0
        self._connect(address, connect_timeout_s)

    def _connect(self, address: tuple[str, int], timeout_s: float) -> None:
        """Connect to the first of a host's addresses that answers within ``timeout_s``."""
        try:
            found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
        except UnicodeError:  # "a..b"
            raise socket.gaierror(socket.EAI_NONAME, "not the name of a host") from None
        failure = OSError("no address")
        for family, kind, protocol, _, place in found:
            with contextlib.ExitStack() as cleanup:
                try:
                    self._sock = cleanup.enter_context(socket.socket(family, kind, protocol))
                    self._sock.setblocking(False)
                    self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    # The first call starts to connect, the second call returns the result.
                    connect = partial(self._sock.connect, place)
                    self._patiently(connect, select.POLLOUT, until=time.monotonic() + timeout_s)
                except TimeoutError:
                    failure = TimeoutError(f"no connection within {timeout_s:g} s")
                except OSError as exc:
                    failure = exc
                else:
                    cleanup.pop_all()
                    return
        raise failure

    def close(self) -> None:
        """Can be called twice."""
        self._sock.close()

    def encrypt(self, context: ssl.SSLContext, host: str) -> None:
        """Do the TLS handshake, within ``silence_s``; everything after it is encrypted."""
        if self._rest:
            raise ProtocolError("bytes came before the TLS connection was made")
        secure = context.wrap_socket(self._sock, server_hostname=host, do_handshake_on_connect=False)
        self._sock = secure
        try:
            self._patiently(secure.do_handshake, select.POLLIN, until=time.monotonic() + self.silence_s)
        except TimeoutError:
            raise TimeoutError(f"no TLS connection within {self.silence_s:g} s") from None

    @property
    def is_stale(self) -> bool:
        """Whether the server has closed it, or sent bytes without a request."""
        poller = select.poll()
        poller.register(self._sock.fileno(), select.POLLIN)
        return self.has_rest or bool(poller.poll(0))

    @property
    def has_rest(self) -> bool:
        """Whether bytes were received that nobody has read."""
        return bool(self._rest) or (isinstance(self._sock, ssl.SSLSocket) and self._sock.pending() > 0)

    def send(self, data: bytes | memoryview) -> None:
        """Send all of these bytes."""
        self.is_idle = False
        view = memoryview(data)
        while view:
            view = view[self._patiently(partial(self._sock.send, view), select.POLLOUT) :]

    def read_head(self) -> Head:
        """Read the head of the answer, after the interim answers."""
        self._num_paced, self._paced_s = 0, 0.0
        for _ in range(MAX_INTERIM_ANSWERS + 1):
            head = parse_head(self.receive_until(b"\r\n\r\n", max_bytes=MAX_LINES_BYTES))
            self.was_used = True
            if head.status >= 200:
                self._num_paced, self._paced_s = 0, 0.0
                return head
            if head.status == http.HTTPStatus.SWITCHING_PROTOCOLS:
                raise ProtocolError("it switches to a protocol that was not asked for")
        raise ProtocolError(f"more than {MAX_INTERIM_ANSWERS} interim answers came in place of an answer")

    def receive(self, into: memoryview) -> int:
        """Receive bytes and return their number, at least one; 0 at the end of the connection."""
        if self._rest:
            num = min(len(self._rest), len(into))
            into[:num] = self._rest[:num]
            self._rest = self._rest[num:]
            return num
        sock = self._sock
        num = self._patiently(partial(sock.recv_into, into), select.POLLIN)
        # An encrypted record holds at most 16 KiB, so more may be there. An error comes again with the next call.
        with contextlib.suppress(OSError):
            while isinstance(sock, ssl.SSLSocket) and 0 < num < len(into) and (more := sock.recv_into(into[num:])):
                num += more
        self._check_pace(num)
        return num

    def receive_until(self, end: bytes, *, max_bytes: int) -> bytes:
        """Read the bytes before ``end``, at most ``max_bytes``, and skip it."""
        found = bytearray(self._rest)
        self._rest = memoryview(b"")
        block = memoryview(bytearray(_BLOCK_BYTES))
        num_searched = 0
        while (stop := found.find(end, max(0, num_searched - len(end)))) < 0 and len(found) <= max_bytes:
            _check_lines(found, num_searched)
            num_searched = len(found)
            if not (num := self.receive(block)):
                raise ConnectionResetError("the connection was closed in place of an answer")
            found += block[:num]
        if not 0 <= stop <= max_bytes:
            raise ProtocolError(f"more than {max_bytes} bytes of lines come before or between the bytes of its body")
        _check_lines(found[:stop], num_searched)
        self._rest = memoryview(bytes(found[stop + len(end) :]))
        return bytes(found[:stop])

    def _check_pace(self, num_bytes: int) -> None:
        """Refuse an answer that has become too slow, as curl does with ``--speed-limit`` and ``--speed-time``.

        Only the time counts in which we wait for the server; and not before the first byte, which a server may have to
        fetch from elsewhere: silence has a limit of its own.
        """
        if self._num_paced:
            self._paced_s += self._waited_s
        self._num_paced, self._waited_s = self._num_paced + num_bytes, 0.0
        if self._paced_s < self.silence_s:
            return
        if self._num_paced < MIN_BYTES_PER_S * self._paced_s:
            raise TooSlowError(
                f"only {self._num_paced} bytes in {self._paced_s:.1f} s, less than {MIN_BYTES_PER_S} bytes/s"
            )
        self._num_paced, self._paced_s = 0, 0.0

    def _patiently(self, act: Callable[[], Result], events: int, *, until: float | None = None) -> Result:
        """Call ``act`` again whenever the socket is ready, until it has done something."""
        while True:
            wanted = events
            try:
                return act()
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError) as exc:
                if isinstance(exc, ssl.SSLError):
                    wanted = select.POLLIN if isinstance(exc, ssl.SSLWantReadError) else select.POLLOUT
            poller = select.poll()
            poller.register(self._sock.fileno(), wanted)
            started = time.monotonic()
            last = started + self.silence_s if until is None else until
            while True:
                if self.stopped():
                    raise StoppedError
                remaining_s = last - time.monotonic()
                if poller.poll(max(0.0, min(remaining_s, STOP_CHECK_S)) * 1000):
                    break
                if remaining_s <= 0:
                    raise TimeoutError(f"no byte for {self.silence_s:g} s")
            self._waited_s += time.monotonic() - started


def _check_lines(lines: bytearray, start: int) -> None:
    if _LONE_LINE_FEED.search(lines, start):
        raise ProtocolError("a line of its answer ends without a carriage return")


class Answer:
    """The head of an answer, and its body, which can be read once.

    The body ends after its length, with its last chunk, or, if the head names neither, with the connection. It is an
    error if the connection ends earlier. ``give_back`` takes the connection when the answer is closed.
    """

    def __init__(
        self,
        connection: HttpConnection,
        head: Head,
        *,
        url: str,
        has_body: bool,
        give_back: Callable[[HttpConnection], None],
    ) -> None:
        self.url = url
        self.status, self.reason, self.headers, self.length = head.status, head.reason, head.headers, head.length
        self._connection: HttpConnection | None = connection
        self._is_last, self._give_back = head.is_last, give_back
        has_body = has_body and head.status not in (204, 304)
        self._is_chunked = head.is_chunked and has_body
        self._remaining = 0 if head.is_chunked or not has_body else head.length
        """Bytes of the body, or of this chunk, that are still to come; ``None``: all until the connection ends."""
        self._num_bytes = 0
        self._num_line_bytes = 0
        self._check_end()

    def close(self) -> None:
        """Give the connection back; one in the middle of the body is closed. Can be called twice."""
        connection, self._connection = self._connection, None
        if connection is not None:
            self._give_back(connection)

    @property
    def is_inherited(self) -> bool:
        """Whether it came in a parent of this process, from which this one was forked."""
        return self._connection is not None and self._connection.process != os.getpid()

    @property
    def is_complete(self) -> bool:
        """Whether the body is known to be at its end."""
        return self._remaining == 0 and not self._is_chunked

    def receive(self, into: memoryview) -> int:
        """Receive bytes of the body and return their number; 0 at its end."""
        if self._is_chunked and not self._remaining:
            self._begin_chunk()
        if self._remaining == 0:
            return 0
        assert self._connection is not None, "the answer is closed"
        num = self._connection.receive(into if self._remaining is None else into[: self._remaining])
        self._num_bytes += num
        if self._remaining is not None:
            if not num:
                raise ConnectionResetError(f"the connection was closed after {self._num_bytes} bytes of the body")
            self._remaining -= num
        self._check_end()
        return num

    def read_short(self, max_bytes: int) -> bytes:
        """Read a short body, or the beginning of a long one, after which the connection cannot be used."""
        found = bytearray()
        block = memoryview(bytearray(_BLOCK_BYTES))
        while len(found) <= max_bytes and (num := self.receive(block)):
            found += block[:num]
        return bytes(found)

    def _check_end(self) -> None:
        connection = self._connection
        if self.is_complete and connection is not None:
            # Nobody asked for bytes behind the body; they would be taken for the next answer.
            connection.is_idle = not (self._is_last or connection.is_last or connection.has_rest)

    def _begin_chunk(self) -> None:
        """Read the line with the size of the next chunk; of the last one, which is empty, the trailers, too."""
        if self._num_bytes and self._next_line():
            raise ProtocolError("a chunk of the body is longer than its size")
        if not (found := _CHUNK.fullmatch(self._next_line())):
            raise ProtocolError("a chunk of the body has no size")
        self._remaining = int(found[1], 16)
        if self._remaining == 0:
            while self._next_line():
                pass
            self._is_chunked = False
            self._check_end()

    def _next_line(self) -> bytes:
        assert self._connection is not None, "the answer is closed"
        max_bytes = MAX_LINES_BYTES + 8 * self._num_bytes - self._num_line_bytes
        line = self._connection.receive_until(b"\r\n", max_bytes=max_bytes)
        self._num_line_bytes += len(line) + 2
        return line
