"""Buckets of one name in several namespaces are several buckets, for whatever asks a cluster for one."""

import uuid
from pathlib import Path

import pytest

import dali_pipes as dp
from dali_pipes.errors import StoreError
from dali_pipes.store.cluster.ais import AisStore
from dali_pipes.store.cluster.endpoint import endpoint_for
from dali_pipes.store.ranges import ComponentRange
from dali_pipes.store.urls import resolve_shards
from prep.shuffle.request import Request
from prep.shuffle.shuffle import shuffle
from tests.loaders import keys_of, open_loader
from tests.servers.scripted import scripted
from tests.shards import fill_bucket, make_samples, write_shards


@pytest.fixture
def pair(node: str) -> tuple[AisStore, AisStore]:
    """A bucket without a namespace, and one of the same name in a namespace; both are empty."""
    name, namespace = (f"n{uuid.uuid4().hex[:8]}" for _ in range(2))
    stores = AisStore(node, name), AisStore(node, f"#{namespace}/{name}")
    for store in stores:
        store.create()
    return stores


def test_objects_are_in_their_own_bucket(pair: tuple[AisStore, AisStore]) -> None:
    plain, other = pair
    for store in pair:
        store.write("small", store.url.encode())
        store.write_stream("large", lambda store=store: [memoryview(store.url.encode())], num_bytes=len(store.url))
        assert store.write_new("new", b"x", by="me")
    for store in pair:
        assert [store.read(name) for name in ("small", "large")] == [store.url.encode()] * 2
        assert [entry.name for entry in store.list_all("")] == ["large", "new", "small"]
        assert store.size("small") == len(store.url)
    other.delete("small")
    assert [store.size("small") for store in pair] == [len(plain.url), None]
    other.sdk_bucket.delete()
    assert [store.exists() for store in pair] == [True, False]
    with pytest.raises(StoreError, match=f"no bucket '{other.url}' at .* makes one"):
        other.access()


def test_namespaces_of_a_bucket_are_two_data_sets(
    pair: tuple[AisStore, AisStore], small_shards: Path, tmp_path: Path
) -> None:
    """A loader of each reads its own samples, at the same time and from one cache; so does a mixture of both."""
    plain, other = pair
    fill_bucket(plain, small_shards)
    fill_bucket(other, write_shards(tmp_path / "other", make_samples([(30, 30)] * 4, first=100), per_shard=2))
    options = {"endpoint": plain.endpoint, "cache": dp.Cache(directory=tmp_path), "shuffle": False}
    with open_loader(f"{plain.url}/s-", **options) as one, open_loader(f"{other.url}/s-", **options) as two:
        assert len(keys_of(one)) == 23
        assert keys_of(two) == [f"s{number:05d}" for number in range(100, 104)]
    with open_loader(dp.Mixture({"a": f"{plain.url}/s-", "b": f"{other.url}/s-"}), **options) as both:
        assert both.num_samples == 27


def test_dsort_goes_from_one_namespace_to_another(pair: tuple[AisStore, AisStore], small_shards: Path) -> None:
    plain, other = pair
    fill_bucket(plain, small_shards)
    shards = resolve_shards(f"{plain.url}/s-", endpoint=plain.endpoint)
    report = shuffle(Request(shards, target=other, output_prefix="t-", engine="dsort"))
    assert report.num_samples == 23
    assert not plain.list("t-")
    assert [entry.name for entry in other.list("t-") if entry.name.endswith(".tar")]


def test_getbatch_names_the_bucket_once() -> None:
    """An entry without a bucket is in that of the URL, which has a namespace, as an entry has not."""
    with scripted(lambda visit: visit.say(501, b"{}")) as server:
        store = AisStore(server.endpoint, "@other#x/b", provider="aws")
        ranges = [ComponentRange("s.tar", 0, 1, 0, "k", "jpg")]
        for way in store.range_ways():
            way(ranges)
        path = "/v1/ml/moss/b?provider=aws&namespace=%40other%23x"
        assert server.paths == [path, path]
        assert not [request for request in server.requests if b'"bucket"' in request]


def test_embedded_folder_without_the_bucket_of_the_namespace_is_refused(tmp_path: Path) -> None:
    (tmp_path / "buckets" / "#x" / "pets").mkdir(parents=True)
    missing = pytest.raises(StoreError, match=r"no bucket 'ais://pets': .*found: '#x/pets'")
    with missing, endpoint_for(["ais://pets/s-"], endpoint=None, embedded_dir=tmp_path):
        pass
