"""The gateway counts bytes and keeps answers unchanged. The simulated bucket has correct indexes."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import urllib3

from bench.tools.gateway import Gateway, _Routes, read_counter
from bench.tools.simulated_bucket import BODIES, BUCKET, PREFIX, SimulatedBucket, simulated_bucket
from dali_pipes.data_set.indexing import index_in_memory, read_index, read_manifest
from dali_pipes.formats.names import described, index_name, manifest_name
from dali_pipes.store.base import Store
from dali_pipes.store.cluster.ais import AisStore
from dali_pipes.store.shard_set import ShardSet
from dali_pipes.store.urls import open_store
from tests.servers.scripted import says, scripted

DATA = bytes(range(256)) * 4096  # 1 MiB


@pytest.fixture(scope="module")
def gateway(node: str) -> Iterator[Gateway]:
    """A gateway in front of a node with one object."""
    store = AisStore(node, "behind")
    store.create()
    store.write("o", DATA)
    with Gateway(node) as started:
        yield started


def test_sdk_reads_through_it(gateway: Gateway) -> None:
    """The SDK reads an object, its size and a listing. The redirect to the target goes through the gateway, too."""
    store = AisStore(gateway.endpoint, "behind")
    before = read_counter(gateway.counter)
    assert store.read("o") == DATA
    passed = read_counter(gateway.counter) - before
    assert len(DATA) < passed < len(DATA) + 4096, "the object, and the heads of redirect and answer"
    assert store.size("o") == len(DATA)
    assert [entry.name for entry in store.list("")] == ["o"]


def test_gateway_measures_what_the_connections_end_ends_and_says_who_does_not_answer(closed_port: int) -> None:
    routes = _Routes(latency_s=0.0, counter=Path("/dev/null"))
    with scripted(says(b"HTTP/1.1 200 OK\r\n\r\nwhole")) as server:
        found = urllib3.request("GET", f"http://{routes.to(server.endpoint[7:])}")
    assert (found.data, found.headers["Content-Length"]) == (b"whole", "5")
    found = urllib3.request("GET", f"http://{routes.to(f'127.0.0.1:{closed_port}')}", retries=False)
    assert (found.status, b"Connection refused" in found.data) == (502, True)


NUM_SHARDS = 2500


@pytest.fixture(scope="module")
def simulated() -> Iterator[SimulatedBucket]:
    with simulated_bucket(NUM_SHARDS, shard_samples=3, page_latency_s=0.0) as running:
        yield running


@pytest.fixture(params=["ais", "s3"])
def store(request: pytest.FixtureRequest, simulated: SimulatedBucket, monkeypatch: pytest.MonkeyPatch) -> Store:
    for name, value in {
        "AWS_ENDPOINT_URL": f"{simulated.endpoint}/s3",
        "AWS_ACCESS_KEY_ID": "any",
        "AWS_SECRET_ACCESS_KEY": "any",
        "AWS_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    endpoint = simulated.endpoint if request.param == "ais" else None
    return open_store(f"{request.param}://{BUCKET}/{PREFIX}", endpoint=endpoint)[0]


def test_bucket_is_listed_in_pages_and_holds_what_indexing_finds(simulated: SimulatedBucket, store: Store) -> None:
    """A listing has each shard, each index and the manifest once, with its size. A page has 1,000 names.

    Shards that are indexed anew have the checksums, sizes and indexes that the server made up.
    """
    before = simulated.requests.copy()
    found = {entry.name: entry.size for start in (PREFIX, described(PREFIX)) for entry in store.list(start)}
    asked = simulated.requests - before
    assert len(found) == 2 * NUM_SHARDS + 1
    assert asked["list"] == 6
    for name in (f"{PREFIX}00002499.tar", manifest_name(PREFIX)):
        assert found[name] == len(store.read(name))
    manifest = read_manifest(store, PREFIX)
    assert manifest is not None
    assert (manifest.num_shards, manifest.num_samples) == (NUM_SHARDS, 3 * NUM_SHARDS)
    chosen = [0, BODIES + 2, NUM_SHARDS - 1]
    names = [manifest.names[row] for row in chosen]
    made = index_in_memory(ShardSet(store=store, names=names))
    assert made.manifest.digest == manifest.select(names, where="here").digest
    for row in chosen:
        assert read_index(store, manifest, row) == made.indexes[index_name(manifest.names[row])]
