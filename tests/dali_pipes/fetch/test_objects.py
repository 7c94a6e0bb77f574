"""Objects to extents, through a proxy that breaks what it passes: the embedded node behind it."""

import contextlib
import itertools
import logging
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from dali_pipes.cache.extents import Extent
from dali_pipes.errors import CacheError, DataError, StoreError
from dali_pipes.fetch.fetcher import Wanted
from dali_pipes.store.cluster.access import ClusterAccess, Token
from dali_pipes.store.cluster.ais import AisStore
from dali_pipes.store.cluster.objects import StoredObjects
from dali_pipes.store.http import objects
from dali_pipes.store.http.client import HttpAccess, HttpClient, NoAnswerError
from dali_pipes.store.http.objects import ObjectFetcher, RetryPolicy
from dali_pipes.store.http.wire import StoppedError
from dali_pipes.store.patience import Patience, in_threads, waits_ended_by
from tests.dali_pipes.fetch.served import BRIEF, DATA, OTHER, Place, checksum, fails, fetch_through, fetching
from tests.servers.faulty import KINDS, faulty
from tests.servers.scripted import Visit, scripted

PROMPT = RetryPolicy(silence_s=0.2, connect_timeout_s=60.0)
"""A server on a loaded machine may look silent, too; then the client makes more attempts."""

# What breaks and is mended


@pytest.mark.parametrize("kind", KINDS)
def test_fault_of_each_kind_is_recovered_from(store: AisStore, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """Twice in a row; the bytes are whole, and each retry is logged with the object and its cause."""
    caplog.set_level(logging.INFO, "dali_pipes")
    is_stall = kind.startswith("stall")
    with faulty(store.endpoint, rate=1, kinds=[kind], max_faults=2, stall_s=60) as proxy:
        fetch_through(proxy, store, **({"retry": PROMPT} if is_stall else {}))
        assert proxy.faults == {kind: 2}
        if kind in ("short", "stall_body"):  # the retry continues where the body broke
            assert not str(proxy.seen[-1].headers["Range"]).startswith(("None", "bytes=0-"))
    retries = [record.getMessage() for record in caplog.records]
    assert len(retries) == 2 or (is_stall and len(retries) > 2)
    assert all(store.locate("a/x.tar") in text and "the next in" in text for text in retries)


def test_retry_after_is_honoured(store: AisStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client waits for a minute, though the policy's longest wait is 20 ms."""
    paused_s: list[float] = []

    class Clock:
        monotonic = staticmethod(lambda: sum(paused_s))

    monkeypatch.setattr(objects, "time", Clock)
    monkeypatch.setattr(objects, "pause", paused_s.append)
    with faulty(store.endpoint, rate=1, kinds=["429"], max_faults=1, retry_after="59") as proxy:
        fetch_through(proxy, store)
    assert sum(paused_s) == pytest.approx(59)


def test_faults_without_end_are_given_up(store: AisStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """With attempts, time and the last cause. The patience's time passes by 20 ms with each fault."""
    with faulty(store.endpoint, rate=1, kinds=["503"]) as proxy:
        clock = SimpleNamespace(monotonic=lambda: 0.02 * proxy.faults["503"], sleep=time.sleep)
        monkeypatch.setattr("dali_pipes.store.patience.time", clock)
        text = (
            r"'ais://.*/a/x.tar' at http://.*: given up after \d+ attempts in \d+\.\d s \(patience: 0.2 s without "
            r"progress\), the last one: 503 made by the .*; try later"
        )
        with pytest.raises(StoreError, match=text):
            fetch_through(proxy, store, patience=Patience(patience_s=0.2, longest_pause_s=0.02, advice="try later"))
        assert proxy.faults["503"] == 11


def test_faults_with_progress_are_bounded_too(store: AisStore) -> None:
    """Each attempt brings bytes, and the object still never ends."""
    retry = RetryPolicy(max_broken=9, attempts=3, silence_s=60, connect_timeout_s=60)
    with faulty(store.endpoint, rate=1, kinds=["short"]) as proxy:
        # Past an object's end nothing is left to break: so it is the first bytes, over and over.
        proxy.place = lambda num: 1  # type: ignore[method-assign]
        with fetching(proxy.endpoint, store.bucket, retry=retry) as fetcher:
            fails(fetcher, StoreError, "given up after 9 attempts")


def test_wrong_bytes_without_end_are_given_up(store: AisStore) -> None:
    """The object's checksum is right in its head, its bytes are not: no word of a replaced object."""
    text = "given up after 6 attempts .* its bytes have the checksum"
    with faulty(store.endpoint, rate=1, kinds=["flip"]) as proxy, pytest.raises(StoreError, match=text):
        fetch_through(proxy, store)


# Several ranges at a time


@pytest.mark.usefixtures("small_ranges")
def test_ranges_recover_each_on_its_own(store: AisStore) -> None:
    """Every byte is right after faults of all kinds except silence, which would take too long."""
    kinds = [kind for kind in KINDS if not kind.startswith("stall")]
    with faulty(store.endpoint, rate=0.4, seed=0, kinds=kinds) as proxy:
        for _ in range(5):
            fetch_through(proxy, store, num_connections=4)
        assert len(proxy.faults) > 2


@pytest.mark.usefixtures("small_ranges")
def test_server_without_ranges_is_read_in_one_piece() -> None:
    """After a 200 to a range, the client asks for the whole object. It asks for no range of the next object."""
    with scripted(lambda visit: visit.say(200, DATA)) as server, fetching(server.endpoint, "b") as fetcher:
        for _ in range(2):
            place = Place()
            assert fetcher.fetch([Wanted("x.tar", place.extent, checksum(DATA))], num_connections=4)
            assert place.holds(DATA)
        assert [wanted is None for wanted in server.ranges] == [False, True, True]


# Objects that are not the manifest's


@pytest.mark.usefixtures("small_ranges")
@pytest.mark.parametrize(
    ("is_deleted", "size", "num_connections"),
    [(False, len(DATA), 1), (True, len(DATA), 1), (True, 10, 1), (False, len(DATA), 4)],
)
def test_object_replaced_between_two_attempts_is_no_mix(
    store: AisStore, is_deleted: bool, size: int, num_connections: int
) -> None:
    """The body breaks, and what goes on is another object, with another version or, put after a delete, the same."""
    with faulty(store.endpoint, rate=1, kinds=["short"], max_faults=1) as proxy:
        replace = proxy.place

        def place_and_replace(num: int) -> int:
            if is_deleted:
                store.delete("a/x.tar")
            store.write("a/x.tar", OTHER[:size])
            return max(1000, replace(num))

        proxy.place = place_and_replace  # type: ignore[method-assign]
        with pytest.raises(DataError, match="it was replaced since"):
            fetch_through(proxy, store, num_connections=num_connections)


# Answers that cannot be mended


@pytest.mark.parametrize(
    ("status", "token", "expected"),
    [
        (400, None, "400 no good$"),
        (401, None, "401 no good; log in"),
        (403, Token("t0ken"), "403 no good; the token in AIS_AUTHN_TOKEN lacks a right: ask"),
        (404, None, "404 no good; was it deleted\\? put it back; .* prep index URL --allow-missing"),
        (501, None, "501 no good$"),
    ],
)
def test_permanent_error_is_told_at_once(status: int, token: Token | None, expected: str) -> None:
    """One request; the object's URL, the endpoint, AIStore's own words, and what to do."""
    with scripted(lambda visit: visit.say(status, b'{"tcode": "Err", "message": "no  good"}')) as server:
        connection = ClusterAccess(endpoint=server.endpoint, token=token)
        text = f"'aws://b/x.tar' at {server.endpoint}: ".replace("aws", "s3") + expected
        with ObjectFetcher(StoredObjects(connection, "b", provider="aws"), patience=BRIEF) as fetcher:
            fails(fetcher, StoreError, text, name="x.tar")
        # An object that is not found may be on its way from one target to another: the cluster's map tells.
        looks = ["/v1/daemon?what=smap"] if status == 404 else []
        assert server.paths == ["/v1/objects/b/x.tar?provider=aws", *looks]


def test_full_disk_is_the_cache_error_of_the_extent(store: AisStore) -> None:
    with Path("/dev/full").open("r+b", buffering=0) as disk, fetching(store.endpoint, store.bucket) as fetcher:
        wanted = Wanted("a/x.tar", Extent(disk.fileno(), 0, len(DATA)), checksum(DATA))
        with pytest.raises(CacheError, match="cannot write to the cache file: No space left on device"):
            fetcher.fetch([wanted])


def test_name_that_no_resolver_takes_is_no_answer() -> None:
    client = HttpClient(HttpAccess(endpoint="http://a..b"))
    with pytest.raises(NoAnswerError, match="not the name of a host"):
        client.ask("http://a..b/o")


# Stopping


@pytest.mark.parametrize("kind", ["stall", "stall_body", "503"])
def test_stopped_ends_a_silent_wait(store: AisStore, kind: str) -> None:
    """Of an answer, of a body, and of a long back-off: ``False``, long before either would end."""
    patience = Patience(patience_s=600, longest_pause_s=600)
    with faulty(store.endpoint, rate=1, kinds=[kind], stall_s=600, retry_after="600") as proxy:
        with fetching(proxy.endpoint, store.bucket, retry=RetryPolicy(silence_s=600), patience=patience) as fetcher:
            answers, place = iter([False, False, False]), Place()
            assert not fetcher.fetch(
                [Wanted("a/x.tar", place.extent, checksum(DATA))],
                stopped=lambda: proxy.faults.total() > 0 and next(answers, True),
            )
            assert next(answers, True), "it was asked again and again"
        proxy.kinds = []
        fetch_through(proxy, store)


def test_stopped_ends_the_wait_for_a_silent_map() -> None:
    """An object is missing, and the proxy that is asked whether a target is away says nothing."""

    def script(visit: Visit) -> None:
        if b"/v1/objects/" in visit.request:
            visit.say(404)
        else:
            visit.server.closing.wait(600)

    with scripted(script) as server, fetching(server.endpoint, "b") as fetcher:
        place = Place()
        wanted = [Wanted("a/x.tar", place.extent, checksum(DATA))]
        assert not fetcher.fetch(wanted, stopped=lambda: len(server.requests) == 2)


def test_requests_end_with_the_thread_that_waits_for_them() -> None:
    """A closed loader ends the requests of threads that its own threads have started, though the server is silent."""
    closed = threading.Event()

    def script(visit: Visit) -> None:
        closed.set()
        visit.server.closing.wait(600)

    with (
        scripted(script) as server,
        contextlib.closing(HttpClient(HttpAccess(endpoint=server.endpoint))) as client,
        waits_ended_by(closed),
        pytest.raises(StoppedError),
    ):
        in_threads(client.ask, [server.endpoint] * 2, num_threads=2)


def test_connection_that_is_not_made_ends_when_the_thread_is_to_stop() -> None:
    """The host drops packets: closing a loader must not wait for attempts at all addresses of the host."""
    with contextlib.ExitStack() as cleanup:
        full = cleanup.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(3):  # no thread accepts, so the kernel drops further connection requests
            waiting = cleanup.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        url = f"http://127.0.0.1:{full.getsockname()[1]}"
        client = cleanup.enter_context(contextlib.closing(HttpClient(HttpAccess(endpoint=url), connect_timeout_s=600)))
        answers = itertools.chain([False, False], itertools.repeat(True))
        with pytest.raises(StoppedError):
            client.ask(url, stopped=lambda: next(answers))
