"""Objects to extents, through a proxy that breaks what it passes: the embedded node behind it."""

import contextlib
import json
import logging
import os
import random
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import requests
import trustme
import xxhash

from dali_pipes.cache.extents import Extent
from dali_pipes.errors import DataError, PipesError, StoreError
from dali_pipes.fetch import objects
from dali_pipes.fetch.answers import StoredObjects
from dali_pipes.fetch.connection_pool import ClusterAccess, is_token_for
from dali_pipes.fetch.fetcher import Wanted
from dali_pipes.fetch.objects import ObjectFetcher, RetryPolicy
from dali_pipes.processes.programs import ServerProcess
from dali_pipes.store.cluster import embedded_node
from dali_pipes.store.cluster.ais import AisStore, ais_client
from tests.faults import FaultyProxy, faulty

DATA = random.Random(0).randbytes(2_500_001)
OTHER = random.Random(1).randbytes(2_500_001)
PROMPT = RetryPolicy(base_s=0.005, cap_s=0.02, silence_s=0.3, connect_timeout_s=1.0)
"""So that a test of many faults is over soon."""
SENDFILE_MARGIN = 1000  # bytes of the file around an extent


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with embedded_node.start(tmp_path_factory.mktemp("node")) as running:
        yield running


@pytest.fixture
def store(node: ServerProcess) -> AisStore:
    """A bucket of this test's own with ``a/x.tar``, 2.5 MB."""
    made = AisStore(node.endpoint, f"transport-{uuid.uuid4().hex[:8]}")
    made.create()
    made.write("a/x.tar", DATA)
    return made


class Place:
    """A file with an extent in its middle."""

    def __init__(self, size: int = len(DATA)) -> None:
        self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 (the garbage collector closes it)
        self._file.write(b"\xaa" * (size + 2 * SENDFILE_MARGIN))
        self.extent = Extent(self._file.fileno(), SENDFILE_MARGIN, size)

    def holds(self, data: bytes) -> bool:
        """Whether these bytes lie there, and its neighbours are as they were."""
        margin = b"\xaa" * SENDFILE_MARGIN
        size = self.extent.size + 2 * SENDFILE_MARGIN
        return os.pread(self._file.fileno(), size + 1, 0) == margin + data + margin


def checksum(data: bytes) -> int:
    found: int = xxhash.xxh64_intdigest(data)
    return found


@contextlib.contextmanager
def fetching(endpoint: str, bucket: str, *, retry: RetryPolicy = PROMPT) -> Iterator[ObjectFetcher]:
    with ObjectFetcher(StoredObjects(ClusterAccess(endpoint=endpoint), bucket), retry=retry) as fetcher:
        yield fetcher


def fetch_through(proxy: FaultyProxy, store: AisStore, *, num_connections: int = 1) -> None:
    """Fetch ``a/x.tar`` and hold every byte against what was written."""
    place = Place()
    with fetching(proxy.endpoint, store.bucket) as fetcher:
        assert fetcher.fetch([Wanted("a/x.tar", place.extent, checksum(DATA))], num_connections=num_connections)
    assert place.holds(DATA)


def fails(
    fetcher: ObjectFetcher,
    error: type[Exception],
    text: str,
    *,
    name: str = "a/x.tar",
    place: Place | None = None,
    num_connections: int = 1,
) -> str:
    """The text of the error that a fetch of ``DATA`` must raise."""
    place = place or Place()
    with pytest.raises(error, match=text) as raised:
        fetcher.fetch([Wanted(name, place.extent, checksum(DATA))], num_connections=num_connections)
    return str(raised.value)


def ranges_of(proxy: FaultyProxy) -> list[str | None]:
    """What each request at a target asked for."""
    return [seen.headers.get("Range") for seen in proxy.seen if not seen.is_entry]


# What comes is what was stored


@pytest.mark.parametrize("size", [0, 1, 4096, 1_048_577])
def test_object_of_any_size_lies_in_its_extent(store: AisStore, size: int) -> None:
    """And nowhere else."""
    store.write("some.bin", DATA[:size])
    place = Place(size)
    with fetching(store.endpoint, store.bucket) as fetcher:
        assert fetcher.fetch([Wanted("some.bin", place.extent, checksum(DATA[:size]))])
    assert place.holds(DATA[:size])


@pytest.mark.parametrize("name", ["a b.tar", "ä/ö?.tar", "50%.tar", "a#b&c=d+e.tar"])
def test_object_names_are_quoted_as_the_sdk_does(store: AisStore, name: str) -> None:
    """What the SDK has put is found."""
    store.write(name, b"abc")
    place = Place(3)
    with fetching(store.endpoint, store.bucket) as fetcher:
        assert fetcher.fetch([Wanted(name, place.extent, checksum(b"abc"))])
    assert place.holds(b"abc")


def test_object_name_that_climbs_is_not_folded(store: AisStore) -> None:
    """``a/../a/x.tar`` is no other name of ``a/x.tar``: the node, which refuses it, gets to see it."""
    with fetching(store.endpoint, store.bucket) as fetcher:
        fails(fetcher, StoreError, "400 invalid object name", name="a/../a/x.tar")


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

    def act(exchange: Exchange) -> None:
        both.wait(10)
        exchange.say(200, DATA[:100] if "index" in exchange.path else DATA)

    shard, index = Place(), Place(100)
    with answering(act) as server, fetching(server.endpoint, "b") as fetcher:
        wanted = [Wanted("x.tar", shard.extent, checksum(DATA)), Wanted("x.index", index.extent, checksum(DATA[:100]))]
        assert fetcher.fetch(wanted)
    assert shard.holds(DATA)
    assert index.holds(DATA[:100])


def test_one_object_that_cannot_be_had_fails_both(store: AisStore) -> None:
    """And says which one."""
    place = Place()
    wanted = [Wanted("a/x.tar", place.extent, checksum(DATA)), Wanted("a/none.index", Place(100).extent, 0)]
    with fetching(store.endpoint, store.bucket) as fetcher, pytest.raises(StoreError, match=r"a/none\.index"):
        fetcher.fetch(wanted)


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


def test_close_twice_and_an_unused_fetcher() -> None:
    """Both do nothing."""
    fetcher = ObjectFetcher(StoredObjects(ClusterAccess(endpoint="http://localhost:1"), "b"))
    fetcher.close()
    fetcher.close()


# What breaks and is mended


@pytest.mark.parametrize(
    "kind",
    ["reset", "reset_body", "short", "flip", "stall", "stall_body", "gone", "408", "429", "500", "502", "503", "504"],
)
def test_fault_of_each_kind_is_recovered_from(store: AisStore, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """Twice in a row; the bytes are whole, and each retry is logged with the object and its cause."""
    caplog.set_level(logging.INFO, "dali_pipes")
    with faulty(store.endpoint, rate=1, kinds=[kind], max_faults=2, stall_s=3) as proxy:
        fetch_through(proxy, store)
        assert proxy.faults == {kind: 2}
    retries = [record.getMessage() for record in caplog.records]
    assert len(retries) == 2
    assert all(store.locate("a/x.tar") in text and "the next in" in text for text in retries)


@pytest.mark.parametrize("kind", ["reset_body", "short", "stall_body"])
def test_broken_body_goes_on_where_it_broke(store: AisStore, kind: str) -> None:
    """Not one byte that has arrived is asked for again."""
    with faulty(store.endpoint, rate=1, kinds=[kind], max_faults=3, seed=5, stall_s=3) as proxy:
        fetch_through(proxy, store)
        first, *resumed = ranges_of(proxy)
    assert first is None
    starts = [int((wanted or "").removeprefix("bytes=").removesuffix(f"-{len(DATA) - 1}")) for wanted in resumed]
    assert len(starts) == 3
    assert starts == sorted(starts)
    if kind != "reset_body":  # a reset takes with it what the client's kernel has not handed over
        assert proxy.body_bytes == len(DATA)


@pytest.mark.parametrize("seed", range(3))
def test_faults_of_all_kinds_at_once_are_recovered_from(store: AisStore, seed: int) -> None:
    """Every third request breaks, each hop of a redirect being one."""
    with faulty(store.endpoint, rate=0.33, seed=seed, stall_s=1) as proxy:
        for _ in range(10):
            fetch_through(proxy, store)
        assert len(proxy.faults) > 2


def test_target_that_vanishes_is_asked_for_anew(store: AisStore) -> None:
    """Its port stops listening in the middle of a body: the proxy knows where the object is now."""
    with faulty(store.endpoint, rate=1, kinds=["stall_body"], max_faults=1, stall_s=3) as proxy:
        threading.Timer(0.1, proxy.vanish).start()
        fetch_through(proxy, store)
        assert proxy.num_connections["target"] == 2
        assert proxy.requests["entry"] == 2


def test_retry_after_is_honoured(store: AisStore) -> None:
    """A second, though the policy's own longest wait is 20 ms."""
    with faulty(store.endpoint, rate=1, kinds=["429"], max_faults=1, retry_after="1") as proxy:
        start = time.monotonic()
        fetch_through(proxy, store)
        assert time.monotonic() - start >= 1


def test_faults_without_end_are_given_up(store: AisStore) -> None:
    """With attempts, time and the last cause."""
    with faulty(store.endpoint, rate=1, kinds=["503"]) as proxy:
        text = r"'ais://.*/a/x.tar' at http://.*: given up after 6 attempts in \d+\.\d s, the last one: 503 made by the"
        with pytest.raises(StoreError, match=text):
            fetch_through(proxy, store)
        assert proxy.faults == {"503": 6}


def test_faults_with_progress_are_bounded_too(store: AisStore) -> None:
    """Each attempt brings bytes, and the object still never ends."""
    retry = RetryPolicy(base_s=0.0, max_attempts=9, attempts=3)
    with faulty(store.endpoint, rate=1, kinds=["short"]) as proxy:
        # Past an object's end nothing is left to break: so it is the first bytes, over and over.
        proxy.place = lambda num: 1  # type: ignore[method-assign]
        with fetching(proxy.endpoint, store.bucket, retry=retry) as fetcher:
            fails(fetcher, StoreError, "given up after 9 attempts")


def test_wrong_bytes_without_end_are_given_up(store: AisStore) -> None:
    """The object's checksum is right in its head, its bytes are not: no word of a replaced object."""
    text = "given up after 6 attempts .* its bytes have the xxhash2"
    with faulty(store.endpoint, rate=1, kinds=["flip"]) as proxy, pytest.raises(StoreError, match=text):
        fetch_through(proxy, store)


def test_endpoint_without_a_server_is_named() -> None:
    """The address, the reason, and what to check."""
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    endpoint = f"http://127.0.0.1:{port}"
    text = (
        rf"at {endpoint}: given up after 6 .* no answer from 127.0.0.1:{port}: Connection refused; is .* AIS_ENDPOINT"
    )
    with fetching(endpoint, "b") as fetcher:
        fails(fetcher, StoreError, text, name="x.tar")


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


@pytest.mark.parametrize("size", [len(DATA) - 1, len(DATA) + 1])
def test_object_of_another_size_is_refused_before_its_body(store: AisStore, size: int) -> None:
    """A longer one would not fit, a shorter one leaves old bytes."""
    place = Place(size)
    with fetching(store.endpoint, store.bucket) as fetcher:
        fails(fetcher, DataError, f"has {len(DATA)} bytes, the manifest says {size}; it was replaced", place=place)
    assert place.holds(b"\xaa" * size)


@pytest.mark.parametrize("is_deleted", [False, True])
@pytest.mark.parametrize("size", [len(DATA), 10])
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


@pytest.mark.parametrize("kind", ["none", "crc32c", "md5", "sha256", "sha512", "xxhash", "xxhash2"])
def test_bucket_of_each_checksum_type(store: AisStore, kind: str) -> None:
    """The object is whole; a flipped byte is asked for again; another object is the manifest's error."""
    set_props(store, {"checksum": {"type": kind}})
    store.write("a/x.tar", DATA)
    with faulty(store.endpoint, rate=1, kinds=["flip"], max_faults=2, seed=3) as proxy:
        fetch_through(proxy, store)
        assert proxy.requests["target"] == 3
    store.write("a/x.tar", OTHER)
    with faulty(store.endpoint) as proxy, pytest.raises(DataError, match=r"has the xxhash2 .* it was replaced since"):
        fetch_through(proxy, store)


def set_props(store: AisStore, props: dict[str, object]) -> None:
    message = json.dumps({"action": "set-bprops", "value": props})
    answer = requests.patch(f"{store.endpoint}/v1/buckets/{store.bucket}", data=message, timeout=10)
    answer.raise_for_status()


# Answers that cannot be mended


@pytest.mark.parametrize(
    ("status", "token", "expected"),
    [
        (400, None, "400 no good$"),
        (401, None, "401 no good; set AIS_AUTHN_TOKEN to a token that may read this bucket"),
        (403, "t0ken", "403 no good; the token in AIS_AUTHN_TOKEN may have expired"),
        (404, None, "404 no good; was it deleted\\? index the shards anew: dali-pipes prep index URL"),
        (416, None, "416 no good$"),
        (501, None, "501 no good$"),
    ],
)
def test_permanent_error_is_told_at_once(status: int, token: str | None, expected: str) -> None:
    """One request; the object's URL, the endpoint, AIStore's own words, and what to do."""
    with answering(lambda exchange: exchange.say(status, b'{"tcode": "Err", "message": "no  good"}')) as server:
        connection = ClusterAccess(endpoint=server.endpoint, token=token)
        text = f"'aws://b/x.tar' at {server.endpoint}: ".replace("aws", "s3") + expected
        with ObjectFetcher(StoredObjects(connection, "b", provider="aws"), retry=PROMPT) as fetcher:
            fails(fetcher, StoreError, text, name="x.tar")
        assert len(server.paths) == 1
        assert server.paths == ["/v1/objects/b/x.tar?provider=aws"]


@pytest.mark.parametrize("missing", ["object", "bucket"])
def test_missing_object_or_bucket_is_told_at_once(store: AisStore, missing: str) -> None:
    """As the node says it."""
    bucket = store.bucket if missing == "object" else "no-such-bucket"
    with fetching(store.endpoint, bucket) as fetcher:
        fails(fetcher, StoreError, r"404 .*does not exist.*deleted", name="no.tar")


@pytest.mark.parametrize("location", ["ftp://127.0.0.1/x", "file:///etc/passwd", "", "http://", "http://h:99999/"])
def test_redirect_to_anything_but_http_is_refused(location: str) -> None:
    """The scheme in the text; nothing is opened."""
    redirecting = answering(lambda exchange: exchange.say(301, b"", Location=location))
    with redirecting as server, fetching(server.endpoint, "b") as fetcher:
        fails(fetcher, StoreError, "which is not the URL of a host", name="x.tar")


def test_redirects_in_a_circle_are_refused() -> None:
    """After a few."""
    circle = answering(lambda exchange: exchange.say(307, b"", Location=exchange.path))
    with circle as server, fetching(server.endpoint, "b") as fetcher:
        fails(fetcher, StoreError, "redirected 4 times", name="x.tar")


def test_body_without_a_length_is_counted() -> None:
    """In chunks, as from behind a proxy that does not know it: as long as it must be, too long, too short."""
    sent = DATA[:100_000]
    with answering(lambda exchange: exchange.say_chunked(sent)) as server, fetching(server.endpoint, "b") as fetcher:
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


def test_what_is_no_http_is_told() -> None:
    """An SSH server, for instance."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def greet() -> None:
            with contextlib.suppress(OSError):
                while True:
                    client, _ = listener.accept()
                    client.sendall(b"SSH-2.0-OpenSSH_9.2\r\n\r\n")
                    client.close()

        threading.Thread(target=greet, daemon=True).start()
        with fetching(f"http://127.0.0.1:{listener.getsockname()[1]}", "b") as fetcher:
            fails(fetcher, StoreError, r"does not speak HTTP/1.1|reset", name="x.tar")


def test_full_disk_is_the_cache_error_of_the_extent(store: AisStore) -> None:
    """Unchanged, at the byte where the disk ends, after one request; here the limit of a file's size is the disk's."""
    code = f"""
import resource, tempfile
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
from dali_pipes.errors import CacheError
from dali_pipes.cache.extents import Extent
from dali_pipes.fetch.fetcher import Wanted
from dali_pipes.fetch.answers import StoredObjects
from dali_pipes.fetch.connection_pool import ClusterAccess
from dali_pipes.fetch.objects import ObjectFetcher
with tempfile.TemporaryFile(buffering=0) as file:
    fetcher = ObjectFetcher(StoredObjects(ClusterAccess(endpoint="{{}}"), "{store.bucket}"))
    for _ in range(2):
        try:
            fetcher.fetch([Wanted("a/x.tar", Extent(file.fileno(), 0, {len(DATA)}), {checksum(DATA)})])
        except CacheError as exc:
            print(exc, exc.__cause__.__class__.__name__)
    print(file.seek(0, 2))
"""
    with faulty(store.endpoint) as proxy:
        command = [sys.executable, "-c", code.format(proxy.endpoint)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        assert proxy.requests["target"] == 2
    assert done.stdout.splitlines() == ["cannot write to the cache file: File too large OSError"] * 2 + [str(1 << 20)]


# Stopping


@pytest.mark.parametrize("kind", ["stall", "stall_body", "503"])
def test_stopped_ends_a_silent_wait(store: AisStore, kind: str) -> None:
    """Of an answer, of a body, and of a long back-off: ``False``, long before either would end."""
    patient = RetryPolicy(base_s=60, cap_s=60, silence_s=60)
    with faulty(store.endpoint, rate=1, kinds=[kind], stall_s=30, retry_after="30") as proxy:
        with fetching(proxy.endpoint, store.bucket, retry=patient) as fetcher:
            deadline = time.monotonic() + 0.3
            asked: list[float] = []

            def stopped() -> bool:
                asked.append(time.monotonic())
                return asked[-1] > deadline

            place = Place()
            assert not fetcher.fetch([Wanted("a/x.tar", place.extent, checksum(DATA))], stopped=stopped)
            assert time.monotonic() - deadline < 5
            assert len(asked) >= 3
        proxy.kinds = []
        fetch_through(proxy, store)


def test_fetcher_goes_on_after_it_was_stopped(store: AisStore) -> None:
    """In the middle of a body; its connection is not used again."""
    stalling = faulty(store.endpoint, rate=1, kinds=["stall_body"], max_faults=1, stall_s=30)
    with stalling as proxy, fetching(proxy.endpoint, store.bucket) as fetcher:
        place = Place()
        is_late = threading.Event()
        threading.Timer(0.1, is_late.set).start()
        assert not fetcher.fetch([Wanted("a/x.tar", place.extent, checksum(DATA))], stopped=is_late.is_set)
        assert fetcher.fetch([Wanted("a/x.tar", place.extent, checksum(DATA))])
        assert place.holds(DATA)


# Several ranges at a time


@pytest.fixture
def small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "RANGE_BYTES", 500_000)


@pytest.mark.usefixtures("small_ranges")
def test_ranges_are_read_in_parallel_from_one_target(store: AisStore) -> None:
    """Four connections, one redirect; an object too small for two ranges is read in one piece."""
    with faulty(store.endpoint) as proxy:
        fetch_through(proxy, store, num_connections=4)
        assert sorted(wanted or "" for wanted in ranges_of(proxy)) == sorted(
            f"bytes={start}-{min(start + 625_001, len(DATA)) - 1}" for start in range(0, len(DATA), 625_001)
        )
        assert proxy.requests == {"entry": 1, "target": 4}
        assert proxy.num_connections["target"] == 4
        store.write("small.bin", DATA[:999_999])
        with fetching(proxy.endpoint, store.bucket) as fetcher:
            place = Place(999_999)
            assert fetcher.fetch([Wanted("small.bin", place.extent, checksum(DATA[:999_999]))], num_connections=4)
        assert ranges_of(proxy)[-1] is None


@pytest.mark.usefixtures("small_ranges")
@pytest.mark.parametrize("seed", range(3))
def test_ranges_recover_each_on_its_own(store: AisStore, seed: int) -> None:
    """All kinds of faults; every byte is right."""
    with faulty(store.endpoint, rate=0.4, seed=seed, stall_s=1) as proxy:
        for _ in range(5):
            fetch_through(proxy, store, num_connections=4)
        assert len(proxy.faults) > 2


@pytest.mark.usefixtures("small_ranges")
@pytest.mark.parametrize("kind", ["none", "crc32c", "xxhash2"])
def test_ranges_with_a_wrong_byte_are_read_again(store: AisStore, kind: str) -> None:
    """In one piece, for no one knows which range it was in."""
    set_props(store, {"checksum": {"type": kind}})
    store.write("a/x.tar", DATA)
    with faulty(store.endpoint, rate=1, kinds=["flip"], max_faults=1) as proxy:
        fetch_through(proxy, store, num_connections=4)
        assert ranges_of(proxy)[-1] is None


@pytest.mark.usefixtures("small_ranges")
def test_ranges_with_checksums_of_their_own_are_given_up(store: AisStore) -> None:
    """A bucket may be set so; then nothing tells whether the object was replaced, but the whole does."""
    set_props(store, {"checksum": {"enable_read_range": True}})
    with faulty(store.endpoint) as proxy, fetching(proxy.endpoint, store.bucket) as fetcher:
        for _ in range(2):
            place = Place()
            assert fetcher.fetch([Wanted("a/x.tar", place.extent, checksum(DATA))], num_connections=4)
            assert place.holds(DATA)
        assert [wanted is None for wanted in ranges_of(proxy)] == [False, True, True]
        store.write("a/x.tar", OTHER)
        fails(fetcher, DataError, "it was replaced since", place=place, num_connections=4)


def test_broken_body_of_a_bucket_with_range_checksums_starts_again(store: AisStore) -> None:
    """The range's checksum is another than the whole's: no proof that it is the same object."""
    set_props(store, {"checksum": {"enable_read_range": True}})
    with faulty(store.endpoint, rate=1, kinds=["short"], max_faults=1) as proxy:
        fetch_through(proxy, store)
        assert [wanted is None for wanted in ranges_of(proxy)] == [True, False, True]


@pytest.mark.usefixtures("small_ranges")
def test_ranges_of_a_replaced_object_are_no_mix(store: AisStore) -> None:
    """Replaced after the first range's head."""
    with faulty(store.endpoint, rate=1, kinds=["short"], max_faults=1) as proxy:

        def place_and_replace(num: int) -> int:
            store.write("a/x.tar", OTHER)
            return num // 2

        proxy.place = place_and_replace  # type: ignore[method-assign]
        with pytest.raises(DataError, match="it was replaced since"):
            fetch_through(proxy, store, num_connections=4)


@pytest.mark.usefixtures("small_ranges")
def test_server_without_ranges_is_read_in_one_piece() -> None:
    """200 to a range: no part of it is taken for one. The next object is not asked for in ranges."""
    with answering(lambda exchange: exchange.say(200, DATA)) as server, fetching(server.endpoint, "b") as fetcher:
        for _ in range(2):
            place = Place()
            assert fetcher.fetch([Wanted("x.tar", place.extent, checksum(DATA))], num_connections=4)
            assert place.holds(DATA)
        assert [wanted is None for wanted in server.ranges] == [False, True, True]


# Tokens


TOKEN = "s3cret-t0ken"


def test_token_goes_where_the_sdk_sends_it(store: AisStore) -> None:
    """To the proxy; not to a target, at another address: held against the SDK's own requests."""
    with faulty(store.endpoint) as proxy:
        place = Place()
        with ObjectFetcher(StoredObjects(ClusterAccess(endpoint=proxy.endpoint, token=TOKEN), store.bucket)) as fetcher:
            assert fetcher.fetch([Wanted("a/x.tar", place.extent, checksum(DATA))])
        ours = [(seen.is_entry, seen.headers.get("Authorization")) for seen in proxy.seen]
        proxy.seen.clear()
        client = ais_client(proxy.endpoint)
        client.cluster().client.token = TOKEN
        client.bucket(store.bucket).object("a/x.tar").get_reader().read_all()
        sdks = [(seen.is_entry, seen.headers.get("Authorization")) for seen in proxy.seen]
    assert ours == sdks == [(True, f"Bearer {TOKEN}"), (False, None)]


def test_token_goes_to_a_target_at_the_endpoint() -> None:
    """One address for all, as the embedded node, or a gateway before a cluster."""
    seen: list[str | None] = []

    def exchange_once(exchange: "Exchange") -> None:
        seen.append(exchange.headers.get("Authorization"))
        if "pid=" in exchange.path:
            exchange.say(200, DATA)
        else:
            exchange.say(301, b"", Location=f"{exchange.path}&pid=1")

    place = Place()
    with answering(exchange_once) as server:
        fetcher = ObjectFetcher(StoredObjects(ClusterAccess(endpoint=server.endpoint, token=TOKEN), "b"))
        assert fetcher.fetch([Wanted("x.tar", place.extent, checksum(DATA))])
        fetcher.close()
    assert seen == [f"Bearer {TOKEN}"] * 2


@pytest.mark.parametrize(
    ("url", "is_sent"),
    [
        ("https://ais:51080/x", True),
        ("https://AIS:51080/x", True),
        ("https://ais:51081/x", False),  # another port: a target
        ("https://t1:51080/x", False),
        ("http://ais:51080/x", False),  # for everybody to read
        ("http://ais/x", False),
        ("https://ais.evil.example:51080/x", False),
    ],
)
def test_token_is_for_the_endpoint_only(url: str, is_sent: bool) -> None:
    """Both ways round, and for standard ports."""
    endpoint = "https://ais:51080"
    assert is_token_for(endpoint, url) == is_token_for(url, endpoint) == is_sent
    assert is_token_for("http://ais", "https://ais:443/x")
    assert not is_token_for("https://ais", "http://ais")


def test_token_is_in_no_text(caplog: pytest.LogCaptureFixture) -> None:
    """Not in logs at the finest level, errors with all their causes, nor any repr; not even if a server repeats it."""
    caplog.set_level(logging.DEBUG)
    texts = []
    echo = f'{{"message": "bad token Bearer {TOKEN}"}}'.encode()
    acts: list[Callable[[Exchange], None]] = [
        *(lambda exchange, status=status: exchange.say(status, echo) for status in (400, 401, 403, 404, 500, 501)),
        lambda exchange: exchange.say(301, b"", Location=f"ftp://{TOKEN}/"),
        lambda exchange: exchange.say(200, b"short"),
        lambda exchange: exchange.say(200, DATA),
        lambda exchange: exchange.connection.close(),
    ]
    for act in acts:
        with answering(act) as server:
            connection = ClusterAccess(endpoint=server.endpoint, token=TOKEN)
            with ObjectFetcher(StoredObjects(connection, "b"), retry=PROMPT) as fetcher:
                place = Place()
                with pytest.raises(PipesError) as raised:
                    fetcher.fetch([Wanted("x.tar", place.extent, 0)])
                exc: BaseException | None = raised.value
                while exc:
                    texts += [str(exc), repr(exc)]
                    exc = exc.__cause__ or exc.__context__
                texts += [repr(connection), str(connection), repr(fetcher), repr(vars(fetcher))]
    texts += [record.getMessage() for record in caplog.records]
    assert len(texts) > 50
    assert not [text for text in texts if TOKEN in text]


def test_token_that_is_no_header_is_refused_without_showing_it() -> None:
    """A line end in it would start another header."""
    with pytest.raises(ValueError, match="is AIS_AUTHN_TOKEN complete") as raised:
        ClusterAccess(endpoint="http://localhost:1", token=f"{TOKEN}\r\nX: y")
    assert TOKEN not in str(raised.value)


@pytest.mark.parametrize("endpoint", ["localhost:51080", "ftp://h", "http://", "http://h:port", "http://u:pw@h"])
def test_endpoint_that_is_no_url_is_refused(endpoint: str) -> None:
    """A password in it is not repeated."""
    with pytest.raises(ValueError, match="endpoint") as raised:
        ClusterAccess(endpoint=endpoint)
    assert "pw" not in str(raised.value)


def test_environment_is_read_as_the_sdk_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its variables, held against what the SDK makes of them."""
    from aistore import Client
    from aistore.sdk.session_manager import resolve_ssl_config

    for name in (
        "AIS_AUTHN_TOKEN",
        "AIS_CLIENT_CA",
        "AIS_CRT",
        "AIS_CRT_KEY",
        "AIS_SKIP_VERIFY",
        "AIS_SKIP_VERIFY_CRT",
        "REQUESTS_CA_BUNDLE",
        "CURL_CA_BUNDLE",
    ):
        monkeypatch.delenv(name, raising=False)
    steps = [
        {},
        {"AIS_AUTHN_TOKEN": TOKEN, "AIS_CLIENT_CA": "/ca.pem"},
        {"AIS_CRT": "/c.pem"},  # a certificate without a key is none
        {"AIS_CRT_KEY": "/k.pem"},
        {"AIS_SKIP_VERIFY": "Yes"},
        {"AIS_SKIP_VERIFY_CRT": "no"},  # comes before the older name
        {"AIS_SKIP_VERIFY_CRT": "T"},
    ]
    for variables in steps:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        ours = ClusterAccess.from_environment("https://ais:1")
        verify, certificate = resolve_ssl_config()
        assert (not ours.skip_verify and (str(ours.ca) if ours.ca else True)) == verify
        assert (ours.client_cert and tuple(map(str, ours.client_cert))) == certificate
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the SDK's, of not verifying
            assert ours.token == Client("http://localhost:1").cluster().client.token


# TLS


@dataclass(frozen=True)
class Tls:
    ca: Path
    other_ca: Path
    client_cert: tuple[Path, Path]
    context: ssl.SSLContext
    strict: ssl.SSLContext
    """Asks for a client's certificate."""


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    folder = tmp_path_factory.mktemp("tls")
    ca, other = trustme.CA(), trustme.CA()
    ca.cert_pem.write_to_path(str(folder / "ca.pem"))
    other.cert_pem.write_to_path(str(folder / "other.pem"))
    client = ca.issue_cert("client@example.org")
    client.cert_chain_pems[0].write_to_path(str(folder / "client.pem"))
    client.private_key_pem.write_to_path(str(folder / "client.key"))
    contexts = []
    for mode in (ssl.CERT_NONE, ssl.CERT_REQUIRED):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        ca.issue_cert("127.0.0.1").configure_cert(context)
        ca.configure_trust(context)
        context.verify_mode = mode
        contexts.append(context)
    client_cert = (folder / "client.pem", folder / "client.key")
    return Tls(folder / "ca.pem", folder / "other.pem", client_cert, *contexts)


def test_https_with_the_cluster_ca(store: AisStore, tls: Tls) -> None:
    """Proxy and target, connections kept; broken bodies go on."""
    with faulty(store.endpoint, context=tls.context, rate=1, kinds=["reset_body", "short"], max_faults=2) as proxy:
        place = Place()
        with ObjectFetcher(
            StoredObjects(ClusterAccess(endpoint=proxy.endpoint, ca=tls.ca), store.bucket), retry=PROMPT
        ) as fetcher:
            for _ in range(3):
                assert fetcher.fetch([Wanted("a/x.tar", place.extent, checksum(DATA))])
        assert place.holds(DATA)
        assert proxy.num_connections["entry"] == 1
        assert ranges_of(proxy)[0] is None
        assert ranges_of(proxy)[1] is not None


@pytest.mark.usefixtures("small_ranges")
def test_https_in_parallel_ranges(store: AisStore, tls: Tls) -> None:
    """Four of them."""
    with faulty(store.endpoint, context=tls.context) as proxy:
        place = Place()
        with ObjectFetcher(StoredObjects(ClusterAccess(endpoint=proxy.endpoint, ca=tls.ca), store.bucket)) as fetcher:
            assert fetcher.fetch([Wanted("a/x.tar", place.extent, checksum(DATA))], num_connections=4)
        assert place.holds(DATA)
        assert proxy.requests["target"] == 4


@pytest.mark.parametrize("ca", [None, "other_ca"])
def test_https_with_another_ca_is_refused_at_once(store: AisStore, tls: Tls, ca: str | None) -> None:
    """One attempt; the text names the variable."""
    with faulty(store.endpoint, context=tls.context) as proxy:
        connection = ClusterAccess(endpoint=proxy.endpoint, ca=getattr(tls, ca) if ca else None)
        text = r"127.0.0.1:\d+ shows a certificate that cannot be trusted \(.+\); set AIS_CLIENT_CA"
        with ObjectFetcher(StoredObjects(connection, store.bucket)) as fetcher:
            fails(fetcher, StoreError, text)
        assert proxy.num_connections["entry"] == 1


def test_https_skip_verify_trusts_anybody(store: AisStore, tls: Tls) -> None:
    """As asked for."""
    with faulty(store.endpoint, context=tls.context) as proxy:
        place = Place()
        with ObjectFetcher(
            StoredObjects(ClusterAccess(endpoint=proxy.endpoint, skip_verify=True), store.bucket)
        ) as fetcher:
            assert fetcher.fetch([Wanted("a/x.tar", place.extent, checksum(DATA))])
        assert place.holds(DATA)


def test_https_with_a_client_certificate(store: AisStore, tls: Tls) -> None:
    """With it, bytes; without, an error that names the variables."""
    with faulty(store.endpoint, context=tls.strict) as proxy:
        place = Place()
        connection = ClusterAccess(endpoint=proxy.endpoint, ca=tls.ca, client_cert=tls.client_cert)
        with ObjectFetcher(StoredObjects(connection, store.bucket)) as fetcher:
            assert fetcher.fetch([Wanted("a/x.tar", place.extent, checksum(DATA))])
        assert place.holds(DATA)
        with ObjectFetcher(
            StoredObjects(ClusterAccess(endpoint=proxy.endpoint, ca=tls.ca), store.bucket), retry=PROMPT
        ) as fetcher:
            fails(fetcher, StoreError, "set AIS_CRT and AIS_CRT_KEY", place=place)


def test_https_to_a_server_without_tls_is_told(store: AisStore) -> None:
    """At once."""
    endpoint = store.endpoint.replace("http://", "https://")
    with fetching(endpoint, store.bucket) as fetcher:
        fails(fetcher, StoreError, "does not speak TLS")


@pytest.mark.parametrize("is_missing", [True, False])
def test_ca_that_cannot_be_read_is_named(tmp_path: Path, is_missing: bool) -> None:
    """With the variable."""
    path = tmp_path / "ca.pem"
    if not is_missing:
        path.write_text("no certificate")
    with ObjectFetcher(
        StoredObjects(ClusterAccess(endpoint="https://127.0.0.1:1", ca=path), "b"), retry=PROMPT
    ) as fetcher:
        fails(fetcher, StoreError, r"ca.pem.*check AIS_CLIENT_CA|given up", name="x.tar")
    with pytest.raises(StoreError, match=r"ca.pem.*check AIS_CLIENT_CA"):
        ClusterAccess(endpoint="https://127.0.0.1:1", ca=path).tls_context()


# The environment's proxies


def test_loopback_is_reached_without_the_environments_proxy(store: AisStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """No proxy can reach this machine's loopback."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    place = Place()
    with fetching(store.endpoint, store.bucket) as fetcher:
        assert fetcher.fetch([Wanted("a/x.tar", place.extent, checksum(DATA))])


def test_other_hosts_are_reached_through_the_environments_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its password, and the whole URL; what it answers with is the object."""
    heads: list[tuple[str, str | None]] = []

    def exchange_once(exchange: "Exchange") -> None:
        heads.append((exchange.path, exchange.headers.get("Proxy-Authorization")))
        exchange.say(200, DATA)

    with answering(exchange_once) as server:
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        monkeypatch.setenv("http_proxy", server.endpoint.replace("://", "://u:p%40@"))
        place = Place()
        with fetching("http://ais.invalid:51080", "b") as fetcher:
            assert fetcher.fetch([Wanted("x.tar", place.extent, checksum(DATA))])
        assert place.holds(DATA)
    assert heads == [("http://ais.invalid:51080/v1/objects/b/x.tar?provider=ais", "Basic dTpwQA==")]


def test_https_goes_through_a_tunnel(store: AisStore, tls: Tls, monkeypatch: pytest.MonkeyPatch) -> None:
    """CONNECT to the cluster's host, by name; what is in it is the cluster's TLS."""
    asked: list[str] = []
    with faulty(store.endpoint, context=tls.context) as proxy, socket.create_server(("127.0.0.1", 0)) as listener:
        port = int(proxy.endpoint.rpartition(":")[2])

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    client, _ = listener.accept()
                    head = client.recv(4096)
                    asked.append(head.split(b"\r\n")[0].decode())
                    number = asked[-1].split()[1].rpartition(":")[2]
                    client.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
                    server = socket.create_connection(("127.0.0.1", int(number)))
                    for pair in ((client, server), (server, client)):
                        threading.Thread(target=pump, args=pair, daemon=True).start()

        def pump(source: socket.socket, sink: socket.socket) -> None:
            with contextlib.suppress(OSError):
                while data := source.recv(1 << 16):
                    sink.sendall(data)
                sink.shutdown(socket.SHUT_WR)

        threading.Thread(target=serve, daemon=True).start()
        monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{listener.getsockname()[1]}")
        monkeypatch.setenv("no_proxy", "")
        monkeypatch.setenv("NO_PROXY", "")
        place = Place()
        # The redirect leads to 127.0.0.1, with the certificate of that; the proxy's own name is not checked here.
        connection = ClusterAccess(endpoint=f"https://ais.invalid:{port}", skip_verify=True)
        with ObjectFetcher(StoredObjects(connection, store.bucket), retry=PROMPT) as fetcher:
            assert fetcher.fetch([Wanted("a/x.tar", place.extent, checksum(DATA))])
        assert place.holds(DATA)
    assert asked[0] == f"CONNECT ais.invalid:{port} HTTP/1.1"
    assert len(asked) == 2


def test_proxy_of_another_kind_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its password."""
    monkeypatch.setenv("http_proxy", "socks5://u:pw@127.0.0.1:1")
    monkeypatch.setenv("no_proxy", "")
    with fetching("http://ais.invalid:51080", "b") as fetcher:
        text = fails(fetcher, StoreError, r"proxy for ais.invalid:51080 is of the kind 'socks5'.* NO_PROXY")
    assert "pw" not in text


# A server that says what it is told to


class Exchange(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: "Answering"

    def do_GET(self) -> None:
        self.server.paths.append(self.path)
        self.server.ranges.append(self.headers.get("Range"))
        self.server.act(self)

    def say(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def say_chunked(self, body: bytes) -> None:
        self.send_response_only(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for start in range(0, len(body), 30_000):
            chunk = body[start : start + 30_000]
            self.wfile.write(f"{len(chunk):x};x=y\r\n".encode() + chunk + b"\r\n")
        self.wfile.write(b"0\r\nX-Trailer: z\r\n\r\n")

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


class Answering(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, act: Callable[[Exchange], None]) -> None:
        super().__init__(("127.0.0.1", 0), Exchange)
        self.act = act
        self.paths: list[str] = []
        self.ranges: list[str | None] = []
        self.endpoint = f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients hang up."""


@contextlib.contextmanager
def answering(act: Callable[[Exchange], None]) -> Iterator[Answering]:
    """A server whose every answer is ``act``'s."""
    with Answering(act) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
