"""Test the embedded node over plain HTTP: redirects, open and broken connections, harmful names and bodies."""

import http.client
import json
import queue
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from prep.embedded.connection import NodeConnection
from prep.embedded.server import NodeServer
from tests.prep.embedded.conftest import node_server
from tests.programs import wait_until

A = "/v1/objects/b/a?pid=p"
HALF_A_BODY = b"PUT /v1/objects/b/a?pid=p HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\n\r\nda"


class Raw:
    """A connection to a node that stays open."""

    def __init__(self, node: NodeServer) -> None:
        self.port = node.port
        self.connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)

    def ask(
        self, method: str, path: str, body: object = None, headers: dict[str, str] | None = None
    ) -> tuple[http.client.HTTPResponse, bytes]:
        self.connection.request(method, path, body, headers or {})  # type: ignore[arg-type]
        response = self.connection.getresponse()
        return response, response.read()

    def socket(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=60)

    def send(self, request: str) -> bytes:
        """Send bytes, and return all that the node answers until it closes the connection."""
        with self.socket() as client:
            client.sendall(request.encode("latin-1"))
            client.shutdown(socket.SHUT_WR)
            return client.makefile("rb").read()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[NodeServer, Path]]:
    """A node of this module with the bucket ``b``, and its folder."""
    folder = tmp_path_factory.mktemp("http")
    with node_server(folder) as server:
        server.storage.create_bucket("b")
        yield server, folder


@pytest.fixture
def folder(served: tuple[NodeServer, Path]) -> Path:
    return served[1]


@pytest.fixture
def raw(served: tuple[NodeServer, Path]) -> Raw:
    """A connection to the node, whose bucket ``b`` has the object ``a``."""
    served[0].storage.write("b", "a", [b"0123456789"])
    return Raw(served[0])


def test_redirect_spares_the_body_of_a_client_that_asks_first(raw: Raw) -> None:
    """With ``Expect: 100-continue`` the proxy redirects without reading the body, and the target reads it."""
    headers = "Host: 127.0.0.1\r\nExpect: 100-continue\r\nContent-Length: 3\r\n"
    head = f"PUT /v1/objects/b/c?provider=ais{{}} HTTP/1.1\r\n{headers}\r\n"
    with raw.socket() as proxy:
        proxy.sendall(head.format("").encode())
        assert proxy.makefile("rb").read().startswith(b"HTTP/1.1 307 ")  # read to the end: it closes
    with raw.socket() as target:
        target.sendall(head.format("&pid=p").encode())
        answers = target.makefile("rb")
        assert answers.readline() == b"HTTP/1.1 100 Continue\r\n"
        target.sendall(b"abc")
        answers.readline()
        assert answers.readline().startswith(b"HTTP/1.1 200 ")
    assert raw.ask("GET", "/v1/objects/b/c?provider=ais&pid=p")[1] == b"abc"


def test_body_in_chunks_is_refused(raw: Raw) -> None:
    """No client of the node sends one; nothing is stored, and what follows is not taken for a request."""
    chunks = "3\r\nabc\r\n0\r\n\r\nDELETE /v1/objects/b/a?pid=p HTTP/1.1\r\nHost: localhost\r\n\r\n"
    for length in ("", "Content-Length: 3\r\n"):
        head = f"PUT /v1/objects/b/a?pid=p HTTP/1.1\r\nHost: localhost\r\n{length}Transfer-Encoding: chunked\r\n\r\n"
        answer = raw.send(head + chunks)
        assert answer.startswith(b"HTTP/1.1 411 ")
        assert answer.count(b"HTTP/1.1 ") == 1
    assert raw.ask("GET", A)[1] == b"0123456789"


@pytest.mark.parametrize(
    ("head", "status"),
    [
        ("GET  /v1/health extra HTTP/1.1\r\n\r\n", 400),
        ("GET /v1/health HTTP/1.1\r\nHost: evil.example:80\r\n\r\n", 403),  # DNS rebinding to this node
        ("\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 a TLS client's first bytes\r\n\r\n", 400),
        ("PUT /v1/objects/b/a?pid=p HTTP/1.1\r\nContent-Length: 3\r\nContent-Length: 8\r\n\r\nabcdefgh", 400),
        ("PUT /v1/objects/b/a?pid=p HTTP/1.1\r\nContent-Length: 0x3\r\n\r\nabc", 400),
        ("PUT /v1/objects/b/a?pid=p HTTP/1.1\r\nContent-Length: -1\r\n\r\nabc", 400),
        (f"PUT /v1/objects/b/a?pid=p HTTP/1.1\r\nContent-Length: {'9' * 5000}\r\n\r\nabc", 400),
        ("GET /v1/health HTTP/1.1\r\nHost: localhost\r\nOrigin: http://evil.example\r\n\r\n", 403),  # a web page
        ("GET /v1/health HTTP/1.1\r\nHost: localhost\r\nSec-Fetch-Site: cross-site\r\n\r\n", 403),
    ],
)
def test_request_that_no_client_of_ours_sends_is_refused(raw: Raw, head: str, status: int) -> None:
    assert raw.send(head).startswith(f"HTTP/1.1 {status} ".encode())
    assert raw.ask("GET", A)[1] == b"0123456789"


def test_line_ends_of_the_client_make_no_headers(raw: Raw) -> None:
    path = "/v1/objects/b/x%0D%0AEvil:%20yes%0D%0A%0D%0Abody?pid=p"
    raw.ask("PUT", path, b"x")
    for method in ("HEAD", "GET"):
        response, _ = raw.ask(method, path)
        assert (response.status, response.headers["Evil"]) == (200, None)


def test_name_that_leads_elsewhere_is_refused(raw: Raw, folder: Path) -> None:
    """Proxy and target answer 400; nothing is created or destroyed outside the buckets' folder."""
    before = sorted(folder.rglob("*"))
    for name in ("../x", "..%2Fx", "/x", "a//b", "./x", "x/", "%00", "%FF", "y" * 1025):
        for query in ("provider=ais", "provider=ais&pid=p"):
            for method in ("PUT", "GET", "DELETE"):
                response, body = raw.ask(method, f"/v1/objects/b/{name}?{query}", b"x" if method == "PUT" else None)
                assert response.status == 400, body
    for name in ("..", ".", "%2E%2E", "a%2Fb", "%00"):
        for method, action in (("POST", "create-bck"), ("DELETE", "destroy-bck")):
            message = json.dumps({"action": action})
            assert raw.ask(method, f"/v1/buckets/{name}?provider=ais", message)[0].status >= 400
        assert raw.ask("GET", f"/v1/objects/{name}/a?provider=ais&pid=p")[0].status >= 400
    assert sorted(folder.rglob("*")) == before


def test_connection_without_a_request_is_closed_but_not_a_slow_one(tmp_path: Path) -> None:
    """The node closes an idle connection, as AIS does, so clients must cope with it; a body may pause longer."""
    seen: queue.Queue[NodeConnection] = queue.Queue()

    def before(handler: NodeConnection) -> None:
        handler.timeout = 0.1
        seen.put(handler)

    with node_server(tmp_path, before_request=before) as node:
        node.storage.create_bucket("b")
        with socket.create_connection(("127.0.0.1", node.port), timeout=60) as client:
            client.sendall(HALF_A_BODY)
            handler = seen.get(timeout=60)
            wait_until(lambda: handler.connection.gettimeout() == NodeConnection.body_timeout_s)
            client.sendall(b"ta")
            assert client.makefile("rb").read().startswith(b"HTTP/1.1 200 "), "and then it is closed"
        assert node.storage.read("b", "a") == b"data"


@pytest.mark.parametrize("end", ["goes", "stops"])
def test_client_that_goes_or_stops_within_a_body_leaves_the_old_object(tmp_path: Path, end: str) -> None:
    """The node closes the connection of a client that stops. Half a body becomes no object and leaves no file."""

    def before(handler: NodeConnection) -> None:
        handler.body_timeout_s = 0.1 if end == "stops" else 300.0

    def half_written() -> list[Path]:
        return [path for path in tmp_path.glob("scratch/*/*") if path.name != ".lock"]

    with node_server(tmp_path, before_request=before) as node:
        node.storage.create_bucket("b")
        node.storage.write("b", "a", [b"old"])
        with socket.create_connection(("127.0.0.1", node.port), timeout=60) as client:
            client.sendall(HALF_A_BODY)
            if end == "stops":
                assert client.recv(1) == b""
            else:
                wait_until(lambda: len(half_written()) == 1)
        wait_until(lambda: half_written() == [])
        assert node.storage.read("b", "a") == b"old"


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/v1/objects/b/a?provider=ais&archpath=x", None),
        ("GET", "/v1/objects/b/a?provider=ais&namespace=%40other%23ns", None),
        ("POST", "/v1/buckets/b?provider=ais", {"action": "move-bck"}),
        ("PATCH", "/v1/buckets/b?provider=ais", {"action": "set-bprops", "value": {"versioning": {"enabled": False}}}),
        ("GET", "/v1/buckets/b?provider=ais", {"action": "list", "value": {"flags": "8"}}),  # into archives
    ],
)
def test_what_the_node_does_not_do_is_said(raw: Raw, method: str, path: str, body: dict[str, object] | None) -> None:
    """The answer is 501 and says what to do; the node does not do something else instead."""
    response, text = raw.ask(method, path, json.dumps(body) if body else None)
    assert response.status == 501
    assert "set AIS_ENDPOINT" in json.loads(text)["message"]


LIST = {"action": "list"}
SORT = {"input_bck": {"name": "b"}, "output_format": "o-{0..9}", "algorithm": {"kind": "shuffle"}}


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/v1/buckets/b", LIST | {"value": [1]}),
        ("PATCH", "/v1/buckets/b", {"action": "set-bprops", "value": 5}),
        ("POST", "/v1/buckets/c", {"action": "create-bck", "value": {"checksum": {"type": ["md5"]}}}),
        ("POST", "/v1/sort", SORT | {"output_format": f"o-{{0..{'9' * 5000}}}"}),
        ("POST", "/v1/sort", SORT | {"output_format": "../c/o-{0..9}"}),  # into another bucket
        ("POST", "/v1/buckets/c", {"action": "create-bck", "value": {"checksum": {"type": "\ud800"}}}),  # a surrogate
    ],
)
def test_message_of_wrong_types_or_measures_is_400(raw: Raw, method: str, path: str, body: dict[str, object]) -> None:
    response, text = raw.ask(method, f"{path}?provider=ais", json.dumps(body))
    assert response.status == 400, text
    assert json.loads(text)["message"]


def test_message_that_is_too_long_is_413(raw: Raw) -> None:
    assert raw.ask("POST", "/v1/buckets/c", b" " * (17 << 20))[0].status == 413


def test_node_listens_on_loopback_only(raw: Raw) -> None:
    """The port is closed at the machine's other addresses."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.2", raw.port))  # taken, if the node had bound to all addresses


@pytest.mark.parametrize(
    ("method", "path", "status", "text"),
    [
        ("HEAD", "/v1/buckets/b?bsumm_remote=true", 501, ""),
        ("DELETE", "/v1/sort/abort?uuid=none", 404, "dsort job none does not exist"),
        ("PATCH", "/v1/sort", 501, "does not do that"),
    ],
)
def test_what_the_node_does_not_do_is_refused(raw: Raw, method: str, path: str, status: int, text: str) -> None:
    response, body = raw.ask(method, path)
    assert (response.status, text in body.decode()) == (status, True), body
