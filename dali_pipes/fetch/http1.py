"""A client for HTTP/1.1 GETs whose sockets never block, so that one thread can drive many connections.

Shards are large, and the CPU time for each byte on its way to the cache file limits the speed. The existing HTTP
clients (`requests`, `http.client`, libcurl) copy each byte through a buffer of the process, and occupy one thread for
each connection, or call back every 16 KiB. This one moves a body from its socket to a file inside the kernel, with
``splice``. Note [no libcurl] has the measurements.

It can do what reading an object needs: a request without a body, the head of the answer, a body that ends by its
length, by chunks or with the connection, TLS by `ssl`, and connections that stay open. It leaves out requests with a
body, compressed bodies, pipelining, cookies and HTTP/2. Redirects, tokens and proxies are in
`dali_pipes.fetch.connection_pool` and `dali_pipes.fetch.objects`.

Every function that has to wait is a task, a generator, of `dali_pipes.fetch.event_loop`.

# Note [no libcurl]: libcurl's callbacks get 16 KiB at a time, copied into an object, and every byte crosses into this
# process and back into the page cache. With ``splice`` only the hash reads the bytes. CPU seconds per GiB, for 64 MiB
# objects into reserved tmpfs, XXH64 included, with 1 / 4 / 8 connections and cores shared with the server: libcurl with
# a 512 KiB buffer 0.76 / 1.10 / 1.22, with 4 MiB 0.64 / 0.75 / 0.84; ``recv_into`` and ``pwrite`` 0.55 / 0.66 / 0.76;
# this client 0.46 / 0.72 / 0.70.
"""

import contextlib
import fcntl
import http.client
import io
import os
import select
import socket
import ssl
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeVar

from dali_pipes.fetch.event_loop import Task, Wait

PIPE_BYTES = 1 << 20  # the most that a process without privileges may ask for
MAX_HEAD_BYTES = 64 << 10
# The most to read of an error's body, to quote it and to keep the connection.
MAX_ERROR_BYTES = 64 << 10

Result = TypeVar("Result")


class ProtocolError(Exception):
    """The server's answer is not HTTP/1.1, or ends early."""


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


class Answer(NamedTuple):
    """The head of an answer."""

    status: int
    reason: str
    headers: http.client.HTTPMessage
    is_1_1: bool

    @property
    def length(self) -> int | None:
        """Bytes of the body; ``None`` if the head does not state them."""
        text = self.headers.get("Content-Length", "")
        return int(text) if text.isascii() and text.isdigit() and not self.is_chunked else None

    @property
    def is_chunked(self) -> bool:
        """Whether the body comes in chunks, each with its size."""
        return self.headers.get("Transfer-Encoding", "").lower() == "chunked"

    @property
    def is_last(self) -> bool:
        """Whether the server closes the connection after it."""
        option = self.headers.get("Connection", "").lower()
        return option == "close" or (not self.is_1_1 and option != "keep-alive")


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

    It serves requests for its ``origin``, ``http://host:port``. ``silence_s`` without a byte is a `TimeoutError`.
    """

    def __init__(self, sock: socket.socket, *, origin: str, silence_s: float) -> None:
        self._sock, self._silence_s = sock, silence_s
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
        """Do the TLS handshake; everything after it is encrypted."""
        secure = context.wrap_socket(self._sock, server_hostname=host, do_handshake_on_connect=False)
        self._sock = secure
        yield from self._patiently(secure.do_handshake, events=select.POLLIN)

    @property
    def is_stale(self) -> bool:
        """Whether the server has closed it, or sent bytes without a request."""
        poller = select.poll()
        poller.register(self._sock.fileno(), select.POLLIN)
        return bool(poller.poll(0))

    def ask(self, request: bytes) -> Task[Answer]:
        """Send a request without a body, and return the head of the answer."""
        self.is_idle = False
        view = memoryview(request)
        while view:
            sent = yield from self._patiently(partial(self._sock.send, view), events=select.POLLOUT)
            view = view[sent:]
        while True:
            head = yield from self.receive_until(b"\r\n\r\n")
            answer = _parse_head(head)
            self.num_answers += 1
            if answer.status >= 200:
                return answer

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
        return num

    @property
    def can_splice(self) -> bool:
        """Whether `splice` can take the next bytes: they were not received already, and do not come over TLS."""
        return not self._rest and not isinstance(self._sock, ssl.SSLSocket)

    def splice(self, pipe: Pipe, limit: int) -> Task[int]:
        """Move bytes into an empty pipe: their number, at least one, or 0 at the end of the connection."""
        file = self._sock.fileno()
        return (yield from self._patiently(partial(os.splice, file, pipe.sink, limit), events=select.POLLIN))

    def receive_until(self, end: bytes) -> Task[bytes]:
        """Read the bytes before ``end``, and skip it."""
        found = bytearray(self._rest)
        self._rest = memoryview(b"")
        block = memoryview(bytearray(16 << 10))
        while (stop := found.find(end)) < 0:
            if len(found) > MAX_HEAD_BYTES:
                raise ProtocolError(f"the head of its answer is longer than {MAX_HEAD_BYTES} bytes")
            num = yield from self.receive(block)
            if not num:
                raise ConnectionResetError("the connection was closed in place of an answer")
            found += block[:num]
        self._rest = memoryview(bytes(found[stop + len(end) :]))
        return bytes(found[:stop])

    def _patiently(self, act: Callable[[], Result], *, events: int) -> Task[Result]:
        while True:
            wanted = events
            try:
                return act()
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError) as exc:
                if isinstance(exc, ssl.SSLError):
                    wanted = select.POLLIN if isinstance(exc, ssl.SSLWantReadError) else select.POLLOUT
            try:
                yield Wait(self._sock.fileno(), wanted, time.monotonic() + self._silence_s)
            except TimeoutError:
                raise TimeoutError(f"no byte for {self._silence_s:g} s") from None


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

    def read_error(self) -> Task[bytes]:
        """Read a short body, or the beginning of a long one, after which the connection cannot be used."""
        found = bytearray()
        block = memoryview(bytearray(16 << 10))
        while len(found) <= MAX_ERROR_BYTES and (num := (yield from self.receive(block))):
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
            self._connection.is_idle = not self._answer.is_last

    def _next_chunk(self) -> Task[bool]:
        if self._num_bytes:
            yield from self._connection.receive_until(b"\r\n")  # the end of the chunk before
        text = (yield from self._connection.receive_until(b"\r\n")).partition(b";")[0].strip()
        try:
            self._left = int(text, 16)
        except ValueError:
            raise ProtocolError("a chunk of the body has no size") from None
        if self._left == 0:
            while (yield from self._connection.receive_until(b"\r\n")):
                pass  # trailers
            self._is_chunked = False
            self._check_end()
        return bool(self._left)


def _parse_head(head: bytes) -> Answer:
    first, _, lines = head.partition(b"\r\n")
    version, _, rest = first.decode("latin-1").partition(" ")
    status, _, reason = rest.partition(" ")
    if version not in ("HTTP/1.0", "HTTP/1.1") or not (len(status) == 3 and status.isascii() and status.isdigit()):
        raise ProtocolError("the server does not speak HTTP/1.1")
    try:
        headers = http.client.parse_headers(io.BytesIO(lines + b"\r\n\r\n"))
    except http.client.HTTPException as exc:
        raise ProtocolError(f"the head of its answer cannot be read ({exc})") from exc
    return Answer(int(status), reason.strip(), headers, version == "HTTP/1.1")
