"""Objects that the tests of fetchers serve, break and compare."""

import contextlib
import json
import os
import random
import tempfile
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import requests
import xxhash

from dali_pipes.cache.extents import Extent
from dali_pipes.fetch.fetcher import Wanted
from dali_pipes.store.cluster.access import ClusterAccess
from dali_pipes.store.cluster.ais import AisStore
from dali_pipes.store.cluster.objects import StoredObjects
from dali_pipes.store.http.objects import ObjectFetcher, RetryPolicy
from dali_pipes.store.patience import Patience
from tests.servers.faulty import FaultyProxy

DATA = random.Random(0).randbytes(2_500_001)
OTHER = random.Random(1).randbytes(2_500_001)
PROMPT = RetryPolicy(silence_s=0.3, connect_timeout_s=1.0)
"""So that a test of many faults is over soon."""
BRIEF = Patience(patience_s=1.0, longest_pause_s=0.02)
SENDFILE_MARGIN = 1000  # bytes of the file around an extent


class Place:
    """A file with an extent in its middle."""

    def __init__(self, size: int = len(DATA)) -> None:
        self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 (the garbage collector closes it)
        self._file.write(b"\xaa" * (size + 2 * SENDFILE_MARGIN))
        self.extent = Extent(self._file.fileno(), SENDFILE_MARGIN, size)

    def holds(self, data: bytes) -> bool:
        """Whether these bytes lie there, and its neighbours are as they were."""
        margin = b"\xaa" * SENDFILE_MARGIN
        size = self.extent.size + 2 * SENDFILE_MARGIN
        return os.pread(self._file.fileno(), size + 1, 0) == margin + data + margin


def checksum(data: bytes) -> int:
    found: int = xxhash.xxh64_intdigest(data)
    return found


@contextlib.contextmanager
def fetching(
    endpoint: str, bucket: str, *, retry: RetryPolicy = PROMPT, patience: Patience = BRIEF, **access: Any
) -> Iterator[ObjectFetcher]:
    """A fetcher from a cluster; ``access`` are arguments of `ClusterAccess`, such as a token and certificates."""
    source = StoredObjects(ClusterAccess(endpoint=endpoint, **access), bucket)
    with ObjectFetcher(source, retry=retry, patience=patience) as fetcher:
        yield fetcher


def fetch_object(fetcher: ObjectFetcher, *, name: str = "a/x.tar", times: int = 1, num_connections: int = 1) -> None:
    """Fetch an object whose bytes are ``DATA``, and hold every byte against them."""
    place = Place()
    for _ in range(times):
        assert fetcher.fetch([Wanted(name, place.extent, checksum(DATA))], num_connections=num_connections)
    assert place.holds(DATA)


def fetch_through(proxy: FaultyProxy, store: AisStore, *, num_connections: int = 1, patience: Patience = BRIEF) -> None:
    """Fetch ``a/x.tar`` and hold every byte against what was written."""
    with fetching(proxy.endpoint, store.bucket, patience=patience) as fetcher:
        fetch_object(fetcher, num_connections=num_connections)


def fails(
    fetcher: ObjectFetcher,
    error: type[Exception],
    text: str,
    *,
    name: str = "a/x.tar",
    place: Place | None = None,
    num_connections: int = 1,
) -> str:
    """The text of the error that a fetch of ``DATA`` must raise."""
    place = place or Place()
    with pytest.raises(error, match=text) as raised:
        fetcher.fetch([Wanted(name, place.extent, checksum(DATA))], num_connections=num_connections)
    return str(raised.value)


def ranges_of(proxy: FaultyProxy) -> list[str | None]:
    """What each request at a target asked for."""
    return [seen.headers.get("Range") for seen in proxy.seen if not seen.is_entry]


def set_props(store: AisStore, props: dict[str, object]) -> None:
    message = json.dumps({"action": "set-bprops", "value": props})
    answer = requests.patch(f"{store.endpoint}/v1/buckets/{store.bucket}", data=message, timeout=10)
    answer.raise_for_status()


class Exchange(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: "Answering"

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", "0")))
        self.server.paths.append(self.path)
        self.server.ranges.append(self.headers.get("Range"))
        self.server.act(self)

    def say(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def say_chunked(self, body: bytes) -> None:
        self.send_response_only(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for start in range(0, len(body), 30_000):
            chunk = body[start : start + 30_000]
            self.wfile.write(f"{len(chunk):x};x=y\r\n".encode() + chunk + b"\r\n")
        self.wfile.write(b"0\r\nX-Trailer: z\r\n\r\n")

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


class Answering(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, act: Callable[[Exchange], None]) -> None:
        super().__init__(("127.0.0.1", 0), Exchange)
        self.act = act
        self.paths: list[str] = []
        self.ranges: list[str | None] = []
        self.endpoint = f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients hang up."""


@contextlib.contextmanager
def answering(act: Callable[[Exchange], None]) -> Iterator[Answering]:
    """A server whose every answer is ``act``'s."""
    with Answering(act) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
