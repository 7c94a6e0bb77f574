"""Stand between loaders and their cluster: delay every request, and count the bytes of every answer.

The gateway is a process on loopback, in front of the embedded node or of any cluster. All loaders get its address as
the endpoint. It rewrites redirects, such as those of the proxy to its targets, so that they lead through it again.

Each request waits once, and a new connection waits once more for its handshake. Connections do not wait for each other,
and bodies are passed on as they come: this adds latency and does not limit bandwidth. TCP's slow start is not imitated.
The bytes of all answers are counted, heads and bodies, also those that a loader has requested ahead and not used.
"""

import argparse
import http.client
import os
import socket
import sys
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from dali_pipes.processes.programs import ServerProcess, end_with_owner

_COUNTER_BYTES = 8
_BUFFER_BYTES = 1 << 18
_CONNECT_S = 10.0
_HOP_HEADERS = frozenset({"connection", "keep-alive", "proxy-connection", "expect"})
_ENCODING_HEADERS = frozenset({"connection", "transfer-encoding"})


def read_counter(path: Path) -> int:
    """The bytes of all answers so far, heads and bodies, from a gateway's file; in any process."""
    return int.from_bytes(path.read_bytes(), "little")


class Gateway(ServerProcess):
    """A running gateway before the cluster ``http://HOST:PORT``.

    ``latency_s``, in [0, 60), is that of a round trip, added to each request and to each new connection.
    """

    counter: Path

    def __init__(self, endpoint: str, *, latency_s: float = 0.0) -> None:
        check_upstream(endpoint)
        with tempfile.NamedTemporaryFile(prefix="dali-pipes-traffic-", delete=False) as file:
            file.write(bytes(_COUNTER_BYTES))
        self.counter = Path(file.name)
        arguments = ["--upstream", endpoint, "--latency-s", repr(latency_s), "--counter", file.name]
        super().__init__("bench.tools.gateway", *arguments)

    def close(self) -> None:
        super().close()
        self.counter.unlink(missing_ok=True)


def check_upstream(endpoint: str) -> None:
    """Refuse an endpoint that a gateway cannot serve."""
    url = urlsplit(endpoint)
    if url.scheme != "http" or not url.hostname:
        raise ValueError(
            f"a gateway counts and delays what it can read, http://HOST:PORT, got the endpoint '{endpoint}'; "
            "pass --direct to go without one"
        )


class _Routes:
    """One listener for each server behind the gateway: the named one, and those that it redirects to."""

    def __init__(self, *, latency_s: float, counter: Path) -> None:
        self.latency_s = latency_s
        self._counter, self._num_bytes = os.open(counter, os.O_WRONLY), 0
        self._listeners: dict[str, _Listener] = {}
        self._lock = threading.Lock()

    def to(self, netloc: str) -> str:
        """The address here that leads to ``netloc``."""
        with self._lock:
            if netloc in (listener.netloc for listener in self._listeners.values()):
                return netloc  # this gateway: a server may take its own address from the request
            if netloc not in self._listeners:
                listener = _Listener(netloc, self)
                self._listeners[netloc] = listener
                threading.Thread(target=listener.serve_forever, daemon=True).start()
            return self._listeners[netloc].netloc

    def count(self, num_bytes: int) -> None:
        with self._lock:
            self._num_bytes += num_bytes
            os.pwrite(self._counter, self._num_bytes.to_bytes(_COUNTER_BYTES, "little"), 0)


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
        """Print nothing: at the end of a turn, clients leave in the middle of an answer."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Listener

    def setup(self) -> None:
        super().setup()
        self._upstream = http.client.HTTPConnection(*self.server.upstream)
        # Here the kernel's handshake took no time; a client far away would still wait for it.
        time.sleep(self.server.routes.latency_s)

    def finish(self) -> None:
        self._upstream.close()
        super().finish()

    def parse_request(self) -> bool:
        # The first line of the request has come.
        time.sleep(self.server.routes.latency_s)
        return super().parse_request()

    def relay(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        is_kept = self._upstream.sock is not None
        try:
            try:
                answer = self._ask(body)
            except (ConnectionError, http.client.HTTPException):
                self._upstream.close()
                if not is_kept:
                    raise
                answer = self._ask(body)  # the server has closed the kept connection in the meantime
        except (OSError, http.client.HTTPException) as exc:
            self.send_error(502, explain=str(exc))
            return
        self._answer(answer)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = do_PATCH = do_OPTIONS = relay  # noqa: N815 (http.server's names)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing for a request."""

    def _ask(self, body: bytes) -> http.client.HTTPResponse:
        if self._upstream.sock is None:
            self._upstream.sock = socket.create_connection(self.server.upstream, timeout=_CONNECT_S)
            self._upstream.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._upstream.sock.settimeout(None)
        self._upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            if name.lower() not in _HOP_HEADERS:
                self._upstream.putheader(name, value)
        self._upstream.endheaders(body)
        return self._upstream.getresponse()

    def _answer(self, answer: http.client.HTTPResponse) -> None:
        headers = [(name, value) for name, value in answer.getheaders() if name.lower() not in _ENCODING_HEADERS]
        whole = None
        if self.command != "HEAD" and answer.status not in (204, 304) and answer.length is None:
            # In chunks, or until the connection ends: listings and errors.
            whole = answer.read()
            headers.append(("Content-Length", str(len(whole))))
        lines = [f"HTTP/1.1 {answer.status} {answer.reason}"]
        for name, value in headers:
            url = urlsplit(value)
            # A relative redirect leads here anyway; an encrypted one cannot be read here.
            if name.lower() == "location" and url.scheme == "http":
                value = urlunsplit(url._replace(netloc=self.server.routes.to(url.netloc)))
            lines.append(f"{name}: {value}")
        self._send("\r\n".join([*lines, "", ""]).encode("latin-1"))
        try:
            for piece in [whole] if whole is not None else iter(lambda: answer.read1(_BUFFER_BYTES), b""):
                self._send(piece)
        finally:
            if answer.length or answer.will_close:
                # The end of the connection tells the client of a short body.
                self.close_connection = self.close_connection or bool(answer.length)
                self._upstream.close()
            answer.close()

    def _send(self, data: bytes) -> None:
        # Count first: when a client has read a whole answer, the count includes all of it.
        self.server.routes.count(len(data))
        self.connection.sendall(data)


def main(argv: list[str] | None = None) -> int:
    """Print the endpoint, and serve until the owner is gone; open connections are then cut."""
    parser = argparse.ArgumentParser(prog="python -m bench.tools.gateway", description=__doc__)
    parser.add_argument("--latency-s", type=float, default=0.0)
    parser.add_argument("--owner", type=int, required=True, help="the process with which this one ends")
    parser.add_argument("--upstream", required=True, help="the cluster behind, http://HOST:PORT")
    parser.add_argument("--counter", type=Path, required=True, help="the file that holds the count")
    options = parser.parse_args(argv)
    routes = _Routes(latency_s=options.latency_s, counter=options.counter)
    print(f"http://{routes.to(urlsplit(options.upstream).netloc)}", flush=True)  # the owner reads it
    end_with_owner(options.owner)
    options.counter.unlink(missing_ok=True)  # the owner may have been killed
    return 0


if __name__ == "__main__":
    sys.exit(main())
