"""Answers that no honest server sends: each is an error of ours, soon, and in little memory."""

import resource
import time
from collections.abc import Callable

import pytest

from dali_pipes.errors import StoreError
from dali_pipes.fetch.fetcher import Wanted
from dali_pipes.store.cloud.objects import CloudObjects
from dali_pipes.store.cluster.access import ClusterAccess
from dali_pipes.store.cluster.objects import StoredObjects
from dali_pipes.store.http.answers import ObjectRequest, ObjectSource
from dali_pipes.store.http.client import HttpAccess
from dali_pipes.store.http.objects import ObjectFetcher, RetryPolicy
from dali_pipes.store.http.wire import MIN_BYTES_PER_S
from dali_pipes.store.patience import Patience
from tests.dali_pipes.fetch.served import BRIEF, DATA, Place, checksum, fails, fetching
from tests.servers.scripted import Script, Visit, never_ends, says, scripted

ONCE = RetryPolicy(attempts=2, silence_s=0.5, connect_timeout_s=1.0)
SMALL = DATA[:1000]
OK = b"HTTP/1.1 200 OK\r\n"
MAX_MORE_KIB = 64 << 10
"""Memory that a hostile answer may cost."""
SOON_S = 10.0


def whole(body: bytes = SMALL, *, status: bytes = b"200 OK", more: bytes = b"") -> bytes:
    """A valid answer."""
    return b"HTTP/1.1 %b\r\n%bContent-Length: %d\r\n\r\n%b" % (status, more, len(body), body)


CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
LINES = "bytes of lines come before or between"
ATTACKS: list[tuple[str, Script, str]] = [
    ("100 Continue for ever", never_ends(b"", b"HTTP/1.1 100 Continue\r\n\r\n"), "more than 16 interim answers"),
    ("103 Early Hints for ever", never_ends(b"", b"HTTP/1.1 103 Hints\r\nLink: x\r\n\r\n"), "16 interim answers"),
    ("101 without a question", says(b"HTTP/1.1 101 Switching Protocols\r\n\r\n" + whole()), "not asked for"),
    ("a head without end", never_ends(OK, b"X-More: 1\r\n"), LINES),
    ("one field without end", never_ends(OK + b"X: ", b"a" * 1000), LINES),
    ("a status line without end", never_ends(b"HTTP/1.1 200 ", b"O" * 1000), LINES),
    ("a head in single bytes, slowly", never_ends(OK + b"X: ", b"a", 0.1), "bytes/s"),
    ("trailers without end", never_ends(CHUNKED + b"0\r\n", b"X-More: 1\r\n"), LINES),
    ("one trailer without end", never_ends(CHUNKED + b"0\r\nX: ", b"a" * 1000), LINES),
    ("an extension without end", never_ends(CHUNKED + b"5;", b"a" * 1000), LINES),
    ("an extension at each byte", never_ends(CHUNKED, b"1;%b\r\na\r\n" % (b"x" * 8000)), LINES),
    ("chunk size -1", says(CHUNKED + b"-1\r\n" + SMALL), "has no size"),
    ("chunk size +5", says(CHUNKED + b"+5\r\nabcde\r\n0\r\n\r\n"), "has no size"),
    ("chunk size 0x5", says(CHUNKED + b"0x5\r\nabcde\r\n0\r\n\r\n"), "has no size"),
    ("chunk size 1_0", says(CHUNKED + b"1_0\r\nabcde\r\n0\r\n\r\n"), "has no size"),
    ("chunk size of 17 digits", says(CHUNKED + b"1" + b"0" * 16 + b"\r\n" + SMALL), "has no size"),
    ("chunk size without digits", says(CHUNKED + b"\r\n" + SMALL), "has no size"),
    ("a chunk longer than its size", says(CHUNKED + b"3\r\nabcde\r\n0\r\n\r\n"), "longer than its size"),
    ("a chunk line with a line feed only", says(CHUNKED + b"5\nabcde\n0\n\n"), "carriage return"),
    ("Content-Length of 10,000 digits", says(OK + b"Content-Length: " + b"9" * 10_000 + b"\r\n\r\n"), "not one number"),
    ("Content-Length -1", says(OK + b"Content-Length: -1\r\n\r\n" + SMALL), "not one number"),
    ("Content-Length +1000", says(OK + b"Content-Length: +1000\r\n\r\n" + SMALL), "not one number"),
    ("Content-Length empty", says(OK + b"Content-Length: \r\n\r\n" + SMALL), "not one number"),
    ("Transfer-Encoding empty", says(whole(more=b"Transfer-Encoding:\r\n")), "other than 'chunked'"),
    ("Content-Length twice", says(OK + b"Content-Length: 1000\r\nContent-Length: 3\r\n\r\n" + SMALL), "not one number"),
    ("Content-Length and chunks", says(whole(more=b"Transfer-Encoding: chunked\r\n")), "both a Content-Length and"),
    ("gzip, chunked", says(OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n" + SMALL), "other than 'chunked'"),
    ("chunks twice", says(CHUNKED.replace(b"\r\n\r\n", b"\r\nTransfer-Encoding: chunked\r\n\r\n")), "other than"),
    ("chunks of HTTP/1.0", says(CHUNKED.replace(b"1.1", b"1.0") + b"0\r\n\r\n"), "other than 'chunked'"),
    ("line feeds only", says(whole().replace(b"\r\n", b"\n")), "carriage return"),
    ("a line feed in a head", never_ends(OK.replace(b"\r\n", b"\n"), b"X: 1\r\n"), "carriage return"),
    ("a space before the colon", says(whole(more=b"Content-Length : 3\r\n")), "a line that is not a field"),
    ("a carriage return in a field", says(whole(more=b"X: a\rContent-Length: 3\r\n")), "a line that is not a field"),
    ("a NUL in a field", says(whole(more=b"X: a\0b\r\n")), "a line that is not a field"),
    ("a fold before the first field", says(whole(more=b" X: a\r\n")), "a line that is not a field"),
    ("HTTP/0.9", says(b"<html>\r\n\r\n"), "does not speak HTTP/1.1"),
    ("status 600", says(whole(status=b"600 Odd")), "does not speak HTTP/1.1"),
    ("a redirect to itself", says(b"HTTP/1.1 307 Go\r\nLocation: /v1/objects/b/o\r\n\r\n"), "redirected 4 times"),
    ("a redirect to a password", says(whole(status=b"307 Go", more=b"Location: http://a:b@h/\r\n")), "URL of a host"),
    ("an error without end", never_ends(b"HTTP/1.1 404 No\r\n\r\n", b"x" * 1000), "404 xxxxxxx"),
    ("a body in single bytes", never_ends(OK + b"Content-Length: 1000\r\n\r\n", b"a", 0.1), "bytes/s"),
    ("a chunked body in single bytes", never_ends(CHUNKED, b"1\r\na\r\n", 0.1), "bytes/s"),
    ("an error in single bytes", never_ends(b"HTTP/1.1 404 No\r\n\r\n", b"x", 0.1), "bytes/s"),
    ("a redirect's body in single bytes", never_ends(b"HTTP/1.1 307 Go\r\nLocation: /\r\n\r\n", b"x", 0.1), "bytes/s"),
]


def cluster(endpoint: str) -> ObjectSource:
    return StoredObjects(ClusterAccess(endpoint=endpoint), "b")


def cloud(endpoint: str) -> ObjectSource:
    """Of S3, Google, Azure and web servers: they differ in the signature alone."""

    def ask_for(name: str) -> ObjectRequest:
        return ObjectRequest(f"{endpoint}/{name}")

    return CloudObjects(ask_for, locate=str, access=HttpAccess(endpoint=endpoint), service="S3")


# All stores read by one client: the other schemes need no more than a sample of the table.
CASES = [(*attack, cluster) for attack in ATTACKS] + [(*attack, cloud) for attack in ATTACKS[::6]]


@pytest.mark.parametrize(
    ("script", "text", "source"), [case[1:] for case in CASES], ids=[f"{case[0]}-{case[3].__name__}" for case in CASES]
)
def test_hostile_answer_is_an_error_soon_and_in_little_memory(
    script: Script, text: str, source: Callable[[str], ObjectSource]
) -> None:
    """No answer makes a fetch hang, grow, or raise another exception than ours, whatever the store."""
    before_kib, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    place = Place(len(SMALL))
    with scripted(script) as server, ObjectFetcher(source(server.endpoint), retry=ONCE, patience=BRIEF) as fetcher:
        fails(fetcher, StoreError, text, place=place)
        assert not server.num_endless
    assert time.monotonic() - started < SOON_S
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < MAX_MORE_KIB


def test_head_that_comes_too_slowly_is_a_wrong_answer() -> None:
    """A slow head counts as a slow body: the server is there, so the client does not wait for minutes."""
    script: Script = lambda visit: visit.send_slowly(whole(), pause_s=0.1)  # noqa: E731
    with (
        scripted(script) as server,
        fetching(server.endpoint, "b", retry=ONCE, patience=Patience(patience_s=60)) as fetcher,
    ):
        fails(fetcher, StoreError, "given up after 2 attempts .*bytes/s", place=Place(len(SMALL)))


@pytest.mark.parametrize(
    ("behind", "pause_s"),
    [
        (whole(b"SMUGGLED", status=b"404 SMUGGLED"), 0.0),  # comes with the body
        (whole(b"SMUGGLED", status=b"404 SMUGGLED"), 0.05),  # comes on the idle connection
        (b"\r\n", 0.0),
        (b"H", 0.05),
    ],
)
@pytest.mark.parametrize("is_chunked", [False, True])
def test_bytes_behind_a_body_are_not_the_next_answer(behind: bytes, pause_s: float, is_chunked: bool) -> None:
    """A connection with bytes that nobody asked for is closed; the next object comes on a new one."""
    answer = CHUNKED + b"3e8\r\n" + SMALL + b"\r\n0\r\n\r\n" if is_chunked else whole()

    def script(visit: Visit) -> None:
        if pause_s:
            visit.send(answer)
            time.sleep(pause_s)
            visit.send(behind)
        else:
            visit.send(answer + behind)

    with scripted(script) as server, fetching(server.endpoint, "b", retry=ONCE) as fetcher:
        for _ in range(3):
            place = Place(len(SMALL))
            assert fetcher.fetch([Wanted("o", place.extent, checksum(SMALL))])
            assert place.holds(SMALL)
            time.sleep(2 * pause_s)
        assert (server.num_connections, len(server.requests)) == (3, 3)


@pytest.mark.parametrize(
    "change",
    [
        lambda answer: answer.replace(b": ", b":"),
        lambda answer: answer.replace(b": ", b":\r\n  "),  # folded, as RFC 9112 lets a client read
        lambda answer: answer.replace(b"Content-Length", b"CONTENT-length"),
        lambda answer: b"HTTP/1.1 100 Continue\r\n\r\n" * 16 + answer,
        lambda answer: answer.replace(b"200 OK", b"200"),
        lambda answer: answer.replace(b"200 OK\r\n", b"200 OK\r\nX: " + b"x" * 60_000 + b"\r\n"),
        lambda _: CHUNKED + b"".join(b"1 ;a=b\r\n%c\r\n" % byte for byte in SMALL) + b"0\r\nX: y\r\nZ: \r\n\r\n",
    ],
)
def test_unusual_answers_that_are_valid_are_read(change: Callable[[bytes], bytes]) -> None:
    """The limits leave room for every honest server."""

    def script(visit: Visit) -> None:
        visit.send(change(whole()))

    with scripted(script) as server, fetching(server.endpoint, "b", retry=ONCE) as fetcher:
        for _ in range(2):
            place = Place(len(SMALL))
            assert fetcher.fetch([Wanted("o", place.extent, checksum(SMALL))])
            assert place.holds(SMALL)
        assert server.num_connections == 1


def test_slow_and_honest_link_is_read() -> None:
    """Twice the least rate passes, though the transfer takes several times as long as the longest silence."""
    body, piece, silence_s = DATA[:5000], 100, 0.5

    def script(visit: Visit) -> None:
        visit.send(OK + b"Content-Length: 5000\r\n\r\n")
        time.sleep(0.8 * silence_s)  # nothing counts before the first byte
        for start in range(0, len(body), piece):
            visit.send(body[start : start + piece])
            time.sleep(piece / (2 * MIN_BYTES_PER_S))

    place = Place(len(body))
    with scripted(script) as server, fetching(server.endpoint, "b", retry=ONCE) as fetcher:
        assert fetcher.fetch([Wanted("o", place.extent, checksum(body))])
        assert len(server.requests) == 1
    assert place.holds(body)
