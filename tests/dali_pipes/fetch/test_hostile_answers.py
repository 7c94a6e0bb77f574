"""Answers that no honest server sends, and odd answers that an honest server may send: one table for all stores.

All stores read through one HTTP client. Each store gets each answer of the table. The fetch fails soon, in little
memory and with our error, or it reads the object; the table says whether the client then uses the connection again.
"""

import contextlib
import gzip
import json
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from enum import Enum
from typing import NamedTuple

import pytest

from dali_pipes.errors import StoreError
from dali_pipes.fetch.fetcher import Wanted
from dali_pipes.store import listings
from dali_pipes.store.cloud.bucket import CloudStore
from dali_pipes.store.cloud.settings import CloudSettings
from dali_pipes.store.cluster import transformed
from dali_pipes.store.cluster.ais import AisStore
from dali_pipes.store.cluster.transformed import TransformedStore
from dali_pipes.store.http import answers, objects, wire
from dali_pipes.store.http.objects import ObjectFetcher, RetryPolicy
from dali_pipes.store.http.wire import MIN_BYTES_PER_S
from dali_pipes.store.patience import Patience
from tests.dali_pipes.fetch.served import DATA, LookedAtClock, Place, checksum, fails
from tests.programs import wait_until
from tests.servers.scripted import Script, Visit, never_ends, says, scripted

ONCE = RetryPolicy(attempts=2, silence_s=10.0, connect_timeout_s=60.0)
AT_ONCE = Patience(patience_s=0.2, longest_pause_s=0.0)
SMALL = DATA[:1000]
OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
KIB = 1 << 10


def whole(body: bytes = SMALL, *, status: bytes = b"200 OK", more: bytes = b"") -> bytes:
    """A valid answer."""
    return b"HTTP/1.1 %b\r\n%bContent-Length: %d\r\n\r\n%b" % (status, more, len(body), body)


class Must(Enum):
    """What the client must do."""

    FAIL = "fail"
    READ = "read it, and use the connection again"
    LEAVE = "read it, and leave the connection"


class Hostile(NamedTuple):
    answer: str
    script: Script
    wrong: str
    """A part of the error's text; empty if the client must read the object."""
    must: Must = Must.FAIL
    is_slow: bool = False


def sends(answer: bytes) -> Script:
    return lambda visit: visit.send(answer)


def unusual(answer: str, data: bytes) -> Hostile:
    return Hostile(answer, sends(data), "", Must.READ)


def behind(answer: str, data: bytes) -> Hostile:
    """A body with bytes behind it; the client must not take these bytes for the next answer."""
    return Hostile(answer, sends(data), "", Must.LEAVE)


SMUGGLED = whole(b"SMUGGLED", status=b"404 SMUGGLED")
ONE_CHUNK = CHUNKED + b"3e8\r\n" + SMALL + b"\r\n0\r\n\r\n"
LINES = "bytes of lines come before or between"
NO_FIELD = "a line that is not a field"
SLOW = "bytes/s"
TABLE = [
    Hostile("100 Continue for ever", never_ends(b"", b"HTTP/1.1 100 Continue\r\n\r\n"), "more than 16 interim answers"),
    Hostile("103 for ever", never_ends(b"", b"HTTP/1.1 103 Hints\r\nLink: x\r\n\r\n"), "16 interim answers"),
    Hostile("101 without a question", says(whole(status=b"101 Switching Protocols")), "not asked for"),
    Hostile("a head without end", never_ends(OK, b"X-More: 1\r\n" * 99), LINES),
    Hostile("one field without end", never_ends(OK + b"X: ", b"a" * 1000), LINES),
    Hostile("a status line without end", never_ends(b"HTTP/1.1 200 ", b"O" * 1000), LINES),
    Hostile("trailers without end", never_ends(CHUNKED + b"0\r\n", b"X-More: 1\r\n" * 99), LINES),
    Hostile("one trailer without end", never_ends(CHUNKED + b"0\r\nX: ", b"a" * 1000), LINES),
    Hostile("an extension without end", never_ends(CHUNKED + b"5;", b"a" * 1000), LINES),
    Hostile("an extension at each byte", never_ends(CHUNKED, b"1;%b\r\na\r\n" % (b"x" * 8000)), LINES),
    Hostile("chunk size -1", says(CHUNKED + b"-1\r\n" + SMALL), "has no size"),
    Hostile("chunk size +5", says(CHUNKED + b"+5\r\nabcde\r\n0\r\n\r\n"), "has no size"),
    Hostile("chunk size 0x5", says(CHUNKED + b"0x5\r\nabcde\r\n0\r\n\r\n"), "has no size"),
    Hostile("chunk size 1_0", says(CHUNKED + b"1_0\r\nabcde\r\n0\r\n\r\n"), "has no size"),
    Hostile("chunk size of 17 digits", says(CHUNKED + b"1" + b"0" * 16 + b"\r\n" + SMALL), "has no size"),
    Hostile("chunk size without digits", says(CHUNKED + b"\r\n" + SMALL), "has no size"),
    Hostile("a chunk longer than its size", says(CHUNKED + b"3\r\nabcde\r\n0\r\n\r\n"), "longer than its size"),
    Hostile("a chunk line with a line feed only", says(CHUNKED + b"5\nabcde\n0\n\n"), "carriage return"),
    Hostile("10,000 digits", says(OK + b"Content-Length: " + b"9" * 10_000 + b"\r\n\r\n"), "not one number"),
    Hostile("Content-Length -1", says(OK + b"Content-Length: -1\r\n\r\n" + SMALL), "not one number"),
    Hostile("Content-Length +1000", says(OK + b"Content-Length: +1000\r\n\r\n" + SMALL), "not one number"),
    Hostile("Content-Length empty", says(OK + b"Content-Length: \r\n\r\n" + SMALL), "not one number"),
    Hostile("Content-Length twice", says(whole(more=b"Content-Length: 3\r\n")), "not one number"),
    Hostile("Content-Length and chunks", says(whole(more=b"Transfer-Encoding: chunked\r\n")), "both a Content-Length"),
    Hostile("Transfer-Encoding empty", says(whole(more=b"Transfer-Encoding:\r\n")), "other than 'chunked'"),
    Hostile("chunks without a last one", says(ONE_CHUNK[:-5]), "was closed in place of an answer"),
    Hostile("gzip, chunked", says(CHUNKED.replace(b": chunked", b": gzip, chunked")), "other than 'chunked'"),
    Hostile("chunks twice", says(CHUNKED[:-2] + b"Transfer-Encoding: chunked\r\n\r\n"), "other than 'chunked'"),
    Hostile("chunks of HTTP/1.0", says(CHUNKED.replace(b"1.1", b"1.0") + b"0\r\n\r\n"), "other than 'chunked'"),
    Hostile("line feeds only", says(whole().replace(b"\r\n", b"\n")), "carriage return"),
    Hostile("a line feed in a head", never_ends(OK.replace(b"\r\n", b"\n"), b"X: 1\r\n"), "carriage return"),
    Hostile("a space before the colon", says(whole(more=b"Content-Length : 3\r\n")), NO_FIELD),
    Hostile("a carriage return in a field", says(whole(more=b"X: a\rContent-Length: 3\r\n")), NO_FIELD),
    Hostile("a NUL in a field", says(whole(more=b"X: a\0b\r\n")), NO_FIELD),
    Hostile("a fold before the first field", says(whole(more=b" X: a\r\n")), NO_FIELD),
    Hostile("HTTP/0.9", says(b"<html>\r\n\r\n"), "does not speak HTTP/1.1"),
    Hostile("status 600", says(whole(status=b"600 Odd")), "does not speak HTTP/1.1"),
    Hostile("a redirect to itself", says(whole(b"", status=b"307 Go", more=b"Location: /o\r\n")), "redirected 4 times"),
    *(
        Hostile(f"a redirect to '{to}'", says(whole(b"", status=b"301 Go", more=b"Location: %b\r\n" % to.encode())), of)
        for to in ("http://a:b@h/", "ftp://127.0.0.1/x", "file:///etc/passwd", "", "http://", "http://h:99999/")
        for of in ("which is not the URL of a host",)
    ),
    Hostile("an error without end", never_ends(b"HTTP/1.1 404 No\r\n\r\n", b"x" * 1000), "404 xxx|more than 1048576"),
    Hostile("a head in single bytes", never_ends(OK + b"X: ", b"a"), SLOW, is_slow=True),
    Hostile("a good head, slowly", lambda visit: visit.send_slowly(whole()), SLOW, is_slow=True),
    Hostile("a slow body", never_ends(OK + b"Content-Length: 1000\r\n\r\n", b"a"), SLOW, is_slow=True),
    Hostile("a slow chunked body", never_ends(CHUNKED, b"1\r\na\r\n"), SLOW, is_slow=True),
    Hostile("a slow error", never_ends(b"HTTP/1.1 404 No\r\n\r\n", b"x"), SLOW, is_slow=True),
    Hostile("a slow redirect", never_ends(b"HTTP/1.1 307 Go\r\nLocation: /\r\n\r\n", b"x"), SLOW, is_slow=True),
    behind("an answer behind the body", whole() + SMUGGLED),
    behind("an answer behind the chunks", ONE_CHUNK + SMUGGLED),
    behind("a line behind the body", whole() + b"\r\n"),
    behind("a byte behind the chunks", ONE_CHUNK + b"H"),
    # The limits leave room for every honest server.
    unusual("a field without a space", whole().replace(b": ", b":")),
    unusual("a folded field, as RFC 9112 lets a client read", whole().replace(b": ", b":\r\n  ")),
    unusual("a field in capitals", whole().replace(b"Content-Length", b"CONTENT-length")),
    unusual("16 interim answers", b"HTTP/1.1 100 Continue\r\n\r\n" * 16 + whole()),
    unusual("no reason", whole(status=b"200")),
    unusual("a long field", whole(more=b"X: " + b"x" * 60_000 + b"\r\n")),
    unusual(
        "chunks of one byte, with extensions, and trailers",
        CHUNKED + b"".join(b"1 ;a=b\r\n%c\r\n" % byte for byte in SMALL) + b"0\r\nX: y\r\nZ: \r\n\r\n",
    ),
]
SCHEMES = {
    "http": {},
    "s3": {"aws_endpoint_url": "{}", "aws_skip_signature": "true"},
    "gs": {"google_base_url": "{}", "google_skip_signature": "true"},
    "az": {"azure_storage_endpoint": "{}", "azure_skip_signature": "true"},
    "ais": {},
}


def open_fetcher(scheme: str, endpoint: str) -> ObjectFetcher:
    """Open the fetcher of the scheme's store, with a single attempt."""
    if scheme == "ais":
        source = AisStore(endpoint, "b").objects.source
    else:
        options = {name: value.format(endpoint) for name, value in SCHEMES[scheme].items()}
        bucket = endpoint.partition("://")[2] if scheme == "http" else "b"
        source = CloudStore(CloudSettings(scheme=scheme, bucket=bucket, options=options)).source
    return ObjectFetcher(source, retry=ONCE, patience=AT_ONCE)


def fetch_small(fetcher: ObjectFetcher) -> None:
    place = Place(len(SMALL))
    assert fetcher.fetch([Wanted("o", place.extent, checksum(SMALL))])
    assert place.holds(SMALL)


@contextlib.contextmanager
def in_little_memory(most_kib: int) -> Iterator[None]:
    """Check that the client and the small server together use less memory than this."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < most_kib * KIB
    finally:
        tracemalloc.stop()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> LookedAtClock:
    """Replace the client's clock, so that no test here waits for real time."""
    found = LookedAtClock()
    monkeypatch.setattr(wire, "time", found)
    return found


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.answer)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_hostile_answer_is_an_error_soon_and_in_little_memory(
    scheme: str, row: Hostile, request: pytest.FixtureRequest
) -> None:
    """No answer makes a fetch hang, grow, or raise another exception than ours, whatever the store."""
    with scripted(row.script) as server, open_fetcher(scheme, server.endpoint) as fetcher:
        if row.is_slow:
            server.is_due = request.getfixturevalue("clock").is_due
        if row.must is Must.FAIL:
            with in_little_memory(16 * KIB):
                fails(fetcher, StoreError, row.wrong, place=Place(len(SMALL)))
        else:
            for _ in range(3):
                fetch_small(fetcher)
            assert len(server.requests) == 3, server.paths
            assert server.num_connections == (1 if row.must is Must.READ else 3)
        assert not server.num_endless


@pytest.mark.parametrize("row", [row for row in TABLE if row.wrong], ids=lambda row: row.answer)
def test_hostile_answer_to_the_sdk_is_an_error_too(row: Hostile, request: pytest.FixtureRequest) -> None:
    """The SDK's requests, such as a listing, use the same client; it does not take the answer for a listing."""
    with scripted(row.script) as server:
        if row.is_slow:
            server.is_due = request.getfixturevalue("clock").is_due
        with in_little_memory(16 * KIB), pytest.raises(StoreError, match=row.wrong):
            AisStore(server.endpoint, "b").list("a")
        assert not server.num_endless


def test_a_head_of_blanks_is_read_once() -> None:
    """A pattern that tries every split of the blanks would take an hour."""
    with pytest.raises(wire.ProtocolError):
        wire.parse_head(b"HTTP/1.1 200 OK\r\nA:" + b" " * 1_000_000 + b"\0")


@pytest.mark.parametrize("late", [SMUGGLED, b"H"])
def test_bytes_behind_a_body_are_not_the_next_answer(late: bytes) -> None:
    """Here the bytes come later, on the idle connection; the table has the bytes that come with the body."""
    was_read = [threading.Event() for _ in range(3)]

    def script(visit: Visit) -> None:
        visit.send(whole())
        was_read[visit.number].wait(120)
        visit.send(late)

    with scripted(script) as server, open_fetcher("ais", server.endpoint) as fetcher:
        for read in was_read:
            fetch_small(fetcher)
            read.set()
            wait_until(lambda: all(connection.is_stale for connection in fetcher.client._idle))
        assert (server.num_connections, len(server.requests)) == (3, 3)


def test_slow_and_honest_link_is_read(clock: LookedAtClock) -> None:
    """A transfer above the lowest rate succeeds, though it takes longer than twice the longest silence."""
    body = DATA[:200_000]

    def script(visit: Visit) -> None:
        visit.send(OK + b"Content-Length: %d\r\n\r\n" % len(body))
        for start in range(0, len(body), MIN_BYTES_PER_S // 2):
            visit.wait_until_due()
            visit.send(body[start : start + MIN_BYTES_PER_S // 2])

    place = Place(len(body))
    with scripted(script) as server, open_fetcher("ais", server.endpoint) as fetcher:
        server.is_due = clock.is_due
        assert fetcher.fetch([Wanted("o", place.extent, checksum(body))])
        assert len(server.requests) == 1
    assert place.holds(body)
    assert clock.monotonic() > 2 * ONCE.silence_s


# Answers that are read into memory, by the SDK or for us, have limits of their own

LISTED = OK + b"Content-Type: application/json\r\n"
CHUNK = b"10000\r\n%b\r\n" % bytes(65536)


def listed(body: bytes, *, more: bytes = b"") -> bytes:
    return LISTED + more + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)


def page(number: int, *, token: str, names: int = 3) -> bytes:
    entries = [{"name": f"{number:06d}-{row}", "size": "1"} for row in range(names)]
    return listed(json.dumps({"uuid": "u", "continuation_token": token, "flags": 0, "entries": entries}).encode())


def lists(token: Callable[[int], str], *, names: int = 3) -> Script:
    return lambda visit: visit.send(page(visit.number, token=token(visit.number), names=names))


def entry(name: object, size: object, **more: object) -> bytes:
    entries = [{"name": name, "size": size, **more}]
    return json.dumps({"uuid": "u", "continuation_token": "", "flags": 0, "entries": entries}).encode()


BOMB = gzip.compress(bytes(32 << 20))
LISTINGS: list[tuple[str, Script, str]] = [
    ("a body without end", never_ends(LISTED + b"\r\n", bytes(1 << 20)), "more than 67108864 bytes"),
    ("chunks without end", never_ends(CHUNKED, CHUNK), "more than 67108864 bytes"),
    ("a 503 without end", never_ends(b"HTTP/1.1 503 No\r\n\r\n", bytes(1 << 16)), "more than 1048576 bytes|503"),
    ("a bomb", says(listed(BOMB, more=b"Content-Encoding: gzip\r\n")), "compressed|Content-Encoding"),
    ("a token that repeats", lists(lambda _: "again"), "page 2 leads back"),
    ("tokens that repeat in turn", lists(lambda number: "ab"[number % 2]), "page 3 leads back"),
    ("tokens without end", lists(str), "more than 50 pages"),
    ("tokens without end and names", lists(str, names=0), "more than 50 pages"),
    ("an entry without a name", says(listed(entry("", 1))), "an entry without a name"),
    ("an entry of -1 bytes", says(listed(entry("a", -1))), "an entry without a name"),
    ("a name that is a number", says(listed(entry(7, "1"))), "an entry without a name"),
    ("a checksum that is a number", says(listed(entry("a", "1", checksum=7))), "an entry without a name"),
    ("an endless size", says(listed(entry("a", float("inf")))), "not the page of a listing"),
    ("no UTF-8", says(listed(entry("a", 1).replace(b'"a"', b'"\xff"'))), "not an AIStore"),
    ("nested arrays", says(listed(b"[" * 100_000)), "not an AIStore"),
    ("no page", says(listed(b"[1]")), "not the page of a listing"),
    ("text", says(listed(b"hello")), "not an AIStore"),
]


@pytest.mark.parametrize(("script", "text"), [row[1:] for row in LISTINGS], ids=[row[0] for row in LISTINGS])
def test_hostile_listing_is_an_error(script: Script, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An endless or invalid listing fails; it takes a few times `MAX_ANSWER_BYTES` of memory."""
    monkeypatch.setattr(listings, "MAX_PAGES", 50)
    with scripted(script) as server:
        with in_little_memory(300 * KIB), pytest.raises(StoreError, match=text):
            AisStore(server.endpoint, "b").list("a")
        assert not server.num_endless
        assert len(server.requests) <= 51


def test_object_that_is_too_long_for_memory_is_refused_before_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client refuses an object of any stated length, or of none. It reads no more of a range than it asked for."""
    announced = OK + b"Content-Length: %d\r\n\r\n" % (1 << 50)
    too_long = pytest.raises(StoreError, match=f"more than {answers.MAX_OBJECT_BYTES} bytes")
    with scripted(says(announced)) as server, too_long:
        AisStore(server.endpoint, "b").read("manifest")
    monkeypatch.setattr(objects, "MAX_OBJECT_BYTES", 1 << 20)
    with scripted(never_ends(announced, bytes(1 << 16))) as server, in_little_memory(8 * KIB):
        store = AisStore(server.endpoint, "b")
        with pytest.raises(StoreError, match="more than 1048576 bytes"):
            store.read("manifest")
        assert store.read_range("x.tar", start=0, size=100) == bytes(100)
    monkeypatch.setattr(transformed, "MAX_OBJECT_BYTES", 4 << 20)
    too_long = pytest.raises(StoreError, match="more than 4194304 bytes")
    with scripted(never_ends(CHUNKED, CHUNK)) as server, in_little_memory(32 * KIB), too_long:
        TransformedStore(AisStore(server.endpoint, "b"), "e").read("x.tar")
