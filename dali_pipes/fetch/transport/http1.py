"""A client for HTTP/1.1 GETs whose sockets never block, so that one thread can drive many connections.

Shards are large, and the CPU time for each byte on its way to the cache file limits the speed. The existing HTTP
clients (`requests`, `http.client`, libcurl) copy each byte through a buffer of the process, and occupy one thread for
each connection, or call back every 16 KiB. This one moves a body from its socket to a file inside the kernel, with
``splice``. Note [no libcurl] has the measurements.

It can do what reading an object needs: a request, whose body is short, the head of the answer, a body that ends by its
length, by chunks or with the connection, TLS by `ssl`, and connections that stay open. It leaves out long
requests, compressed bodies, pipelining, cookies and HTTP/2. Redirects, tokens and proxies are in
`dali_pipes.fetch.transport.connection_pool` and `dali_pipes.fetch.objects`.

A server that lies or is broken costs a bounded time and little memory. `dali_pipes.fetch.transport.http_head` refuses
heads and chunks that are not valid; the lines of an answer, its interim answers and its slowness have limits, see
`dali_pipes.store.cluster.transport.http_limits`. Bytes that no request asked for end the connection.

Every function that has to wait is a task, a generator, of `dali_pipes.fetch.transport.event_loop`.

# Note [no libcurl]: libcurl's callbacks get 16 KiB at a time, copied into an object, and every byte crosses into this
# process and back into the page cache. With ``splice`` only the hash reads the bytes. CPU seconds per GiB, for 64 MiB
# objects into reserved tmpfs, XXH64 included, with 1 / 4 / 8 connections and cores shared with the server: libcurl with
# a 512 KiB buffer 0.76 / 1.10 / 1.22, with 4 MiB 0.64 / 0.75 / 0.84; ``recv_into`` and ``pwrite`` 0.55 / 0.66 / 0.76;
# this client 0.46 / 0.72 / 0.70.
"""

import contextlib
import fcntl
import http
import os
import select
import socket
import ssl
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from dali_pipes.fetch.transport.event_loop import Task, Wait
from dali_pipes.fetch.transport.http_head import Answer, chunk_size, has_lone_line_feed, parse_head
from dali_pipes.store.cluster.transport.http_limits import (
    MAX_ERROR_BYTES,
    MAX_INTERIM_ANSWERS,
    MAX_LINES_BYTES,
    Pace,
    ProtocolError,
    max_lines_bytes,
)

PIPE_BYTES = 1 << 20  # the most that a process without privileges may ask for

Result = TypeVar("Result")


class Pipe:
    """A pipe for spliced bytes, empty between calls."""

    def __init__(self) -> None:
        self.source, self.sink = os.pipe2(os.O_CLOEXEC)
        # It stays at 64 KiB beyond the user's limit for all pipes together.
        with contextlib.suppress(OSError):
            fcntl.fcntl(self.sink, fcntl.F_SETPIPE_SZ, PIPE_BYTES)

    def close(self) -> None:
        """Close both ends; call it once."""
        os.close(self.source)
        os.close(self.sink)


def dial(host: str, port: int, *, timeout_s: float) -> Task[socket.socket]:
    """Connect to the first of the host's addresses that answers within ``timeout_s``."""
    failed: OSError | None = None
    for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with contextlib.suppress(BlockingIOError):
                sock.connect(address)
            yield Wait(sock.fileno(), select.POLLOUT, time.monotonic() + timeout_s)
            if error := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                raise OSError(error, os.strerror(error))
        except TimeoutError:
            sock.close()
            failed = TimeoutError(f"no connection within {timeout_s:g} s")
        except OSError as exc:
            sock.close()
            failed = exc
        except BaseException:
            sock.close()
            raise
        else:
            return sock
    assert failed is not None, "getaddrinfo raises if it finds no address"
    raise failed


class HttpConnection:
    """One connection; owns its socket. After an error, or in the middle of an answer, it cannot be used again.

    It serves requests for its ``origin``, ``http://host:port``. ``silence_s`` without a byte is a `TimeoutError`; so is
    an answer that comes too slowly for that time, see `Pace`.
    """

    def __init__(self, sock: socket.socket, *, origin: str, silence_s: float) -> None:
        self._sock, self._silence_s = sock, silence_s
        self._pace = Pace(silence_s)
        self._waited_s = 0.0
        """Seconds that were waited since the last bytes came."""
        self.origin = origin
        self._rest = memoryview(b"")
        """Bytes that came with a head, and are not read yet."""
        self.num_answers = 0
        self.is_idle = True
        """Whether the last answer was read to its end, so that another request may follow."""

    def close(self) -> None:
        """Can be called twice."""
        self._sock.close()

    def encrypt(self, context: ssl.SSLContext, host: str) -> Task[None]:
        """Do the TLS handshake, within ``silence_s``; everything after it is encrypted."""
        if self._rest:
            raise ProtocolError("bytes came before the TLS connection was made")
        secure = context.wrap_socket(self._sock, server_hostname=host, do_handshake_on_connect=False)
        self._sock = secure
        until = time.monotonic() + self._silence_s
        try:
            yield from self._patiently(secure.do_handshake, events=select.POLLIN, until=until)
        except TimeoutError:
            raise TimeoutError(f"no TLS connection within {self._silence_s:g} s") from None

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

    def ask(self, request: bytes) -> Task[Answer]:
        """Send a request, and return the head of the answer."""
        self.is_idle = False
        view = memoryview(request)
        while view:
            sent = yield from self._patiently(partial(self._sock.send, view), events=select.POLLOUT)
            view = view[sent:]
        self._pace.restart()
        for _ in range(MAX_INTERIM_ANSWERS + 1):
            answer = parse_head((yield from self.receive_until(b"\r\n\r\n", max_bytes=MAX_LINES_BYTES)))
            self.num_answers += 1
            if answer.status >= 200:
                self._pace.restart()
                return answer
            if answer.status == http.HTTPStatus.SWITCHING_PROTOCOLS:
                raise ProtocolError("it switches to a protocol that was not asked for")
        raise ProtocolError(f"more than {MAX_INTERIM_ANSWERS} interim answers came in place of an answer")

    def receive(self, into: memoryview) -> Task[int]:
        """Receive bytes and return their number, at least one; 0 at the end of the connection."""
        if self._rest:
            num = min(len(self._rest), len(into))
            into[:num] = self._rest[:num]
            self._rest = self._rest[num:]
            return num
        sock = self._sock
        num = yield from self._patiently(partial(sock.recv_into, into), events=select.POLLIN)
        # An encrypted record holds at most 16 KiB, so more may be there. An error comes again with the next call.
        with contextlib.suppress(OSError):
            while isinstance(sock, ssl.SSLSocket) and 0 < num < len(into) and (more := sock.recv_into(into[num:])):
                num += more
        return self._counted(num)

    @property
    def can_splice(self) -> bool:
        """Whether `splice` can take the next bytes: they were not received already, and do not come over TLS."""
        return not self._rest and not isinstance(self._sock, ssl.SSLSocket)

    def splice(self, pipe: Pipe, limit: int) -> Task[int]:
        """Move bytes into an empty pipe: their number, at least one, or 0 at the end of the connection."""
        file = self._sock.fileno()
        return self._counted(
            (yield from self._patiently(partial(os.splice, file, pipe.sink, limit), events=select.POLLIN))
        )

    def receive_until(self, end: bytes, *, max_bytes: int) -> Task[bytes]:
        """Read the bytes before ``end``, at most ``max_bytes``, and skip it."""
        found = bytearray(self._rest)
        self._rest = memoryview(b"")
        block = memoryview(bytearray(16 << 10))
        num_searched = 0
        while (stop := found.find(end, max(0, num_searched - len(end)))) < 0:
            _check_lines(found, num_searched)
            num_searched = len(found)
            if num_searched > max_bytes:
                break
            num = yield from self.receive(block)
            if not num:
                raise ConnectionResetError("the connection was closed in place of an answer")
            found += block[:num]
        if not 0 <= stop <= max_bytes:
            raise ProtocolError(f"more than {max_bytes} bytes of lines come before or between the bytes of its body")
        _check_lines(found[:stop], num_searched)
        self._rest = memoryview(bytes(found[stop + len(end) :]))
        return bytes(found[:stop])

    def _counted(self, num: int) -> int:
        self._pace.count(num, waited_s=self._waited_s)
        self._waited_s = 0.0
        return num

    def _patiently(self, act: Callable[[], Result], *, events: int, until: float | None = None) -> Task[Result]:
        while True:
            wanted = events
            try:
                return act()
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError) as exc:
                if isinstance(exc, ssl.SSLError):
                    wanted = select.POLLIN if isinstance(exc, ssl.SSLWantReadError) else select.POLLOUT
            started = time.monotonic()
            try:
                yield Wait(self._sock.fileno(), wanted, started + self._silence_s if until is None else until)
            except TimeoutError:
                raise TimeoutError(f"no byte for {self._silence_s:g} s") from None
            self._waited_s += time.monotonic() - started


def _check_lines(lines: bytearray, start: int) -> None:
    if has_lone_line_feed(lines, start):
        raise ProtocolError("a line of its answer ends without a carriage return")


class AnswerBody:
    """The body that follows a head; can be read once.

    It ends after its length, with its last chunk, or, if the head names neither, with the connection. It is an error if
    the connection ends earlier.
    """

    def __init__(self, connection: HttpConnection, answer: Answer) -> None:
        self._connection, self._answer = connection, answer
        self._left = answer.length
        """Bytes left of the body, or of this chunk; ``None``: all bytes until the connection ends."""
        self._is_chunked = answer.is_chunked
        if self._is_chunked or answer.status in (204, 304):
            self._left = 0
        self._num_bytes = 0
        self._num_line_bytes = 0
        """Bytes of the lines between chunks."""
        self._check_end()

    @property
    def is_complete(self) -> bool:
        return self._left == 0 and not self._is_chunked

    @property
    def can_splice(self) -> bool:
        return bool(self._left) and not self._is_chunked and self._connection.can_splice

    def splice(self, pipe: Pipe) -> Task[int]:
        """Move bytes into the empty pipe, and return their number, at least one; only if `can_splice`."""
        assert self._left is not None, "the body has a length, and is not in chunks"
        num = yield from self._connection.splice(pipe, min(self._left, PIPE_BYTES))
        self._count(num)
        return num

    def receive(self, into: memoryview) -> Task[int]:
        """Receive bytes and return their number; 0 at the end of the body."""
        if self._is_chunked and not self._left and not (yield from self._next_chunk()):
            return 0
        if self._left == 0:
            return 0
        num = yield from self._connection.receive(into if self._left is None else into[: self._left])
        if not num and self._left is None:
            return 0
        self._count(num)
        return num

    def read_short(self, max_bytes: int = MAX_ERROR_BYTES) -> Task[bytes]:
        """Read a short body, or the beginning of a long one, after which the connection cannot be used."""
        found = bytearray()
        block = memoryview(bytearray(16 << 10))
        while len(found) <= max_bytes and (num := (yield from self.receive(block))):
            found += block[:num]
        return bytes(found)

    def _count(self, num: int) -> None:
        if not num:
            raise ConnectionResetError(f"the connection was closed after {self._num_bytes} bytes of the body")
        self._num_bytes += num
        if self._left is not None:
            self._left -= num
        self._check_end()

    def _check_end(self) -> None:
        if self.is_complete:
            # Nobody asked for bytes behind the body; they would be taken for the next answer.
            self._connection.is_idle = not (self._answer.is_last or self._connection.has_rest)

    def _next_chunk(self) -> Task[bool]:
        # The end of the chunk before.
        if self._num_bytes and (yield from self._next_line()):
            raise ProtocolError("a chunk of the body is longer than its size")
        self._left = chunk_size((yield from self._next_line()))
        if self._left == 0:
            while (yield from self._next_line()):
                pass  # trailers
            self._is_chunked = False
            self._check_end()
        return bool(self._left)

    def _next_line(self) -> Task[bytes]:
        left = max_lines_bytes(self._num_bytes) - self._num_line_bytes
        line = yield from self._connection.receive_until(b"\r\n", max_bytes=left)
        self._num_line_bytes += len(line) + 2
        return line
