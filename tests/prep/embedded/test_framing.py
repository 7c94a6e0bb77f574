"""Test the embedded node with requests that break HTTP's rules, or that never end."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dali_pipes.processes.programs import ServerProcess
from prep.embedded.connection import NodeConnection
from prep.embedded.server import NodeServer
from prep.embedded.storage import Storage
from tests.prep.embedded.test_http import Raw

PUT = "PUT /v1/objects/b/a?pid=p HTTP/1.1\r\nHost: localhost\r\n"


@pytest.fixture
def raw(node: ServerProcess) -> Raw:
    """A connection to a node that has the bucket ``b`` with the object ``a``."""
    raw = Raw(node)
    assert raw.ask("POST", "/v1/buckets/b", json.dumps({"action": "create-bck"}))[0].status == 200
    assert raw.ask("PUT", "/v1/objects/b/a?pid=p", b"0123456789")[0].status == 200
    return raw


def send(raw: Raw, request: str | bytes) -> bytes:
    """Send bytes, and return all that the node answers until it closes the connection."""
    with raw.socket() as client:
        client.sendall(request.encode() if isinstance(request, str) else request)
        client.shutdown(socket.SHUT_WR)
        return client.makefile("rb").read()


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        ("Transfer-Encoding: gzip, chunked\r\n", "3\r\nabc\r\n0\r\n\r\n", 501),
        ("Transfer-Encoding: chunked, gzip\r\n", "3\r\nabc\r\n0\r\n\r\n", 501),
        ("Transfer-Encoding: xchunked\r\n", "3\r\nabc\r\n0\r\n\r\n", 501),
        ("Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n", "0\r\n\r\n", 501),
        ("Transfer-Encoding: chunked\r\nContent-Length: 3\r\n", "3\r\nabc\r\n0\r\n\r\n", 400),
        ("Content-Length: 3\r\nContent-Length: 8\r\n", "abcdefgh", 400),
        ("Content-Length: 3, 8\r\n", "abcdefgh", 400),
        ("Content-Length: +3\r\n", "abc", 400),
        ("Content-Length: 0x3\r\n", "abc", 400),
        ("Content-Length : 3\r\n", "abc", 400),
        ("Content-Length: ٣\r\n", "abc", 400),  # a digit, but not one of HTTP's
        ("Host: 127.0.0.1\r\nContent-Length: 3\r\n", "abc", 400),  # a second one
        ("Transfer-Encoding: chunked\r\n", "-1\r\nabc\r\n0\r\n\r\n", 400),
        ("Transfer-Encoding: chunked\r\n", "3\r\nabcdefg\r\n0\r\n\r\n", 400),  # more than the chunk says
        ("Transfer-Encoding: chunked\r\n", "3\nabc\r\n0\r\n\r\n", 400),
        ("Transfer-Encoding: chunked\r\n", "0x3\r\nabc\r\n0\r\n\r\n", 400),
        ("Transfer-Encoding: chunked\r\n", f"{'f' * 21}\r\nabc\r\n0\r\n\r\n", 400),
        ("Transfer-Encoding: chunked\r\n", f"3;{'x' * 300_000}\r\nabc\r\n0\r\n\r\n", 400),
        ("Transfer-Encoding: chunked\r\n", "3\r\nabc\r\n0\r\n" + "X: y\r\n" * 50_000 + "\r\n", 400),  # trailers
    ],
)
def test_body_of_doubtful_length_is_refused_and_nothing_is_stored(
    raw: Raw, headers: str, body: str, status: int
) -> None:
    """The old object stays, and what follows is not taken for a request."""
    answer = send(raw, f"{PUT}{headers}\r\n{body}GET /v1/health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert answer.startswith(f"HTTP/1.1 {status} ".encode())
    assert answer.count(b"HTTP/1.1 ") == 1
    assert b"\r\nConnection: close\r\n" in answer
    assert raw.ask("GET", "/v1/objects/b/a?pid=p")[1] == b"0123456789"


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        ("GET /v1/health HTTP/1.1 \r\nHost: localhost\r\n\r\n", 400),
        ("GET  /v1/health HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        ("GET /v1/health HTTP/2.0\r\nHost: localhost\r\n\r\n", 505),
        ("GET /v1/health HTTP/0.9\r\nHost: localhost\r\n\r\n", 505),
        ("GET /v1/health\r\n\r\n", 400),
        ("GET /v1/health HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n", 400),
        ("GET /v1/health HTTP/1.1\r\nHost: localhost\r\nX\x00: y\r\n\r\n", 400),
        ("GET /v1/health HTTP/1.1\r\nHost: localhost\r\nX: a\rb\r\n\r\n", 400),
        ("GET /v1/health HTTP/1.1\r\n Host: localhost\r\n\r\n", 400),
        ("GET /v1/health HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (f"GET /v1/health HTTP/1.1\r\nHost: localhost\r\nX: {'y' * 100_000}\r\n\r\n", 431),
        ("\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 a TLS client's first bytes\r\n\r\n", 400),
    ],
)
def test_head_that_breaks_the_rules_is_refused(raw: Raw, request_line: str, status: int) -> None:
    assert send(raw, request_line.encode("latin-1")).startswith(f"HTTP/1.1 {status} ".encode())


@pytest.mark.parametrize("is_http_1_0", [False, True])
def test_requests_that_come_together_are_answered_in_order(raw: Raw, is_http_1_0: bool) -> None:
    """Bodies of either kind end where they say; an HTTP/1.0 client gets one answer."""
    version = "HTTP/1.0" if is_http_1_0 else "HTTP/1.1"
    put = PUT.replace("HTTP/1.1", version)
    answers = send(
        raw,
        f"{put}Content-Length: 3\r\n\r\nabcGET /v1/objects/b/a?pid=p {version}\r\nHost: localhost\r\n\r\n"
        f"{PUT}Transfer-Encoding: chunked\r\n\r\n2\r\nde\r\n0\r\nTrailer: x\r\n\r\n"
        "GET /v1/objects/b/a?pid=p HTTP/1.1\r\nHost: localhost\r\n\r\n",
    )
    assert answers.count(b"HTTP/1.1 200 OK\r\n") == (1 if is_http_1_0 else 4)
    if not is_http_1_0:
        assert b"\r\n\r\nabcHTTP/1.1 " in answers
        assert answers.endswith(b"\r\n\r\nde")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("HEAD", "/v1/objects/b/x%0D%0AEvil:%20yes%0D%0A%0D%0Abody?pid=p"),
        ("GET", "/v1/objects/b/x%0D%0AEvil:%20yes?pid=p"),
        ("HEAD", "/v1/buckets/b?bsumm_remote=true&uuid=x%0D%0AEvil:%20yes"),
    ],
)
def test_line_ends_of_the_client_make_no_headers(raw: Raw, method: str, path: str) -> None:
    raw.ask("PUT", path, b"x")
    response, _ = raw.ask(method, path)
    assert response.status == 200
    assert response.headers["Evil"] is None
    if method == "HEAD":
        values = [value for name, value in response.headers.items() if name in ("Ais-Name", "Ais-Xaction-Id")]
        assert [value.split("Evil")[0] for value in values] == ["x  "]


@pytest.mark.parametrize("name", ["фото/ä.tar", "日本.tar", "\U0001f600"])
def test_head_of_any_name_is_answered(raw: Raw, name: str) -> None:
    """In UTF-8, as AIS answers; refusals name it too."""
    from urllib.parse import quote

    path = f"/v1/objects/b/{quote(name)}?pid=p"
    missing, _ = raw.ask("HEAD", path)
    assert missing.status == 404
    assert json.loads(missing.headers["Hdr-Error"])["message"].endswith(f"ais://b/{name} does not exist")
    assert raw.ask("PUT", path, b"abc")[0].status == 200
    response, _ = raw.ask("HEAD", path)
    assert response.status == 200
    assert response.headers["Ais-Name"].encode("latin-1").decode() == name


def test_text_that_is_not_unicode_is_refused(raw: Raw) -> None:
    """JSON can hold half a character."""
    message = b'{"action": "create-bck", "value": {"checksum": {"type": "\\ud800"}}}'
    assert raw.ask("POST", "/v1/buckets/c", message)[0].status == 400
    assert raw.ask("GET", "/v1/health")[0].status == 200


def test_json_in_chunks_without_end_is_refused(raw: Raw) -> None:
    """The node stops at 16 MiB, as for a message that says its length."""
    with raw.socket() as client:
        client.sendall(PUT.replace("PUT /v1/objects/b/a", "POST /v1/buckets/c").encode())
        client.sendall(b"Transfer-Encoding: chunked\r\n\r\n")
        chunk = b"100000\r\n" + b" " * 0x100000 + b"\r\n"
        for _ in range(17):
            client.sendall(chunk)
        assert client.recv(100).startswith(b"HTTP/1.1 413 ")


# Clients that are slow


@pytest.fixture
def hasty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NodeServer]:
    """A node that waits shortly, and has the object ``b/a``."""
    monkeypatch.setattr(NodeConnection, "idle_s", 0.5)
    monkeypatch.setattr(NodeConnection, "per_s", 0.5)
    monkeypatch.setattr(NodeConnection, "min_bytes", 100)
    with Storage(tmp_path / "ais") as storage, NodeServer(storage, port=0) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        storage.create_bucket("b")
        storage.write("b", "a", [b"old"])
        yield running
        running.shutdown()


@pytest.mark.parametrize("framing", ["Content-Length: 1000\r\n", "Transfer-Encoding: chunked\r\n"])
def test_body_that_comes_too_slowly_is_refused(hasty: NodeServer, framing: str) -> None:
    """A byte now and then does not hold the connection for ever; the old object stays."""
    assert hasty.node is not None
    with socket.create_connection(("127.0.0.1", hasty.port), timeout=10) as client:
        client.sendall(f"{PUT}{framing}\r\n".encode())
        since_s = time.monotonic()
        client.settimeout(0.05)
        answer = b""
        while not answer and time.monotonic() - since_s < 10:
            client.sendall(b"1" if "Length" in framing else b"1\r\nx\r\n")
            try:
                answer = client.recv(1000)
            except TimeoutError:
                continue
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"too slowly" in answer
    assert hasty.node.storage.read("b", "a") == b"old"


def test_body_that_pauses_but_comes_fast_is_taken(hasty: NodeServer) -> None:
    with socket.create_connection(("127.0.0.1", hasty.port), timeout=10) as client:
        client.sendall(f"{PUT}Content-Length: 800\r\n\r\n".encode())
        for _ in range(4):
            client.sendall(b"x" * 200)
            time.sleep(0.3)
        assert client.recv(1000).startswith(b"HTTP/1.1 200 ")


def test_head_that_comes_byte_by_byte_is_cut_off(hasty: NodeServer) -> None:
    """The time is for the whole head, not for each piece of it."""
    with socket.create_connection(("127.0.0.1", hasty.port), timeout=0.05) as client:
        since_s = time.monotonic()
        data = None
        while data is None and time.monotonic() - since_s < 10:
            try:
                client.sendall(b"X")
                data = client.recv(100)
            except TimeoutError:
                continue
            except ConnectionError:
                data = b""
        assert data == b""
