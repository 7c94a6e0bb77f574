"""A bucket that exists nowhere: what the server makes up is what indexing it finds, and all names are listed."""

from collections.abc import Iterator

import pytest

import dali_pipes as dp
from bench.tools.simulated_bucket import BODIES, BUCKET, PREFIX, SimulatedBucket, simulated_bucket
from dali_pipes.data_set.indexing import index_in_memory, read_index, read_manifest
from dali_pipes.formats.names import index_name
from dali_pipes.store.base import Store
from dali_pipes.store.shard_set import ShardSet
from dali_pipes.store.urls import open_store

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


def test_all_names_are_listed_in_pages(bucket: SimulatedBucket, store: Store) -> None:
    """Each shard, each index and the manifest once, with their sizes; 1,000 names a page."""
    before = bucket.requests.copy()
    found = {entry.name: entry.size for entry in store.list(PREFIX)}
    asked = bucket.requests - before
    assert len(found) == 2 * NUM_SHARDS + 1
    assert asked["list"] == 6
    assert found[f"{PREFIX}00002499.tar"] == len(store.read(f"{PREFIX}00002499.tar"))
    assert found[f"{PREFIX}manifest.safetensors"] == len(store.read(f"{PREFIX}manifest.safetensors"))


def test_manifest_is_that_of_the_shards(store: Store) -> None:
    """Shards that are indexed anew have the checksums, sizes and indexes that the server made up."""
    manifest = read_manifest(store, PREFIX)
    assert manifest is not None
    assert (manifest.num_shards, manifest.num_samples) == (NUM_SHARDS, 3 * NUM_SHARDS)
    chosen = [0, 1, BODIES + 2, NUM_SHARDS - 1]
    names = [manifest.names[row] for row in chosen]
    made = index_in_memory(ShardSet(store=store, names=names))
    assert made.manifest.digest == manifest.select(names, where="here").digest
    for row in chosen:
        assert read_index(store, manifest, row) == made.indexes[index_name(manifest.names[row])]


def test_loader_lists_nothing(bucket: SimulatedBucket, store: Store) -> None:
    """The manifest is one request; the first batches come from a few shards of many."""
    before = bucket.requests.copy()
    with dp.loader(
        f"{store.url.rstrip('/')}/{PREFIX}",
        dp.classification_eval(resize=16, crop=16),
        batch_size=6,
        shuffle=dp.Shuffle(window_bytes=100_000),
        device="cpu",
        endpoint=store.endpoint if store.url.startswith("ais") else None,
    ) as loader:
        assert len(loader) == NUM_SHARDS // 2
        next(loader)
    asked = bucket.requests - before
    assert asked["manifest"] == 1
    assert asked["list"] == 0
    assert 0 < asked["shard"] < NUM_SHARDS / 4
