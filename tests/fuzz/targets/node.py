"""Requests to the embedded node: it answers in HTTP or hangs up, keeps running, and stores only bytes of a request."""

import contextlib
import json
import socket
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

import h11
import requests

from prep.embedded.server import NodeServer
from prep.embedded.storage import Storage
from tests.fuzz.target import Answer, BrokenPromiseError, Target

# The client says that it sends no more, so the server answers at once; under load this takes seconds.
ANSWER_S = 300.0
OLD = b"0123456789" * 20
NEW = b"abcdefghij" * 30


class NodeRequests(Target):
    """Send broken HTTP requests to the node."""

    num_daily = 150

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="dali-pipes-fuzz-node-")
        self._server = NodeServer(Storage(Path(self._folder.name) / "node"), port=0)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self._session = requests.Session()
        self._url = f"{self._server.endpoint}/v1/objects/b/o?provider=ais&pid=p"
        self._ask("POST", f"{self._server.endpoint}/v1/buckets/b", json.dumps({"action": "create-bck"}).encode())
        self._is_old = False

    def seeds(self) -> Sequence[bytes]:
        listing = json.dumps({"action": "list", "value": {"prefix": "", "pagesize": 10}}).encode()
        path = b"/v1/objects/b/o?provider=ais&pid=p"
        return [
            _request(b"GET /v1/health"),
            _request(b"GET " + path, b"Range: bytes=5-14"),
            _request(b"HEAD " + path),
            _request(b"PUT " + path, body=NEW),
            _request(b"GET /v1/buckets/b?provider=ais", body=listing),
            _request(b"GET " + path) + _request(b"GET /v1/health"),
        ]

    def check(self, data: bytes) -> Answer:
        if not self._is_old:
            self._ask("PUT", self._url, OLD)
        self._is_old = True
        statuses = self._statuses(data)
        answer = self._session.get(self._url, timeout=ANSWER_S)
        # A mutant may be a valid request that deletes or replaces the object.
        if answer.status_code not in (200, 404) or (answer.status_code == 200 and not _was_sent(answer.content, data)):
            raise BrokenPromiseError(f"the object is {answer.status_code} {answer.content!r:.200} after {data!r:.500}")
        self._is_old = answer.content == OLD
        return "taken" if statuses and max(statuses) < 400 else "refused"

    def _statuses(self, data: bytes) -> list[int]:
        """Send bytes, and read answers until the node hangs up."""
        received = b""
        address = ("127.0.0.1", self._server.port)
        # The node may hang up on a request that it refuses.
        with socket.create_connection(address, timeout=ANSWER_S) as client, contextlib.suppress(ConnectionError):
            client.sendall(data)
            client.shutdown(socket.SHUT_WR)
            while block := client.recv(1 << 16):
                received += block
        return _parsed(received, data)

    def _ask(self, method: str, url: str, data: bytes) -> None:
        self._session.request(method, url, data=data, timeout=ANSWER_S).raise_for_status()

    def close(self) -> None:
        self._session.close()
        self._server.shutdown()
        self._server.server_close()
        self._folder.cleanup()


def _request(line: bytes, header: bytes = b"Accept: application/msgpack", *, body: bytes = b"") -> bytes:
    length = b"Content-Length: %d\r\n" % len(body) if body else b""
    return line + b" HTTP/1.1\r\nHost: localhost\r\n" + header + b"\r\n" + length + b"\r\n" + body


def _was_sent(content: bytes, data: bytes) -> bool:
    """Whether the object has its old bytes or bytes of the request."""
    return content == OLD or content in data


def _parsed(received: bytes, data: bytes) -> list[int]:
    """The statuses of the answers. h11 must accept each answer; only a truncated one is allowed to fail."""
    statuses: list[int] = []
    while received:
        connection = h11.Connection(h11.CLIENT)
        # The request's method decides whether an answer has a body. Answers to HEAD mutants are read until one fails.
        method = "HEAD" if data.startswith(b"HEAD") else "GET"
        connection.send(h11.Request(method=method, target="/", headers=[("Host", "h")]))
        connection.send(h11.EndOfMessage())
        connection.receive_data(received)
        connection.receive_data(b"")
        try:
            while not isinstance(event := connection.next_event(), h11.EndOfMessage | h11.ConnectionClosed):
                if isinstance(event, h11.Response):
                    statuses.append(event.status_code)
        except h11.RemoteProtocolError as exc:
            if b"HEAD" in data or statuses:
                return statuses
            raise BrokenPromiseError(f"the answer {received!r:.300} is not HTTP ({exc}), to {data!r:.500}") from exc
        received = connection.trailing_data[0]
    return statuses
