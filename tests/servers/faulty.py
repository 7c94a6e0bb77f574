"""Stand between a client and a cluster: requests pass, and some GETs of objects break, as a seed says.

The proxy listens at one entry and, for each address that the cluster redirects to, at ports of its own; redirects are
rewritten, so that a client never leaves it. Nothing else is changed: what goes wrong is what the kernel and the bytes
make of it, not a mock.
"""

import contextlib
import http.client
import random
import socket
import ssl
import struct
import threading
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any, cast
from urllib.parse import urlsplit

BLOCK_BYTES = 256 << 10

STATUSES = (408, 429, 500, 502, 503, 504)
KINDS = (
    "reset",  # no answer: the connection is reset
    "reset_body",  # reset in the middle of the body
    "short",  # the body ends early, the connection is closed in order
    "flip",  # one byte of the body is another
    "stall",  # no answer for stall_s
    "stall_body",  # half a body, then silence for stall_s
    "gone",  # a redirect to a port where nobody listens
    *(str(status) for status in STATUSES),
)
_AT_ENTRY = ("reset", "stall", "gone", *(str(status) for status in STATUSES))
_AT_TARGET = tuple(kind for kind in KINDS if kind != "gone")


@dataclass(frozen=True)
class Seen:
    """A request that came in."""

    is_entry: bool
    headers: Message


class FaultyProxy:
    """A proxy before a cluster or another store that breaks some answers.

    Args:
        upstream: The store's http URL.
        rate: The share of requests for objects that break; each hop of a redirect is a request.
        seed: Decides which requests break, and how.
        kinds: Of `KINDS`.
        stall_s: How long a stall lasts.
        retry_after: What 429 and 503 say in the header of that name.
        max_faults: After this many faults nothing breaks any more.
        context: Speak TLS to clients.
        objects: The part of a path by which a GET of an object is known.
        redirects: Whether the store sends clients elsewhere for an object; if not, all faults happen where they ask.
        writes: What happens to the first PUTs: ``flip``: a byte of the body is another; ``lost``: the store does it,
            and its answer does not arrive; empty: nothing.
    """

    def __init__(
        self,
        upstream: str,
        *,
        rate: float = 0.0,
        seed: int = 0,
        kinds: Sequence[str] = KINDS,
        stall_s: float = 5.0,
        retry_after: str | None = None,
        max_faults: int | None = None,
        context: ssl.SSLContext | None = None,
        objects: str = "/v1/objects/",
        redirects: bool = True,
        writes: Sequence[str] = (),
    ) -> None:
        self.rate, self.kinds, self.stall_s = rate, kinds, stall_s
        self.retry_after, self.max_faults, self.context = retry_after, max_faults, context
        self.objects, self.redirects = objects, redirects
        self.requests: Counter[str] = Counter()
        """``entry`` and ``target``: GETs of objects."""
        self.faults: Counter[str] = Counter()
        """By kind."""
        self.seen: deque[Seen] = deque(maxlen=10_000)
        self.closing = threading.Event()
        self._writes = list(writes)
        self._random, self._lock = random.Random(seed), threading.Lock()
        # Bound, and so nobody else's, but not listening: connections are refused.
        self._dead = socket.socket()
        self._dead.bind(("127.0.0.1", 0))
        self._dead_port = self._dead.getsockname()[1]
        self._entry = _Port(self, upstream, is_entry=redirects)
        self._targets: dict[str, _Port] = {}
        self.endpoint = self._entry.endpoint

    def redirect(self, location: str, *, is_gone: bool) -> str:
        """A redirect that leads back here."""
        parts = urlsplit(location)
        origin = f"{parts.scheme}://{parts.netloc}"
        with self._lock:
            if origin not in self._targets:
                self._targets[origin] = _Port(self, origin, is_entry=False)
            base = self._targets[origin].endpoint
        if is_gone:
            base = base.rpartition(":")[0] + f":{self._dead_port}"
        return base + location[len(origin) :]

    def draw(self, *, is_entry: bool) -> str | None:
        """The fault of the next GET of an object."""
        with self._lock:
            self.requests["entry" if is_entry else "target"] += 1
            fitting = [kind for kind in self.kinds if kind in (_AT_ENTRY if is_entry else _AT_TARGET)]
            is_over = self.max_faults is not None and self.faults.total() >= self.max_faults
            if not fitting or is_over or self._random.random() >= self.rate:
                return None
            kind = self._random.choice(fitting)
            self.faults[kind] += 1
            return kind

    def draw_write(self) -> str | None:
        """The fault of the next PUT with a body."""
        with self._lock:
            return self._writes.pop(0) if self._writes else None

    def place(self, num: int) -> int:
        """A byte of a body: not the first."""
        with self._lock:
            return self._random.randrange(1, num) if num > 1 else 0

    def close(self) -> None:
        """Stop listening."""
        self.closing.set()
        for port in (self._entry, *self._targets.values()):
            port.close()
        self._dead.close()


def faulty(upstream: str, **options: Any) -> "contextlib.closing[FaultyProxy]":
    """A `FaultyProxy`, as a context manager."""
    return contextlib.closing(FaultyProxy(upstream, **options))


class _Port(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, proxy: FaultyProxy, upstream: str, *, is_entry: bool) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.proxy, self.upstream, self.is_entry = proxy, urlsplit(upstream), is_entry
        scheme = "https" if proxy.context else "http"
        self.endpoint = f"{scheme}://127.0.0.1:{self.server_address[1]}"
        self._open: set[socket.socket] = set()
        self._is_open = True
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    def server_bind(self) -> None:
        # Without the look-up of the machine's name that HTTPServer adds.
        TCPServer.server_bind(self)

    def finish_request(self, request: object, client_address: object) -> None:
        sock = cast("socket.socket", request)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self.proxy.context:
            sock = self.proxy.context.wrap_socket(sock, server_side=True)
        self._open.add(sock)
        try:
            super().finish_request(sock, client_address)
        finally:
            self._open.discard(sock)
            sock.close()

    def handle_error(self, request: object, client_address: object) -> None:
        """Broken connections are what this is about."""

    def close(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        self.shutdown()
        self.server_close()
        for sock in list(self._open):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Port

    def setup(self) -> None:
        super().setup()
        self._upstream: http.client.HTTPConnection | None = None

    def finish(self) -> None:
        if self._upstream:
            self._upstream.close()
        with contextlib.suppress(OSError):
            super().finish()

    def _pass(self) -> None:
        proxy = self.server.proxy
        is_object = self.command == "GET" and proxy.objects in self.path
        fault = proxy.draw(is_entry=self.server.is_entry) if is_object else None
        proxy.seen.append(Seen(self.server.is_entry, self.headers))
        if fault == "reset":
            self._reset()
        elif fault == "stall":
            proxy.closing.wait(proxy.stall_s)
            self.close_connection = True
        elif fault and fault.isdigit():
            body = b'{"message": "made by the test"}'
            headers = [("Retry-After", proxy.retry_after)] if proxy.retry_after and fault in ("429", "503") else []
            self._send_head(int(fault), "", [*headers, ("Content-Length", str(len(body)))])
            self.wfile.write(body)
        else:
            self._relay(fault)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = do_PATCH = _pass  # noqa: N815 (http.server's names)

    def _relay(self, fault: str | None) -> None:
        proxy, upstream = self.server.proxy, self.server.upstream
        if self._upstream is None:
            self._upstream = http.client.HTTPConnection(upstream.hostname or "", upstream.port, timeout=60)
        if self.headers.get("Expect", "").lower() == "100-continue":
            self.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        hop = ("expect", "connection", *(["host"] if proxy.redirects else []))  # a signed request signs the host
        headers = {name: value for name, value in self.headers.items() if name.lower() not in hop}
        length = int(self.headers.get("Content-Length", "0"))
        body = bytearray(self.rfile.read(length)) if length else None
        write_fault = proxy.draw_write() if body and self.command == "PUT" else None
        if body and write_fault == "flip":
            body[proxy.place(length)] ^= 0xFF
        self._upstream.request(self.command, self.path, body=body, headers=headers)
        answer = self._upstream.getresponse()
        if write_fault == "lost":
            answer.read()
            self._reset()
            return
        heads = [
            (name, proxy.redirect(value, is_gone=fault == "gone") if name.lower() == "location" else value)
            for name, value in answer.getheaders()
            if name.lower() not in ("connection", "keep-alive", "transfer-encoding")
        ]
        is_framed = answer.getheader("Content-Length") is not None
        if not is_framed and self.command != "HEAD" and answer.status not in (204, 304):
            self.close_connection = True
            heads.append(("Connection", "close"))
        self._send_head(answer.status, answer.reason, heads)
        if self.command != "HEAD":
            self._send_body(answer, fault)
        if answer.will_close:
            self._upstream.close()
            self._upstream = None

    def _send_body(self, answer: http.client.HTTPResponse, fault: str | None) -> None:
        proxy, length = self.server.proxy, answer.length or 0
        breaks_at = proxy.place(length) if fault in ("reset_body", "short", "flip", "stall_body") and length else None
        block = memoryview(bytearray(BLOCK_BYTES))
        position = 0
        while True:
            stop = BLOCK_BYTES
            if breaks_at is not None and position < breaks_at:
                stop = min(BLOCK_BYTES, breaks_at - position)
            num = answer.readinto(block[:stop])
            if not num:
                return
            if breaks_at is not None and position == breaks_at:
                if fault == "flip":
                    block[0] ^= 0xFF
                else:
                    self._break_off(fault)
                    return
            self.wfile.write(block[:num])
            position += num

    def _break_off(self, fault: str | None) -> None:
        if fault == "stall_body":
            self.server.proxy.closing.wait(self.server.proxy.stall_s)
        if self._upstream:
            self._upstream.close()
            self._upstream = None
        if fault == "reset_body":
            self._reset()
        self.close_connection = True

    def _reset(self) -> None:
        # To linger for no time is to reset.
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        # Not shutdown: that would end the connection in order.
        self.connection.close()
        self.wfile = _Nowhere()  # type: ignore[assignment]  # what http.server flushes at the end
        self.rfile.close()

    def _send_head(self, status: int, reason: str, headers: Sequence[tuple[str, str]]) -> None:
        self.send_response_only(status, reason or None)
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: it is counted."""


class _Nowhere:
    closed = True

    def close(self) -> None:
        """Closed already."""
