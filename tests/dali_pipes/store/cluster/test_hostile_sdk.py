"""Answers to the SDK, and to reads into memory, that no honest cluster sends.

`tests.dali_pipes.fetch.test_hostile_answers` has the table of the client through which all of them go.
"""

import gzip
import json
import resource
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from dali_pipes.errors import StoreError
from dali_pipes.store import listings
from dali_pipes.store.cluster import ais, transformed
from dali_pipes.store.cluster.ais import AisStore
from dali_pipes.store.cluster.endpoint import check_endpoint
from dali_pipes.store.cluster.transformed import TransformedStore
from dali_pipes.store.http import answers, objects
from tests.servers.scripted import Script, Visit, never_ends, says, scripted

OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/msgpack\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
MAX_MORE_KIB = 300 << 10
"""Memory that a hostile answer may cost: `MAX_ANSWER_BYTES`, a few times over."""
SOON_S = 60.0


def whole(body: bytes, *, more: bytes = b"") -> bytes:
    return OK + more + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)


def page(number: int, *, token: str, names: int = 3) -> bytes:
    entries = [{"n": f"{number:06d}-{row}", "s": 1} for row in range(names)]
    return whole(msgspec.msgpack.encode({"UUID": "u", "ContinuationToken": token, "Flags": 0, "Entries": entries}))


def lists(token: Callable[[int], str], *, names: int = 3) -> Script:
    return lambda visit: visit.send(page(visit.number, token=token(visit.number), names=names))


def nested(depth: int) -> bytes:
    return b"\x91" * depth + b"\x90"


BOMB = gzip.compress(bytes(512 << 20), compresslevel=9)
NAMELESS = msgspec.msgpack.encode({"UUID": "u", "ContinuationToken": "", "Flags": 0, "Entries": [{"n": "", "s": 1}]})
NEGATIVE = msgspec.msgpack.encode({"UUID": "u", "ContinuationToken": "", "Flags": 0, "Entries": [{"n": "a", "s": -1}]})

ATTACKS: list[tuple[str, Script, str]] = [
    ("a body without end", never_ends(OK + b"\r\n", bytes(1 << 20)), "more than 67108864 bytes"),
    ("chunks without end", never_ends(CHUNKED, b"10000\r\n%b\r\n" % bytes(65536)), "more than 67108864 bytes"),
    ("an error without end", never_ends(b"HTTP/1.1 400 No\r\n\r\n", bytes(1 << 16)), "more than 1048576 bytes|400 "),
    ("a 503 without end", never_ends(b"HTTP/1.1 503 No\r\n\r\n", bytes(1 << 16)), "more than 1048576 bytes|503"),
    (
        "a redirect without end",
        never_ends(b"HTTP/1.1 307 Go\r\nLocation: /\r\n\r\n", bytes(1 << 16)),
        "redirected 4 times",
    ),
    ("a bomb", says(whole(BOMB, more=b"Content-Encoding: gzip\r\n")), "compressed|Content-Encoding"),
    ("a body in single bytes", never_ends(OK + b"Content-Length: 1000\r\n\r\n", b"a", 0.1), "[Tt]imed out|bytes/s"),
]
LISTINGS: list[tuple[str, Script, str]] = [
    ("a token that repeats", lists(lambda _: "again"), "page 2 leads back"),
    ("tokens that repeat in turn", lists(lambda number: "ab"[number % 2]), "page 3 leads back"),
    ("tokens without end", lists(str), "more than 50 pages"),
    ("tokens without end and names", lists(str, names=0), "more than 50 pages"),
    ("an entry without a name", says(whole(NAMELESS)), "an entry without a name"),
    ("an entry of -1 bytes", says(whole(NEGATIVE)), "an entry without a name"),
    ("a name that is not UTF-8", says(whole(NAMELESS.replace(b"\xa1n\xa0", b"\xa1n\xa1\xff"))), "not UTF-8"),
    ("2^32 entries", says(whole(b"\x84\xa4UUID\xa1u\xa7Entries\xdd\xff\xff\xff\xff")), "not an AIStore"),
    ("nested arrays", says(whole(b"\x81\xa7Entries\x91\x81\xa6object" + nested(100_000))), "not an AIStore"),
    ("JSON", says(whole(b"[1]").replace(b"msgpack", b"json")), "not an AIStore"),
    ("text", says(whole(b"hello")), "not an AIStore"),
]


def _ids(rows: list[tuple[str, Script, str]]) -> list[str]:
    return [row[0] for row in rows]


@pytest.fixture(autouse=True)
def prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short time-outs."""
    monkeypatch.setattr(ais, "SILENCE_S", 1.0)
    monkeypatch.setattr(ais, "PROMPT_S", 1.0)


def _fails(ask: Callable[[], object], text: str) -> None:
    before_kib, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    with pytest.raises(StoreError, match=text):
        ask()
    assert time.monotonic() - started < SOON_S
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < MAX_MORE_KIB


@pytest.mark.parametrize(("script", "text"), [row[1:] for row in ATTACKS], ids=_ids(ATTACKS))
def test_hostile_answer_is_an_error_soon_and_in_little_memory(script: Script, text: str) -> None:
    """A listing, read through the SDK."""
    with scripted(script) as server:
        _fails(lambda: AisStore(server.endpoint, "b").list("a"), text)
        assert not server.num_endless


@pytest.mark.parametrize(("script", "text"), [row[1:] for row in LISTINGS], ids=_ids(LISTINGS))
def test_hostile_listing_is_an_error(script: Script, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A listing that has no end, or cannot be one."""
    monkeypatch.setattr(listings, "MAX_PAGES", 50)
    with scripted(script) as server:
        _fails(lambda: AisStore(server.endpoint, "b").list("a"), text)
        assert len(server.requests) <= 51


def test_listing_in_pages_is_read() -> None:
    """Pages are put together, also an empty one in the middle."""

    def script(visit: Visit) -> None:
        body = json.loads(visit.request.partition(b"\r\n\r\n")[2])["value"]
        assert body.get("continuation_token", "") == (str(visit.number) if visit.number else "")
        token = "" if visit.number == 3 else str(visit.number + 1)
        visit.send(page(visit.number, token=token, names=0 if visit.number == 1 else 3))

    with scripted(script) as server:
        assert len(AisStore(server.endpoint, "b").list("a")) == 9


def test_object_longer_than_the_limit_is_refused_before_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read whole has a limit, however long the answer says it is; a range is never longer than it was asked."""
    monkeypatch.setattr(objects, "MAX_OBJECT_BYTES", 1 << 20)

    with scripted(never_ends(OK + b"Content-Length: %d\r\n\r\n" % (1 << 50), bytes(1 << 16))) as server:
        store = AisStore(server.endpoint, "b")
        _fails(lambda: store.read("manifest"), "more than 1048576 bytes")
        assert store.read_range("x.tar", start=0, size=100) == bytes(100)
    monkeypatch.undo()
    with scripted(says(OK + b"Content-Length: %d\r\n\r\n" % (1 << 50))) as server:
        _fails(lambda: AisStore(server.endpoint, "b").read("manifest"), f"more than {answers.MAX_OBJECT_BYTES} bytes")


def test_transformed_shard_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """An ETL sends a shard without its length; what is read into memory has a limit nevertheless."""
    monkeypatch.setattr(transformed, "MAX_OBJECT_BYTES", 4 << 20)
    with scripted(never_ends(CHUNKED, b"10000\r\n%b\r\n" % bytes(65536))) as server:
        store = TransformedStore(AisStore(server.endpoint, "b"), "e")
        _fails(lambda: store.read("x.tar"), "more than 4194304 bytes")


@pytest.mark.parametrize("script", [ATTACKS[0][1], ATTACKS[-1][1]], ids=[ATTACKS[0][0], ATTACKS[-1][0]])
def test_hostile_answer_to_a_health_check_is_an_error(script: Script) -> None:
    """The first request of every command."""
    with scripted(script) as server:
        _fails(lambda: check_endpoint(server.endpoint), "AIStore|answers")
        assert not server.num_endless


def test_empty_file_is_put_by_the_sdk(tmp_path: Path) -> None:
    """`requests` announces it in chunks; two announcements of its length would be an error."""
    (tmp_path / "empty").touch()
    with scripted(says(whole(b""))) as server:
        AisStore(server.endpoint, "b").client.bucket("b").object("o").get_writer().put_file(tmp_path / "empty")
        head = server.requests[0].lower()
    assert b"content-length: 0" in head
    assert b"transfer-encoding" not in head
