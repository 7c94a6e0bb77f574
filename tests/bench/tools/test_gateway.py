"""The gateway adds latency to each request, counts what it passes on, and leaves every answer as it is."""

import http.client
import http.server
import json
import socket
import threading
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import psutil
import pytest

from bench.tools.gateway import Gateway, read_counter
from dali_pipes.processes.programs import ServerProcess
from dali_pipes.store.cluster import embedded_node
from dali_pipes.store.cluster.ais import AisStore

DATA = bytes(range(256)) * 4096  # 1 MiB


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with embedded_node.start(tmp_path_factory.mktemp("server")) as started:
        store = AisStore(started.endpoint, "b")
        store.create()
        store.write("o", DATA)
        yield started


@pytest.fixture(scope="module")
def gateway(server: ServerProcess) -> Iterator[Gateway]:
    with Gateway(server.endpoint) as started:
        yield started


def ask(
    connection: http.client.HTTPConnection, path: str, method: str = "GET", **headers: str
) -> tuple[int, http.client.HTTPMessage, bytes]:
    connection.request(method, path, headers=headers)
    response = connection.getresponse()
    return response.status, response.headers, response.read()


def test_sdk_reads_through_it(gateway: Gateway) -> None:
    """Bytes, size, and a listing: the redirect to the target leads through the gateway again."""
    store = AisStore(gateway.endpoint, "b")
    before = read_counter(gateway.counter)
    assert store.read("o") == DATA
    passed = read_counter(gateway.counter) - before
    assert len(DATA) < passed < len(DATA) + 4096, "the object, and the heads of redirect and answer"
    assert store.size("o") == len(DATA)
    assert [entry.name for entry in store.list("")] == ["o"]


def test_answers_are_as_they_are(server: ServerProcess, gateway: Gateway) -> None:
    """Status, headers and body of ranges, HEADs and refusals are those of the server behind; connections are kept."""
    direct = http.client.HTTPConnection(urlsplit(server.endpoint).netloc)
    through = http.client.HTTPConnection(urlsplit(gateway.endpoint).netloc)
    _, headers, _ = ask(direct, "/v1/objects/b/o")
    target = headers["Location"].removeprefix(server.endpoint)
    for method, path, sent in (
        ("GET", target, {"Range": "bytes=1000-1999"}),
        ("GET", target, {}),
        ("HEAD", target, {}),
        ("GET", target.replace("/b/o", "/b/none"), {}),
        ("GET", "/v1/nonsense", {}),
    ):
        expected, found = ask(direct, path, method, **sent), ask(through, path, method, **sent)
        sock = through.sock
        assert found[0] == expected[0]
        if expected[0] < 400:
            assert found[2] == expected[2]
        else:  # it says from which port it was asked
            assert json.loads(found[2])["message"] == json.loads(expected[2])["message"]
        ignored = {"date", "connection"} | ({"content-length"} if expected[0] >= 400 else set())
        assert {(name.lower(), value) for name, value in found[1].items() if name.lower() not in ignored} == {
            (name.lower(), value) for name, value in expected[1].items() if name.lower() not in ignored
        }
    assert through.sock is sock
    assert server.endpoint not in str(ask(through, "/v1/objects/b/o")[1]), "a redirect leads through the gateway again"
    direct.close()
    through.close()


def test_latency_is_real_and_connections_do_not_wait_for_each_other(server: ServerProcess) -> None:
    """A request cannot be answered before the round trip is over; eight at a time do not take that long eight times."""
    latency_s = 0.1
    with Gateway(server.endpoint, latency_s=latency_s) as far:
        connection = http.client.HTTPConnection(urlsplit(far.endpoint).netloc)
        ask(connection, "/v1/health")
        took: list[float] = []

        def once() -> None:
            one = http.client.HTTPConnection(urlsplit(far.endpoint).netloc)
            started = time.monotonic()
            ask(one, "/v1/health")
            took.append(time.monotonic() - started)
            one.close()

        started = time.monotonic()
        ask(connection, "/v1/health")
        assert time.monotonic() - started >= latency_s
        threads = [threading.Thread(target=once) for _ in range(8)]
        began = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert min(took) >= 2 * latency_s
        assert time.monotonic() - began < sum(took), "they waited side by side"
        connection.close()


class _Odd(http.server.BaseHTTPRequestHandler):
    """Answers in the ways that AIStore's own server does not here: in chunks, until the end, without a body."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path == "/chunks":
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for piece in (b"first ", b"x" * 3000, b" last"):
                self.wfile.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
            self.wfile.write(b"0\r\n\r\n")
        elif self.path == "/until-close":
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"all there is")
            self.close_connection = True
        elif self.path == "/elsewhere":
            self.send_response(302)
            self.send_header("Location", "http://192.0.2.7:51081/v1/x?pid=p")
            self.send_header("Content-Length", "0")
            self.end_headers()
        else:
            self.send_response(204)
            self.end_headers()

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[::-1])

    def log_message(self, format: str, *args: object) -> None:
        del format, args


@pytest.fixture(scope="module")
def odd() -> Iterator[http.client.HTTPConnection]:
    """A connection to a gateway before such a server."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Odd) as upstream:
        threading.Thread(target=upstream.serve_forever, daemon=True).start()
        with Gateway(f"http://127.0.0.1:{upstream.server_address[1]}") as started:
            yield http.client.HTTPConnection(urlsplit(started.endpoint).netloc)
        upstream.shutdown()


def test_bodies_of_every_kind_pass(odd: http.client.HTTPConnection) -> None:
    """In chunks, none at all, one that is sent there, and one until the connection ends."""
    assert ask(odd, "/chunks")[2] == b"first " + b"x" * 3000 + b" last"
    assert ask(odd, "/none")[0] == 204
    odd.request("PUT", "/o", body=b"abc")
    assert odd.getresponse().read() == b"cba"
    assert ask(odd, "/until-close")[2] == b"all there is"


def test_a_target_elsewhere_gets_a_listener_of_its_own(odd: http.client.HTTPConnection) -> None:
    """A cluster's proxy names its targets: each of them is reached through here, the query kept."""
    location = urlsplit(ask(odd, "/elsewhere")[1]["Location"])
    assert location.hostname == "127.0.0.1"
    assert location.port != odd.port
    assert f"{location.path}?{location.query}" == "/v1/x?pid=p"
    assert urlsplit(ask(odd, "/elsewhere")[1]["Location"]).netloc == location.netloc


def test_no_server_behind_is_a_bad_gateway() -> None:
    """502, and the next request is answered, too."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with Gateway(f"http://127.0.0.1:{port}") as started:
        connection = http.client.HTTPConnection(urlsplit(started.endpoint).netloc)
        assert [ask(connection, "/v1/health")[0] for _ in range(2)] == [502, 502]
        connection.close()


def test_gateway_ends_when_closed(server: ServerProcess) -> None:
    """Nothing of it is left, neither process nor file."""
    started = Gateway(server.endpoint)
    assert psutil.pid_exists(started.pid)
    started.close()
    started.close()
    assert not psutil.pid_exists(started.pid)
    assert not started.counter.exists()


@pytest.mark.parametrize(
    ("endpoint", "message"),
    [
        ("https://ais:51080", "got the endpoint 'https://ais:51080'; pass --direct"),
        ("ais:51080", "got the endpoint 'ais:51080'"),
    ],
)
def test_endpoint_that_cannot_be_read_is_refused_first(endpoint: str, message: str) -> None:
    """Before a process is started."""
    with pytest.raises(ValueError, match=message):
        Gateway(endpoint)
