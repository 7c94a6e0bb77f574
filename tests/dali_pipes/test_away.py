"""A cluster that is away for a while costs a wait, not the job."""

from __future__ import annotations

import itertools
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import dali_pipes as dp
from dali_pipes.errors import StoreError
from dali_pipes.fetch.fetcher import Wanted
from dali_pipes.store import patience
from dali_pipes.store.cluster import embedded_node
from dali_pipes.store.cluster.access import ClusterAccess, Token
from dali_pipes.store.cluster.ais import AisStore
from dali_pipes.store.cluster.endpoint import check_endpoint
from dali_pipes.store.cluster.objects import StoredObjects
from dali_pipes.store.http.objects import ObjectFetcher
from dali_pipes.store.patience import Patience, use_patience
from tests.dali_pipes.fetch.served import Place, checksum
from tests.programs import wait_until
from tests.servers.scripted import Visit, scripted
from tests.shards import fill_bucket, make_samples, write_shards

BODY = bytes(range(256)) * 200
PATIENT = Patience(patience_s=60, longest_pause_s=0.1)


@contextmanager
def restarting(folder: Path, caplog: pytest.LogCaptureFixture) -> Iterator[tuple[str, Callable[[], None]]]:
    """A node, and a function that stops it, and restarts it when the log says that a job waits for it."""
    nodes = [embedded_node.start(folder)]
    endpoint = nodes[0].endpoint
    threads: list[threading.Thread] = []

    def waits() -> int:
        return sum("waiting for AIStore" in record.getMessage() for record in [*caplog.records])

    def start(num_waits: int) -> None:
        wait_until(lambda: waits() > num_waits, "nobody waits for the node")
        nodes.append(embedded_node.start(folder, port=int(endpoint.rpartition(":")[2])))

    def restart() -> None:
        nodes[-1].close()
        patience._told_at.clear()
        threads.append(threading.Thread(target=start, args=(waits(),)))
        threads[-1].start()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(patience, "_QUIET_S", 0.3)
        try:
            yield endpoint, restart
        finally:
            for thread in threads:
                thread.join()
            nodes[-1].close()


def filled(endpoint: str, folder: Path) -> AisStore:
    """A bucket with ten indexed shards of two samples."""
    store = AisStore(endpoint, "pets")
    fill_bucket(store, write_shards(folder, make_samples([(40, 30)] * 20), per_shard=2, index=False))
    return store


def loader_of(endpoint: str, tmp_path: Path, **cache: float) -> dp.Loader:
    """One that stages a window of two shards at a time, so that most are fetched in the middle of the epoch."""
    (tmp_path / "cache").mkdir(parents=True)
    return dp.loader(
        "ais://pets/s-",
        dp.segmentation(crop=16),
        batch_size=2,
        device="cpu",
        endpoint=endpoint,
        shuffle=dp.Shuffle(enabled=False, window_bytes=1),
        outputs=dp.Outputs(keys=True),
        decode=dp.Decode(queue_depth=1),
        cache=dp.Cache(directory=tmp_path / "cache", **cache),  # type: ignore[arg-type]
    )


def rows_of(batches: Iterator[list[dict[str, object]]]) -> list[tuple[str, bytes]]:
    return [
        (key, photo.numpy().tobytes())
        for (batch,) in batches
        for key, photo in zip(batch["key"], batch["image"], strict=True)  # type: ignore[call-overload]
    ]


def test_loader_waits_for_a_node_that_restarts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each sample once, with the same bytes; one line says for whom it waits, one that it goes on."""
    with restarting(tmp_path / "node", caplog) as (endpoint, restart):
        filled(endpoint, tmp_path / "shards")
        with loader_of(endpoint, tmp_path / "1") as loader:
            expected = rows_of(iter(loader))
        with loader_of(endpoint, tmp_path / "2") as loader:
            batches = iter(loader)
            rows = rows_of(itertools.islice(batches, 1))
            restart()
            rows += rows_of(batches)
    assert rows == expected
    assert len({key for key, _ in rows}) == 20
    lines = [record.getMessage() for record in caplog.records if record.name.endswith("patience")]
    assert [line.split(" at ")[0] for line in lines] == ["waiting for AIStore", "AIStore"]
    assert re.search(
        rf"{endpoint} for \d s so far, up to 600 s without progress: 'ais://pets/.*s-.*' *: no ans", lines[0]
    )


def test_a_cluster_that_is_away_at_the_start_is_waited_for_if_asked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with restarting(tmp_path / "node", caplog) as (endpoint, restart):
        filled(endpoint, tmp_path / "shards")
        restart()
        with loader_of(endpoint, tmp_path, start_patience_s=60) as loader:
            assert len(rows_of(iter(loader))) == 20


def test_loader_that_waited_in_vain_says_how_to_go_on(tmp_path: Path) -> None:
    """And does: a new loader continues at the exact next sample."""
    with embedded_node.start(tmp_path / "node") as node:
        filled(node.endpoint, tmp_path / "shards")
        loader = loader_of(node.endpoint, tmp_path / "1", patience_s=0.5)
        batches = iter(loader)
        rows = rows_of(itertools.islice(batches, 1))
    text = r"given up after .* \(patience: 0.5 s without progress\), .* no answer from .*exact next sample .*state="
    with loader:
        with pytest.raises(StoreError, match=text):
            rows.extend(row for batch in batches for row in rows_of(iter([batch])))
        state = json.loads(json.dumps(loader.state_dict()))
    with embedded_node.start(tmp_path / "node") as node, loader_of(node.endpoint, tmp_path / "2") as again:
        again.load_state_dict(state)
        rows += rows_of(iter(again))
    assert len(rows) == len({key for key, _ in rows}) == 20


# Answers of a cluster that changes


def fetch(server_endpoint: str, *, patience: Patience = PATIENT, token: Token | None = None) -> bool:
    place = Place(len(BODY))
    source = StoredObjects(ClusterAccess(endpoint=server_endpoint, token=token), "b")
    with ObjectFetcher(source, patience=patience) as fetcher:
        done = fetcher.fetch([Wanted("x.tar", place.extent, checksum(BODY))])
    return done and place.holds(BODY)


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (400, "no storage targets in the cluster"),
        (503, "p[x] primary: not ready yet (cluster is starting up)"),
        (429, "rate limit exceeded"),
        (500, "failed to call t[x]: connect: connection refused"),
        (502, "bad gateway"),
    ],
)
def test_a_cluster_without_its_nodes_is_waited_for(status: int, text: str) -> None:
    """By the fetcher, and by the SDK's sessions."""
    num_left = 20

    def act(visit: Visit) -> None:
        nonlocal num_left
        num_left -= 1
        if num_left % 20:
            visit.say(status, json.dumps({"message": text, "status": status}).encode())
        else:
            visit.say(200, BODY)

    with scripted(act) as server, use_patience(PATIENT):
        assert fetch(server.endpoint)
        num_left = 20
        assert AisStore(server.endpoint, "b").read("x.tar") == BODY
        num_left = 20
        with AisStore(server.endpoint, "b").open("x.tar") as stream:
            assert stream.read() == BODY


def map_of(version: int, *targets: str) -> bytes:
    node = {"public_net": {"direct_url": "http://127.0.0.1:1"}, "flags": 0}
    return json.dumps({"version": str(version), "pmap": {}, "tmap": dict.fromkeys(targets, node)}).encode()


def test_a_missing_shard_is_waited_for_as_long_as_a_target_is_missing() -> None:
    """Its target restarts: the map lacks it, then it is back, and with it the shard."""
    asked = 0

    def act(visit: Visit) -> None:
        nonlocal asked
        if "what=smap" in visit.path:
            visit.say(200, map_of(5, "t1", "t2") if not asked else map_of(6, "t1"))
        elif "what=status" in visit.path:
            visit.say(404, b"no such job")
        else:
            asked += 1
            visit.say(*((200, BODY) if asked > 20 else (404, b'{"message": "x.tar does not exist"}')))

    with scripted(act) as server, use_patience(PATIENT):
        store = AisStore(server.endpoint, "b")
        place = Place(len(BODY))
        with store.open_fetcher() as fetcher:
            assert fetcher.fetch([Wanted("x.tar", place.extent, checksum(BODY))])
        assert place.holds(BODY)
        asked = 0
        with AisStore(server.endpoint, "b").open("x.tar") as stream:
            assert stream.read() == BODY


def test_another_named_proxy_is_asked(tmp_path: Path, closed_port: int) -> None:
    """The first does not answer: at the start, and for each client."""
    dead = f"http://127.0.0.1:{closed_port}"
    with embedded_node.start(tmp_path / "node") as node:
        filled(node.endpoint, tmp_path / "shards")
        both = f"{dead},{node.endpoint}"
        assert check_endpoint(both) == f"{node.endpoint},{dead}"
        with use_patience(Patience(patience_s=20, start_s=20)):
            store = AisStore(both, "pets")
            assert len(store.list("s-")) == 10
            store.access().write_stream("w", lambda: [memoryview(b"abc")], num_bytes=3)
            assert store.read("w") == b"abc"
        with loader_of(both, tmp_path) as loader:
            assert len(rows_of(iter(loader))) == 20


@pytest.mark.parametrize("token", ["", "t0ken"])
def test_a_proxy_of_the_map_is_asked_but_not_with_a_token(token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The token goes only to hosts that the user named."""
    monkeypatch.setenv("AIS_AUTHN_TOKEN", token)
    node = {"public_net": {"direct_url": "http://127.0.0.1:1"}}
    answer = json.dumps({"version": "3", "pmap": {"p2": node}, "tmap": {}}).encode()
    with scripted(lambda visit: visit.say(200, answer)) as first:
        store = AisStore(first.endpoint, "b")
        store.learn_map()
        store.proxies.turn_from(first.endpoint)
        assert store.proxies.current == (first.endpoint if token else "http://127.0.0.1:1")
