"""Speak HTTP/1.1 over sockets that never block: a request out, an answer's head and body in.

Whatever has to wait is a generator that yields what it waits for (``Steps``), and a `Loop` of the caller's drives one
or several of them in one thread. So one thread reads several ranges of an object, and can stop at any of these places.

# Note [no libcurl]: its callbacks get 16 KiB at a time, copied into an object, and every byte crosses into this process
# and back into the page cache. Here ``splice`` moves a plain connection's body to the file inside the kernel; only the
# hash reads it. CPU-s a GiB, 64 MiB objects into reserved tmpfs, XXH64 included, 1 / 4 / 8 connections, cores shared
# with the server: libcurl with a 512 KiB buffer 0.76 / 1.10 / 1.22, with 4 MiB 0.64 / 0.75 / 0.84; ``recv_into`` and
# ``pwrite`` 0.55 / 0.66 / 0.76; this 0.46 / 0.72 / 0.70.
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
from collections.abc import Callable, Generator
from functools import partial
from typing import Final, NamedTuple, TypeAlias, TypeVar

__all__ = ["NOW", "Answer", "Body", "HttpConnection", "Loop", "Pipe", "ProtocolError", "Steps", "Wait", "dial"]

PIPE_BYTES = 1 << 20  # what a process without privileges may ask for
# A head, and how much of a body that nobody wants is read for the connection's sake.
MAX_HEAD_BYTES = 64 << 10
MAX_ASIDE_BYTES = 64 << 10
STOP_CHECK_S = 0.1

Result = TypeVar("Result")


class Wait(NamedTuple):
    """What a generator waits for."""

    file: int | None
    """A descriptor; ``None`` for a time alone."""
    events: int
    """`select.POLLIN` and the like."""
    until: float
    """`time.monotonic()` at which `TimeoutError` is thrown in, or, without a descriptor, the generator goes on."""


NOW: Final = Wait(None, 0, 0.0)
"""Nothing: lets the others take a step."""

Steps: TypeAlias = Generator[Wait, None, Result]


class ProtocolError(Exception):
    """What came is no answer of HTTP/1.1, or ends early."""


class Loop:
    """Takes generators forward, each when what it waits for is there."""

    def __init__(self) -> None:
        self._waits: dict[Steps[None], Wait] = {}

    def start(self, steps: Steps[None]) -> None:
        """Take one up; also from inside another."""
        self._waits[steps] = NOW

    def run(self, stopped: Callable[[], bool]) -> bool:
        """Until all have ended: ``True``; or, asked at least every 100 ms, ``stopped`` says so: ``False``.

        Raises:
            Exception: What one of them raised. Then, and when stopped, the others are closed.
        """
        try:
            while self._waits:
                if stopped():
                    return False
                for steps, is_late in self._due():
                    self._advance(steps, is_late)
            return True
        finally:
            while self._waits:
                self._waits.popitem()[0].close()

    def _due(self) -> list[tuple[Steps[None], bool]]:
        poller = select.poll()
        first = time.monotonic() + STOP_CHECK_S
        for wait in self._waits.values():
            if wait.file is not None:
                poller.register(wait.file, wait.events)
            first = min(first, wait.until)
        ready = {file for file, _ in poller.poll(max(0.0, first - time.monotonic()) * 1000)}
        now = time.monotonic()
        # Ready comes before late: after a pause of the whole machine both are true.
        return [
            (steps, wait.file is not None and wait.file not in ready)
            for steps, wait in self._waits.items()
            if wait.file in ready or wait.until <= now
        ]

    def _advance(self, steps: Steps[None], is_late: bool) -> None:
        try:
            self._waits[steps] = steps.throw(TimeoutError()) if is_late else next(steps)
        except StopIteration:
            del self._waits[steps]
        except BaseException:
            del self._waits[steps]
            raise


class Pipe:
    """A pipe of the kernel's: where spliced bytes are on their way. Empty between calls."""

    def __init__(self) -> None:
        self.source, self.sink = os.pipe2(os.O_CLOEXEC)
        # Over the user's limit for all pipes it stays as it is, at 64 KiB.
        with contextlib.suppress(OSError):
            fcntl.fcntl(self.sink, fcntl.F_SETPIPE_SZ, PIPE_BYTES)

    def close(self) -> None:
        """Once."""
        os.close(self.source)
        os.close(self.sink)


class Answer(NamedTuple):
    """An answer's head."""

    status: int
    reason: str
    headers: http.client.HTTPMessage
    is_1_1: bool

    @property
    def length(self) -> int | None:
        """Bytes of the body, ``None`` where the head does not say."""
        text = self.headers.get("Content-Length", "")
        return int(text) if text.isascii() and text.isdigit() and not self.is_chunked else None

    @property
    def is_chunked(self) -> bool:
        """Whether the body comes in chunks that carry their sizes."""
        return self.headers.get("Transfer-Encoding", "").lower() == "chunked"

    @property
    def is_last(self) -> bool:
        """Whether the server closes the connection after it."""
        said = self.headers.get("ClusterAccess", "").lower()
        return said == "close" or (not self.is_1_1 and said != "keep-alive")


def dial(host: str, port: int, *, timeout_s: float) -> Steps[socket.socket]:
    """A connected socket, to the first of the host's addresses that answers.

    Raises:
        OSError: If none does; each has ``timeout_s``.
    """
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
    assert failed is not None, "a look-up that finds nothing raises"
    raise failed


class HttpConnection:
    """One connection. Owns its socket; broken or left in the middle of an answer, it is of no further use.

    Args:
        sock: Connected and not blocking.
        origin: ``http://host:port`` of what it talks to; says for which requests it can be used again.
        silence_s: After so long without a byte, `TimeoutError` is raised.
    """

    def __init__(self, sock: socket.socket, *, origin: str, silence_s: float) -> None:
        self._sock, self._silence_s = sock, silence_s
        self.origin = origin
        self._rest = memoryview(b"")
        """Received and not yet asked for: what came with a head."""
        self.num_answers = 0
        self.is_idle = True
        """Whether the last answer was read to its end, and another request may follow."""

    def close(self) -> None:
        """Can be called twice."""
        self._sock.close()

    def encrypt(self, context: ssl.SSLContext, host: str) -> Steps[None]:
        """Shake hands; all that follows is encrypted.

        Raises:
            ssl.SSLError: If one of both does not trust the other.
        """
        secure = context.wrap_socket(self._sock, server_hostname=host, do_handshake_on_connect=False)
        self._sock = secure
        yield from self._patiently(secure.do_handshake, events=select.POLLIN)

    @property
    def is_stale(self) -> bool:
        """Whether the server has closed it, or says what nobody asked for."""
        poller = select.poll()
        poller.register(self._sock.fileno(), select.POLLIN)
        return bool(poller.poll(0))

    def ask(self, request: bytes) -> Steps[Answer]:
        """Send a request without a body; the answer's head.

        Raises:
            OSError, ProtocolError: If the connection breaks, or what comes is no answer.
        """
        self.is_idle = False
        view = memoryview(request)
        while view:
            sent = yield from self._patiently(partial(self._sock.send, view), events=select.POLLOUT)
            view = view[sent:]
        while True:
            head = yield from self._receive_until(b"\r\n\r\n")
            answer = _parse_head(head)
            self.num_answers += 1
            if answer.status >= 200:
                return answer

    def receive(self, into: memoryview) -> Steps[int]:
        """Bytes received, at least one; 0 at the connection's end."""
        if self._rest:
            num = min(len(self._rest), len(into))
            into[:num] = self._rest[:num]
            self._rest = self._rest[num:]
            return num
        sock = self._sock
        num = yield from self._patiently(partial(sock.recv_into, into), events=select.POLLIN)
        # An encrypted record has 16 KiB at most. An error comes again with the next call.
        with contextlib.suppress(OSError):
            while isinstance(sock, ssl.SSLSocket) and 0 < num < len(into) and (more := sock.recv_into(into[num:])):
                num += more
        return num

    def receive_line(self) -> Steps[bytes]:
        """Up to a line's end, without it."""
        return (yield from self._receive_until(b"\r\n"))

    @property
    def can_splice(self) -> bool:
        """Whether the next bytes can go to a pipe inside the kernel."""
        return not self._rest and not isinstance(self._sock, ssl.SSLSocket)

    def splice(self, pipe: Pipe, limit: int) -> Steps[int]:
        """Bytes moved into an empty pipe, at least one; 0 at the connection's end."""
        file = self._sock.fileno()
        return (yield from self._patiently(partial(os.splice, file, pipe.sink, limit), events=select.POLLIN))

    def _receive_until(self, end: bytes) -> Steps[bytes]:
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

    def _patiently(self, act: Callable[[], Result], *, events: int) -> Steps[Result]:
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


class Body:
    """What follows a head, read once, whatever frames it.

    Its end is known by its length, by chunks' sizes, or by the connection's end; before that, an end is an error.
    """

    def __init__(self, line: HttpConnection, answer: Answer) -> None:
        self._line, self._answer = line, answer
        self._left = answer.length
        """Of the body, or of this chunk; ``None``: up to the connection's end."""
        self._is_chunked = answer.is_chunked
        if self._is_chunked or answer.status in (204, 304):
            self._left = 0
        self._num_bytes = 0
        self._note_end()

    @property
    def is_complete(self) -> bool:
        """Whether its end is reached."""
        return self._left == 0 and not self._is_chunked

    @property
    def can_splice(self) -> bool:
        """Whether `splice` would do."""
        return bool(self._left) and not self._is_chunked and self._line.can_splice

    def splice(self, pipe: Pipe) -> Steps[int]:
        """Bytes moved into the empty pipe, at least one: it is asked only before the end."""
        assert self._left is not None, "can_splice was asked"
        num = yield from self._line.splice(pipe, min(self._left, PIPE_BYTES))
        self._count(num)
        return num

    def receive(self, into: memoryview) -> Steps[int]:
        """Bytes received; 0 at the body's end."""
        if self._is_chunked and not self._left and not (yield from self._next_chunk()):
            return 0
        if self._left == 0:
            return 0
        num = yield from self._line.receive(into if self._left is None else into[: self._left])
        if not num and self._left is None:
            return 0
        self._count(num)
        return num

    def read_aside(self) -> Steps[bytes]:
        """A short body whole; of a long one some, and the connection is then of no further use."""
        found = bytearray()
        block = memoryview(bytearray(16 << 10))
        while len(found) <= MAX_ASIDE_BYTES and (num := (yield from self.receive(block))):
            found += block[:num]
        return bytes(found)

    def _count(self, num: int) -> None:
        if not num:
            raise ConnectionResetError(f"the connection was closed after {self._num_bytes} bytes of the body")
        self._num_bytes += num
        if self._left is not None:
            self._left -= num
        self._note_end()

    def _note_end(self) -> None:
        if self.is_complete:
            self._line.is_idle = not self._answer.is_last

    def _next_chunk(self) -> Steps[bool]:
        if self._num_bytes:
            yield from self._line.receive_line()  # what ends the data of the chunk before
        text = (yield from self._line.receive_line()).partition(b";")[0].strip()
        try:
            self._left = int(text, 16)
        except ValueError:
            raise ProtocolError("a chunk of the body has no size") from None
        if self._left == 0:
            while (yield from self._line.receive_line()):
                pass  # trailers
            self._is_chunked = False
            self._note_end()
        return bool(self._left)


def _parse_head(head: bytes) -> Answer:
    first, _, lines = head.partition(b"\r\n")
    version, _, rest = first.decode("latin-1").partition(" ")
    status, _, reason = rest.partition(" ")
    if version not in ("HTTP/1.0", "HTTP/1.1") or not (len(status) == 3 and status.isascii() and status.isdigit()):
        raise ProtocolError("what answers does not speak HTTP/1.1")
    try:
        headers = http.client.parse_headers(io.BytesIO(lines + b"\r\n\r\n"))
    except http.client.HTTPException as exc:
        raise ProtocolError(f"the head of its answer cannot be read ({exc})") from exc
    return Answer(int(status), reason.strip(), headers, version == "HTTP/1.1")
