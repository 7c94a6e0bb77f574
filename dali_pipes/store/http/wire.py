"""HTTP/1.1 over sockets: a request, the head of its answer, and the body, each within limits.

A server that lies or is broken costs a bounded time and little memory. The lines of an answer, its interim answers, its
silence and its slowness have limits. What RFC 9112 leaves in doubt is refused: two readers that disagree on the end of
a body take a part of it for the next answer. So an answer with two lengths, or with a length and chunks, or with a size
that is not a plain number, is broken. Bytes that no request asked for end the connection.

Left out: compressed bodies, pipelining, cookies and HTTP/2.

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
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple, TypeVar

MAX_INTERIM_ANSWERS = 16
"""Answers of the kind ``100 Continue`` before the answer itself."""
MAX_LINES_BYTES = 64 << 10
"""Bytes of a head, or of the lines between the chunks of a body, see `max_lines_bytes`."""
MIN_BYTES_PER_S = 1024
"""A slower transfer is a broken one: a shard of 64 MiB would take 18 hours. curl's manual suggests 1000."""
MAX_DIGITS = 18
"""A length with more digits is refused: sizes of objects are 64-bit integers."""
STOP_CHECK_S = 0.1

_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) ([1-5][0-9][0-9])(?: ([^\r\n\0]*))?")
_FIELD = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\r\n\0]*)")
_FOLD = re.compile(rb"\r\n[ \t]+")
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[^\r\n\0]*)?")
_LONE_LINE_FEED = re.compile(rb"(?<!\r)\n")
_BLOCK_BYTES = 16 << 10

Result = TypeVar("Result")
Stopped = Callable[[], bool]
"""Whether a thread is to stop. It is called at least every 100 ms of a wait."""


class ProtocolError(Exception):
    """The server's answer is not valid HTTP/1.1, or exceeds a limit."""


class TooSlowError(TimeoutError):
    """Bytes come, but too few."""


class StoppedError(Exception):
    """The thread was told to stop while it waited for a server."""


def never() -> bool:
    """The `Stopped` of a thread that goes on."""
    return False


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

    def items(self) -> Iterable[tuple[str, str]]:
        """Names, in small letters, and values."""
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
    fields = []
    for line in _FOLD.sub(b" ", lines).split(b"\r\n") if lines else ():
        if not (field := _FIELD.fullmatch(line)):
            raise ProtocolError("the head of its answer holds a line that is not a field")
        fields.append((field[1].decode("latin-1"), field[2].decode("latin-1").rstrip(" \t")))
    headers, is_1_1 = Headers(fields), status_line[1] == b"1"
    length, coding = headers.find("Content-Length"), headers.find("Transfer-Encoding")
    if coding is not None and (coding.lower() != "chunked" or not is_1_1):
        raise ProtocolError("its answer has a Transfer-Encoding other than 'chunked'")
    if coding is not None and length is not None:
        raise ProtocolError("its answer has both a Content-Length and a Transfer-Encoding")
    if length is not None and decimal(length) is None:
        raise ProtocolError("the Content-Length of its answer is not one number")
    options = [option.strip() for option in headers.get("Connection").lower().split(",")]
    is_last = "close" in options or (not is_1_1 and "keep-alive" not in options)
    reason = (status_line[3] or b"").decode("latin-1").strip()
    return Head(
        int(status_line[2]), reason, headers, None if length is None else decimal(length), coding is not None, is_last
    )


def decimal(text: str) -> int | None:
    """Read a plain number of at most `MAX_DIGITS` digits; ``None`` for any other text.

    >>> [decimal(text) for text in ("20480", "-1", "+1", "1_0", "9" * 10_000)]
    [20480, None, None, None, None]
    """
    return int(text) if text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS else None


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

    def __init__(self) -> None:
        self._num_bytes, self._waited_s = 0, 0.0

    def restart(self) -> None:
        """Forget the bytes and seconds until now."""
        self._num_bytes, self._waited_s = 0, 0.0

    def count(self, num_bytes: int, *, waited_s: float, window_s: float) -> None:
        """Count bytes that came after a wait; `TooSlowError` if the answer is too slow."""
        if self._num_bytes:
            self._waited_s += waited_s
        self._num_bytes += num_bytes
        if self._waited_s < window_s:
            return
        if self._num_bytes < MIN_BYTES_PER_S * self._waited_s:
            raise TooSlowError(
                f"only {self._num_bytes} bytes in {self._waited_s:.1f} s, less than {MIN_BYTES_PER_S} bytes/s"
            )
        self.restart()


def _wait(file: int, events: int, *, until: float, stopped: Stopped) -> None:
    """Wait for an event of a descriptor; a `TimeoutError` at the time ``until``."""
    poller = select.poll()
    poller.register(file, events)
    while True:
        if stopped():
            raise StoppedError
        remaining_s = until - time.monotonic()
        if poller.poll(max(0.0, min(remaining_s, STOP_CHECK_S)) * 1000):
            return
        if remaining_s <= 0:
            raise TimeoutError


def dial(host: str, port: int, *, timeout_s: float, stopped: Stopped = never) -> socket.socket:
    """Connect to the first of the host's addresses that answers within ``timeout_s``."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError:  # "a..b"
        raise socket.gaierror(socket.EAI_NONAME, "not the name of a host") from None
    failure: OSError | None = None
    for family, kind, protocol, _, address in found:
        with contextlib.ExitStack() as cleanup:
            sock = cleanup.enter_context(socket.socket(family, kind, protocol))
            try:
                sock.setblocking(False)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                with contextlib.suppress(BlockingIOError):
                    sock.connect(address)
                _wait(sock.fileno(), select.POLLOUT, until=time.monotonic() + timeout_s, stopped=stopped)
                if error := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    raise OSError(error, os.strerror(error))
            except TimeoutError:
                failure = TimeoutError(f"no connection within {timeout_s:g} s")
            except OSError as exc:
                failure = exc
            else:
                cleanup.pop_all()
                return sock
    assert failure is not None, "getaddrinfo raises if it finds no address"
    raise failure


class HttpConnection:
    """One connection; owns its socket. After an error, or in the middle of an answer, it cannot be used again.

    It serves requests for its ``origin``, ``http://host:port``.
    """

    def __init__(self, sock: socket.socket, *, origin: str, silence_s: float, stopped: Stopped) -> None:
        self.origin = origin
        self.silence_s = silence_s
        """So long without a byte is a `TimeoutError`; so is an answer that comes too slowly for that time: `Pace`."""
        self.stopped = stopped
        self.is_idle = True
        """Whether the last answer was read to its end, so that another request may follow."""
        self.was_used = False
        self.is_last = False
        """Whether no other request may follow, whatever the answer says: the server may still wait for a body."""
        self.process = os.getpid()
        """The process that made it. A forked child that reads from it takes bytes that its parent waits for."""
        self._sock = sock
        self._pace = Pace()
        self._waited_s = 0.0
        """Seconds that were waited since the last bytes came."""
        self._rest = memoryview(b"")
        """Bytes that came with a head, and are not read yet."""

    def close(self) -> None:
        """Can be called twice."""
        self._sock.close()

    def encrypt(self, context: ssl.SSLContext, host: str) -> None:
        """Do the TLS handshake, within ``silence_s``; everything after it is encrypted."""
        if self._rest:
            raise ProtocolError("bytes came before the TLS connection was made")
        secure = context.wrap_socket(self._sock, server_hostname=host, do_handshake_on_connect=False)
        self._sock = secure
        until = time.monotonic() + self.silence_s
        try:
            self._patiently(secure.do_handshake, events=select.POLLIN, until=until)
        except TimeoutError:
            raise TimeoutError(f"no TLS connection within {self.silence_s:g} s") from None

    @property
    def is_stale(self) -> bool:
        """Whether the server has closed it, or sent bytes without a request."""
        if self.has_rest:
            return True
        poller = select.poll()
        poller.register(self._sock.fileno(), select.POLLIN)
        return bool(poller.poll(0))

    @property
    def has_rest(self) -> bool:
        """Whether bytes were received that nobody has read."""
        return bool(self._rest) or (isinstance(self._sock, ssl.SSLSocket) and self._sock.pending() > 0)

    def send(self, data: bytes | memoryview) -> None:
        """Send all of these bytes."""
        self.is_idle = False
        view = memoryview(data)
        while view:
            view = view[self._patiently(partial(self._sock.send, view), events=select.POLLOUT) :]

    def read_head(self) -> Head:
        """Read the head of the answer, after the interim answers."""
        self._pace.restart()
        for _ in range(MAX_INTERIM_ANSWERS + 1):
            head = parse_head(self.receive_until(b"\r\n\r\n", max_bytes=MAX_LINES_BYTES))
            self.was_used = True
            if head.status >= 200:
                self._pace.restart()
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
        num = self._patiently(partial(sock.recv_into, into), events=select.POLLIN)
        # An encrypted record holds at most 16 KiB, so more may be there. An error comes again with the next call.
        with contextlib.suppress(OSError):
            while isinstance(sock, ssl.SSLSocket) and 0 < num < len(into) and (more := sock.recv_into(into[num:])):
                num += more
        self._pace.count(num, waited_s=self._waited_s, window_s=self.silence_s)
        self._waited_s = 0.0
        return num

    def receive_until(self, end: bytes, *, max_bytes: int) -> bytes:
        """Read the bytes before ``end``, at most ``max_bytes``, and skip it."""
        found = bytearray(self._rest)
        self._rest = memoryview(b"")
        block = memoryview(bytearray(_BLOCK_BYTES))
        num_searched = 0
        while (stop := found.find(end, max(0, num_searched - len(end)))) < 0:
            _check_lines(found, num_searched)
            num_searched = len(found)
            if num_searched > max_bytes:
                break
            num = self.receive(block)
            if not num:
                raise ConnectionResetError("the connection was closed in place of an answer")
            found += block[:num]
        if not 0 <= stop <= max_bytes:
            raise ProtocolError(f"more than {max_bytes} bytes of lines come before or between the bytes of its body")
        _check_lines(found[:stop], num_searched)
        self._rest = memoryview(bytes(found[stop + len(end) :]))
        return bytes(found[:stop])

    def _patiently(self, act: Callable[[], Result], *, events: int, until: float | None = None) -> Result:
        while True:
            wanted = events
            try:
                return act()
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError) as exc:
                if isinstance(exc, ssl.SSLError):
                    wanted = select.POLLIN if isinstance(exc, ssl.SSLWantReadError) else select.POLLOUT
            started = time.monotonic()
            last = started + self.silence_s if until is None else until
            try:
                _wait(self._sock.fileno(), wanted, until=last, stopped=self.stopped)
            except TimeoutError:
                raise TimeoutError(f"no byte for {self.silence_s:g} s") from None
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
        self._head, self._give_back = head, give_back
        self._remaining = head.length
        """Bytes of the body, or of this chunk, that are still to come; ``None``: all until the connection ends."""
        has_body = has_body and head.status not in (204, 304)
        self._is_chunked = head.is_chunked and has_body
        if head.is_chunked or not has_body:
            self._remaining = 0
        self._num_bytes = 0
        self._num_line_bytes = 0
        """Bytes of the lines between chunks."""
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
        if self._is_chunked and not self._remaining and not self._next_chunk():
            return 0
        if self._remaining == 0:
            return 0
        assert self._connection is not None, "the answer is closed"
        num = self._connection.receive(into if self._remaining is None else into[: self._remaining])
        if not num:
            if self._remaining is None:
                return 0
            raise ConnectionResetError(f"the connection was closed after {self._num_bytes} bytes of the body")
        self._num_bytes += num
        if self._remaining is not None:
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
        if self.is_complete and self._connection is not None:
            # Nobody asked for bytes behind the body; they would be taken for the next answer.
            connection = self._connection
            connection.is_idle = not (self._head.is_last or connection.is_last or connection.has_rest)

    def _next_chunk(self) -> bool:
        # The end of the chunk before.
        if self._num_bytes and self._next_line():
            raise ProtocolError("a chunk of the body is longer than its size")
        if not (found := _CHUNK.fullmatch(self._next_line())):
            raise ProtocolError("a chunk of the body has no size")
        self._remaining = int(found[1], 16)
        if self._remaining == 0:
            while self._next_line():
                pass  # trailers
            self._is_chunked = False
            self._check_end()
        return bool(self._remaining)

    def _next_line(self) -> bytes:
        assert self._connection is not None, "the answer is closed"
        max_bytes = max_lines_bytes(self._num_bytes) - self._num_line_bytes
        line = self._connection.receive_until(b"\r\n", max_bytes=max_bytes)
        self._num_line_bytes += len(line) + 2
        return line
