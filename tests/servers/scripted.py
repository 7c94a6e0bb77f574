"""A server on loopback whose answers are bytes that a test writes: valid, wrong, endless, or late."""

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable

Script = Callable[["Visit"], None]
"""Answers one request."""

MAX_S = 30.0
"""After this time a server stops what never ends, so that a client without limits fails a test and does not hang."""


class Visit:
    """One request, and the connection on which it came."""

    def __init__(self, server: "ScriptedServer", sock: socket.socket, request: bytes, number: int) -> None:
        self.server, self._sock, self.request, self.number = server, sock, request, number
        """``number`` counts the requests of the whole server, from 0."""
        self.is_over = False

    def send(self, data: bytes) -> None:
        """Send bytes now."""
        self._sock.sendall(data)

    def send_for_ever(self, data: bytes, *, pause_s: float = 0.0) -> None:
        """Send the same bytes until the client closes the connection."""
        until = time.monotonic() + MAX_S
        while time.monotonic() < until and not self.server.closing.wait(pause_s):
            self.send(data)
        self.server.num_endless += time.monotonic() >= until

    def send_slowly(self, data: bytes, *, pause_s: float) -> None:
        """Send single bytes."""
        for start in range(len(data)):
            self.send(data[start : start + 1])
            self.server.closing.wait(pause_s)

    def hang_up(self) -> None:
        """End the connection after this answer."""
        self.is_over = True

    def hang_up_if_idle(self, idle_s: float) -> None:
        """End the connection if no further request comes in time."""
        self._sock.settimeout(idle_s)


class ScriptedServer:
    """Made by `scripted`."""

    def __init__(self, script: Script, context: ssl.SSLContext | None) -> None:
        self._script, self._context = script, context
        self.closing = threading.Event()
        self.requests: list[bytes] = []
        self.num_connections = 0
        self.num_endless = 0
        """Answers to which the client would have listened for ever."""
        self._open: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        scheme = "https" if context else "http"
        self.endpoint = f"{scheme}://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Stop listening, and end all connections."""
        self.closing.set()
        for sock in [self._listener, *self._open]:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

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
                sock = self._context.wrap_socket(sock, server_side=True)
                self._open.append(sock)
            while request := _read_request(sock):
                self.requests.append(request)
                visit = Visit(self, sock, request, len(self.requests) - 1)
                self._script(visit)
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


def never_ends(head: bytes, more: bytes, pause_s: float = 0.0) -> Script:
    """A head, and then the same bytes without end."""

    def script(visit: Visit) -> None:
        visit.send(head)
        visit.send_for_ever(more, pause_s=pause_s)

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
    head, _, body = found.partition(b"\r\n\r\n")
    lengths = [line.split(b":")[1] for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
    if lengths and b"100-continue" not in head:
        while len(body) < int(lengths[0]):
            body += sock.recv(64 << 10)
    return head + b"\r\n\r\n" + body
