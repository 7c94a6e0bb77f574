"""Objects to extents, through a proxy that breaks what it passes: the embedded node behind it."""

import contextlib
import logging
import threading
from pathlib import Path

import pytest

from dali_pipes.cache.extents import Extent
from dali_pipes.errors import CacheError, DataError, StoreError
from dali_pipes.fetch.fetcher import Wanted
from dali_pipes.store.cluster.access import ClusterAccess, Token
from dali_pipes.store.cluster.ais import AisStore
from dali_pipes.store.cluster.objects import StoredObjects
from dali_pipes.store.http import objects
from dali_pipes.store.http.objects import ObjectFetcher, RetryPolicy
from dali_pipes.store.patience import Patience
from tests.dali_pipes.fetch.served import (
    DATA,
    OTHER,
    PATIENT,
    Place,
    checksum,
    fails,
    fetch_through,
    fetching,
    ranges_of,
    set_props,
)
from tests.servers.faulty import faulty
from tests.servers.scripted import Visit, scripted

PROMPT = RetryPolicy(silence_s=0.2, connect_timeout_s=60.0)
"""A loaded machine may look silent, too: then there are more attempts."""

# What comes is what was stored


@pytest.mark.parametrize("size", [0, 1, 1_048_577])
def test_object_of_any_size_lies_in_its_extent(store: AisStore, size: int) -> None:
    """And nowhere else."""
    store.write("some.bin", DATA[:size])
    place = Place(size)
    with fetching(store.endpoint, store.bucket) as fetcher:
        assert fetcher.fetch([Wanted("some.bin", place.extent, checksum(DATA[:size]))])
    assert place.holds(DATA[:size])


def test_connections_stay_open_between_objects(store: AisStore) -> None:
    """Five objects, two connections: one to the proxy, one to the target; each redirect is followed once."""
    with faulty(store.endpoint) as proxy:
        place = Place()
        with fetching(proxy.endpoint, store.bucket) as fetcher:
            for _ in range(5):
                assert fetcher.fetch([Wanted("a/x.tar", place.extent, checksum(DATA))])
        assert proxy.num_connections == {"entry": 1, "target": 1}
        assert proxy.requests == {"entry": 5, "target": 5}


def test_objects_that_are_fetched_together_do_not_wait_for_each_other() -> None:
    """A shard's index, small as it is, would cost another round trip: the server answers neither before both ask."""
    both = threading.Barrier(2)

    def script(visit: Visit) -> None:
        both.wait(120)
        visit.say(200, DATA[:100] if "index" in visit.path else DATA)

    shard, index = Place(), Place(100)
    with scripted(script) as server, fetching(server.endpoint, "b") as fetcher:
        wanted = [Wanted("x.tar", shard.extent, checksum(DATA)), Wanted("x.index", index.extent, checksum(DATA[:100]))]
        assert fetcher.fetch(wanted)
    assert shard.holds(DATA)
    assert index.holds(DATA[:100])


def test_object_that_reports_its_end_fails_alone(store: AisStore) -> None:
    """The others are fetched on; each says once how it ended."""
    place, ends = Place(), dict[str, list[Exception | None]]()
    wanted = [
        Wanted("a/none.tar", Place(100).extent, 0, ends.setdefault("none", []).append),
        Wanted("a/x.tar", place.extent, checksum(DATA), ends.setdefault("x", []).append),
    ]
    with fetching(store.endpoint, store.bucket) as fetcher:
        assert fetcher.fetch(wanted)
    assert place.holds(DATA)
    assert ends["x"] == [None]
    (error,) = ends["none"]
    assert isinstance(error, StoreError)
    assert "a/none.tar" in str(error)


def test_connection_closed_while_idle_is_no_fault(store: AisStore, caplog: pytest.LogCaptureFixture) -> None:
    """The target's ports vanish between two objects: the next one is found where the proxy sends, without a retry."""
    caplog.set_level(logging.INFO, "dali_pipes")
    with faulty(store.endpoint) as proxy, fetching(proxy.endpoint, store.bucket) as fetcher:
        for _ in range(2):
            place = Place()
            assert fetcher.fetch([Wanted("a/x.tar", place.extent, checksum(DATA))])
            assert place.holds(DATA)
            proxy.vanish()
        assert proxy.num_connections == {"entry": 1, "target": 2}
    assert not caplog.records


# What breaks and is mended


@pytest.mark.parametrize(
    "kind",
    ["reset", "reset_body", "short", "flip", "stall", "stall_body", "gone", "408", "429", "500", "502", "503", "504"],
)
def test_fault_of_each_kind_is_recovered_from(store: AisStore, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """Twice in a row; the bytes are whole, and each retry is logged with the object and its cause."""
    caplog.set_level(logging.INFO, "dali_pipes")
    is_stall = kind.startswith("stall")
    with faulty(store.endpoint, rate=1, kinds=[kind], max_faults=2, stall_s=60) as proxy:
        fetch_through(proxy, store, **({"retry": PROMPT} if is_stall else {}))
        assert proxy.faults == {kind: 2}
    retries = [record.getMessage() for record in caplog.records]
    assert len(retries) == 2 or (is_stall and len(retries) > 2)
    assert all(store.locate("a/x.tar") in text and "the next in" in text for text in retries)


@pytest.mark.parametrize("kind", ["reset_body", "short"])
def test_broken_body_goes_on_where_it_broke(store: AisStore, kind: str) -> None:
    """Not one byte that has arrived is asked for again."""
    with faulty(store.endpoint, rate=1, kinds=[kind], max_faults=3, seed=5) as proxy:
        fetch_through(proxy, store)
        first, *resumed = ranges_of(proxy)
    assert first is None
    starts = [int((wanted or "").removeprefix("bytes=").removesuffix(f"-{len(DATA) - 1}")) for wanted in resumed]
    assert len(starts) == 3
    assert starts == sorted(starts)
    if kind != "reset_body":  # a reset takes with it what the client's kernel has not handed over
        assert proxy.body_bytes == len(DATA)


def test_retry_after_is_honoured(store: AisStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A minute, though the policy's own longest wait is 20 ms."""
    paused_s: list[float] = []

    class Clock:
        monotonic = staticmethod(lambda: sum(paused_s))

    monkeypatch.setattr(objects, "time", Clock)
    monkeypatch.setattr(objects, "pause", paused_s.append)
    with faulty(store.endpoint, rate=1, kinds=["429"], max_faults=1, retry_after="59") as proxy:
        fetch_through(proxy, store)
    assert sum(paused_s) == pytest.approx(59)


def test_faults_without_end_are_given_up(store: AisStore) -> None:
    """With attempts, time and the last cause."""
    with faulty(store.endpoint, rate=1, kinds=["503"]) as proxy:
        text = (
            r"'ais://.*/a/x.tar' at http://.*: given up after \d+ attempts in \d+\.\d s \(patience: 0.2 s without "
            r"progress\), the last one: 503 made by the .*; try later"
        )
        with pytest.raises(StoreError, match=text):
            fetch_through(proxy, store, patience=Patience(patience_s=0.2, longest_pause_s=0.02, advice="try later"))
        assert proxy.faults["503"] > 6


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


# Objects that are not the manifest's


def test_replaced_object_is_refused_before_its_body(store: AisStore) -> None:
    """Its head says so; the extent is as it was."""
    store.write("a/x.tar", OTHER)
    place = Place()
    with faulty(store.endpoint) as proxy, fetching(proxy.endpoint, store.bucket) as fetcher:
        digests = f"has the xxhash2 {checksum(OTHER):016x}, the manifest says {checksum(DATA):016x}"
        text = rf"'{store.locate('a/x.tar')}' {digests}; it was replaced since: .* dali-pipes prep index URL"
        fails(fetcher, DataError, text, place=place)
    assert place.holds(b"\xaa" * len(DATA))


@pytest.mark.parametrize(("is_deleted", "size"), [(False, len(DATA)), (True, len(DATA)), (True, 10)])
def test_object_replaced_between_two_attempts_is_no_mix(store: AisStore, is_deleted: bool, size: int) -> None:
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
            fetch_through(proxy, store)


@pytest.mark.parametrize("kind", ["crc32c", "md5", "sha256", "sha512", "xxhash", "xxhash2"])
def test_bytes_without_a_manifest_have_the_checksum_that_the_store_reports(store: AisStore, kind: str) -> None:
    """Of each type: a flipped byte is asked for again."""
    set_props(store, {"checksum": {"type": kind}})
    store.write("a/x.tar", DATA)
    with faulty(store.endpoint, rate=1, kinds=["flip"], max_faults=2, seed=3) as proxy:
        with fetching(proxy.endpoint, store.bucket) as fetcher:
            assert fetcher.read("a/x.tar") == DATA
        assert proxy.requests["target"] == 3


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
        with ObjectFetcher(StoredObjects(connection, "b", provider="aws"), patience=PATIENT) as fetcher:
            fails(fetcher, StoreError, text, name="x.tar")
        # An object that is not found may be on its way from one target to another: the cluster's map tells.
        looks = ["/v1/daemon?what=smap"] if status == 404 else []
        assert server.paths == ["/v1/objects/b/x.tar?provider=aws", *looks]


def test_body_without_a_length_is_counted() -> None:
    """In chunks, as from behind a proxy that does not know it: as long as it must be, too long, too short."""
    sent = DATA[:100_000]
    with scripted(lambda visit: visit.say_chunked(sent)) as server, fetching(server.endpoint, "b") as fetcher:
        for size, expected in [
            (100_000, None),
            (99_999, (DataError, "has more than 99999 bytes, the manifest's; it was replaced")),
            (100_001, (StoreError, "its body ends after 100000 of 100001 bytes")),
        ]:
            place = Place(size)
            outcome = pytest.raises(expected[0], match=expected[1]) if expected else contextlib.nullcontext()
            with outcome:
                assert fetcher.fetch([Wanted("x.tar", place.extent, checksum(sent))])
                assert place.holds(sent)
            if size < len(sent):
                assert place.holds(sent[:size])


def test_full_disk_is_the_cache_error_of_the_extent(store: AisStore) -> None:
    with Path("/dev/full").open("r+b", buffering=0) as disk, fetching(store.endpoint, store.bucket) as fetcher:
        wanted = Wanted("a/x.tar", Extent(disk.fileno(), 0, len(DATA)), checksum(DATA))
        with pytest.raises(CacheError, match="cannot write to the cache file: No space left on device"):
            fetcher.fetch([wanted])


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
