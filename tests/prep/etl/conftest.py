"""Shards of text, a node that may run transforms, and a server that gives one answer."""

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from dali_pipes.store.cluster import embedded_node
from dali_pipes.store.cluster.ais import AisStore
from dali_pipes.store.cluster.embedded_node import ALLOW_ETL
from tests.shards import tar_bytes


def make_shard(samples: Mapping[str, Mapping[str, bytes]]) -> bytes:
    members = {f"{key}.{name}": data for key, components in samples.items() for name, data in components.items()}
    return tar_bytes(members, mtime=1234, uname="somebody")


def words(first: int = 0, count: int = 3) -> bytes:
    return make_shard({f"d/{n:03d}": {"txt": b"word %d" % n, "cls": b"%d" % n} for n in range(first, first + count)})


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Two shards of text and a class table."""
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "samples-000000.tar").write_bytes(words())
    (folder / "samples-000001.tar").write_bytes(words(3, 2))
    (folder / "samples-classes.json").write_text('{"0": "zero"}')
    return folder


@pytest.fixture(scope="module")
def etl_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An embedded node that may run transforms."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ALLOW_ETL, "1")
        with embedded_node.start(tmp_path_factory.mktemp("etl")) as running:
            yield running.endpoint


@pytest.fixture
def source(etl_node: str, shards: Path, request: pytest.FixtureRequest) -> AisStore:
    """The shards in a bucket of that node, beside an object that is not a shard."""
    store = AisStore(etl_node, f"b{abs(hash(request.node.nodeid)):x}")
    store.create()
    for path in shards.iterdir():
        store.write(path.name, path.read_bytes())
    store.write("samples-manifest.safetensors", b"no tar")
    return store


@contextmanager
def stub(status: int, message: dict[str, object]) -> Iterator[tuple[str, list[bytes]]]:
    """A server that answers every request so, and the bodies that it got."""
    got: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            got.append(self.rfile.read(int(self.headers.get("Content-Length", 0))))
            body = json.dumps(message).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = do_PUT  # noqa: N815  # http.server's names

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}", got
        server.shutdown()
