"""The embedded node answers as AIStore does, to clients that know nothing of it, and can be slowed."""

import http.client
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
import xxhash

from dali_pipes.processes.programs import ServerProcess
from dali_pipes.store.cluster.ais import AisStore
from dali_pipes.store.cluster.client import ais_client
from dali_pipes.store.cluster.embedded_node import start

DATA = bytes(range(256)) * 4096  # 1 MiB


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with start(tmp_path_factory.mktemp("server")) as started:
        store = AisStore(started.endpoint, "b")
        store.create()
        store.write("o", DATA)
        yield started


def ask(
    connection: http.client.HTTPConnection, path: str, **headers: str
) -> tuple[int, http.client.HTTPMessage, bytes]:
    connection.request("GET", path, headers=headers)
    response = connection.getresponse()
    return response.status, response.headers, response.read()


def test_sdk_reads_through_it(server: ServerProcess) -> None:
    """The SDK's own client: the object's bytes, its size by HEAD, and a listing with checksums."""
    assert ais_client(server.endpoint).bucket("b").object("o").get_reader().read_all() == DATA
    store = AisStore(server.endpoint, "b")
    assert store.size("o") == len(DATA)
    assert [(entry.name, entry.checksum) for entry in store.list("")] == [("o", f"{xxhash.xxh64_intdigest(DATA):016x}")]


def test_get_redirects_to_the_target_and_keeps_the_connection(server: ServerProcess) -> None:
    """301 to a URL of the same address with the proxy's mark; then the body with AIStore's headers; one connection."""
    connection = http.client.HTTPConnection(urlsplit(server.endpoint).netloc)
    status, headers, _ = ask(connection, "/v1/objects/b/o")
    socket = connection.sock
    assert status == 301
    target = urlsplit(headers["Location"])
    assert target.netloc == urlsplit(server.endpoint).netloc
    assert target.query.startswith("pid=")
    status, headers, body = ask(connection, f"{target.path}?{target.query}")
    assert (status, body) == (200, DATA)
    assert headers["ais-checksum-type"] == "xxhash2"
    assert headers["ais-checksum-value"] == f"{xxhash.xxh64_intdigest(DATA):016x}"
    assert headers["ais-version"] == "1"
    status, headers, body = ask(connection, f"{target.path}?{target.query}", Range="bytes=1000-1999")
    assert (status, body) == (206, DATA[1000:2000])
    assert headers["content-range"] == f"bytes 1000-1999/{len(DATA)}"
    assert connection.sock is socket
    connection.close()


def test_latency_is_slept_before_each_request(tmp_path: Path) -> None:
    """The proxy's answer and the target's each wait once, on a connection that is kept, too."""
    latency_s = 0.1
    with start(tmp_path, latency_s=latency_s) as node:
        store = AisStore(node.endpoint, "b")
        store.create()
        store.write("o", b"bytes")
        connection = http.client.HTTPConnection(urlsplit(node.endpoint).netloc)
        started = time.monotonic()
        _, headers, _ = ask(connection, "/v1/objects/b/o")
        assert time.monotonic() - started >= latency_s
        assert ask(connection, headers["Location"].removeprefix(node.endpoint))[2] == b"bytes"
        assert time.monotonic() - started >= 2 * latency_s
        connection.close()


def test_slowed_node_gives_the_same_bytes(tmp_path: Path) -> None:
    """Two nodes over one folder, one of them slowed, as `bench windows` has them."""
    with start(tmp_path) as fast, start(tmp_path, latency_s=0.001) as slow:
        store = AisStore(fast.endpoint, "b")
        store.create()
        store.write("o", DATA)
        assert AisStore(slow.endpoint, "b").read("o") == DATA


def test_process_ends_when_closed(tmp_path: Path) -> None:
    node = start(tmp_path)
    assert psutil.pid_exists(node.pid)
    node.close()
    assert not psutil.pid_exists(node.pid)
