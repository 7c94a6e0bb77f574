"""Answers of a server, and requests to the embedded node.

A fetch gives the right bytes or an error of ours, and the next answer is not poisoned. The node answers in HTTP or
hangs up, goes on, and stores nothing that was not sent.
"""

import json
import random
import socket
import tempfile
import threading
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from zlib import crc32

import h11
import msgspec
import requests
import xxhash

from dali_pipes.cache.extents import Extent
from dali_pipes.errors import PipesError
from dali_pipes.fetch.fetcher import Wanted
from dali_pipes.store.cluster import ais
from dali_pipes.store.cluster.access import ClusterAccess
from dali_pipes.store.cluster.ais import AisStore
from dali_pipes.store.cluster.objects import StoredObjects
from dali_pipes.store.http.objects import ObjectFetcher, RetryPolicy
from dali_pipes.store.patience import Patience, use_patience
from prep.embedded.server import NodeServer
from prep.embedded.storage import Storage
from tests.fuzz.target import Answer, BrokenPromiseError, Target
from tests.servers.scripted import ScriptedServer, Visit

BODY = random.Random(3).randbytes(1500)
LOCATION = "/v1/objects/b/o?elsewhere=1"


def object_answers() -> Sequence[bytes]:
    """Answers to a GET of an object whose bytes are `BODY`: the object, redirects, a server that is busy."""
    length = b"Content-Length: %d\r\n" % len(BODY)
    chunks = b"".join(b"%x;a=b\r\n%b\r\n" % (len(piece), piece) for piece in (BODY[:700], BODY[700:1499], BODY[1499:]))
    chunked = b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\nX-Trailer: y\r\n\r\n"
    checksum = b"Ais-Checksum-Type: md5\r\nAis-Checksum-Value: 0123456789abcdef0123456789abcdef\r\nAis-Version: 7\r\n"
    error = b'{"status": 503, "message": "ais://b/o is busy", "method": "GET"}'
    return [
        b"HTTP/1.1 200 OK\r\n" + length + b"\r\n" + BODY,
        b"HTTP/1.1 200 OK\r\nDate: Sun, 22 Nov 2026 14:24:02 GMT\r\nConnection: close\r\n" + length + b"\r\n" + BODY,
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.1 200 OK\r\n" + chunked,
        b"HTTP/1.1 200 OK\r\n" + chunked,
        b"HTTP/1.1 200 OK\r\n\r\n" + BODY,
        b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nX: folded\r\n over lines\r\n" + length + b"\r\n" + BODY,
        b"HTTP/1.1 307 Temporary Redirect\r\nLocation: " + LOCATION.encode() + b"\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 301 Moved\r\nLocation: " + LOCATION.encode() + b"\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 503 Busy\r\nContent-Length: %d\r\n\r\n%b" % (len(error), error),
        b"HTTP/1.1 503 Busy\r\nHdr-Error: starting\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 429 Slow down\r\nRetry-After: 0\r\nContent-Range: bytes */1500\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + checksum.replace(b"md5", b"unknown") + length + b"\r\n" + BODY,
    ]


def listing_answers() -> Sequence[bytes]:
    """Answers to a listing with `entry_names`, in one page."""
    entries = [{"n": name, "s": 5, "cs": "0123456789abcdef"} for name in entry_names()]
    body = msgspec.msgpack.encode({"UUID": "u", "ContinuationToken": "", "Flags": 0, "Entries": entries})
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/msgpack\r\n"
    return [
        head + b"Content-Length: %d\r\n\r\n" % len(body) + body,
        head + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body),
    ]


def entry_names() -> Sequence[str]:
    return [f"a/{number:04d}.tar" for number in range(9)]


# An answer that ends too early, on a connection that stays open, costs this time.
# More than a busy machine needs to answer.
SILENCE_S = 0.5
PATIENCE = Patience(patience_s=2.0, longest_pause_s=0.001)


class _Answers(Target):
    """A server whose next answer is the input, in pieces; ``_honest`` answers all other requests."""

    def __init__(self) -> None:
        self._input: bytes | None = None
        self._is_sent = threading.Event()
        self._server = ScriptedServer(self._answer, None)

    def close(self) -> None:
        self._server.close()

    def _serve_next(self, data: bytes) -> None:
        self._is_sent.clear()
        self._input = data

    def _answer(self, visit: Visit) -> None:
        self._server.requests.clear()
        data, self._input = self._input, None
        if data is None:
            visit.send(self._honest(visit.request))
            return
        try:
            draw = crc32(data)
            step = (len(data), 1 + draw % 700, 1 + draw % 7)[draw % 3] or 1
            for start in range(0, len(data), max(step, len(data) // 300)):
                visit.send(data[start : start + max(step, len(data) // 300)])
            if draw % 16:  # a few connections stay open
                visit.hang_up()
        finally:
            self._is_sent.set()

    @abstractmethod
    def _honest(self, request: bytes) -> bytes:
        """The right answer to a request."""


class ObjectAnswers(_Answers):
    """The fetch client."""

    def __init__(self) -> None:
        super().__init__()
        source = StoredObjects(ClusterAccess(endpoint=self._server.endpoint), "b")
        retry = RetryPolicy(attempts=2, max_broken=4, silence_s=SILENCE_S, connect_timeout_s=SILENCE_S)
        self._fetcher = ObjectFetcher(source, retry=retry, patience=PATIENCE)
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 (closed by close)
        self._wanted = Wanted("o", Extent(self._file.fileno(), 0, len(BODY)), xxhash.xxh64_intdigest(BODY))

    def close(self) -> None:
        self._fetcher.close()
        self._file.close()
        super().close()

    def seeds(self) -> Sequence[bytes]:
        return object_answers()

    def check(self, data: bytes) -> Answer:
        self._serve_next(data)
        try:
            self._fetch()
        except PipesError:
            result: Answer = "refused"
        else:
            result = "taken"
        if not self._is_sent.wait(30):
            raise BrokenPromiseError("the answer was not read, nor its connection closed")
        self._fetch()  # from an honest server, on the same connection if it is kept
        return result

    def _fetch(self) -> None:
        self._wanted.extent.write(bytes(len(BODY)), 0)
        if not self._fetcher.fetch([self._wanted]) or self._wanted.extent.read(0, len(BODY)) != BODY:
            raise BrokenPromiseError("other bytes were delivered")

    def _honest(self, request: bytes) -> bytes:
        asked = request.partition(b"Range: bytes=")[2].partition(b"\r\n")[0]
        if not asked:
            return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(BODY), BODY)
        start, last = (int(number) for number in asked.split(b"-"))
        place = b"Content-Range: bytes %d-%d/%d\r\n" % (start, last, len(BODY))
        body = BODY[start : last + 1]
        return b"HTTP/1.1 206 Partial Content\r\n%bContent-Length: %d\r\n\r\n%b" % (place, len(body), body)


class ListingAnswers(_Answers):
    """What the SDK reads."""

    def __init__(self) -> None:
        super().__init__()
        ais.SILENCE_S = SILENCE_S
        with use_patience(PATIENCE):
            self._store = AisStore(self._server.endpoint, "b")

    def seeds(self) -> Sequence[bytes]:
        return listing_answers()

    def check(self, data: bytes) -> Answer:
        self._serve_next(data)
        try:
            entries = self._store.list("a/")
        except PipesError:
            return "refused"
        for entry in entries:
            if not entry.name or entry.size < 0:
                raise BrokenPromiseError(f"an entry that cannot be one: {entry}")
        return "taken"

    def _honest(self, request: bytes) -> bytes:
        return listing_answers()[0]


# The server answers at once; the client says that it sends no more.
ANSWER_S = 20.0
OLD = b"0123456789" * 20
NEW = b"abcdefghij" * 30


class NodeRequests(Target):
    """The node's side of HTTP."""

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
        # A mutant may be a request that deletes or replaces the object, as its sender says.
        if answer.status_code not in (200, 404) or (answer.status_code == 200 and not _was_sent(answer.content, data)):
            raise BrokenPromiseError(f"the object is {answer.status_code} {answer.content!r:.200} after {data!r:.500}")
        self._is_old = answer.content == OLD
        return "taken" if statuses and max(statuses) < 400 else "refused"

    def _statuses(self, data: bytes) -> list[int]:
        """Send bytes, and read answers until the node hangs up."""
        received = b""
        with socket.create_connection(("127.0.0.1", self._server.port), timeout=ANSWER_S) as client:
            try:
                client.sendall(data)
                client.shutdown(socket.SHUT_WR)
                while block := client.recv(1 << 16):
                    received += block
            except ConnectionError:
                pass  # it hung up on a request that it refused
        return _parsed(received, data)

    def _ask(self, method: str, url: str, data: bytes) -> None:
        self._session.request(method, url, data=data, timeout=ANSWER_S).raise_for_status()

    def close(self) -> None:
        self._session.close()
        self._server.shutdown()
        self._server.server_close()
        self._folder.cleanup()


def _request(line: bytes, header: bytes = b"Accept: */*", *, body: bytes = b"") -> bytes:
    length = b"Content-Length: %d\r\n" % len(body) if body else b""
    return line + b" HTTP/1.1\r\nHost: localhost\r\n" + header + b"\r\n" + length + b"\r\n" + body


def _was_sent(content: bytes, data: bytes) -> bool:
    """Whether an object's bytes stand in a request."""
    return content == OLD or content in data


def _parsed(received: bytes, data: bytes) -> list[int]:
    """The statuses of the answers; each must be HTTP by h11's rules, but for one that was cut off."""
    statuses: list[int] = []
    while received:
        connection = h11.Connection(h11.CLIENT)
        # What was asked decides whether an answer has a body; mutants of HEAD are read until they fail.
        connection.send(
            h11.Request(method="HEAD" if data.startswith(b"HEAD") else "GET", target="/", headers=[("Host", "h")])
        )
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
