"""Objects of a real S3 server, with a proxy before it that breaks transfers."""

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from dali_pipes.errors import StoreError
from dali_pipes.fetch.fetcher import Wanted
from dali_pipes.store.http.objects import ObjectFetcher, RetryPolicy
from dali_pipes.store.patience import Patience
from tests.dali_pipes.fetch.s3_served import s3_objects, s3_server, s3_store
from tests.dali_pipes.fetch.served import DATA, Place, checksum, fails
from tests.faults import FaultyProxy, faulty

BUCKET = "pets"
# A loaded machine makes faults of its own.
RETRY = RetryPolicy(silence_s=1.0, connect_timeout_s=30.0, attempts=20)
PATIENCE = Patience(patience_s=60.0, longest_pause_s=0.02)
NAME = "a/x y+(1).tar"  # a name that signing must encode


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("buckets")
    (folder / BUCKET).mkdir()
    with s3_server(folder) as endpoint:
        yield endpoint


@pytest.fixture(autouse=True)
def stored(endpoint: str) -> Any:
    """The bucket, with the object."""
    store = s3_store(endpoint, BUCKET)
    store.put(NAME, DATA)
    return store


@contextlib.contextmanager
def fetching(endpoint: str) -> Iterator[ObjectFetcher]:
    with ObjectFetcher(s3_objects(endpoint, BUCKET), retry=RETRY, patience=PATIENCE) as fetcher:
        yield fetcher


def breaking(
    endpoint: str, *kinds: str, max_faults: int | None = None, rate: float = 1.0, seed: int = 0
) -> contextlib.AbstractContextManager[FaultyProxy]:
    """A proxy before the server; GETs of objects break."""
    return faulty(
        endpoint,
        kinds=kinds,
        max_faults=max_faults,
        rate=rate,
        seed=seed,
        stall_s=3,
        objects=f"/{BUCKET}/",
        redirects=False,
    )


def fetch(fetcher: ObjectFetcher, *, num_connections: int = 1) -> None:
    place = Place()
    assert fetcher.fetch([Wanted(NAME, place.extent, checksum(DATA))], num_connections=num_connections)
    assert place.holds(DATA)


@pytest.mark.usefixtures("small_ranges")
@pytest.mark.parametrize("num_connections", [1, 4])
def test_object_comes_whole(endpoint: str, num_connections: int) -> None:
    """In one piece and in ranges, whatever its name has."""
    with fetching(endpoint) as fetcher:
        fetch(fetcher, num_connections=num_connections)


@pytest.mark.parametrize("seed", range(3))
def test_many_objects_come_whole_through_many_faults(endpoint: str, seed: int) -> None:
    """Several threads, each with several objects at a time."""
    errors: list[BaseException] = []
    with breaking(endpoint, "reset", "reset_body", "short", "flip", "503", "429", rate=0.4, seed=seed) as proxy:

        def work() -> None:
            try:
                with fetching(proxy.endpoint) as fetcher:
                    places = [Place() for _ in range(4)]
                    assert fetcher.fetch([Wanted(NAME, place.extent, checksum(DATA)) for place in places])
                    assert all(place.holds(DATA) for place in places)
            except BaseException as exc:  # noqa: BLE001 (raised by the test)
                errors.append(exc)

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        assert proxy.faults.total() > 0


def test_signature_that_expired_is_made_anew(endpoint: str) -> None:
    """The server refuses the old one; the store signs again, and the rest comes."""
    source = s3_objects(endpoint, BUCKET, expires_s=1.0)
    ask_for, old = source._ask_for, s3_objects(endpoint, BUCKET, expires_s=1.0)._ask_for(NAME)
    time.sleep(2.5)  # the signature counts whole seconds
    answers = [old]
    source._ask_for = lambda name: answers.pop() if answers else ask_for(name)
    with ObjectFetcher(source, retry=RETRY, patience=PATIENCE) as fetcher:
        fetch(fetcher)
    assert not answers


@pytest.mark.parametrize(
    ("bucket", "name", "secret_key", "expected"),
    [
        (BUCKET, "none.tar", None, r"404 NoSuchKey: .*was it deleted"),
        ("no-such-bucket", NAME, None, r"404 NoSuchBucket: .*is it the right name"),
        (BUCKET, NAME, "wrong", r"403 SignatureDoesNotMatch: .*the secret key is not the one"),
    ],
)
def test_server_says_what_is_wrong(
    endpoint: str, bucket: str, name: str, secret_key: str | None, expected: str
) -> None:
    """In its own words, with advice; no signature in the text."""
    options = {"secret_key": secret_key} if secret_key else {}
    with ObjectFetcher(s3_objects(endpoint, bucket, **options), retry=RETRY, patience=PATIENCE) as fetcher:
        text = fails(fetcher, StoreError, expected, name=name)
    assert "X-Amz-Signature" not in text
