"""The benchmarks' server answers as AIStore does, to clients that know nothing of it, and can be slowed."""

import http.client
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
import xxhash

import bench.tools.object_server
from bench.tools.object_server import ObjectServer
from bench.tools.processes import cpu_s_of
from dali_pipes.errors import StoreError
from dali_pipes.store.cluster.ais import AisStore, ais_client
from prep.embedded.server import NodeServer
from prep.embedded.storage import Storage

DATA = bytes(range(256)) * 4096  # 1 MiB


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectServer]:
    with ObjectServer(tmp_path_factory.mktemp("server")) as started:
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


def test_sdk_reads_through_it(server: ObjectServer) -> None:
    """The SDK's own client: the object's bytes, its size by HEAD, and a listing with checksums."""
    assert ais_client(server.endpoint).bucket("b").object("o").get_reader().read_all() == DATA
    store = AisStore(server.endpoint, "b")
    assert store.size("o") == len(DATA)
    assert [(entry.name, entry.checksum) for entry in store.list("")] == [("o", f"{xxhash.xxh64_intdigest(DATA):016x}")]


def test_get_redirects_to_the_target_and_keeps_the_connection(server: ObjectServer) -> None:
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


def test_latency_is_slept_before_each_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proxy's answer and the target's each wait once, on a connection that is kept, too."""
    slept: list[float] = []
    monkeypatch.setattr(bench.tools.object_server.time, "sleep", slept.append)
    delay = bench.tools.object_server._delay(0.02)
    with Storage(tmp_path) as storage, NodeServer(storage, port=0, before_request=delay) as node:
        thread = threading.Thread(target=node.serve_forever, daemon=True)
        thread.start()
        storage.create_bucket("b")
        storage.write("b", "o", [b"bytes"])
        connection = http.client.HTTPConnection("127.0.0.1", node.port)
        _, headers, _ = ask(connection, "/v1/objects/b/o")
        assert slept == [0.02]
        assert ask(connection, headers["Location"].removeprefix(node.endpoint))[2] == b"bytes"
        assert slept == [0.02, 0.02]
        connection.close()
        node.shutdown()


def test_slowed_server_gives_the_same_bytes(server: ObjectServer, tmp_path: Path) -> None:
    """Two servers over one folder, one of them slowed, as `bench windows` has them."""
    with ObjectServer(tmp_path) as fast, ObjectServer(tmp_path, latency_s=0.001) as slow:
        store = AisStore(fast.endpoint, "b")
        store.create()
        store.write("o", DATA)
        assert AisStore(slow.endpoint, "b").read("o") == DATA


def test_server_counts_its_cpu_and_ends_when_closed(tmp_path: Path) -> None:
    """CPU seconds are those of that process, and nothing of it is left."""
    server = ObjectServer(tmp_path)
    assert cpu_s_of(server.pid) > 0
    assert psutil.pid_exists(server.pid)
    server.close()
    server.close()
    assert not psutil.pid_exists(server.pid)


def test_server_that_cannot_start_is_named(tmp_path: Path) -> None:
    """A file where the folder should be."""
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"server over '.*/file' did not start, exit status 1"):
        ObjectServer(tmp_path / "file")
