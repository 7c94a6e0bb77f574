"""The gateway adds latency, counts bytes and keeps answers unchanged. The simulated bucket has correct indexes."""

import http.client
import threading
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from bench.tools.gateway import Gateway, read_counter
from bench.tools.simulated_bucket import BODIES, BUCKET, PREFIX, SimulatedBucket, simulated_bucket
from dali_pipes.data_set.indexing import index_in_memory, read_index, read_manifest
from dali_pipes.formats.names import index_name
from dali_pipes.store.base import Store
from dali_pipes.store.cluster.ais import AisStore
from dali_pipes.store.shard_set import ShardSet
from dali_pipes.store.urls import open_store
from tests.servers.scripted import Visit, scripted

DATA = bytes(range(256)) * 4096  # 1 MiB


@pytest.fixture(scope="module")
def gateway(node: str) -> Iterator[Gateway]:
    """A gateway in front of a node with one object."""
    store = AisStore(node, "behind")
    store.create()
    store.write("o", DATA)
    with Gateway(node) as started:
        yield started


def ask(
    connection: http.client.HTTPConnection, path: str, method: str = "GET", **headers: str
) -> tuple[int, http.client.HTTPMessage, bytes]:
    connection.request(method, path, headers=headers)
    response = connection.getresponse()
    return response.status, response.headers, response.read()


def test_sdk_reads_through_it(gateway: Gateway) -> None:
    """The SDK reads an object, its size and a listing. The redirect to the target goes through the gateway, too."""
    store = AisStore(gateway.endpoint, "behind")
    before = read_counter(gateway.counter)
    assert store.read("o") == DATA
    passed = read_counter(gateway.counter) - before
    assert len(DATA) < passed < len(DATA) + 4096, "the object, and the heads of redirect and answer"
    assert store.size("o") == len(DATA)
    assert [entry.name for entry in store.list("")] == ["o"]


TOGETHER = threading.Barrier(8)
LATENCY_S = 0.05


def odd_answers(visit: Visit) -> None:
    """Answer in ways that AIStore does not use here: in chunks, until the connection closes, without a body."""
    head, _, body = visit.request.partition(b"\r\n\r\n")
    method, path, *_ = head.split()
    if path == b"/chunks":
        visit.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for piece in (b"first ", b"x" * 3000, b" last", b""):
            visit.send(b"%x\r\n%s\r\n" % (len(piece), piece))
    elif path == b"/until-close":
        visit.send(b"HTTP/1.1 200 OK\r\n\r\nall there is")
        visit.hang_up()
    elif path == b"/elsewhere":
        visit.send(b"HTTP/1.1 302 Found\r\nLocation: http://192.0.2.7:51081/v1/x?pid=p\r\nContent-Length: 0\r\n\r\n")
    elif method == b"PUT":
        visit.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body[::-1]))
    else:
        if path == b"/together":
            TOGETHER.wait(240)
        visit.send(b"HTTP/1.1 204 No Content\r\n\r\n")


@pytest.fixture(scope="module")
def odd() -> Iterator[http.client.HTTPConnection]:
    """A connection to a gateway in front of a server that runs `odd_answers`."""
    with scripted(odd_answers) as upstream, Gateway(upstream.endpoint, latency_s=LATENCY_S) as started:
        yield http.client.HTTPConnection(urlsplit(started.endpoint).netloc)


def test_bodies_of_every_kind_pass(odd: http.client.HTTPConnection) -> None:
    """The gateway passes on chunks, no body, a body of a request, and a body that ends with the connection."""
    assert ask(odd, "/chunks")[2] == b"first " + b"x" * 3000 + b" last"
    assert ask(odd, "/none")[0] == 204
    odd.request("PUT", "/o", body=b"abc")
    assert odd.getresponse().read() == b"cba"
    assert ask(odd, "/until-close")[2] == b"all there is"


@pytest.mark.parametrize("endpoint", ["https://ais:51080", "ais:51080"])
def test_endpoint_that_cannot_be_read_is_refused_first(endpoint: str) -> None:
    with pytest.raises(ValueError, match=f"got the endpoint '{endpoint}'; pass --direct"):
        Gateway(endpoint)


NUM_SHARDS = 2500


@pytest.fixture(scope="module")
def bucket() -> Iterator[SimulatedBucket]:
    with simulated_bucket(NUM_SHARDS, shard_samples=3, page_latency_s=0.0) as running:
        yield running


@pytest.fixture(params=["ais", "s3"])
def store(request: pytest.FixtureRequest, bucket: SimulatedBucket, monkeypatch: pytest.MonkeyPatch) -> Store:
    for name, value in {
        "AWS_ENDPOINT_URL": f"{bucket.endpoint}/s3",
        "AWS_ACCESS_KEY_ID": "any",
        "AWS_SECRET_ACCESS_KEY": "any",
        "AWS_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    endpoint = bucket.endpoint if request.param == "ais" else None
    return open_store(f"{request.param}://{BUCKET}/{PREFIX}", endpoint=endpoint)[0]


def test_bucket_is_listed_in_pages_and_holds_what_indexing_finds(bucket: SimulatedBucket, store: Store) -> None:
    """A listing has each shard, each index and the manifest once, with its size. A page has 1,000 names.

    Shards that are indexed anew have the checksums, sizes and indexes that the server made up.
    """
    before = bucket.requests.copy()
    found = {entry.name: entry.size for entry in store.list(PREFIX)}
    asked = bucket.requests - before
    assert len(found) == 2 * NUM_SHARDS + 1
    assert asked["list"] == 6
    for name in (f"{PREFIX}00002499.tar", f"{PREFIX}manifest.safetensors"):
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
