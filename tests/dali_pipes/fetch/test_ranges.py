"""Objects that are read in several ranges at a time."""

import threading

import pytest

from dali_pipes.errors import DataError
from dali_pipes.fetch.fetcher import Wanted
from dali_pipes.store.cluster.ais import AisStore
from tests.dali_pipes.fetch.served import (
    DATA,
    OTHER,
    Place,
    checksum,
    fails,
    fetch_object,
    fetch_through,
    fetching,
    ranged,
    ranges_of,
    set_props,
)
from tests.servers.faulty import KINDS, faulty
from tests.servers.scripted import Visit, scripted


@pytest.mark.usefixtures("small_ranges")
def test_ranges_are_read_in_parallel_from_one_target() -> None:
    """Four connections, one redirect: no range ends before the others have begun."""
    all_asked = threading.Barrier(4)

    def target(visit: Visit) -> None:
        data = ranged(visit, DATA)
        visit.send(data[:100_000])  # the others are asked for when the first one's head is there
        all_asked.wait(120)
        visit.send(data[100_000:])

    with scripted(target) as server:
        redirect = scripted(lambda visit: visit.say(307, Location=f"{server.endpoint}/there"))
        with redirect as entry, fetching(entry.endpoint, "b") as fetcher:
            fetch_object(fetcher, num_connections=4)
            assert len(entry.requests) == 1
        assert server.num_connections == 4
        assert sorted(server.ranges) == sorted(
            f"bytes={start}-{min(start + 625_001, len(DATA)) - 1}" for start in range(0, len(DATA), 625_001)
        )


@pytest.mark.usefixtures("small_ranges")
def test_object_too_small_for_two_ranges_is_read_in_one_piece(store: AisStore) -> None:
    store.write("small.bin", DATA[:999_999])
    with faulty(store.endpoint) as proxy, fetching(proxy.endpoint, store.bucket) as fetcher:
        place = Place(999_999)
        assert fetcher.fetch([Wanted("small.bin", place.extent, checksum(DATA[:999_999]))], num_connections=4)
        assert ranges_of(proxy) == [None]


@pytest.mark.usefixtures("small_ranges")
def test_ranges_recover_each_on_its_own(store: AisStore) -> None:
    """Faults of each kind, but for silence, which takes its time; every byte is right."""
    kinds = [kind for kind in KINDS if not kind.startswith("stall")]
    with faulty(store.endpoint, rate=0.4, seed=0, kinds=kinds) as proxy:
        for _ in range(5):
            fetch_through(proxy, store, num_connections=4)
        assert len(proxy.faults) > 2


@pytest.mark.usefixtures("small_ranges")
@pytest.mark.parametrize("kind", ["none", "xxhash2"])
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
    with scripted(lambda visit: visit.say(200, DATA)) as server, fetching(server.endpoint, "b") as fetcher:
        for _ in range(2):
            place = Place()
            assert fetcher.fetch([Wanted("x.tar", place.extent, checksum(DATA))], num_connections=4)
            assert place.holds(DATA)
        assert [wanted is None for wanted in server.ranges] == [False, True, True]
