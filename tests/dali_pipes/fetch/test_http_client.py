"""The HTTP client below all stores: which connections it uses again, and answers that come early."""

import contextlib
import itertools
import socket
import threading
from collections.abc import Iterator

import pytest

from dali_pipes.store.cluster.access import Proxies
from dali_pipes.store.http.client import HttpAccess, HttpClient, NoAnswerError
from dali_pipes.store.http.wire import StoppedError, parse_head
from tests.servers.scripted import Script, ScriptedServer, Visit, says, scripted

REDIRECT = b"HTTP/1.1 307 Go\r\nLocation: /there\r\nContent-Length: 0\r\n"


@contextlib.contextmanager
def client_of(script: Script) -> Iterator[tuple[ScriptedServer, HttpClient]]:
    with scripted(script) as server, contextlib.closing(HttpClient(HttpAccess(endpoint=server.endpoint))) as client:
        yield server, client


@contextlib.contextmanager
def early(*, is_reset: bool) -> Iterator[str]:
    """A server that answers a PUT before its body is read, and hangs up: politely, as Go's does, or with a reset."""

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = listener.accept()
                with sock:
                    sock.recv(1000)
                    sock.sendall(REDIRECT + b"Connection: close\r\n\r\n")
                    if not is_reset:
                        sock.shutdown(socket.SHUT_WR)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("is_reset", [False, True])
@pytest.mark.parametrize("is_stream", [False, True])
def test_answer_before_the_end_of_a_body_is_read(is_reset: bool, is_stream: bool) -> None:
    """AIStore's proxy redirects a PUT without reading its body: a large one breaks, and the redirect still counts."""
    data = bytes(20 << 20)
    body = iter([memoryview(data)]) if is_stream else data
    headers = [("Content-Length", str(len(data)))]
    with early(is_reset=is_reset) as endpoint, contextlib.closing(HttpClient(HttpAccess(endpoint=endpoint))) as client:
        answer = client.ask(f"{endpoint}/o", method="PUT", headers=headers, body=body)
        assert (answer.status, answer.headers.get("Location")) == (307, "/there")
        answer.close()


def test_connection_of_a_request_without_its_body_is_not_used_again() -> None:
    """The server may take the next request for the body that it still expects."""
    headers = [("Content-Length", "5"), ("Expect", "100-continue"), ("Connection", "close")]

    with client_of(lambda visit: visit.send(REDIRECT + b"\r\n")) as (server, client):
        for _ in range(2):
            with contextlib.closing(client.ask(f"{server.endpoint}/o", method="PUT", headers=headers)) as answer:
                assert answer.read_short(10) == b""
        assert server.num_connections == 2


@pytest.mark.parametrize("status", [b"204 No Content", b"304 Not Modified"])
def test_answer_that_has_no_body_is_not_waited_for(status: bytes) -> None:
    """Whatever its head says of one."""
    head = b"HTTP/1.1 %b\r\nTransfer-Encoding: chunked\r\n\r\n" % status
    with client_of(says(head)) as (server, client):
        answer = client.ask(f"{server.endpoint}/o")
        assert answer.read_short(10) == b""
        answer.close()


def test_spaces_in_a_head_cost_no_time() -> None:
    """60,000 of them once took three seconds, in which no other thread ran: 200 heads would take longer than a test."""
    head = b"HTTP/1.1 200 OK\r\nX: a%bb\r\nContent-Length: 0" % (b" " * 60_000)
    for _ in range(200):
        assert parse_head(head).length == 0


def test_name_that_no_resolver_takes_is_no_answer() -> None:
    client = HttpClient(HttpAccess(endpoint="http://a..b"))
    with pytest.raises(NoAnswerError, match="not the name of a host"):
        client.ask("http://a..b/o")


@pytest.mark.parametrize(
    ("location", "asked"),
    [
        ("{}?x=1", b"GET /?x=1 HTTP/1.1"),
        ("{}", b"GET / HTTP/1.1"),
        ("/y?a#part", b"GET /y?a HTTP/1.1"),  # a fragment is not for servers
    ],
)
def test_redirect_to_an_unusual_url_is_asked_for_correctly(location: str, asked: bytes) -> None:
    def script(visit: Visit) -> None:
        head = b"HTTP/1.1 307 Go\r\nLocation: %b\r\n" % location.format(visit.server.endpoint).encode()
        visit.send((b"HTTP/1.1 200 OK\r\n" if visit.number else head) + b"Content-Length: 0\r\n\r\n")

    with client_of(script) as (server, client):
        client.follow(f"{server.endpoint}/o").close()
        assert server.requests[1].partition(b"\r\n")[0] == asked


def test_connection_that_is_not_made_ends_when_the_thread_is_to_stop() -> None:
    """A host that drops packets: whoever closes a loader must not wait for all of its addresses."""
    with contextlib.ExitStack() as cleanup:
        full = cleanup.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(3):  # nobody accepts, so the kernel drops further requests for a connection
            waiting = cleanup.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        url = f"http://127.0.0.1:{full.getsockname()[1]}"
        client = cleanup.enter_context(contextlib.closing(HttpClient(HttpAccess(endpoint=url), connect_timeout_s=600)))
        answers = itertools.chain([False, False], itertools.repeat(True))
        with pytest.raises(StoppedError):
            client.ask(url, stopped=lambda: next(answers))


def test_a_proxy_that_is_named_twice_does_not_hide_the_next_one() -> None:
    proxies, asked = Proxies(("http://a", "http://a", "http://b")), []
    for _ in range(3):
        asked.append(proxies.current)
        proxies.turn_from(proxies.current)
    assert asked == ["http://a", "http://b", "http://a"]
