"""Stand between loaders and their cluster: every request as late as from far away, every answer's bytes counted.

A process of its own on loopback, in front of the embedded node or of any cluster, for all loaders alike: it is given to
them as the endpoint, so whatever speaks HTTP to AIStore, through an SDK, S3 or sockets, goes through it. An answer that
redirects, as the proxy's to its targets, is rewritten to lead through it again.

What is late is what is late on a network whose round trip is that much longer: each request waits once, and a new
connection once more for its handshake. Connections do not wait for each other, and bodies are passed on as they come:
latency is added, bandwidth is not taken. TCP's slow start, which a long way makes longer, is not imitated.

Bytes are counted where all loaders are alike, in the answers that left here; what a loader has asked for ahead and not
used is in the count.
"""

import argparse
import contextlib
import mmap
import os
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit, urlunsplit

from bench.timing.object_server import module_command, module_environment
from dali_pipes.errors import StoreError
from dali_pipes.store.embedded_node import EmbeddedNode, end_with_owner

__all__ = ["Gateway", "Traffic", "read_traffic"]

_COUNTERS = struct.Struct("<QQQ")
_BUFFER_BYTES = 1 << 20
_MAX_HEAD_BYTES = 1 << 16
_CONNECT_S = 10.0
_HOP_HEADERS = frozenset({"connection", "keep-alive", "proxy-connection", "expect"})


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What went through so far; the difference of two is what went through between them."""

    num_bytes: int
    """Of answers, heads and bodies."""
    num_requests: int
    num_connections: int

    def __sub__(self, other: "Traffic") -> "Traffic":
        return Traffic(
            num_bytes=self.num_bytes - other.num_bytes,
            num_requests=self.num_requests - other.num_requests,
            num_connections=self.num_connections - other.num_connections,
        )


def read_traffic(path: Path) -> Traffic:
    """The counts in a gateway's file, in any process."""
    num_bytes, num_requests, num_connections = _COUNTERS.unpack(path.read_bytes())
    return Traffic(num_bytes=num_bytes, num_requests=num_requests, num_connections=num_connections)


class Gateway:
    """A running gateway; a context manager. When this process dies, in whatever way, it ends too.

    Args:
        endpoint: The cluster behind it, ``http://HOST:PORT``.
        latency_s: Of a round trip, added to each request and to each new connection.

    Raises:
        StoreError: If it does not start.
        ValueError: If the endpoint is no ``http://`` URL, or the latency is negative or a minute and more.
    """

    endpoint: str
    """What to give to loaders: ``http://127.0.0.1:PORT``."""
    counters: Path
    """For `read_traffic`."""

    def __init__(self, endpoint: str, *, latency_s: float = 0.0) -> None:
        check_upstream(endpoint)
        if not 0 <= latency_s < 60:
            raise ValueError(f"latency_s must be in [0, 60), got {latency_s:g}")
        with tempfile.NamedTemporaryFile(prefix="dali-pipes-traffic-", delete=False) as file:
            file.write(bytes(_COUNTERS.size))
        self.counters = Path(file.name)
        arguments = ["--upstream", endpoint, "--latency-s", repr(latency_s), "--counters", str(self.counters)]
        process = subprocess.Popen(  # noqa: S603 (our own interpreter and arguments)
            module_command("bench.timing.gateway", *arguments, "--owner", str(os.getpid())),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=module_environment(),
            start_new_session=True,  # Ctrl-C is the owner's
        )
        self.pid = process.pid
        self._node = EmbeddedNode(process, "")
        assert process.stdout is not None
        # One line, or the end of the pipe; why it ended is on stderr, which is ours.
        self.endpoint = process.stdout.readline().decode().strip()
        if not self.endpoint:
            self.close()
            raise StoreError(f"the gateway to '{endpoint}' did not start, exit status {process.wait()}")

    def traffic(self) -> Traffic:
        """What went through so far."""
        return read_traffic(self.counters)

    def close(self) -> None:
        """End it. Can be called twice."""
        self._node.close()
        self.counters.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def check_upstream(endpoint: str) -> None:
    """Refuse an endpoint that a gateway could not stand before.

    Raises:
        ValueError: If it is no ``http://HOST[:PORT]``.
    """
    url = urlsplit(endpoint)
    if url.scheme != "http" or not url.hostname:
        raise ValueError(
            f"a gateway counts and delays what it can read, http://HOST:PORT, got the endpoint '{endpoint}'; "
            "pass --direct to go without one"
        )


class _Counters:
    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._shared = mmap.mmap(file.fileno(), _COUNTERS.size)
        self._counts = [0, 0, 0]
        self._lock = threading.Lock()

    def add(self, *, num_bytes: int = 0, num_requests: int = 0, num_connections: int = 0) -> None:
        with self._lock:
            for row, more in enumerate((num_bytes, num_requests, num_connections)):
                self._counts[row] += more
            self._shared[:] = _COUNTERS.pack(*self._counts)


class _Routes:
    """A listener for each server behind: the one that was named, and those that it redirects to."""

    def __init__(self, *, latency_s: float, counters: _Counters) -> None:
        self.latency_s = latency_s
        self.counters = counters
        self._listeners: dict[str, _Listener] = {}
        self._lock = threading.Lock()

    def to(self, netloc: str) -> str:
        """The address here that leads to ``netloc``."""
        with self._lock:
            if netloc in (listener.netloc for listener in self._listeners.values()):
                return netloc  # it named us: servers may take their own address from the request
            if netloc not in self._listeners:
                listener = _Listener(netloc, self)
                self._listeners[netloc] = listener
                threading.Thread(target=listener.serve_forever, daemon=True).start()
            return self._listeners[netloc].netloc


class _Listener(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def __init__(self, upstream: str, routes: _Routes) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        host, _, port = upstream.rpartition(":") if ":" in upstream else (upstream, "", "80")
        self.upstream = (host, int(port))
        self.routes = routes
        self.netloc = f"127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients leave in the middle of an answer when a turn is over; that is no error."""


class _UpstreamError(Exception):
    """The server behind does not answer."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Listener

    def setup(self) -> None:
        super().setup()
        self._upstream: socket.socket | None = None
        self._ahead = b""
        self.server.routes.counters.add(num_connections=1)
        # The kernel has shaken hands at once; from far away the client would still be waiting for it.
        time.sleep(self.server.routes.latency_s)

    def finish(self) -> None:
        if self._upstream is not None:
            self._upstream.close()
        super().finish()

    def parse_request(self) -> bool:
        # Its first line has come.
        time.sleep(self.server.routes.latency_s)
        return super().parse_request()

    def relay(self) -> None:
        length = self.headers.get("Content-Length", "0")
        if "Transfer-Encoding" in self.headers or not length.isdecimal():
            self.send_error(411)
            return
        self.server.routes.counters.add(num_requests=1)
        body = self.rfile.read(int(length))
        try:
            head = self._ask(body)
        except (OSError, _UpstreamError) as exc:
            self.send_error(502, explain=str(exc))
            return
        self._answer(head)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = do_PATCH = do_OPTIONS = relay  # noqa: N815 (http.server's names)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing of each request."""

    def _ask(self, body: bytes) -> bytes:
        """Pass the request on; the answer's head, what follows it kept."""
        lines = [f"{self.command} {self.path} HTTP/1.1"]
        lines += [f"{name}: {value}" for name, value in self.headers.items() if name.lower() not in _HOP_HEADERS]
        request = "\r\n".join([*lines, "", ""]).encode("latin-1") + body
        for attempt in range(2):
            is_kept = self._upstream is not None
            try:
                if self._upstream is None:
                    self._upstream = self._connect()
                self._upstream.sendall(request)
                return self._read_head()
            except (ConnectionError, _UpstreamError):
                self._leave()
                # A connection that was kept may have been closed there in the meantime.
                if attempt or not is_kept:
                    raise
        raise AssertionError("left by return or raise")

    def _connect(self) -> socket.socket:
        connection = socket.create_connection(self.server.upstream, timeout=_CONNECT_S)
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def _leave(self) -> None:
        if self._upstream is not None:
            self._upstream.close()
        self._upstream, self._ahead = None, b""

    def _read_head(self) -> bytes:
        assert self._upstream is not None
        data = self._ahead
        while True:
            while b"\r\n\r\n" not in data:
                piece = self._upstream.recv(_MAX_HEAD_BYTES)
                if not piece or len(data) > _MAX_HEAD_BYTES:
                    raise _UpstreamError(f"'{self.server.upstream[0]}:{self.server.upstream[1]}' ended its answer")
                data += piece
            head, _, data = data.partition(b"\r\n\r\n")
            if not head.startswith((b"HTTP/1.1 1", b"HTTP/1.0 1")):  # 100 Continue was not asked for, and may come
                self._ahead = data
                return head

    def _answer(self, head: bytes) -> None:
        status, *rest = head.decode("latin-1").split("\r\n")
        headers = [(name, value.strip()) for name, _, value in (line.partition(":") for line in rest)]
        found = {name.lower(): value for name, value in headers}
        is_chunked = found.get("transfer-encoding", "").lower() == "chunked"
        has_body = self.command != "HEAD" and status.split(" ", 2)[1] not in ("204", "304")
        until_close = has_body and not is_chunked and "content-length" not in found
        lines = [status]
        lines += [
            f"{name}: {self._rewritten(value) if name.lower() == 'location' else value}"
            for name, value in headers
            if name.lower() != "connection"
        ]
        if until_close or found.get("connection", "").lower() == "close":
            self.close_connection = True
        if self.close_connection:
            lines.append("Connection: close")
        self._send("\r\n".join([*lines, "", ""]).encode("latin-1"))
        if has_body:
            for piece in self._body(is_chunked, None if until_close else int(found.get("content-length", 0))):
                self._send(piece)
        if self.close_connection:
            self._leave()

    def _body(self, is_chunked: bool, length: int | None) -> Iterator[bytes | memoryview]:
        """The answer's body in pieces, as they come."""
        if is_chunked:
            yield from self._chunks()
            return
        left = sys.maxsize if length is None else length
        ahead, self._ahead = self._ahead[:left], self._ahead[left:]
        if ahead:
            yield ahead
        left -= len(ahead)
        assert self._upstream is not None
        buffer = memoryview(bytearray(min(left, _BUFFER_BYTES)))
        while left:
            received = self._upstream.recv_into(buffer[: min(left, len(buffer))])
            if not received:
                # Short, or over: either way the client finds out by the end of the connection.
                self.close_connection = True
                return
            yield buffer[:received]
            left -= received

    def _chunks(self) -> Iterator[bytes]:
        """A chunked body as it is, to its last line."""
        while True:
            line = self._line()
            yield line
            size = int(line.split(b";")[0], 16)
            if size == 0:
                while (trailer := self._line()) != b"\r\n":
                    yield trailer
                yield b"\r\n"
                return
            yield self._exactly(size + 2)

    def _line(self) -> bytes:
        while b"\n" not in self._ahead:
            self._more()
        line, _, self._ahead = self._ahead.partition(b"\n")
        return line + b"\n"

    def _exactly(self, size: int) -> bytes:
        while len(self._ahead) < size:
            self._more()
        data, self._ahead = self._ahead[:size], self._ahead[size:]
        return data

    def _more(self) -> None:
        assert self._upstream is not None
        piece = self._upstream.recv(_BUFFER_BYTES)
        if not piece:
            raise ConnectionError("the answer ended before its last chunk")
        self._ahead += piece

    def _send(self, data: bytes | memoryview) -> None:
        # Before, not after: who has read all of an answer finds all of it counted.
        self.server.routes.counters.add(num_bytes=len(data))
        self.connection.sendall(data)

    def _rewritten(self, location: str) -> str:
        url = urlsplit(location)
        if url.scheme != "http":
            return location  # relative, or encrypted: the first stays here, the second cannot
        return urlunsplit(url._replace(netloc=self.server.routes.to(url.netloc)))


def main(argv: list[str] | None = None) -> int:
    """Serve until the owner goes; print the endpoint first."""
    parser = argparse.ArgumentParser(prog="python -m bench.timing.gateway", description=__doc__)
    parser.add_argument("--upstream", required=True, help="the cluster behind, http://HOST:PORT")
    parser.add_argument("--latency-s", type=float, default=0.0, help="added to each request and each new connection")
    parser.add_argument("--counters", type=Path, required=True, help="the file that holds the counts")
    parser.add_argument("--owner", type=int, required=True, help="process whose end is ours")
    options = parser.parse_args(argv)
    routes = _Routes(latency_s=options.latency_s, counters=_Counters(options.counters))
    print(f"http://{routes.to(urlsplit(options.upstream).netloc)}", flush=True)  # what this command is run for
    with contextlib.suppress(KeyboardInterrupt):
        end_with_owner(options.owner)
    options.counters.unlink(missing_ok=True)  # the owner may have been killed
    return 0


if __name__ == "__main__":
    sys.exit(main())
