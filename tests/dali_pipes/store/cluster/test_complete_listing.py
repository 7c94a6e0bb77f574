"""A listing is complete, or an error says that the cluster cannot list everything now."""

import json
import logging
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import pytest

from dali_pipes.errors import StoreError
from dali_pipes.store.cluster.access import ClusterMap, Proxies
from dali_pipes.store.cluster.ais import AisStore
from dali_pipes.store.cluster.client import ClusterClient, RefusedError
from dali_pipes.store.patience import IMPATIENT, Patience, use_patience
from dali_pipes.store.shard_names import ObjectEntry
from dali_pipes.store.urls import resolve_shards
from prep.index import index_shards
from tests.servers.scripted import scripted


def job(kind: str, *, started: str, ended: str = "0001-01-01T00:00:00Z", aborted: bool = False) -> dict[str, object]:
    """A target's job, with the fields that AIS 4.9 sends."""
    return {
        "ext": None,
        "start-time": f"2026-11-22T13:{started}.257261811Z",
        "end-time": ended,
        "bck": {"name": "", "provider": "", "namespace": {"uuid": "", "name": ""}},
        "id": "g1",
        "kind": kind,
        "ctlmsg": "t[ZdPt52081]:<traverse>",
        "abort-err": "aborted by user" if aborted else "",
        "err": "",
        "glob.id": "0",
        "stats": {"loc-objs": "0", "loc-bytes": "0", "in-objs": "20001", "in-bytes": "116399082"},
        "aborted": aborted,
        "is_idle": False,
    }


ENDED = "2026-11-22T13:35:43.53635993Z"
RUNS, RAN = job("rebalance", started="34:57"), job("rebalance", started="34:57", ended=ENDED)


@pytest.fixture(autouse=True)
def _patience() -> Iterator[None]:
    """Wait with the usual patience, but with short pauses."""
    with use_patience(Patience(longest_pause_s=0.01)):
        yield


def say(monkeypatch: pytest.MonkeyPatch, kind: str, *answers: Sequence[dict[str, object]]) -> None:
    """Have a target tell these jobs of one kind, an answer for each time that it is asked."""
    left, original = list(answers), ClusterClient.json

    def told(self: ClusterClient, path: str, value: Any = None, **query: str) -> Any:
        if path != "cluster":
            return original(self, path, value, **query)
        jobs = (left.pop(0) if len(left) > 1 else left[0]) if value["Kind"] == kind else []
        return {"ZdPt52081": jobs, "JTpt52082": None}

    monkeypatch.setattr(ClusterClient, "json", told)


@pytest.fixture
def filled(bucket: AisStore) -> AisStore:
    bucket.create()
    for row in range(3):
        bucket.write(f"s-{row}.tar", b"x")
    return bucket


@pytest.fixture
def impatient(filled: AisStore) -> AisStore:
    """The same bucket for a job that does not wait."""
    with use_patience(IMPATIENT):
        return AisStore(filled.endpoint, filled.bucket)


@pytest.mark.parametrize(
    ("jobs", "refused"),
    [
        ([job("resilver", started="34:57")], "a resilver .* runs"),
        ([RAN], ""),
        ([job("resilver", started="34:57", ended=ENDED, aborted=True)], "a resilver .* was aborted"),
        ([job("rebalance", started="30:00", ended=ENDED, aborted=True), RAN], ""),
        ([job("rebalance", started="30:00", ended=ENDED), RUNS], "a rebalance .* runs"),
    ],
)
def test_cluster_that_moves_objects_is_not_listed(
    impatient: AisStore, monkeypatch: pytest.MonkeyPatch, jobs: list[dict[str, object]], refused: str
) -> None:
    """The last job of a kind decides."""
    say(monkeypatch, str(jobs[0]["kind"]), jobs)
    if not refused:
        assert [entry.name for entry in impatient.list_all("s-")] == ["s-0.tar", "s-1.tar", "s-2.tar"]
        return
    with pytest.raises(StoreError, match=rf"'{impatient.url}/s-' at .* cannot be listed now: {refused}"):
        impatient.list_all("s-")


def test_rebalance_that_begins_while_it_lists_is_noticed(impatient: AisStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The listings agree: on AIS 4.9 all of them lacked the same half for five seconds."""
    say(monkeypatch, "rebalance", [], [RUNS])
    with pytest.raises(StoreError, match="a rebalance of the cluster runs"):
        impatient.list_all("s-")


def lacking_at_first(monkeypatch: pytest.MonkeyPatch, bucket: AisStore) -> list[int]:
    """Have the first two listings lack two objects; returns a list with the number of listings."""
    whole, num_listings = bucket.list("s-"), [0]

    def listed(self: AisStore, prefix: str) -> Sequence[ObjectEntry]:
        num_listings[0] += 1
        return whole[:1] if num_listings[0] <= 2 else whole

    monkeypatch.setattr(AisStore, "list", listed)
    return num_listings


def show_maps(monkeypatch: pytest.MonkeyPatch, *maps: tuple[int, str]) -> None:
    """Have the cluster show these maps, versions and targets, one for each look; the last one stays."""
    left = [ClusterMap(version, (), frozenset(targets)) for version, targets in maps]
    monkeypatch.setattr(Proxies, "ask_map", lambda *_, **__: left.pop(0) if len(left) > 1 else left[0])
    monkeypatch.setattr("dali_pipes.store.cluster.listing.SETTLED_S", 0.1)


@pytest.mark.parametrize(
    ("jobs", "maps"),
    [
        ([[], [RUNS], [RUNS], [RAN]], []),
        ([[]], [(1, "ab"), (1, "ab"), (2, "a"), (3, "ab")]),  # a target comes back
        ([[]], [(1, "ab"), (1, "ab"), (2, "abc")]),  # a new target joins: a rebalance begins a moment later
    ],
)
def test_listing_is_taken_anew_after_the_cluster_has_changed(
    filled: AisStore, monkeypatch: pytest.MonkeyPatch, jobs: list[list[Any]], maps: list[tuple[int, str]]
) -> None:
    """A listing waits as a loader does. Listings from before the change do not count."""
    say(monkeypatch, "rebalance", *jobs)
    if maps:
        show_maps(monkeypatch, *maps)
    num_listings = lacking_at_first(monkeypatch, filled)
    assert len(filled.list_all("s-")) == 3
    assert num_listings == [4]


@pytest.mark.parametrize("looks", [1, 2])
def test_listing_without_a_target_that_died_is_refused(
    impatient: AisStore, monkeypatch: pytest.MonkeyPatch, looks: int
) -> None:
    """The target died before or during the listing: its objects are missing, although no job runs."""
    show_maps(monkeypatch, *[(1, "ab")] * looks, (2, "a"))
    with pytest.raises(StoreError, match="cannot be listed now: a target that was there when this command began"):
        impatient.list_all("s-")


def test_listing_is_taken_again_until_two_agree_or_refused(filled: AisStore, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = filled.list("s-")
    listings = [whole[:1], whole[:2], whole, whole]
    monkeypatch.setattr(AisStore, "list", lambda self, prefix: listings.pop(0))
    assert filled.list_all("s-") == whole
    listings += [whole[:num] for num in (0, 1, 2, 3, 1)]
    with pytest.raises(StoreError, match="5 listings differ, the last ones have 3 and 1 objects"):
        filled.list_all("s-")


def test_index_of_a_bucket_in_a_rebalance_leaves_the_manifest(
    impatient: AisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    impatient.write(".dali-pipes/s-manifest.safetensors", b"the good one")
    say(monkeypatch, "rebalance", [RUNS])
    with use_patience(IMPATIENT), pytest.raises(StoreError, match="a rebalance of the cluster runs"):
        index_shards(resolve_shards(f"{impatient.url}/s-", endpoint=impatient.endpoint), overwrite=True)
    assert impatient.read(".dali-pipes/s-manifest.safetensors") == b"the good one"


def refuse_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a token that may only read."""

    def refuse(self: ClusterClient, *, kind: str) -> NoReturn:
        raise RefusedError(403, "user `reader` has insufficient permissions")

    monkeypatch.setattr(ClusterClient, "jobs", refuse)


def test_cluster_that_does_not_tell_its_jobs_is_listed_with_a_warning(
    filled: AisStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refuse_jobs(monkeypatch)
    with caplog.at_level(logging.WARNING):
        assert len(filled.list_all("s-")) == 3
    assert "does not tell its jobs" in caplog.text
    assert "insufficient permissions" in caplog.text


@pytest.mark.parametrize(("flags", "refused"), [(6, False), (14, True)])
def test_health_of_the_proxy_tells_of_a_rebalance_to_those_who_may_not_see_the_jobs(
    monkeypatch: pytest.MonkeyPatch, flags: int, refused: bool
) -> None:
    """The flags of a proxy of AIS 4.9, at rest and in a rebalance."""
    monkeypatch.setattr(AisStore, "list", lambda self, prefix: [])
    health = json.dumps({"smap": {"version": "5"}, "rmd": {"version": "1"}, "flags": flags}).encode()
    with scripted(lambda visit: visit.say(200, health)) as server, use_patience(IMPATIENT):
        refuse_jobs(monkeypatch)
        store = AisStore(server.endpoint, "b")
        if not refused:
            assert store.list_all("s-") == []
            return
        with pytest.raises(StoreError, match="a rebalance of the cluster runs"):
            store.list_all("s-")


def test_cloud_lists_its_bucket_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the cluster moves."""
    say(monkeypatch, "rebalance", [RUNS])
    monkeypatch.setattr(AisStore, "list", lambda self, prefix: [])
    assert AisStore("http://127.0.0.1:1", "pets", provider="aws").list_all("") == []
