"""Objects that are read in several ranges at a time."""

import pytest

from dali_pipes.errors import DataError
from dali_pipes.fetch.fetcher import Wanted
from dali_pipes.store.cluster.ais import AisStore
from tests.dali_pipes.fetch.served import (
    DATA,
    OTHER,
    Place,
    checksum,
    fetch_through,
    fetching,
)
from tests.servers.faulty import KINDS, faulty
from tests.servers.scripted import scripted


@pytest.mark.usefixtures("small_ranges")
def test_ranges_recover_each_on_its_own(store: AisStore) -> None:
    """Faults of each kind, but for silence, which takes its time; every byte is right."""
    kinds = [kind for kind in KINDS if not kind.startswith("stall")]
    with faulty(store.endpoint, rate=0.4, seed=0, kinds=kinds) as proxy:
        for _ in range(5):
            fetch_through(proxy, store, num_connections=4)
        assert len(proxy.faults) > 2


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
