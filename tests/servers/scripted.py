"""A loopback server whose answers a test writes byte by byte: valid, wrong, endless or slow."""

import contextlib
import io
import socket
import ssl
import threading
import time
from collections.abc import Callable
from email.message import Message
from http.client import parse_headers, responses

Script = Callable[["Visit"], None]
"""Answers one request."""

MAX_S = 120.0
"""After this time a server stops what never ends, so that a client without limits fails a test and does not hang."""


class Visit:
    """One request, and the connection on which it came."""

    def __init__(self, server: "ScriptedServer", sock: socket.socket, request: bytes, number: int) -> None:
        self.server, self._sock, self.request, self.number = server, sock, request, number
        """``number`` counts the requests of the whole server, from 0."""
        self.is_over = False

    @property
    def path(self) -> str:
        return self.request.split(b" ", 2)[1].decode()

    @property
    def headers(self) -> Message:
        return parse_headers(io.BytesIO(self.request.partition(b"\r\n")[2]))

    def send(self, data: bytes) -> None:
        """Send bytes now."""
        self._sock.sendall(data)

    def say(self, status: int, body: bytes = b"", **headers: str) -> None:
        """Send a valid answer."""
        fields = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        head = f"HTTP/1.1 {status} {responses.get(status, '')}\r\n{fields}Content-Length: {len(body)}\r\n\r\n"
        self.send(head.encode() + body)
        self.is_over |= headers.get("Connection") == "close"

    def say_chunked(self, body: bytes) -> None:
        """Send a chunked body, without a Content-Length."""
        chunks = [body[start : start + 30_000] for start in range(0, len(body), 30_000)]
        data = b"".join(b"%x;x=y\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
        self.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + data + b"0\r\nX-Trailer: z\r\n\r\n")

    def send_for_ever(self, data: bytes) -> None:
        """Send the same bytes until the client closes the connection."""
        until = time.monotonic() + MAX_S
        while time.monotonic() < until and not self.server.closing.is_set():
            self.wait_until_due()
            self.send(data)
        self.server.num_endless += time.monotonic() >= until

    def send_slowly(self, data: bytes) -> None:
        """Send one byte at a time, each when it is due."""
        for start in range(len(data)):
            self.wait_until_due()
            self.send(data[start : start + 1])

    def wait_until_due(self) -> None:
        """Wait until the next piece is due or the server closes."""
        while not self.server.is_due() and not self.server.closing.wait(0.0005):
            pass

    def hang_up(self) -> None:
        """End the connection after this answer."""
        self.is_over = True

    def hang_up_if_idle(self, idle_s: float) -> None:
        """End the connection if no further request comes in time."""
        self._sock.settimeout(idle_s)

    def encrypt(self, context: ssl.SSLContext) -> None:
        """Speak TLS from now on, as a server does behind a proxy's tunnel."""
        self._sock = self.server.encrypted(self._sock, context)


class ScriptedServer:
    """Made by `scripted`."""

    def __init__(self, script: Script, context: ssl.SSLContext | None) -> None:
        self._script, self._context = script, context
        self.closing = threading.Event()
        self.is_due: Callable[[], bool] = lambda: True
        """Whether the server may send the next piece of an endless or slow answer."""
        self.requests: list[bytes] = []
        self.num_connections = 0
        self.num_endless = 0
        """Answers to which the client would have listened for ever."""
        self._open: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        scheme = "https" if context else "http"
        self.endpoint = f"{scheme}://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def paths(self) -> list[str]:
        """The path of each request."""
        return [request.split(b" ", 2)[1].decode() for request in self.requests]

    def fields(self, name: str) -> list[str | None]:
        """The value of one header field in each request."""
        return [parse_headers(io.BytesIO(request.partition(b"\r\n")[2])).get(name) for request in self.requests]

    @property
    def ranges(self) -> list[str | None]:
        return self.fields("Range")

    def close(self) -> None:
        """Stop listening, and end all connections."""
        self.closing.set()
        for sock in [self._listener, *self._open]:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def encrypted(self, sock: socket.socket, context: ssl.SSLContext) -> ssl.SSLSocket:
        """Wrap a connection in TLS; the server closes it at its end."""
        secure = context.wrap_socket(sock, server_side=True)
        self._open.append(secure)
        return secure

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                self.num_connections += 1
                self._open.append(sock)
                threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._context:
                sock = self.encrypted(sock, self._context)
            while request := _read_request(sock):
                self.requests.append(request)
                visit = Visit(self, sock, request, len(self.requests) - 1)
                self._script(visit)
                sock = visit._sock
                if visit.is_over:
                    break
        # Shut down first: closing at once may send a reset, and the client then loses bytes that were sent before it.
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_WR)
            sock.close()


def says(answer: bytes) -> Script:
    """The same answer to every request, then the end of the connection."""

    def script(visit: Visit) -> None:
        visit.send(answer)
        visit.hang_up()

    return script


def never_ends(head: bytes, more: bytes) -> Script:
    """A head, and then the same bytes without end."""

    def script(visit: Visit) -> None:
        visit.send(head)
        visit.send_for_ever(more)

    return script


def scripted(script: Script, *, context: ssl.SSLContext | None = None) -> "contextlib.closing[ScriptedServer]":
    """Run a server that answers each request by ``script``; with a ``context`` it speaks TLS. A context manager."""
    return contextlib.closing(ScriptedServer(script, context))


def _read_request(sock: socket.socket) -> bytes:
    """A head with its body; empty if the client closed the connection."""
    found = b""
    while b"\r\n\r\n" not in found:
        block = sock.recv(64 << 10)
        if not block:
            return b""
        found += block
        if found[:1] == b"\x16":  # a TLS handshake starts with this byte
            sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            return b""
    head, _, body = found.partition(b"\r\n\r\n")
    lengths = [line.split(b":")[1] for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
    if lengths and b"100-continue" not in head:
        while len(body) < int(lengths[0]):
            body += sock.recv(64 << 10)
    return head + b"\r\n\r\n" + body
